"""What the scheduler's side tells the worker's in each step, and what it hears back. vLLM pickles these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from qkvault.transfer import LoadItem, SaveItem


class LoadOp(NamedTuple):
    """Copy leased chunks into blocks of a request, before this step's forward."""

    request_id: str
    lease_id: int
    items: tuple[LoadItem, ...]


class SaveOp(NamedTuple):
    """Store chunks of a request after this step's forward. ``start_token`` is where the first one begins."""

    request_id: str
    start_token: int
    items: tuple[SaveItem, ...]
    is_final: bool  # the request has finished: its blocks are kept until this is done


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):
    """All work of one step."""

    loads: list[LoadOp] = field(default_factory=list)
    saves: list[SaveOp] = field(default_factory=list)


@dataclass(slots=True)
class StepReport(KVConnectorWorkerMetadata):
    """What the workers did in one step."""

    ended_leases: set[int] = field(default_factory=set)  # of loads that are over, well or not
    failed_requests: set[str] = field(default_factory=set)  # some block of theirs could not be loaded
    skipped_saves: dict[str, int] = field(default_factory=dict)  # request -> start_token of a save that was not done

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """The report of several workers: a lease ends, or a request fails, if it does on any."""
        if not isinstance(other, StepReport):
            return self
        starts = dict(self.skipped_saves)
        for request_id, start in other.skipped_saves.items():
            starts[request_id] = min(start, starts.get(request_id, start))
        return StepReport(self.ended_leases | other.ended_leases, self.failed_requests | other.failed_requests, starts)
