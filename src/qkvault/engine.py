"""CacheEngine: store, look up and retrieve attention state by token ids.

Tokens + client + transfer, and no state of its own but leases: the observable contract of the reference engine
(rows 1-31), with results that say what was done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec
import torch
from msgspec.structs import replace

from qkvault.client import StoreClient
from qkvault.config import Config
from qkvault.errors import ConfigError, ProtocolError, Unavailable
from qkvault.keys import KeySpace, RequestIdentity
from qkvault.layout import ChunkLayout
from qkvault.loading import Loaded, Loader
from qkvault.logs import RateLimited, get_logger
from qkvault.paged import PagedConnector
from qkvault.prefix import Prefix, require_blocks
from qkvault.stats import StatsMonitor
from qkvault.tokens import load_scheme, num_masked_tokens
from qkvault.transfer import SaveItem, StoreResult, Transfer
from qkvault.types import ChunkRefs, Outcome
from qkvault.wire.messages import Located

if TYPE_CHECKING:
    from qkvault.tokens import Mask, Tokens

_NOBODY: Final = RequestIdentity()
_NOTHING: Final = Located(0, ChunkRefs(), 0)
_log = RateLimited(get_logger("engine"))
_Answer = TypeVar("_Answer")


class EngineMetadata(msgspec.Struct, frozen=True):
    """Whose tensors an engine holds. Part of every key."""

    model_name: str
    model_fingerprint: str
    layout: ChunkLayout
    world_size: int = 1
    worker_id: int = 0

    def space(self, config: Config) -> KeySpace:
        revision = f"@{quote(config.model_revision)}" if config.model_revision else ""
        return KeySpace(
            model_name=self.model_name,
            model_fingerprint=quote(self.model_fingerprint) + revision,  # quoted: "a", "bc" is not "ab", "c"
            world_size=self.world_size,
            worker_id=self.worker_id,
            dtype=self.layout.dtype,
            kind=self.layout.kind,
            chunk_size=config.chunk_size,
            tensors=self.layout.logical,
            hash_algorithm=config.hash_algorithm,
        )


class _Held(NamedTuple):
    prefix: Prefix
    located: Located  # what a lease holds
    promised_tokens: int  # what it was to hold when it was found


class CacheEngine:
    """One engine over one set of paged tensors. Calls are to come from one thread at a time.

    A call hashes its tokens; ``retrieve`` with the id of a lookup takes that one's hashes.

    Nothing of the cache is an error to store, lookup and retrieve: what cannot be had is a shorter result, and a store
    that cannot be reached holds nothing. ValueError is for wrong arguments. Orders (``freeze``, ``set_hot_cache``,
    ``clear``) and ``is_frozen`` raise Unavailable, and orders Refused: who gives one must know that it was not heard.
    """

    def __init__(
        self,
        config: Config,
        metadata: EngineMetadata,
        tensors: Sequence[torch.Tensor] | PagedConnector,
        client: StoreClient,
    ) -> None:
        """``tensors`` are the paged ones, one a layer, laid out as ``metadata.layout`` says; or a connector over them.

        Raises ConfigError if the settings do not fit the layout, LayoutMismatch if the tensors do not.
        """
        paged = tensors if isinstance(tensors, PagedConnector) else PagedConnector(tensors, metadata.layout)
        if config.chunk_size != metadata.layout.chunk_size or paged.layout != metadata.layout:
            msg = f"chunk_size={config.chunk_size}, but the layout has chunks of {metadata.layout.chunk_size} tokens"
            raise ConfigError(msg)
        self.config, self.metadata = config, metadata
        self.stats = StatsMonitor()
        self.is_healthy = True  # whether the store could be reached when it was last asked
        load_scheme(config.hash_algorithm, shared=config.is_shared)  # what is wrong with it is wrong at start
        self._space = metadata.space(config)
        self._client, self._paged = client, paged
        self._transfer = Transfer(client, paged, self._space, stats=self.stats)
        self._loader = Loader(client, self._transfer, self.stats, deadline_seconds=config.load_deadline_seconds)
        self._held: dict[str, _Held] = {}  # by lookup id

    def store(
        self,
        tokens: Tokens,
        mask: Mask | None = None,
        *,
        block_ids: Sequence[int],
        identity: RequestIdentity = _NOBODY,
    ) -> StoreResult:
        """Store the tensors of ``tokens``, which lie in ``block_ids`` in order: whole chunks and whole blocks.

        ``mask`` is F..FT..T with Falses in whole blocks; a chunk all of which is masked is hashed, not stored (rows
        15, 16). When room runs out fewer chunks are stored (row 11), and none of a request that cannot be cached: the
        result says why. Blocks may be overwritten afterwards. Raises ValueError for a misaligned mask or few blocks.
        """
        num_masked = self._num_masked(mask, len(tokens)) // self._space.chunk_size * self._space.chunk_size
        end = self._whole_blocks(len(tokens))
        if not self.config.save_partial_chunks:
            end = end // self._space.chunk_size * self._space.chunk_size
        require_blocks(block_ids, end, self._paged.block_size)
        request = self.stats.on_store_request(len(tokens))
        items: list[SaveItem] = []
        outcomes: list[Outcome] = []
        num_before = self._transfer.num_published
        reason = _refusal(identity)
        try:
            if reason is None:
                prefix = self._prefix(tokens, identity)
                items = prefix.save_items(num_masked, end, block_ids, self._paged.block_size)
                self._reach(lambda: self._save(items, outcomes), None)
        finally:
            num_published = self._transfer.num_published - num_before
            result = replace(StoreResult.of(items, outcomes, num_published), uncacheable_reason=reason)
            chunks = {outcome.value: n for outcome, n in result.outcomes.items() if outcome is not Outcome.RESERVED}
            chunks |= {"stored": num_published, "failed": len(items) - num_published - sum(chunks.values())}
            num_bytes = result.stored_tokens * self.metadata.layout.token_bytes
            self.stats.on_store_finished(request, num_tokens=result.stored_tokens, num_bytes=num_bytes, chunks=chunks)
        return result

    def lookup(
        self,
        tokens: Tokens,
        *,
        search_range: Sequence[str] | None = None,
        lookup_id: str | None = None,
        pin: bool = False,
        identity: RequestIdentity = _NOBODY,
    ) -> int:
        """How many leading tokens are cached, in whole blocks (row 20). What lies in a lower tier begins to come up.

        ``search_range`` names the media to ask (row 22). ``pin`` keeps what was found until ``lookup_unpin`` or until
        its lease runs out, and needs a ``lookup_id``; the same id again replaces its pins. Less than ``min_hit_tokens``
        is 0. Raises ValueError, also for a medium that the store does not have.
        """
        if pin and lookup_id is None:
            msg = "pin needs a lookup_id"
            raise ValueError(msg)
        held = self._look_up(tokens, identity, search_range)
        if pin and lookup_id is not None:
            self._hold(lookup_id, held)
        elif held is not None:
            self._release(held)
        return held.promised_tokens if held is not None else 0

    def lookup_unpin(self, lookup_id: str) -> None:
        """Give up what a lookup pinned or prefetches (rows 24, 55). Unknown ids are ignored."""
        self._hold(lookup_id, None)

    def retrieve(
        self,
        tokens: Tokens,
        mask: Mask | None = None,
        *,
        block_ids: Sequence[int],
        lookup_id: str | None = None,
        identity: RequestIdentity = _NOBODY,
    ) -> torch.Tensor:
        """Load what is cached of ``tokens`` into ``block_ids``. Returns bool ``[len(tokens)]``: it is there (row 26).

        Masked tokens (whole blocks) are not loaded, nor marked. Waits for chunks on their way, at most
        ``load_deadline_seconds``. At the first chunk that fails it stops: everything after it is void (rows 28, 29).
        ``lookup_id`` takes what an earlier lookup of these tokens holds, and releases it. Only blocks of found tokens
        that are not masked are written. Raises ValueError for a misaligned mask or too few blocks.
        """
        num_masked = self._num_masked(mask, len(tokens))
        limit = self._whole_blocks(len(tokens))
        require_blocks(block_ids, limit, self._paged.block_size)
        request = self.stats.on_retrieve_request(len(tokens) - num_masked)
        held, loaded = None, Loaded(num_masked)
        try:
            held = self._take(lookup_id, tokens, identity) or self._find(tokens, identity, None)
            if held is not None:
                loaded = self._load(held, num_masked, limit, block_ids)
        finally:
            if held is not None:
                self._release(held)
            num_tokens = loaded.end_token - num_masked
            self.stats.on_retrieve_finished(
                request,
                num_tokens=num_tokens,
                num_bytes=num_tokens * self.metadata.layout.token_bytes,
                num_failed_tokens=loaded.failed_tokens,
                num_voided_tokens=loaded.voided_tokens,
            )
        marked = torch.zeros(len(tokens), dtype=torch.bool)
        marked[num_masked : loaded.end_token] = True
        return marked

    def async_lookup_and_prefetch(self, lookup_id: str, tokens: Tokens, *, identity: RequestIdentity = _NOBODY) -> None:
        """The third way in (rows 53-55): begin to bring up what is cached and return at once.

        ``prefetched`` tells how far it is, ``retrieve(lookup_id=...)`` takes it, ``lookup_unpin`` gives it up.
        """
        self._hold(lookup_id, self._look_up(tokens, identity, None))

    def prefetched(self, lookup_id: str) -> tuple[int, bool]:
        """(leading tokens that are in RAM now, whether that is all there will be) for an id that holds something."""
        if (held := self._held.get(lookup_id)) is None:
            return 0, True
        if held.located.num_pending:
            held = self._held[lookup_id] = held._replace(located=self._poll(held))
        num_tokens = min(held.located.ready.num_tokens, held.promised_tokens)
        return self._whole_blocks(num_tokens), held.located.num_pending == 0

    def freeze(self, *, enabled: bool) -> None:
        """Frozen, stores are skipped and only RAM serves; nothing is evicted or admitted (row 51)."""
        self._client.switch(frozen=enabled)

    @property
    def is_frozen(self) -> bool:
        return self._client.status().is_frozen

    def set_hot_cache(self, *, enabled: bool) -> None:
        """Switch the cache in RAM at run time; off empties it first (row 52)."""
        self._client.switch(hot_cache=enabled)

    def clear(self) -> int:
        """Forget everything, in every tier. Returns how many chunks are to go."""
        return self._client.clear()

    def close(self) -> None:
        """End the session with the store. Idempotent."""
        self._held.clear()
        self._client.close()

    def _reach(self, ask: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
        """What ``ask`` returns, or ``otherwise`` if the store cannot be reached."""
        try:
            answer = ask()
        except (Unavailable, ProtocolError) as error:
            self.is_healthy = False
            _log.warning("store_out_of_reach", error=error)
            return otherwise
        self.is_healthy = True
        return answer

    def _prefix(self, tokens: Tokens, identity: RequestIdentity) -> Prefix:
        with self.stats.stage("process_tokens", num_tokens=len(tokens)):
            return Prefix(self._space, identity, tokens, shared=self.config.is_shared)

    def _save(self, items: Sequence[SaveItem], outcomes: list[Outcome]) -> None:
        """Store ``items``, and wait for it. Appends to ``outcomes`` what became of them, as far as it comes."""
        for part in self._transfer.save(items):
            outcomes += part.outcomes
        self._transfer.wait()

    def _look_up(self, tokens: Tokens, identity: RequestIdentity, media: Sequence[str] | None) -> _Held | None:
        """What is cached, leased and counted; None if it is less than the least that is used."""
        request = self.stats.on_lookup_request(len(tokens))
        held = None
        try:
            held = self._find(tokens, identity, media)
            if held is not None and held.promised_tokens < max(1, self.config.min_hit_tokens):
                self._release(held)
                held = None
        finally:
            self.stats.on_lookup_finished(request, _by_medium(held) if held is not None else {})
        return held

    def _find(self, tokens: Tokens, identity: RequestIdentity, media: Sequence[str] | None) -> _Held | None:
        """What is cached, leased; None if nothing is."""
        if _refusal(identity) is not None:
            return None
        prefix = self._prefix(tokens, identity)
        located = self._reach(lambda: self._locate(prefix, media), _NOTHING)
        if not located.lease_id:
            return None
        found = located.ready.num_tokens + sum(located.pending_tokens.values())
        return _Held(prefix, located, self._whole_blocks(min(found, len(tokens))))

    def _locate(self, prefix: Prefix, media: Sequence[str] | None) -> Located:
        with self.stats.stage("lookup", num_tokens=prefix.num_tokens):
            return prefix.find(self._client, search_range=media)

    def _hold(self, lookup_id: str, held: _Held | None) -> None:
        before = self._held.pop(lookup_id, None)
        if held is not None:
            self._held[lookup_id] = held
        if before is not None:
            self._release(before)

    def _take(self, lookup_id: str | None, tokens: Tokens, identity: RequestIdentity) -> _Held | None:
        """What ``lookup_id`` holds of these very tokens, with its lease renewed; None if it is none of them.

        What went meanwhile is looked for again; the promise stands, so that what is missing then counts as failed.
        """
        held = self._held.pop(lookup_id, None) if lookup_id is not None else None
        if held is None:
            return None
        if not held.prefix.agrees_with(tokens, identity):
            self._release(held)
            return None
        held = held._replace(located=self._poll(held))
        found = None if held.located.lease_id else self._find(tokens, identity, None)
        if found is None:
            return held
        return found._replace(promised_tokens=max(held.promised_tokens, found.promised_tokens))

    def _poll(self, held: _Held) -> Located:
        return self._reach(lambda: self._client.poll(held.located.lease_id), _NOTHING)

    def _release(self, held: _Held) -> None:
        if held.located.lease_id:
            self._reach(lambda: self._client.release(held.located.lease_id), None)

    def _load(self, held: _Held, num_masked: int, limit: int, block_ids: Sequence[int]) -> Loaded:
        """Load the tokens ``[num_masked, limit)`` of what is held, as far as they come."""
        promised = min(held.promised_tokens, limit)
        if promised - num_masked < max(1, self.config.min_hit_tokens):
            return Loaded(num_masked)
        none = Loaded(num_masked, promised - num_masked)
        least = max(1, self.config.min_hit_tokens)
        return self._reach(
            lambda: self._loader.load(held.located, num_masked, promised, block_ids, min_tokens=least), none
        )

    def _num_masked(self, mask: Mask | None, num_tokens: int) -> int:
        return num_masked_tokens(mask, num_tokens, self._paged.block_size, unit="block")

    def _whole_blocks(self, num_tokens: int) -> int:
        return num_tokens // self._paged.block_size * self._paged.block_size


def _refusal(identity: RequestIdentity) -> str | None:
    """Why the request cannot be cached, also said in the log; None if it can."""
    reason = identity.uncacheable_reason
    if reason is not None:
        _log.warning("request_not_cached", reason=reason)
    return reason


def _by_medium(held: _Held) -> Counter[str]:
    """The promised tokens by where they are: what is in RAM first, then what is on its way."""
    pieces = [(run.medium, run.count * run.num_tokens) for run in held.located.ready.runs]
    found: Counter[str] = Counter()
    for medium, num_tokens in [*pieces, *held.located.pending_tokens.items()]:
        found[medium.value] += min(num_tokens, held.promised_tokens - found.total())
    return found
