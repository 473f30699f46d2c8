"""What the scheduler's side tells the worker's in each step, and what it hears back. vLLM pickles these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from qkvault.capture.plan import RequestStep
from qkvault.integrations.vllm.compat import KVConnectorMetadata, KVConnectorWorkerMetadata
from qkvault.transfer import LoadItem, SaveItem


class LoadOp(NamedTuple):
    """Copy leased chunks into blocks of a request that waits for them.

    ``block_ids`` are the blocks that vLLM wants filled; each rank's items fill them in order. What they leave has
    failed. Without leases there is nothing to load any more.
    """

    request_id: str
    start_token: int  # where in the request the first block begins
    block_ids: tuple[int, ...]
    lease_ids: tuple[int, ...] = ()  # by rank
    items_by_rank: tuple[tuple[LoadItem, ...], ...] = ()

    def lease_of(self, rank: int) -> int:
        """The lease that ``rank`` reads under; 0 if there is none."""
        return self.lease_ids[rank] if self.lease_ids else 0

    def items_of(self, rank: int) -> tuple[LoadItem, ...]:
        """What ``rank`` copies."""
        return self.items_by_rank[rank] if self.items_by_rank else ()


class SaveOp(NamedTuple):
    """Store chunks of a request. ``start_token`` is where the first one begins. The keys are those of rank 0."""

    request_id: str
    start_token: int
    items: tuple[SaveItem, ...]


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):
    """All work of one step. ``number`` rises from step to step."""

    number: int = 0
    loads: list[LoadOp] = field(default_factory=list)
    saves: list[SaveOp] = field(default_factory=list)  # of what this step's forward computes
    finals: list[SaveOp] = field(default_factory=list)  # of finished requests: before the step writes any page
    is_idle: bool = False  # the step has no forward
    query_steps: list[RequestStep] = field(default_factory=list)  # of requests whose queries are captured
    query_drops: list[str] = field(default_factory=list)  # of those: aborted or preempted before this step

    @property
    def stores(self) -> bool:
        """Whether anything may be stored by it: a reset has to come after that."""
        return bool(self.saves or self.finals or self.query_steps)


@dataclass(slots=True)
class StepReport(KVConnectorWorkerMetadata):
    """What the workers did since the last report."""

    ended_leases: set[int] = field(default_factory=set)  # of loads that are over, well or not
    failed_loads: dict[str, int] = field(default_factory=dict)  # request -> first token that could not be loaded
    unsaved: dict[str, int] = field(default_factory=dict)  # request -> first token that could not be stored
    saved_step: int = 0  # number of the last step whose saves are done

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """The report of several workers: what failed on one of them has failed."""
        if not isinstance(other, StepReport):
            return self
        return StepReport(
            self.ended_leases | other.ended_leases,
            _earliest(self.failed_loads, other.failed_loads),
            _earliest(self.unsaved, other.unsaved),
            min(self.saved_step, other.saved_step),
        )


def _earliest(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: min(tokens.get(name, token) for tokens in (one, other)) for name, token in (one | other).items()}
