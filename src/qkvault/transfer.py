"""Transfer: chunks between an engine's pages and slots of the store. The data path of engines and connectors.

Writing: reserve, write header and pages, commit. Reading: the caller holds a lease; the key in each slot's header is
compared before the copy and after it, so that a lease that ran out in between is a failed chunk and not foreign bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch

from qkvault.client import StoreClient
from qkvault.image import Header, header_bytes_for, key_in, peek, sketch_of, write_header
from qkvault.keys import KeySpace
from qkvault.layout import ChunkLayout
from qkvault.paged import PagedConnector, PageRun
from qkvault.types import TOKEN_BYTES, ChunkKey, ChunkRef, NewChunk, Outcome


class SpaceDescription(msgspec.Struct, frozen=True):
    """What an image tells of its chunk besides the tokens: whose it is, and how its payload is laid out."""

    space: KeySpace
    layout: ChunkLayout


class SaveItem(NamedTuple):
    """One chunk to be stored: its identity, its tokens (4 bytes each), and the engine's blocks that hold it."""

    key: bytes
    parent: bytes
    tokens: bytes
    block_ids: Sequence[int]

    @property
    def num_tokens(self) -> int:
        """How many tokens the chunk holds."""
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


class Transfer:
    """Copies for one engine, one space. Owned by the thread that runs the model."""

    def __init__(self, client: StoreClient, paged: PagedConnector, space: KeySpace) -> None:
        """``paged`` gives the layout that new chunks are stored in."""
        self.client = client
        self.paged = paged
        self.layout = paged.layout
        self._description = msgspec.msgpack.encode(SpaceDescription(space, self.layout))
        self._header_bytes = header_bytes_for(self.layout.chunk_size, len(self._description))
        self._layouts: dict[bytes, ChunkLayout] = {self._description: self.layout}
        # Copies a device has not finished, oldest first, each with the write lease to commit then.
        self._copying: deque[tuple[torch.Event, int | None]] = deque()

    def save(self, items: Sequence[SaveItem]) -> SaveReport:
        """Store ``items`` (chains, heads first): one reserve, one copy of all pages, one commit (rows 3, 12).

        Chunks that are present, or for which there is no room, are skipped. When the copy raises, nothing of it is
        stored and the error is passed on. Raises Unavailable.
        """
        if not items:
            return SaveReport((), 0)
        reserved = self.client.reserve([self._new_chunk(item) for item in items])
        runs = []
        for item, offset in zip(items, reserved.offsets, strict=True):
            if offset >= 0:
                runs.append(PageRun(self._open_image(item, offset), len(item.block_ids), 0, item.block_ids))
        if not reserved.lease_id:
            return SaveReport(reserved.outcomes, 0)
        try:
            copied = self.paged.batched_from_gpu(runs)
        except BaseException:
            self.client.abort(reserved.lease_id)
            raise
        if copied is None:
            self.client.commit(reserved.lease_id)
        else:
            self._copying.append((copied, reserved.lease_id))
        return SaveReport(reserved.outcomes, sum(len(run.payload) for run in runs))

    def load(self, items: Sequence[LoadItem]) -> set[int]:
        """Copy leased chunks into the engine's blocks. Returns the positions of items that failed.

        A failed item's blocks hold anything; all others are filled, on a device once its current stream gets there.
        The lease may be released when ``settle`` has returned True. Nothing is copied for no items (row 47). Raises
        LayoutMismatch if a chunk holds other tensors than the engine.
        """
        failed = set()
        runs: dict[ChunkLayout, list[PageRun]] = {}
        images = [self.client.pool.view(item.ref.offset, item.ref.image_bytes) for item in items]
        for at, (item, image) in enumerate(zip(items, images, strict=True)):
            seen = peek(image)
            if seen is None or seen.key != item.ref.key:
                failed.add(at)
                continue
            layout = self._layouts.get(seen.space) or self._learn_layout(seen.space)
            payload = image[seen.header_bytes : seen.header_bytes + seen.payload_bytes]
            run = PageRun(
                payload, layout.num_blocks(seen.num_tokens), self._block_in_chunk(item.start_token), item.block_ids
            )
            runs.setdefault(layout, []).append(run)
        for layout, of_layout in runs.items():
            copied = self.paged.batched_to_gpu(of_layout, layout)
            if copied is not None:
                self._copying.append((copied, None))
        late = (at for at, item in enumerate(items) if key_in(images[at]) != item.ref.key)
        return failed.union(late)

    def settle(self) -> bool:
        """Commit saves whose copies a device has finished, without waiting. True if no copy is under way."""
        while self._copying and self._copying[0][0].query():
            _, lease_id = self._copying.popleft()
            if lease_id is not None:
                self.client.commit(lease_id)
        return not self._copying

    def wait(self) -> None:
        """Block until a device has finished all copies, and commit them."""
        while self._copying:
            self._copying[0][0].synchronize()
            self.settle()

    def _new_chunk(self, item: SaveItem) -> NewChunk:
        image_bytes = self._header_bytes + self.layout.payload_bytes(item.num_tokens)
        return NewChunk(item.key, item.parent, sketch_of(item.tokens), item.num_tokens, image_bytes)

    def _block_in_chunk(self, token: int) -> int:
        return token % self.layout.chunk_size // self.layout.block_size

    def _open_image(self, item: SaveItem, offset: int) -> memoryview:
        # Write the header into the slot and return the payload.
        payload_bytes = self.layout.payload_bytes(item.num_tokens)
        image = self.client.pool.view(offset, self._header_bytes + payload_bytes)
        header = Header(
            ChunkKey(item.key),
            ChunkKey(item.parent),
            item.tokens,
            self._description,
            self._header_bytes,
            payload_bytes,
            0,
        )
        write_header(image, header)
        return image[self._header_bytes :]

    def _learn_layout(self, description: bytes) -> ChunkLayout:
        layout = msgspec.msgpack.decode(description, type=SpaceDescription).layout
        self.layout.require_same_tensors(layout)
        self._layouts[description] = layout
        return layout
