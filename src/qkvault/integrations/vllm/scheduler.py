"""The scheduler's half of the connector: what is cached of a request, what to load, what has become worth storing.

Runs on the scheduler's thread. Copies no bytes. Every hook of vLLM may come repeated, for unknown requests, or not at
all; queries change nothing that a later query depends on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from qkvault.client import StoreClient
from qkvault.config import Config
from qkvault.integrations.vllm.identity import identity_of
from qkvault.integrations.vllm.ops import LoadOp, SaveOp, StepPlan, StepReport
from qkvault.keys import KeySpace
from qkvault.logs import RateLimited, get_logger
from qkvault.prefix import Prefix, load_items
from qkvault.types import ChunkRef, Medium

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_IDLE_NAP_SECONDS: Final = 0.002  # slept in a query while a load is on its way and the engine has nothing to run
_log = RateLimited(get_logger("vllm.scheduler"))


@dataclass(slots=True)
class _Tracked:
    """What we know of one request. All positions are tokens from the start of the request."""

    request: Request
    prefix: Prefix
    lease_id: int = 0
    ready: Sequence[ChunkRef] = ()
    deadline: float | None = None  # when we stop waiting for chunks on their way
    num_local: int = 0  # what vLLM has itself, as of the last query
    stored_tokens: int = 0  # [0, stored) is in the store as whole chunks, or was tried
    saved_end: int = 0  # the same with the tail
    is_bypassed: bool = False  # a load failed: the same hit is not promised again
    loaded_from: Counter[Medium] = field(default_factory=Counter)


class SchedulerSide:
    """State of all requests of one engine."""

    def __init__(
        self, client: StoreClient, space: KeySpace, block_size: int, config: Config, clock: Callable[[], float]
    ) -> None:
        """``block_size`` is the engine's, in tokens; hits and stores end at multiples of it."""
        self._client = client
        self._space = space
        self._block_size = block_size
        self._config = config
        self._clock = clock
        self._tracked: dict[str, _Tracked] = {}
        self._loads: list[LoadOp] = []
        self._finals: list[SaveOp] = []
        self._is_idle = False  # the last step ran no token

    def matched(self, request: Request, num_computed: int) -> int | None:
        """How many tokens beyond ``num_computed`` can be loaded now; None: some are on their way, ask again."""
        tracked = self._track(request)
        if tracked is None or tracked.is_bypassed:
            return 0
        tracked.num_local = num_computed
        num_pending = self._locate(tracked)
        if num_pending and self._may_wait(tracked):
            return None
        found = sum(ref.num_tokens for ref in tracked.ready)
        limit = request.num_tokens - 1  # one token must be left to compute
        num_external = self._whole_blocks(min(found, limit)) - num_computed
        if num_external <= 0 or num_external < self._config.min_hit_tokens:
            self._release(tracked)
            return 0
        return num_external

    def allocated(self, request_id: str, block_ids: Sequence[int], num_external: int) -> None:
        """VLLM gave the request blocks; ``num_external`` tokens of them are to be loaded in the coming step."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        if num_external <= 0 or not tracked.lease_id:
            self._release(tracked)
            return
        start, stop = tracked.num_local, tracked.num_local + num_external
        items = load_items(
            tracked.ready, start, stop, block_ids, chunk_size=self._space.chunk_size, block_size=self._block_size
        )
        tracked.loaded_from.clear()
        for item in items:
            tracked.loaded_from[item.ref.medium] += len(item.block_ids) * self._block_size
        self._loads.append(LoadOp(request_id, tracked.lease_id, tuple(items)))
        tracked.stored_tokens = tracked.saved_end = stop // self._space.chunk_size * self._space.chunk_size
        tracked.lease_id, tracked.ready = 0, ()  # the lease ends with the load

    def loaded_from(self, request_id: str) -> Counter[Medium]:
        """Where the tokens of the request's last load came from."""
        tracked = self._tracked.get(request_id)
        return tracked.loaded_from if tracked is not None else Counter()

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """The work of the step that ``output`` describes. Resets per-step state."""
        self._is_idle = output.total_num_scheduled_tokens == 0
        plan = StepPlan(self._loads, self._finals)
        self._loads, self._finals = [], []
        for request_id, num_before in _computed_before(output):
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                num_after = num_before + output.num_scheduled_tokens.get(request_id, 0)
                save = self._save_of_step(tracked, request_id, num_before, num_after, output)
                if save is not None:
                    plan.saves.append(save)
        return plan

    def finished(self, request: Request, block_ids: Sequence[int], *, is_complete: bool) -> bool:
        """The request has ended. True: its blocks are needed until the next step has stored what is new in them."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False
        self._release(tracked)
        if not (is_complete and self._config.save_decode):
            return False
        end = min(request.num_computed_tokens, request.num_tokens - 1)  # the last sampled token has no KV
        save = self._save(tracked, end, with_tail=self._config.save_partial_chunks, block_ids=block_ids)
        if save is None:
            return False
        self._finals.append(save._replace(is_final=True))
        return True

    def heard(self, report: StepReport) -> None:
        """The workers' report of an earlier step."""
        self._client.release(*report.ended_leases)
        for request_id in report.failed_requests:
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.is_bypassed = True
        for request_id, start in report.skipped_saves.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.stored_tokens = min(tracked.stored_tokens, start)
                tracked.saved_end = min(tracked.saved_end, start)

    def _track(self, request: Request) -> _Tracked | None:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            identity, reason = identity_of(request)
            if reason is not None:
                _log.warning("request_not_cached", request=request.request_id, reason=reason)
                return None
            tracked = self._tracked[request.request_id] = _Tracked(request, Prefix(self._space, identity))
        tracked.prefix.update_to(request.all_token_ids)
        return tracked

    def _locate(self, tracked: _Tracked) -> int:
        # Fills tracked.ready; returns how many more chunks are on their way.
        located = self._client.poll(tracked.lease_id) if tracked.lease_id else None
        if located is None or not located.lease_id:
            located = tracked.prefix.find(self._client)
        tracked.lease_id = located.lease_id
        tracked.ready = located.ready
        return located.num_pending

    def _may_wait(self, tracked: _Tracked) -> bool:
        now = self._clock()
        if tracked.deadline is None:
            tracked.deadline = now + self._config.load_deadline_seconds
        if now >= tracked.deadline:
            return False
        if self._is_idle:
            self._client.wait_change(_IDLE_NAP_SECONDS)
        return True

    def _release(self, tracked: _Tracked) -> None:
        if tracked.lease_id:
            self._client.release(tracked.lease_id)
        tracked.lease_id, tracked.ready = 0, ()

    def _save_of_step(
        self, tracked: _Tracked, request_id: str, num_before: int, num_after: int, output: SchedulerOutput
    ) -> SaveOp | None:
        request = tracked.request
        num_prompt = request.num_prompt_tokens
        # Positions [0, end) are computed when this step is over, and their tokens are known now: drafts that may be
        # rejected and tokens that are still to be sampled are not among request.num_tokens.
        end = min(num_after, request.num_tokens)
        if not self._config.save_decode:
            end = min(end, num_prompt)
        ends_prompt = num_before < num_prompt <= num_after
        ends_request = request.num_output_tokens + 1 >= request.max_tokens and num_after >= request.num_tokens
        with_tail = self._config.save_partial_chunks and (ends_prompt or ends_request)
        if end < tracked.stored_tokens + self._space.chunk_size and not with_tail:
            return None
        block_ids = _block_ids(output, request_id)
        if block_ids is None:
            return None
        return self._save(tracked, end, with_tail=with_tail, block_ids=block_ids)

    def _save(self, tracked: _Tracked, end: int, *, with_tail: bool, block_ids: Sequence[int]) -> SaveOp | None:
        # The chunks of [stored, end) that are whole, then the tail in whole blocks, unless it is stored already.
        tracked.prefix.update_to(tracked.request.all_token_ids)
        start, chunk_size = tracked.stored_tokens, self._space.chunk_size
        tracked.stored_tokens = max(start, end // chunk_size * chunk_size)
        stop = self._whole_blocks(end) if with_tail else tracked.stored_tokens
        if stop <= tracked.saved_end:
            return None
        tracked.saved_end = stop
        items = tracked.prefix.save_items(start, stop, block_ids, self._block_size)
        return SaveOp(tracked.request.request_id, start, tuple(items), is_final=False)

    def _whole_blocks(self, num_tokens: int) -> int:
        return num_tokens // self._block_size * self._block_size


def _computed_before(output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    # (request id, tokens computed before this step) of every request that runs in it.
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)


def _block_ids(output: SchedulerOutput, request_id: str) -> Sequence[int] | None:
    # The request's whole block table: one list, since there is one group.
    state = output.kv_connector_block_state
    tables = state.get_block_ids(request_id) if state is not None else None
    return tables[0] if tables else None
