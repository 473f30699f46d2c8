"""Reader: leased chunks of all ranks into one set of tensors. One for each retrieve; knows no tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from qkvault.client import StoreClient
from qkvault.errors import LayoutMismatch
from qkvault.image import key_in, peek
from qkvault.layout import ChunkLayout
from qkvault.logical import TORCH_DTYPES, logical_views
from qkvault.sdk.geometry import Geometry
from qkvault.sdk.tensors import CacheTensors, Span
from qkvault.spaces import SpaceDescription
from qkvault.types import ChunkRef
from qkvault.wire.messages import Located


class Reader:
    """Tensors of a span, as far as they come. Memory is taken as it is filled."""

    def __init__(
        self, client: StoreClient, geometry: Geometry, span: Span, *, layers: Sequence[int], deadline: float
    ) -> None:
        """``layers``: some of the geometry's. ``deadline`` is on the monotonic clock: later, nothing is waited for."""
        self._client, self._geometry = client, geometry
        self._span, self._layers, self._deadline = span, list(layers), deadline
        self._rows = [geometry.layers.index(layer) for layer in layers]  # of a chunk
        _, num_heads, head_size = geometry.shape
        shape = (len(self._layers), span.stop - span.start, num_heads, head_size)
        dtype = TORCH_DTYPES[geometry.layout.dtype]
        self._parts = tuple(torch.empty(shape, dtype=dtype) for _ in range(geometry.layout.num_parts))
        self._positions: list[range] = []
        self._num_rows = 0
        self._layouts: dict[bytes, ChunkLayout | None] = {}  # by description; None: cannot be read

    def read(self, found: Sequence[Located], first_chunk: int) -> int:
        """Copy what is leased in each rank, from chunk ``first_chunk`` of the prompt on. Returns its number of tokens.

        Ends at the first chunk that cannot be read in one of the ranks, or is not held any more when it has been.
        Raises Unavailable.
        """
        if not all(each.lease_id for each in found):
            return 0
        held = [self._client.wait(each, self._deadline - time.monotonic(), time.monotonic) for each in found]
        chunks = list(zip(*(each.ready for each in held), strict=False))
        self._client.fetch([ref for refs in chunks for ref in refs])
        rows_before, ends = self._num_rows, []
        for number, refs in enumerate(chunks, first_chunk):
            num_tokens = self._copy(refs, number * self._geometry.layout.chunk_size)
            ends.append((num_tokens, self._num_rows))
            if num_tokens < self._geometry.layout.chunk_size:
                break
        num_held = self._num_held(chunks[: len(ends)], [each.lease_id for each in held])
        self._num_rows = ends[num_held - 1][1] if num_held else rows_before
        while self._positions and sum(map(len, self._positions)) > self._num_rows:
            self._positions.pop()
        return sum(num_tokens for num_tokens, _ in ends[:num_held])

    def result(self) -> CacheTensors | None:
        """What was read; None if it is nothing."""
        if not self._num_rows:
            return None
        positions = torch.cat([torch.arange(run.start, run.stop) for run in self._positions])
        parts = tuple(part[:, : self._num_rows].contiguous() for part in self._parts)
        return CacheTensors(self._geometry.layout.kind, parts, positions, tuple(self._layers), self._span.start)

    def _copy(self, refs: Sequence[ChunkRef], base: int) -> int:
        """Append what the span has of a chunk whose first token is ``base``. Returns how many tokens it holds."""
        views = [self._views_of(ref) for ref in refs]
        num_tokens = min(ref.num_tokens for ref in refs)
        start, stop = max(base, self._span.start), min(base + num_tokens, self._span.stop)
        if not all(views):
            return 0
        if start < stop:
            rows, step = slice(self._num_rows, self._num_rows + stop - start), self._geometry.layout.num_heads
            for rank, parts in enumerate(views):
                heads = slice(rank * step, (rank + 1) * step)
                for out, part in zip(self._parts, parts, strict=True):
                    for at, row in enumerate(self._rows):
                        out[at, rows, heads] = part[row, start - base : stop - base]
            self._positions.append(range(start, stop))
            self._num_rows = rows.stop
        return num_tokens

    def _views_of(self, ref: ChunkRef) -> list[torch.Tensor]:
        """The parts of a chunk; none if its slot does not hold what it should."""
        image = self._client.pool.view(ref.offset, ref.image_bytes)
        seen = peek(image)
        if seen is None or seen.key != ref.key or seen.num_tokens < ref.num_tokens:
            return []
        if seen.space not in self._layouts:
            self._layouts[seen.space] = self._layout_in(seen.space)
        layout = self._layouts[seen.space]
        payload = image[seen.header_bytes : seen.header_bytes + seen.payload_bytes]
        if layout is None or len(payload) < layout.payload_bytes(seen.num_tokens):
            return []
        return logical_views(payload, layout, seen.num_tokens)

    def _layout_in(self, description: bytes) -> ChunkLayout | None:
        try:
            layout = SpaceDescription.decode(description).layout
            layout.require_viewable()
            self._geometry.layout.require_same_tensors(layout)
        except (ValueError, LayoutMismatch):
            return None
        return layout

    def _num_held(self, chunks: Sequence[Sequence[ChunkRef]], lease_ids: Sequence[int]) -> int:
        """How many leading chunks were the store's to give until now: a lease that lives has lived all the time."""
        held = [{(ref.key, ref.offset) for ref in each.ready} for each in self._client.poll_each(lease_ids)]
        pool = self._client.pool
        for number, refs in enumerate(chunks):
            for ref, of_rank in zip(refs, held, strict=True):
                is_there = key_in(pool.view(ref.offset, ref.image_bytes)) == ref.key
                if not is_there or (ref.key, ref.offset) not in of_rank:
                    return number
        return len(chunks)
