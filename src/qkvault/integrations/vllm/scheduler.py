"""The scheduler's half of the connector: what is cached of a request, what to load, what has become worth storing.

Runs on the scheduler's thread and copies no bytes. Every hook of vLLM may come repeated, for unknown requests, or not
at all; queries change nothing that a later query depends on. Loads are asynchronous to vLLM: it runs a request when its
blocks are filled, so that nothing is computed on blocks whose load failed, and those who share them wait for them
(docs/decisions/0014).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from qkvault.client import StoreClient
from qkvault.config import Config
from qkvault.errors import ProtocolError, Unavailable
from qkvault.integrations.vllm.fingerprint import Adapters
from qkvault.integrations.vllm.identity import identity_of
from qkvault.integrations.vllm.ops import LoadOp, SaveOp, StepPlan, StepReport
from qkvault.integrations.vllm.query_steps import QuerySteps
from qkvault.integrations.vllm.tracked import LocalCache, Tracked, block_ids_of, computed_before, floor_to
from qkvault.keys import KeySpace
from qkvault.link import Link
from qkvault.logs import RateLimited, get_logger
from qkvault.prefix import Prefix, load_items
from qkvault.stats import StatsMonitor
from qkvault.types import ChunkRefs, Medium
from qkvault.wire.messages import Located

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_IDLE_NAP_SECONDS: Final = 0.002  # slept in a query while chunks are on their way and the engine has nothing to run
_log = RateLimited(get_logger("vllm.scheduler"))


class Engine(NamedTuple):
    """What we have to know of the engine."""

    block_size: int  # tokens; hits and stores end at multiples of it
    can_load: bool = True
    can_save: bool = True
    shares_blocks: bool = True  # its own prefix cache is on: what one request has loaded, others have too
    hashes_media: bool = True  # what it calls a medium is a digest


class SchedulerSide:
    """State of all requests of one engine."""

    def __init__(
        self,
        link: Link,
        spaces: Sequence[KeySpace],
        engine: Engine,
        config: Config,
        stats: StatsMonitor,
        *,
        clock: Callable[[], float],
        query_spaces: Sequence[KeySpace] = (),
    ) -> None:
        """``spaces`` are those of the ranks' keys, ``query_spaces`` of their queries; ``clock``: rising seconds."""
        self._link = link
        self._spaces, self._space = spaces, spaces[0]
        self._engine = engine
        self._config = config
        self._stats = stats
        self._clock = clock
        self._adapters = Adapters()
        self.local = LocalCache(self._adapters)
        self._tracked: dict[str, Tracked | None] = {}  # None: not to be cached
        self._loads: list[LoadOp] = []
        self._finals: list[SaveOp] = []  # for the next plan or none: its step may overwrite those blocks
        self._arriving: dict[bytes, str] = {}  # chunks that are being loaded -> the request they are loaded for
        self._num_steps = self._step_saved = self._step_heard = 0  # the last one; that saves; whose saves are done
        self._clear_after = 0  # what was stored up to that step is to go: a reset came while it was under way
        self._may_nap = False  # the last step ran no token
        self._space_ids = [space.space_id for space in (*spaces, *query_spaces)]
        self._queries = QuerySteps(config, block_size=engine.block_size) if query_spaces and engine.can_save else None

    @property
    def _client(self) -> StoreClient:
        if self._link.is_superseded:
            self.lost(Unavailable("the store was restarted"))
        return self._link.session()

    def lost(self, error: Exception) -> None:
        """The session with the store has failed: nothing it leased is ours any more. It is looked for from now on."""
        for tracked in filter(None, self._tracked.values()):
            tracked.lease_ids, tracked.ready = (), ()
        self._link.lost(error)

    def close(self) -> None:
        self._link.close()

    def matched(self, request: Request, num_local: int) -> int | None:
        """How many tokens beyond ``num_local`` can be loaded now; None: some are on their way, ask again."""
        tracked = self._track(request, num_local)
        if tracked is None or not tracked.can_load or request.skip_reading_prefix_cache:
            return 0
        tracked.num_local, tracked.is_asking = num_local, True
        if self._locate(tracked) and self._may_wait(tracked, is_pending=True):
            return None
        tracked.end_wait(self._stats)
        found = tracked.first_chunk * self._space.chunk_size + _num_everywhere(tracked.ready)
        tracked.num_found = found
        limit = request.num_tokens - 1  # one token must be left to compute
        num_external = floor_to(self._engine.block_size, min(found, limit)) - num_local
        if num_external < max(1, self._config.min_hit_tokens):
            self._release(tracked)
            return 0
        is_arriving = bool(self._arriving) and any(ref.key in self._arriving for ref in tracked.ready[0])
        return None if is_arriving and self._may_wait(tracked, is_pending=False) else num_external

    def allocated(self, request_id: str, block_ids: Sequence[int], num_external: int) -> None:
        """VLLM gave the request blocks; ``num_external`` tokens of them are to be loaded in the coming step.

        Whatever happened since the promise, a load is planned, since vLLM waits for it: one that cannot be had fails.
        """
        tracked = self._tracked.get(request_id)
        if num_external > 0 and all(op.request_id != request_id for op in self._loads):  # else it is told twice
            self._loads.append(self._load_of(tracked, request_id, block_ids, num_external))
        if tracked is None:
            return
        self._release(tracked)
        tracked.deadline = tracked.pending_since = None
        if tracked.is_asking:
            tracked.is_asking = False
            found = tracked.loaded_from if num_external > 0 else {}
            lookup = self._stats.on_lookup_request(tracked.request.num_tokens - tracked.num_local)
            self._stats.on_lookup_finished(lookup, {medium.value: n for medium, n in found.items()})
            if tracked.first_chunk:
                tracked.num_found = self._touch(tracked)
        tracked.stored_tokens = floor_to(self._space.chunk_size, tracked.num_found)
        tracked.saved_end = floor_to(self._engine.block_size, tracked.num_found)

    def loaded_from(self, request_id: str) -> Counter[Medium]:
        """Where the tokens of the request's last load came from."""
        tracked = self._tracked.get(request_id)
        return tracked.loaded_from if tracked is not None else Counter()

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """The work of the step that ``output`` describes. Resets per-step state."""
        self._num_steps += 1
        self._may_nap = output.total_num_scheduled_tokens == 0
        plan = StepPlan(self._num_steps, self._loads, [], self._finals, is_idle=self._may_nap)
        self._loads, self._finals = [], []
        try:
            plan.saves.extend(self._saves_of(output))  # first: it may find that nothing more is to be stored
            if self._queries is not None:
                plan.query_steps, plan.query_drops = self._queries.plan(output, self._tracked)
        except Exception as error:  # thread top: vLLM waits for the plan's loads
            _log.warning("saves_not_planned", error=f"{type(error).__name__}: {error}")
        if plan.stores:
            self._step_saved = self._num_steps
        return plan

    def finished(self, request: Request, block_ids: Sequence[int], *, is_complete: bool) -> None:
        """The request has ended. The next step stores what is new in its blocks, before it writes any: all are free."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        self._forget_arrivals({request.request_id})
        self._release(tracked)
        tracked.confirm(self._adapters)
        end = min(request.num_computed_tokens, request.num_tokens - 1)  # the last sampled token has no KV
        if self._queries is not None:
            self._queries.finished(tracked, end, is_complete=is_complete)
        if is_complete and (final := self._save(tracked, end, block_ids, with_tail=self._config.save_partial_chunks)):
            self._finals.append(final)

    def heard(self, report: StepReport | None, received: Collection[str]) -> None:
        """The workers' report of an earlier step, and requests whose load is over."""
        self._forget_arrivals(received)
        if report is None:
            return
        for request_id, token in report.failed_loads.items():
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.can_load = False
                tracked.rewind(floor_to(self._space.chunk_size, token))
        for request_id, token in report.unsaved.items():
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.rewind(floor_to(self._space.chunk_size, token))
                tracked.rests_until = tracked.request.num_tokens + self._space.chunk_size
        self._end_leases(report.ended_leases)
        self._step_heard = max(self._step_heard, report.saved_step)
        if 0 < self._clear_after <= self._step_heard:
            self._client.clear(spaces=self._space_ids)
            self._clear_after = 0

    def reset(self) -> None:
        """Forget all of this model, in every tier; nothing is stored that was computed before. Raises Unavailable."""
        self.local.reset()
        for tracked in self._tracked.values():
            if tracked is not None:
                self._release(tracked)
                tracked.can_save = False
        if self._queries is not None:
            self._queries.reset()
        self._finals = []
        self._clear_after = 0
        self._client.clear(spaces=self._space_ids)
        if self._step_saved > self._step_heard:
            self._clear_after = self._step_saved  # once the store has obeyed: who refuses once would at every step

    def _track(self, request: Request, num_local: int) -> Tracked | None:
        if request.request_id not in self._tracked:
            identity, reason = identity_of(request, self._adapters, hashes_media=self._engine.hashes_media)
            if reason is not None:
                _log.warning("request_not_cached", request=request.request_id, reason=reason)
            prefix = Prefix(self._space, identity, shared=self._config.is_shared) if reason is None else None
            self._tracked[request.request_id] = Tracked(request, prefix, identity.adapter) if prefix else None
        tracked = self._tracked[request.request_id]
        if tracked is not None:
            tracked.take_tokens(self._stats)
            tracked.can_save &= not (self.local.is_doubtful(request) and num_local)
        return tracked if self._engine.can_load else None

    def _locate(self, tracked: Tracked) -> int:
        # Fills tracked.ready; returns how many more chunks are on their way, on the rank that waits for most.
        located: Sequence[Located] = ()
        first_chunk = tracked.num_local // self._space.chunk_size
        if tracked.lease_ids and tracked.first_chunk <= first_chunk:
            located = self._client.poll_each(tracked.lease_ids)
        if not located or not all(each.lease_id for each in located):
            self._release(tracked)
            tracked.first_chunk = first_chunk
            with self._stats.stage("lookup", num_tokens=tracked.prefix.num_tokens):
                located = tracked.prefix.find_each(self._client, self._spaces, start_chunk=first_chunk)
        tracked.lease_ids = tuple(each.lease_id for each in located)
        tracked.ready = tuple(each.ready for each in located)
        return max(each.num_pending for each in located)

    def _touch(self, tracked: Tracked) -> int:
        # What vLLM has itself was not looked up: it counts as used nevertheless, and need not be stored again.
        try:
            found = tracked.prefix.find_each(self._client, self._spaces, search_range=(Medium.RAM.value,))
        except (Unavailable, ProtocolError) as error:
            self.lost(error)
            return 0
        self._end_leases({each.lease_id for each in found})
        return _num_everywhere([each.ready for each in found])

    def _may_wait(self, tracked: Tracked, *, is_pending: bool) -> bool:
        now = self._clock()
        tracked.deadline = tracked.deadline or now + self._config.load_deadline_seconds
        if now >= tracked.deadline:
            return False
        if is_pending:
            tracked.pending_since = tracked.pending_since or self._stats.clock()
        if is_pending and self._may_nap:
            self._may_nap = False  # once a step
            self._client.wait_change(_IDLE_NAP_SECONDS)
        return True

    def _load_of(self, tracked: Tracked | None, request_id: str, block_ids: Sequence[int], num_external: int) -> LoadOp:
        block_size = self._engine.block_size
        num_before = len(block_ids) - num_external // block_size
        op = LoadOp(request_id, num_before * block_size, tuple(block_ids[num_before:]))
        if tracked is not None:
            tracked.loaded_from.clear()
        if tracked is None or not all(tracked.lease_ids or (0,)) or op.start_token != tracked.num_local:
            return op
        skipped = tracked.first_chunk * self._space.chunk_size
        start, of_ready = op.start_token - skipped, block_ids[skipped // block_size :]
        sizes = {"chunk_size": self._space.chunk_size, "block_size": block_size}
        items = tuple(tuple(load_items(refs, start, start + num_external, of_ready, **sizes)) for refs in tracked.ready)
        for item in items[0]:
            tracked.loaded_from[item.ref.medium] += len(item.block_ids) * block_size
            if self._engine.shares_blocks:
                self._arriving[item.ref.key] = request_id
        lease_ids, tracked.lease_ids, tracked.ready = tracked.lease_ids, (), ()  # the leases end with the load
        return op._replace(lease_ids=lease_ids, items_by_rank=items)

    def _saves_of(self, output: SchedulerOutput) -> Iterator[SaveOp]:
        for request_id, num_before in computed_before(output):
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                num_after = num_before + output.num_scheduled_tokens.get(request_id, 0)
                save = self._save_of_step(tracked, request_id, num_after, output)
                if save is not None:
                    yield save

    def _save_of_step(
        self, tracked: Tracked, request_id: str, num_after: int, output: SchedulerOutput
    ) -> SaveOp | None:
        request = tracked.request
        if num_after < tracked.rests_until:
            return None
        # Positions [0, end) are computed when this step is over, and their tokens are known now: drafts that may be
        # rejected and tokens that are still to be sampled are not among request.num_tokens.
        end = min(num_after, request.num_tokens)
        num_prompt = request.num_prompt_tokens
        is_prompt_due = num_after >= num_prompt and tracked.saved_end < floor_to(self._engine.block_size, num_prompt)
        with_tail = self._config.save_partial_chunks and (is_prompt_due or tracked.is_last_step(num_after))
        if end < tracked.stored_tokens + self._space.chunk_size and not with_tail:
            return None
        block_ids = block_ids_of(output, request_id)
        tracked.confirm(self._adapters)
        return self._save(tracked, end, block_ids, with_tail=with_tail) if block_ids is not None else None

    def _save(self, tracked: Tracked, end: int, block_ids: Sequence[int], *, with_tail: bool) -> SaveOp | None:
        # The chunks of [stored, end) that are whole, then the tail in whole blocks, unless it is stored already.
        if not (tracked.can_save and self._engine.can_save):
            return None
        last = end if self._config.save_decode else tracked.request.num_prompt_tokens
        end = min(end, last, len(block_ids) * self._engine.block_size)
        tracked.take_tokens(self._stats)
        start = tracked.stored_tokens
        tracked.stored_tokens = max(start, floor_to(self._space.chunk_size, end))
        stop = floor_to(self._engine.block_size, end) if with_tail else tracked.stored_tokens
        if stop <= tracked.saved_end:
            return None
        tracked.saved_end = stop
        items = tracked.prefix.save_items(start, stop, block_ids, self._engine.block_size)
        return SaveOp(tracked.request.request_id, start, tuple(items))

    def _release(self, tracked: Tracked) -> None:
        self._end_leases(set(tracked.lease_ids))
        tracked.lease_ids, tracked.ready = (), ()

    def _end_leases(self, lease_ids: Collection[int]) -> None:
        live = [lease_id for lease_id in lease_ids if lease_id]
        if live and self._link.is_up:
            try:
                self._client.release(*live)
            except (Unavailable, ProtocolError) as error:
                self.lost(error)
            except Exception as error:  # thread top: a lease that is not released runs out
                _log.warning("leases_not_released", error=f"{type(error).__name__}: {error}")

    def _forget_arrivals(self, request_ids: Collection[str]) -> None:
        if request_ids and self._arriving:
            self._arriving = {key: owner for key, owner in self._arriving.items() if owner not in request_ids}


def _num_everywhere(ready: Sequence[ChunkRefs]) -> int:
    """How many leading tokens every rank has."""
    return min((refs.num_tokens for refs in ready), default=0)
