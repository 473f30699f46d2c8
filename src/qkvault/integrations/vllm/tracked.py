"""What the scheduler's half knows of one request, and how it reads vLLM's description of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qkvault.integrations.vllm.fingerprint import Adapters
from qkvault.prefix import Prefix
from qkvault.stats import StatsMonitor
from qkvault.types import ChunkRefs, Medium

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass(slots=True)
class Tracked:
    """What we know of one request. All positions are tokens from the start of the request."""

    request: Request
    prefix: Prefix
    adapter: str = ""  # its adapter's name, as it was when the keys were made
    lease_ids: tuple[int, ...] = ()  # by rank
    first_chunk: int = 0  # number of the first chunk in ready; vLLM has what is before it
    ready: tuple[ChunkRefs, ...] = ()  # by rank
    num_local: int = 0  # what vLLM has itself, as of the last query
    num_found: int = 0  # what the store has from the first token on, as of the last query
    is_asking: bool = False  # queried since vLLM gave it blocks
    deadline: float | None = None  # when we stop waiting for chunks on their way
    pending_since: float | None = None  # when some were first seen on their way from a tier, on the statistics' clock
    stored_tokens: int = 0  # [0, stored) is in the store as whole chunks, or was tried
    saved_end: int = 0  # the same with the tail
    rests_until: int = 0  # the last store had no success: none is tried before this token is computed
    can_load: bool = True  # False: a load has failed, so nothing is promised again
    can_save: bool = True  # False: its blocks may be older than a reset, or of an adapter's other files
    loaded_from: Counter[Medium] = field(default_factory=Counter)

    def is_last_step(self, num_after: int) -> bool:
        """Whether the request ends with a step that computes its tokens up to ``num_after``, as far as is known."""
        request = self.request
        return bool(request.num_output_tokens + 1 >= request.max_tokens and num_after >= request.num_tokens)

    def confirm(self, adapters: Adapters) -> None:
        """Store nothing more if the files of the request's adapter are others than when the keys were made."""
        self.can_save = self.can_save and adapters.is_still(self.request.lora_request, self.adapter)

    def take_tokens(self, stats: StatsMonitor) -> None:
        """Hash the tokens that have come since the last call, if any."""
        tokens = self.request.all_token_ids
        if (num_new := len(tokens) - self.prefix.num_tokens) > 0:
            with stats.stage("process_tokens", num_tokens=num_new):
                self.prefix.update_to(tokens)

    def end_wait(self, stats: StatsMonitor) -> None:
        """Count the wait for chunks on their way, if there was one: the bytes of all ranks, and the tokens once."""
        since_seconds, self.pending_since = self.pending_since, None
        if since_seconds is not None:
            risen = [[run for run in refs.runs if run.medium is not Medium.RAM] for refs in self.ready]
            num_bytes = sum(run.count * run.image_bytes for runs in risen for run in runs)
            num_tokens = sum(run.count * run.num_tokens for run in risen[0])
            stats.on_stage("get", stats.clock() - since_seconds, num_bytes=num_bytes, num_tokens=num_tokens)

    def rewind(self, start: int) -> None:
        """What begins at ``start``, a chunk's first token, is not stored."""
        self.num_found = min(self.num_found, start)
        self.stored_tokens = min(self.stored_tokens, start)
        self.saved_end = min(self.saved_end, start)


class LocalCache:
    """Whether vLLM's own prefix cache may have what is older than our keys say. Owned by the scheduler's thread.

    It knows an adapter by name and path, whatever lies there by now. It is not emptied while requests run, and what
    they have computed may come into it later.
    """

    def __init__(self, adapters: Adapters) -> None:
        """It is empty, or as old as the store."""
        self._adapters = adapters
        self._pool: BlockPool | None = None
        self._is_older = False  # than the last reset, in part

    def bind(self, pool: BlockPool) -> None:
        """It keeps its blocks in ``pool``."""
        self._pool = pool

    def reset(self) -> None:
        """The store was emptied: what is in here is older, if anything is."""
        self._is_older = True

    def is_doubtful(self, request: Request) -> bool:
        """Whether what is in it for ``request`` may not be stored under its keys. To be asked of each, before it runs.

        That it is empty, and that nobody has blocks that may come into it, is seen then.
        """
        if self._is_older and (pool := self._pool) is not None:
            num_used = pool.num_gpu_blocks - pool.get_num_free_blocks() - 1  # one is nobody's
            self._is_older = num_used > 0 or len(pool.cached_block_hash_to_block) > 0
        return self._is_older or self._adapters.have_changed(request.lora_request)


def floor_to(size: int, num_tokens: int) -> int:
    """The tokens in whole pieces of ``size``."""
    return num_tokens // size * size


def computed_before(output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """Request id and tokens computed before this step, of every request that runs in it."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)


def block_ids_of(output: SchedulerOutput, request_id: str) -> Sequence[int] | None:
    """The request's whole block table: one list, since there is one group."""
    state = output.kv_connector_block_state
    tables = state.get_block_ids(request_id) if state is not None else None
    return tables[0] if tables else None
