"""CacheEngine: store, look up and retrieve attention state by token ids.

Tokens + client + transfer, and no state of its own but leases: the observable contract of the reference engine
(rows 1-31), with results that say what was done.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import torch

from qkvault.client import StoreClient
from qkvault.config import Config
from qkvault.keys import KeySpace, RequestIdentity
from qkvault.layout import ChunkLayout
from qkvault.paged import PagedConnector
from qkvault.prefix import Prefix, load_items
from qkvault.stats import StatsMonitor
from qkvault.tokens import num_masked_tokens
from qkvault.transfer import SaveItem, Transfer
from qkvault.types import Medium, Outcome

if TYPE_CHECKING:
    from qkvault.tokens import Mask, Tokens
    from qkvault.wire.messages import Located

_NOBODY: Final = RequestIdentity()


class EngineMetadata(msgspec.Struct, frozen=True):
    """Whose tensors an engine holds. Part of every key."""

    model_name: str
    model_fingerprint: str
    layout: ChunkLayout
    world_size: int = 1
    worker_id: int = 0

    def space(self, config: Config) -> KeySpace:
        """The space of the engine's keys."""
        return KeySpace(
            model_name=self.model_name,
            model_fingerprint=f"{self.model_fingerprint}{config.model_revision}",
            world_size=self.world_size,
            worker_id=self.worker_id,
            dtype=self.layout.dtype,
            kind=self.layout.kind,
            chunk_size=config.chunk_size,
            tensors=self.layout.logical,
            hash_algorithm=config.hash_algorithm,
        )


class StoreResult(msgspec.Struct, frozen=True):
    """What a store did. Tokens that were neither stored nor present had no room, or see ``outcomes``."""

    stored_tokens: int
    present_tokens: int
    outcomes: dict[Outcome, int]  # chunks by outcome


class CacheEngine:
    """One engine over one set of paged tensors. Calls are to come from one thread at a time.

    Nothing of the cache is an error to the caller: what cannot be had is a shorter result. ValueError is for wrong
    arguments.
    """

    def __init__(
        self,
        config: Config,
        metadata: EngineMetadata,
        tensors: Sequence[torch.Tensor],
        client: StoreClient,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``tensors`` are the paged ones, one a layer, laid out as ``metadata.layout`` says."""
        self.config = config
        self.metadata = metadata
        self.stats = StatsMonitor()
        self._space = metadata.space(config)
        self._client = client
        self._paged = PagedConnector(tensors, metadata.layout)
        self._transfer = Transfer(client, self._paged, self._space)
        self._clock = clock
        self._pinned: dict[str, Located] = {}  # lookup id -> what it holds

    def store(
        self,
        tokens: Tokens,
        mask: Mask | None = None,
        *,
        block_ids: Sequence[int],
        identity: RequestIdentity = _NOBODY,
    ) -> StoreResult:
        """Store the tensors of ``tokens``, which lie in ``block_ids`` in order: whole chunks and whole blocks.

        ``mask`` is F..FT..T; a masked chunk is hashed, not stored (rows 15, 16). When room runs out fewer chunks are
        stored (row 11). Raises ValueError for a misaligned mask or too few blocks.
        """
        request = self.stats.on_store_request(len(tokens))
        with self.stats.stage("process_tokens", num_tokens=len(tokens)):
            prefix = Prefix(self._space, identity, tokens)
            items = self._save_items(prefix, num_masked_tokens(mask, len(tokens), self._space.chunk_size), block_ids)
        with self.stats.stage("from_gpu") as stage:
            report = self._transfer.save(items)
            stage.num_bytes = report.copied_bytes
        sizes: Counter[Outcome] = Counter()
        for item, outcome in zip(items, report.outcomes, strict=True):
            sizes[outcome] += item.num_tokens
        outcomes = Counter(report.outcomes)
        chunks = {outcome.value: n for outcome, n in outcomes.items() if outcome is not Outcome.RESERVED}
        chunks["stored"] = outcomes[Outcome.RESERVED]
        self.stats.on_store_finished(
            request, num_tokens=sizes[Outcome.RESERVED], num_bytes=report.copied_bytes, chunks=chunks
        )
        return StoreResult(sizes[Outcome.RESERVED], sizes[Outcome.PRESENT], dict(outcomes))

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
        its lease runs out, and needs a ``lookup_id``; the same id again replaces its pins. Raises ValueError.
        """
        if pin and lookup_id is None:
            msg = "pin needs a lookup_id"
            raise ValueError(msg)
        request = self.stats.on_lookup_request(len(tokens))
        located = self._find(Prefix(self._space, identity, tokens), search_range)
        if pin and lookup_id is not None:
            self.lookup_unpin(lookup_id)
            self._pinned[lookup_id] = located
        elif located.lease_id:
            self._client.release(located.lease_id)
        found = Counter[Medium]()
        for ref in located.ready:
            found[ref.medium] += ref.num_tokens
        num_pending = located.num_pending * self._space.chunk_size
        self.stats.on_lookup_finished(request, {medium.value: n for medium, n in found.items()})
        return self._whole_blocks(sum(found.values()) + num_pending, len(tokens))

    def lookup_unpin(self, lookup_id: str) -> None:
        """Give up what a lookup pinned (row 24). Unknown ids are ignored."""
        located = self._pinned.pop(lookup_id, None)
        if located is not None and located.lease_id:
            self._client.release(located.lease_id)

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

        Masked tokens are not loaded, nor marked. Waits for chunks on their way, at most ``load_deadline_seconds``. At
        the first chunk that fails it stops: everything after it is void (rows 28, 29). ``lookup_id`` takes what an
        earlier lookup holds and releases it. Only blocks of tokens marked True, or that failed, are written.
        """
        num_masked = num_masked_tokens(mask, len(tokens), self._space.chunk_size)
        request = self.stats.on_retrieve_request(len(tokens) - num_masked)
        located = self._pinned.pop(lookup_id, None) if lookup_id is not None else None
        if located is None or not located.lease_id:
            located = self._find(Prefix(self._space, identity, tokens), None)
        with self.stats.stage("get"):
            located = self._client.wait(located, self.config.load_deadline_seconds, self._clock)
        marked = torch.zeros(len(tokens), dtype=torch.bool)
        found = self._whole_blocks(sum(ref.num_tokens for ref in located.ready), len(tokens))
        if len(block_ids) * self.metadata.layout.block_size < found:
            msg = f"{len(block_ids)} blocks do not hold {found} tokens"
            raise ValueError(msg)
        items = load_items(
            located.ready, num_masked, found, block_ids,
            chunk_size=self._space.chunk_size, block_size=self.metadata.layout.block_size,
        )  # fmt: skip
        num_bytes = sum(len(item.block_ids) for item in items) * self.metadata.layout.block_bytes
        try:
            with self.stats.stage("to_gpu", num_bytes):
                failed = self._transfer.load(items)
                self._transfer.wait()
        finally:
            if located.lease_id:
                self._client.release(located.lease_id)
        end = items[min(failed)].start_token if failed else found
        marked[num_masked:end] = True
        self.stats.on_retrieve_finished(
            request, num_tokens=max(0, end - num_masked), num_bytes=num_bytes, num_failed_tokens=found - end
        )
        return marked

    def async_lookup_and_prefetch(self, lookup_id: str, tokens: Tokens, *, identity: RequestIdentity = _NOBODY) -> None:
        """The third way in (rows 53-55): begin to bring up what is cached and return at once.

        ``prefetched`` tells how far it is, ``retrieve(lookup_id=...)`` takes it, ``lookup_unpin`` gives it up.
        """
        self.lookup_unpin(lookup_id)
        self._pinned[lookup_id] = self._find(Prefix(self._space, identity, tokens), None)

    def prefetched(self, lookup_id: str) -> tuple[int, bool]:
        """(leading tokens that are in RAM now, whether that is all there will be) for an id that holds something."""
        located = self._pinned.get(lookup_id)
        if located is None:
            return 0, True
        if located.num_pending:
            located = self._pinned[lookup_id] = self._client.poll(located.lease_id)
        return sum(ref.num_tokens for ref in located.ready), located.num_pending == 0

    def freeze(self, *, enabled: bool) -> None:
        """Frozen, stores are skipped and only RAM serves; nothing is evicted or admitted (row 51)."""
        self._client.switch(frozen=enabled)

    @property
    def is_frozen(self) -> bool:
        """Whether the store is frozen."""
        return self._client.status().is_frozen

    def set_hot_cache(self, *, enabled: bool) -> None:
        """Switch the cache in RAM at run time; off empties it first (row 52)."""
        self._client.switch(hot_cache=enabled)

    def clear(self) -> int:
        """Forget everything, in every tier. Returns how many chunks are to go."""
        return self._client.clear()

    def close(self) -> None:
        """End the session with the store. Idempotent."""
        self._pinned.clear()
        self._client.close()

    def _find(self, prefix: Prefix, search_range: Sequence[str] | None) -> Located:
        with self.stats.stage("lookup", num_tokens=prefix.num_tokens):
            return prefix.find(self._client, search_range=search_range)

    def _save_items(self, prefix: Prefix, num_masked: int, block_ids: Sequence[int]) -> list[SaveItem]:
        end = self._whole_blocks(prefix.num_tokens, prefix.num_tokens)
        if not self.config.save_partial_chunks:
            end = end // self._space.chunk_size * self._space.chunk_size
        if len(block_ids) * self.metadata.layout.block_size < end:
            msg = f"{len(block_ids)} blocks do not hold {end} tokens"
            raise ValueError(msg)
        return prefix.save_items(num_masked, end, block_ids, self.metadata.layout.block_size)

    def _whole_blocks(self, num_tokens: int, limit: int) -> int:
        block_size = self.metadata.layout.block_size
        return min(num_tokens, limit) // block_size * block_size
