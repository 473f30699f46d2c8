"""Transfer: chunks between an engine's pages and slots of the store. The data path of engines and connectors.

Writing: reserve, write the pages, then the headers, commit. Reading: the caller holds a lease; the key in each slot's
header is compared before the copy and after it, and ``lost`` asks the store, so that a lease that ran out meanwhile is
a failed chunk and not foreign bytes. A chunk that cannot be read, for whatever reason, is a failed one, not an error.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec
import torch

from qkvault.client import StoreClient
from qkvault.errors import LayoutMismatch, Unavailable
from qkvault.image import Header, header_bytes_for, key_in, peek, sketch_of, write_header
from qkvault.keys import KeySpace
from qkvault.layout import ChunkLayout
from qkvault.logs import get_logger
from qkvault.paged import PagedConnector, PageRun, mark
from qkvault.spaces import SpaceDescription
from qkvault.stats import StatsMonitor
from qkvault.types import SPACE_BYTES, TOKEN_BYTES, ChunkKey, ChunkRef, NewChunk, Outcome

_PART_BYTES: Final = 128 << 20
_log = get_logger("transfer")


class SaveItem(NamedTuple):
    """One chunk to be stored: its identity, its tokens (4 bytes each), and the engine's blocks that hold it.

    ``tokens`` tell chunks of one parent apart: where media touch them they are those of ``Prefix``, not the model's.
    """

    key: bytes
    parent: bytes
    tokens: bytes
    block_ids: Sequence[int]
    flags: int = 0  # of the image: FIRST, PLAIN

    def in_space(self, space_id: bytes) -> SaveItem:
        """The same chunk of another rank, or kind."""
        return self._replace(key=space_id + self.key[SPACE_BYTES:], parent=space_id + self.parent[SPACE_BYTES:])

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


class LoadItem(NamedTuple):
    """Blocks of a leased chunk, and where they are to go. ``start_token`` is where in the request they begin."""

    ref: ChunkRef
    start_token: int
    block_ids: Sequence[int]


class SaveReport(NamedTuple):
    """What became of each item, and how many bytes of payload were copied."""

    outcomes: tuple[Outcome, ...]
    copied_bytes: int


class StoreResult(msgspec.Struct, frozen=True):
    """What a store did. Tokens that are in no count had no room; ``outcomes`` says so, and what else there was."""

    stored_tokens: int
    present_tokens: int
    outcomes: dict[Outcome, int]  # chunks by outcome
    failed_tokens: int = 0  # could not be stored: the store was out of reach, or gave the slots to others meanwhile
    uncacheable_reason: str | None = None  # why nothing of the request may be stored; None if it may

    @classmethod
    def of(cls, items: Sequence[SaveItem], outcomes: Sequence[Outcome], num_published: int) -> StoreResult:
        """The sum over ``items``. ``outcomes`` are those of the first ones; the store was out of reach for the rest."""
        sizes: dict[Outcome, list[int]] = {outcome: [] for outcome in Outcome}
        for item, outcome in zip(items, outcomes, strict=False):
            sizes[outcome].append(item.num_tokens)
        reserved = sizes[Outcome.RESERVED]
        stored = sum(reserved[:num_published])  # what is missing are tails that longer ones have replaced meanwhile
        failed = sum(reserved) - stored + sum(item.num_tokens for item in items[len(outcomes) :])
        return cls(stored, sum(sizes[Outcome.PRESENT]), dict(Counter(outcomes)), failed)


class _Copy(NamedTuple):
    started_seconds: float
    num_bytes: int
    lease_id: int = 0  # of the write lease to commit when it has ended; 0 for a load
    headers: Sequence[tuple[memoryview, Header]] = ()  # to be written before that, each into its image


class Transfer:
    """Copies for one engine, one space. Owned by the thread that runs the model."""

    def __init__(
        self, client: StoreClient, paged: PagedConnector, space: KeySpace, *, stats: StatsMonitor | None = None
    ) -> None:
        """``paged`` gives the layout that new chunks are stored in. ``stats`` counts its stages, from ``put`` on.

        Raises LayoutMismatch if a chunk is not whole blocks of the engine.
        """
        if paged.layout.chunk_size % paged.block_size:
            msg = f"chunks of {paged.layout.chunk_size} tokens are not blocks of {paged.block_size}"
            raise LayoutMismatch(msg)
        self.client = client
        self.paged = paged
        self.layout = paged.layout
        self.num_published = 0  # chunks that became readable so far; a save whose lease ran out adds none
        self.num_begun = self.num_ended = 0  # copies; they end in the order in which they began
        self._stats = stats if stats is not None else StatsMonitor()
        self._description = SpaceDescription(space, self.layout).encode()
        self._header_bytes = header_bytes_for(self.layout.chunk_size, len(self._description))
        self._num_in_part = max(1, _PART_BYTES // self.layout.payload_bytes(self.layout.chunk_size))
        self._layouts: dict[bytes, ChunkLayout | None] = {self._description: self.layout}  # None: cannot be read
        self._copying: deque[tuple[torch.Event, _Copy]] = deque()  # what a device has not finished, oldest first

    @property
    def is_idle(self) -> bool:
        """Whether no copy is under way."""
        return self.num_begun == self.num_ended

    def save(self, items: Sequence[SaveItem]) -> Iterator[SaveReport]:
        """Store ``items`` (chains, heads first): one reserve, one copy of all pages, one commit (rows 3, 12).

        More than some 100 MB go in parts, so that tiers write the first while the next is copied. Each part is stored
        as its report is asked for. Chunks that are present, or for which there is no room, are skipped. On a device the
        commit comes with ``settle`` or ``wait``; until then the pages must be left alone. When a copy raises, nothing
        of its part is stored, those before it keep their fate, and the error is passed on. Raises Unavailable, and
        ValueError if an item's blocks are not those of its tokens.
        """
        if any(len(item.block_ids) * self.paged.block_size != item.num_tokens for item in items):
            msg = f"a chunk's tokens must fill its blocks of {self.paged.block_size}"
            raise ValueError(msg)
        for start in range(0, len(items), self._num_in_part):
            yield self._save_part(items[start : start + self._num_in_part])

    def _save_part(self, items: Sequence[SaveItem]) -> SaveReport:
        with self._stats.stage("put"):
            reserved = self.client.reserve([self._new_chunk(item) for item in items], self.layout.kind)
        if not reserved.lease_id:
            return SaveReport(reserved.outcomes, 0)
        started_seconds = self._stats.clock()
        placed = [(item, offset) for item, offset in zip(items, reserved.offsets, strict=True) if offset >= 0]
        try:
            headers = [self._header_of(item, offset) for item, offset in placed]
            runs = [
                PageRun(image[self._header_bytes :], self.layout.num_blocks(item.num_tokens), 0, item.block_ids)
                for (item, _), (image, _) in zip(placed, headers, strict=True)
            ]
            copied = self.paged.batched_from_gpu(runs)
        except BaseException:
            self._stats.on_stage("from_gpu", self._stats.clock() - started_seconds, failed=True)
            self._abort(reserved.lease_id)
            raise
        num_bytes = sum(len(run.payload) for run in runs)
        self._began(copied, _Copy(started_seconds, num_bytes, reserved.lease_id, headers))
        return SaveReport(reserved.outcomes, num_bytes)

    def load(self, items: Sequence[LoadItem]) -> set[int]:
        """Copy leased chunks into the engine's blocks. Returns the positions of items that failed.

        A failed item's blocks hold anything; all others are filled, on a device once its current stream gets there.
        The lease may be released when ``settle`` has returned True. Nothing is copied for no items (row 47). Raises
        ValueError, before anything is copied, for a block that the engine does not have.
        """
        failed = set()
        runs: dict[ChunkLayout, list[PageRun]] = {}
        for at, item in enumerate(items):
            opened = self._open_chunk(item)
            if opened is None:
                failed.add(at)
            else:
                layout, run = opened
                runs.setdefault(layout, []).append(run)
        for layout, of_layout in runs.items():
            started_seconds = self._stats.clock()
            copied = self.paged.batched_to_gpu(of_layout, layout)
            num_tokens = sum(len(run.block_ids) for run in of_layout) * self.paged.block_size
            self._began(copied, _Copy(started_seconds, num_tokens * self.layout.token_bytes))
        return failed | self.stale(items)

    def fetch(self, items: Sequence[LoadItem], timeout_seconds: float | None = None) -> None:
        """Bring the items' chunks here, if the store's memory is not shared. To be called first.

        Blocks for ``timeout_seconds`` at most; None: for a time that fits the size. Raises Unavailable.
        """
        started_seconds, num_bytes, is_done = self._stats.clock(), 0, False
        try:
            num_bytes = self.client.fetch([item.ref for item in items], timeout_seconds)
            is_done = True
        finally:
            if num_bytes or not is_done:  # else the pool is the store's own memory
                num_tokens = sum(len(item.block_ids) for item in items) * self.paged.block_size
                seconds = self._stats.clock() - started_seconds
                self._stats.on_stage("get", seconds, num_bytes=num_bytes, num_tokens=num_tokens, failed=not is_done)

    def stale(self, items: Sequence[LoadItem]) -> set[int]:
        """Positions of items whose slot does not hold their chunk any more, as far as its header tells."""
        pool = self.client.pool
        return {
            at
            for at, item in enumerate(items)
            if key_in(pool.view(item.ref.offset, item.ref.image_bytes)) != item.ref.key
        }

    def lost(self, items: Sequence[LoadItem], lease_id: int) -> set[int]:
        """Positions of items that ``lease_id`` does not hold any more: what was copied of them proves nothing.

        To be asked when the copies have ended; a lease that lives then has lived all the time. Raises Unavailable.
        """
        held = {(ref.key, ref.offset) for ref in self.client.poll(lease_id).ready}
        return {at for at, item in enumerate(items) if (item.ref.key, item.ref.offset) not in held}

    def settle(self) -> bool:
        """Commit saves whose copies a device has finished, without waiting. True if no copy is under way.

        Raises Unavailable; the save in question is then not stored.
        """
        while self._copying and self._copying[0][0].query():
            _, copy = self._copying.popleft()
            self._ended(copy)  # counts it first: pages are not read any more, whatever the store says
        return not self._copying

    def wait(self) -> None:
        """Block until a device has finished all copies, and commit them. Raises Unavailable as ``settle`` does."""
        while self._copying:
            self._copying[0][0].synchronize()
            self.settle()

    def abandon(self) -> None:
        """Block until a device has finished all copies; none of them is committed. For a session that has failed."""
        try:
            self._synchronize()
        finally:
            self._copying.clear()
            self.num_ended = self.num_begun

    def _synchronize(self) -> None:
        if (begun := mark(self.paged.device)) is not None:
            begun.synchronize()

    def _began(self, copied: torch.Event | None, copy: _Copy) -> None:
        self.num_begun += 1
        if copied is None:
            self._ended(copy)
        else:
            self._copying.append((copied, copy))

    def _ended(self, copy: _Copy) -> None:
        self.num_ended += 1
        seconds = self._stats.clock() - copy.started_seconds
        stage, num_tokens = "from_gpu" if copy.lease_id else "to_gpu", copy.num_bytes // self.layout.token_bytes
        self._stats.on_stage(stage, seconds, num_bytes=copy.num_bytes, num_tokens=num_tokens)
        for image, header in copy.headers:
            write_header(image, header)  # last: a slot never carries the key of bytes that are not there yet
        if copy.lease_id:
            with self._stats.stage("put", copy.num_bytes, num_tokens=num_tokens):
                self.num_published += self.client.commit(copy.lease_id)

    def _abort(self, lease_id: int) -> None:
        # What the device has begun it goes on with: the slots must not get another owner before it is through.
        self._synchronize()
        with suppress(Unavailable):
            self.client.abort(lease_id)

    def _new_chunk(self, item: SaveItem) -> NewChunk:
        image_bytes = self._header_bytes + self.layout.payload_bytes(item.num_tokens)
        return NewChunk(item.key, item.parent, sketch_of(item.tokens), item.num_tokens, image_bytes)

    def _header_of(self, item: SaveItem, offset: int) -> tuple[memoryview, Header]:
        """The image that is to be in the slot at ``offset``, and its header."""
        payload_bytes, space = self.layout.payload_bytes(item.num_tokens), self._description
        key, parent = ChunkKey(item.key), ChunkKey(item.parent)
        header = Header(key, parent, item.tokens, space, self._header_bytes, payload_bytes, 0, item.flags)
        return self.client.pool.view(offset, self._header_bytes + payload_bytes), header

    def _open_chunk(self, item: LoadItem) -> tuple[ChunkLayout, PageRun] | None:
        """The chunk's layout, and what to copy of it; None if the slot does not hold what the item wants."""
        image = self.client.pool.view(item.ref.offset, item.ref.image_bytes)
        seen = peek(image)
        if seen is None or seen.key != item.ref.key:
            return None
        if seen.space not in self._layouts:
            self._layouts[seen.space] = self._layout_in(seen.space)
        layout = self._layouts[seen.space]
        first_block = item.start_token % self.layout.chunk_size // self.paged.block_size
        num_tokens = (first_block + len(item.block_ids)) * self.paged.block_size
        payload = image[seen.header_bytes : seen.header_bytes + seen.payload_bytes]
        if layout is None or num_tokens > seen.num_tokens or len(payload) < layout.payload_bytes(seen.num_tokens):
            return None
        return layout, PageRun(payload, layout.num_blocks(seen.num_tokens), first_block, item.block_ids)

    def _layout_in(self, description: bytes) -> ChunkLayout | None:
        """The layout that an image describes; None if this engine can neither copy nor convert it."""
        try:
            layout = SpaceDescription.decode(description).layout
            if not layout.has_same_pages(self.layout):
                self.layout.require_same_tensors(layout)
                layout.require_viewable()
                self.layout.require_viewable()
        except (ValueError, LayoutMismatch) as error:
            _log.warning("chunks_of_unreadable_layout", error=error)
            return None
        return layout
