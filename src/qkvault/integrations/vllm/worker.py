"""The worker's half of the connector: copies between vLLM's pages and the store's slots.

Runs on the thread that runs the model. Nothing raises out of here: a load that fails, for whatever reason, is a list of
blocks that vLLM computes again, and what could not be stored is told to the scheduler's half.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from qkvault.errors import ProtocolError, Unavailable
from qkvault.integrations.vllm.ops import LoadOp, SaveOp, StepPlan, StepReport
from qkvault.keys import KeySpace
from qkvault.link import Link
from qkvault.logs import RateLimited, get_logger
from qkvault.paged import PagedConnector, mark
from qkvault.transfer import LoadItem, Transfer
from qkvault.types import Outcome

if TYPE_CHECKING:
    from qkvault.stats import Request, StatsMonitor

_UNSAVED: Final = (Outcome.NO_ROOM, Outcome.BUSY)  # what may succeed later
_log = RateLimited(get_logger("vllm.worker"))


class _Loading(NamedTuple):
    op: LoadOp
    num_good: int  # leading items that were copied, or are being copied
    copied: torch.Event | None  # None: the copies are done
    request: Request  # of the statistics


class WorkerSide:
    """One worker's pages and its session with the store."""

    def __init__(
        self,
        paged: PagedConnector,
        space: KeySpace,
        link: Link,
        stats: StatsMonitor,
        *,
        rank: int = 0,
        can_save: bool = True,
        load_deadline_seconds: float = 10.0,
    ) -> None:
        """``rank`` is the worker's place in what plans say by rank; without ``can_save`` another stores for it.

        The loads of one step have ``load_deadline_seconds`` together: what is not here then is computed.
        """
        self._paged = paged
        self._space = space
        self._link = link
        self._stats = stats
        self._rank = rank
        self._can_save = can_save
        self._load_deadline_seconds = load_deadline_seconds
        self._transfer: Transfer | None = None
        self._step_begun = self._step_loaded = self._step_saved = 0  # the last plans' numbers: none is done twice
        self._loading: deque[_Loading] = deque()
        self._report = StepReport()
        self._received: set[str] = set()
        self._failed_blocks: set[int] = set()

    def begin(self, plan: StepPlan) -> None:
        """Store what finished requests have left, before this step writes any page: vLLM has given their blocks away.

        On a device the copies are only begun, on the stream that the step's forward and loads come behind.
        """
        if plan.number != self._step_begun:
            self._step_begun = plan.number
            if plan.finals:
                self._try_save(plan.finals)

    def load(self, plan: StepPlan) -> None:
        """Begin the loads of this step."""
        if plan.number == self._step_loaded:
            return
        self._step_loaded = plan.number
        deadline = time.monotonic() + self._load_deadline_seconds
        for op in plan.loads:
            request = self._stats.on_retrieve_request(len(op.block_ids) * self._paged.block_size)
            num_good = self._try_load(op, deadline)
            self._loading.append(_Loading(op, num_good, mark(self._paged.device), request))

    def save(self, plan: StepPlan) -> None:
        """Store what this step computed, in one go.

        An idle step waits until a device has copied all that was begun.
        """
        if plan.number == self._step_saved:
            return
        self._step_saved = plan.number
        if plan.saves:
            for op, num_saved in zip(plan.saves, self._try_save(plan.saves), strict=True):
                if num_saved < len(op.items):
                    chunks_tokens = num_saved * self._paged.layout.chunk_size
                    self._report.unsaved[op.request_id] = op.start_token + chunks_tokens
        if plan.stores:
            self._report.saved_step = plan.number
        self._settle(wait=plan.is_idle)

    def take_loaded(self) -> set[str]:
        """Requests whose load is over, well or not, since the last call."""
        while self._loading and (self._loading[0].copied is None or self._loading[0].copied.query()):
            self._end_load(self._loading.popleft())
        received, self._received = self._received, set()
        return received

    def take_failed_blocks(self) -> set[int]:
        """Blocks whose load failed since the last call: never later than ``take_loaded`` tells of their request."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> StepReport | None:
        """What the scheduler's half should hear, if anything."""
        report, self._report = self._report, StepReport()
        has_news = report.ended_leases or report.failed_loads or report.unsaved or report.saved_step
        return report if has_news else None

    def close(self) -> None:
        """Finish the copies that were begun and end the session."""
        self._settle(wait=True)
        self._abandon()
        self._link.close()

    def _try_load(self, op: LoadOp, deadline: float) -> int:
        """How many leading items were copied, or are being copied. What is behind a failure is of no use."""
        try:
            items = op.items_of(self._rank)
            failed = self._fetch_and_load(items, deadline) if items else set()
        except Exception as error:  # thread top: the engine must go on; vLLM computes these blocks again
            self._lost(error, "load_failed")
            return 0
        return min(failed, default=len(items))

    def _fetch_and_load(self, items: Sequence[LoadItem], deadline: float) -> set[int]:
        transfer = self._session()
        left_seconds = deadline - time.monotonic()
        if left_seconds <= 0:  # the step's loads before this one took it all
            return {0}
        transfer.fetch(items, left_seconds)
        return transfer.load(items)

    def _end_load(self, loading: _Loading) -> None:
        op, items = loading.op, loading.op.items_of(self._rank)
        good = items[: loading.num_good]
        if loading.copied is not None:
            good = good[: self._num_fresh(good)]
        num_filled = sum(len(item.block_ids) for item in good)
        num_blocks, block_size = len(op.block_ids), self._paged.block_size
        if num_filled < num_blocks:
            self._failed_blocks.update(op.block_ids[num_filled:])
            self._report.failed_loads[op.request_id] = op.start_token + num_filled * block_size
        self._received.add(op.request_id)
        if lease_id := op.lease_of(self._rank):
            self._report.ended_leases.add(lease_id)
        num_bad = len(items[len(good)].block_ids) if len(good) < len(items) else num_blocks - num_filled
        self._stats.on_retrieve_finished(
            loading.request,
            num_tokens=num_filled * block_size,
            num_bytes=num_filled * block_size * self._paged.layout.token_bytes,
            num_failed_tokens=num_bad * block_size,
            num_voided_tokens=(num_blocks - num_filled - num_bad) * block_size,
        )

    def _num_fresh(self, items: Sequence[LoadItem]) -> int:
        """How many leading slots still hold their chunk: one with a new owner may have had him while we copied."""
        try:
            return min(self._session().stale(items), default=len(items))
        except Exception as error:  # thread top: as for the load itself
            self._lost(error, "load_failed")
            return 0

    def _try_save(self, ops: Sequence[SaveOp]) -> list[int]:
        """How many leading items of each op need no second try."""
        if not self._can_save:
            return [len(op.items) for op in ops]
        items = [item.in_space(self._space.space_id) for op in ops for item in op.items]  # plans name those of rank 0
        request = self._stats.on_store_request(sum(item.num_tokens for item in items))
        outcomes: list[Outcome] = []  # of the items before what raises
        num_bytes = 0
        try:
            for part in self._session().save(items):
                outcomes += part.outcomes
                num_bytes += part.copied_bytes
        except Exception as error:  # thread top: what is not stored is a later miss
            self._lost(error, "save_failed")
        chunks = {outcome.value: outcomes.count(outcome) for outcome in Outcome}
        chunks |= {"stored": chunks.pop(Outcome.RESERVED.value), "failed": len(items) - len(outcomes)}
        reserved = zip(items, outcomes, strict=False)
        num_tokens = sum(item.num_tokens for item, outcome in reserved if outcome is Outcome.RESERVED)
        self._stats.on_store_finished(request, num_tokens=num_tokens, num_bytes=num_bytes, chunks=chunks)
        if len(outcomes) < len(items):
            return [0] * len(ops)  # what is there by then costs nothing
        left = iter(outcomes)
        return [_num_before(_UNSAVED, [next(left) for _ in op.items]) for op in ops]

    def _settle(self, *, wait: bool) -> None:
        try:
            if self._transfer is not None:
                (self._transfer.wait if wait else self._transfer.settle)()
        except Exception as error:  # thread top: what is not committed is a later miss
            self._lost(error, "save_failed")

    def _session(self) -> Transfer:
        if self._link.is_superseded and not self._loading and (self._transfer is None or self._transfer.is_idle):
            self._lost(Unavailable("the store was restarted"), "session_changed")
        client = self._link.session()
        if self._transfer is None or self._transfer.client is not client:
            self._transfer = Transfer(client, self._paged, self._space, stats=self._stats)
        return self._transfer

    def _lost(self, error: Exception, event: str) -> None:
        _log.warning(event, error=f"{type(error).__name__}: {error}")
        if isinstance(error, (Unavailable, ProtocolError)):
            self._abandon()
            self._link.lost(error)

    def _abandon(self) -> None:
        # With the session its slots go to others: not before a device has finished what it is copying.
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            with suppress(Exception):  # thread top: a device that fails copies nothing any more
                transfer.abandon()


def _num_before(kinds: Sequence[Outcome], outcomes: Sequence[Outcome]) -> int:
    return next((at for at, outcome in enumerate(outcomes) if outcome in kinds), len(outcomes))
