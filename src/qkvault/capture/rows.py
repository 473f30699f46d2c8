"""Collector: which ring blocks belong to which chunk of which request, from the first row to the last.

Chunked prefill and decoding compute a chunk in many steps; its blocks stay with the request until all its rows are
there. A chunk with a token that was not computed here (a prefix that the engine had, or got from us) is a hole: it is
never stored. All layers use the same blocks. Pure state of the host: no tensors, no store.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from qkvault.capture.plan import RequestStep, Wanted
from qkvault.transfer import SaveItem


class Reason(str, Enum):
    """Why queries of a chunk are not stored."""

    NOT_COMPUTED = "not_computed"  # some of its tokens came from a cache, or were computed before capture began
    RING_FULL = "ring_full"
    BAD_BLOCKS = "bad_blocks"  # blocks do not cover the tokens, or do not exist (row 90)
    ROW_MISSING = "row_missing"  # a token had no row in its step, or two (row 89)
    LAYER_MISSING = "layer_missing"  # a layer of a step brought no queries, or a fault came between
    ENDED = "ended"  # the request ended in the middle of it, or was preempted: no hole, there is no more of it
    NO_ROOM = "no_room"  # the store had none
    NOT_STORED = "not_stored"  # the store was away, or the copy failed


class Hole(NamedTuple):
    """A chunk of a request whose queries are not captured, and why."""

    request_id: str
    chunk: int
    reason: Reason


@dataclass(slots=True)
class CaptureCounters:
    """What became of chunks."""

    num_captured: int = 0  # whole, and handed to the store
    num_stored: int = 0
    num_present: int = 0  # the store had them
    dropped: Counter[Reason] = field(default_factory=Counter)


class Whole(NamedTuple):
    """A chunk with all its rows. Whoever takes it owns the blocks."""

    request_id: str
    chunk: int
    item: SaveItem
    ring_block_ids: tuple[int, ...]


class Blocks(Protocol):
    """What the collector needs of a ring."""

    block_size: int

    def allocate(self, count: int) -> list[int] | None: ...
    def free(self, block_ids: Sequence[int]) -> None: ...


@dataclass(slots=True, eq=False)
class _Chunk:
    """A chunk on its way. ``end`` counts its tokens that are captured or will be by steps that are under way."""

    request: _Request
    number: int
    blocks: list[int] = field(default_factory=list)
    end: int = 0
    num_unverified: int = 0  # steps of which it is not known yet whether its rows were there
    item: SaveItem | None = None
    is_over: bool = False  # its blocks are somebody else's


@dataclass(slots=True, eq=False)
class _Request:
    request_id: str
    end: int = 0  # all before it was captured, or is a hole
    chunks: dict[int, _Chunk] = field(default_factory=dict)
    items: dict[int, SaveItem] = field(default_factory=dict)  # known, of chunks that are not whole
    settled: set[int] = field(default_factory=set)  # chunks that were whole
    holes: set[int] = field(default_factory=set)


class _Span(NamedTuple):
    chunk: _Chunk
    first: int  # the first wanted token of the step that is the chunk's
    num_tokens: int


class StepCapture(NamedTuple):
    """What a step is to capture. ``wanted`` has its tokens; ``spans`` say whose they are."""

    wanted: Wanted
    spans: list[_Span]


class Collector:
    """The rows of all requests. Owned by the thread that runs the model; nothing raises for what a request brings."""

    def __init__(
        self,
        ring: Blocks,
        *,
        chunk_size: int,
        num_engine_blocks: int,
        counters: CaptureCounters,
        reclaim: Callable[[], None],
    ) -> None:
        """``reclaim`` frees blocks that a store has done with, without waiting. The ring's blocks are as the engine's.

        Raises ValueError unless a chunk is whole blocks.
        """
        if chunk_size % ring.block_size:
            msg = f"a chunk of {chunk_size} tokens is not blocks of {ring.block_size}"
            raise ValueError(msg)
        self._ring = ring
        self._block_size = ring.block_size
        self._chunk_size = chunk_size
        self._num_engine_blocks = num_engine_blocks
        self._counters = counters
        self._reclaim = reclaim
        self._requests: dict[str, _Request] = {}
        self._ended: set[_Chunk] = set()  # of requests that have ended: all rows are there, but not all are verified
        self._whole: deque[Whole] = deque()
        self._holes: list[Hole] = []

    @property
    def num_blocks(self) -> int:
        """How many blocks of the ring are the collector's."""
        chunks = [chunk for request in self._requests.values() for chunk in request.chunks.values()]
        in_chunks = sum(len(chunk.blocks) for chunk in (*chunks, *self._ended))
        return in_chunks + sum(len(whole.ring_block_ids) for whole in self._whole)

    def begin(self, steps: Iterable[RequestStep]) -> StepCapture:
        """Take the requests of a step that is about to run. To be followed by ``verify``, in the order of steps."""
        capture = StepCapture(Wanted(array("q"), array("q")), [])
        captured: set[str] = set()
        ending: list[_Request] = []  # with rows in this step: nobody else may write their blocks in it
        for step in steps:
            if step.request_id in captured:
                continue  # told twice: its ring slots must not be given away and written in one step
            request = self._requests.setdefault(step.request_id, _Request(step.request_id))
            self._rewind(request, step.num_before)
            self._skip_to(request, step.num_before)
            if step.num_after > step.num_before:
                captured.add(step.request_id)
                self._capture(request, step, capture)
            for number, item in enumerate(step.items, step.first_chunk):
                if number not in request.settled and number not in request.holes:
                    request.items[number] = item
                    if (chunk := request.chunks.get(number)) is not None:
                        self._settle(chunk)
            if step.is_last and step.request_id in captured:
                ending.append(request)
            elif step.is_last:
                self._end(request)
        for request in ending:
            self._end(request)
        return capture

    def verify(self, capture: StepCapture, is_found: Sequence[bool] | None) -> None:
        """The step has run. ``is_found`` says of each wanted token whether its row was there; None: a layer failed."""
        for chunk, first, num_tokens in capture.spans:
            chunk.num_unverified -= 1
            if chunk.is_over:
                continue
            if is_found is None:
                self._make_hole(chunk.request, chunk.number, Reason.LAYER_MISSING)
            elif not all(is_found[first : first + num_tokens]):
                self._make_hole(chunk.request, chunk.number, Reason.ROW_MISSING)
            else:
                self._settle(chunk)

    def drop(self, request_id: str) -> None:
        """Forget a request that was preempted or aborted, also if it has ended. Unknown ones are none of ours."""
        request = self._requests.pop(request_id, None)
        chunks = [chunk for chunk in self._ended if chunk.request.request_id == request_id]
        for chunk in [*chunks, *(request.chunks.values() if request is not None else ())]:
            self._drop(chunk, Reason.ENDED)

    def clear(self) -> None:
        """Forget everything, whole chunks included."""
        for request_id in list(self._requests):
            self.drop(request_id)
        for chunk in list(self._ended):
            self._drop(chunk, Reason.ENDED)
        for whole in self.take_whole():
            self._ring.free(whole.ring_block_ids)
            self._counters.dropped[Reason.NOT_STORED] += 1

    def take_whole(self) -> list[Whole]:
        """Chunks that have become whole since the last call, the heads of each request first."""
        taken = list(self._whole)
        self._whole.clear()
        return taken

    def take_holes(self) -> list[Hole]:
        """Holes that were found since the last call."""
        holes, self._holes = self._holes, []
        return holes

    def _rewind(self, request: _Request, end: int) -> None:
        # Drafts that were rejected, or a request that is computed anew: what was captured from `end` on is void.
        if end >= request.end:
            return
        request.end = end
        for chunk in list(request.chunks.values()):
            start = chunk.number * self._chunk_size
            if start >= end:
                self._trim(chunk, 0)
                self._forget(chunk)
            else:
                chunk.end = min(chunk.end, end - start)
                self._trim(chunk, chunk.end)

    def _skip_to(self, request: _Request, end: int) -> None:
        # Tokens between what was seen and `end` were not computed here: their chunks are holes.
        if end > request.end:
            for number in range(request.end // self._chunk_size, -(-end // self._chunk_size)):
                self._make_hole(request, number, Reason.NOT_COMPUTED)
            request.end = end

    def _capture(self, request: _Request, step: RequestStep, capture: StepCapture) -> None:
        start, end = step.num_before, step.num_after
        first_block = start // self._block_size
        num_blocks = -(-end // self._block_size) - first_block
        ids = step.block_ids
        is_covered = len(ids) == num_blocks and 0 <= min(ids) <= max(ids) < self._num_engine_blocks
        for number in range(start // self._chunk_size, -(-end // self._chunk_size)):
            base = number * self._chunk_size
            low, high = max(start, base), min(end, base + self._chunk_size)
            if not is_covered:
                self._make_hole(request, number, Reason.BAD_BLOCKS)
            elif (chunk := self._chunk_at(request, number, low - base)) is not None and self._grow(chunk, high - base):
                self._want(chunk, range(low, high), ids[low // self._block_size - first_block :], capture)
        request.end = end

    def _chunk_at(self, request: _Request, number: int, offset: int) -> _Chunk | None:
        """The chunk whose next token is that at ``offset``; None if there is no use in its rows."""
        chunk = request.chunks.get(number)
        if chunk is not None:
            return chunk  # its next token is that one: whatever was skipped has made it a hole
        if number in request.settled:
            return None
        if offset:
            self._make_hole(request, number, Reason.NOT_COMPUTED)
            return None
        request.holes.discard(number)  # computed anew, from its first token on
        chunk = request.chunks[number] = _Chunk(request, number)
        return chunk

    def _grow(self, chunk: _Chunk, end: int) -> bool:
        num_new = -(-end // self._block_size) - len(chunk.blocks)
        blocks = self._ring.allocate(num_new)
        if blocks is None:
            self._reclaim()
            blocks = self._ring.allocate(num_new)
        if blocks is None:
            self._make_hole(chunk.request, chunk.number, Reason.RING_FULL)
            return False
        chunk.blocks += blocks
        chunk.end = end
        return True

    def _want(self, chunk: _Chunk, tokens: range, block_ids: Sequence[int], capture: StepCapture) -> None:
        size, base = self._block_size, chunk.number * self._chunk_size
        kv_slots, ring_slots = capture.wanted
        capture.spans.append(_Span(chunk, len(kv_slots), len(tokens)))
        chunk.num_unverified += 1
        low = tokens.start
        for block_id, ring_block in zip(block_ids, chunk.blocks[(low - base) // size :], strict=False):
            if low >= tokens.stop:
                break
            offset = low % size
            count = min(size - offset, tokens.stop - low)
            kv_slots.extend(range(block_id * size + offset, block_id * size + offset + count))
            ring_slots.extend(range(ring_block * size + offset, ring_block * size + offset + count))
            low += count

    def _settle(self, chunk: _Chunk) -> None:
        """If all rows are there, and it is known of which tokens they are, the chunk is whole."""
        item = chunk.item or chunk.request.items.get(chunk.number)
        if item is None or chunk.num_unverified or chunk.end < item.num_tokens:
            return
        is_partial = item.num_tokens < self._chunk_size
        if is_partial and chunk not in self._ended:
            return  # it may become whole yet
        self._trim(chunk, item.num_tokens)
        self._whole.append(Whole(chunk.request.request_id, chunk.number, item, tuple(chunk.blocks)))
        chunk.request.settled.add(chunk.number)
        self._counters.num_captured += 1
        self._forget(chunk)

    def _end(self, request: _Request) -> None:
        for chunk in list(request.chunks.values()):
            item = request.items.get(chunk.number)
            if item is None or chunk.end < item.num_tokens or item.num_tokens % self._block_size:
                self._drop(chunk, Reason.ENDED)
            else:
                chunk.item = item
                self._ended.add(chunk)
                self._settle(chunk)
        self._requests.pop(request.request_id, None)

    def _make_hole(self, request: _Request, number: int, reason: Reason) -> None:
        if number in request.settled or number in request.holes:
            return
        request.holes.add(number)
        self._holes.append(Hole(request.request_id, number, reason))
        if (chunk := request.chunks.get(number)) is not None:
            self._drop(chunk, reason)
        else:
            self._counters.dropped[reason] += 1

    def _drop(self, chunk: _Chunk, reason: Reason) -> None:
        self._trim(chunk, 0)
        self._counters.dropped[reason] += 1
        self._forget(chunk)

    def _forget(self, chunk: _Chunk) -> None:
        chunk.is_over = True
        chunk.blocks = []
        chunk.request.chunks.pop(chunk.number, None)
        chunk.request.items.pop(chunk.number, None)
        self._ended.discard(chunk)

    def _trim(self, chunk: _Chunk, num_tokens: int) -> None:
        """Free the blocks behind the first ``num_tokens`` tokens."""
        num_kept = -(-num_tokens // self._block_size)
        self._ring.free(chunk.blocks[num_kept:])
        del chunk.blocks[num_kept:]
