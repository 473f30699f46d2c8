"""QRingBufferAdapter: between a ring and the store. Whole chunks go the way of KV, under a kind of their own.

The copy, the reserve and the commit are those of ``Transfer``, over a PagedConnector on the ring. Keys differ from
those of the KV of the same tokens in their space only (rows 95, 106). Ring blocks are freed when their copy has ended,
however it ends (row 96): not before, since a device may still be reading them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from msgspec.structs import replace

from qkvault.capture.drops import DropLog
from qkvault.capture.ring import QRingBuffer
from qkvault.capture.rows import CaptureCounters, Collector, Reason, Whole
from qkvault.errors import InvariantError, LayoutMismatch, ProtocolError, Unavailable
from qkvault.keys import KeySpace
from qkvault.layout import ChunkLayout
from qkvault.link import Link
from qkvault.logs import RateLimited, get_logger
from qkvault.paged import PagedConnector
from qkvault.stats import StatsMonitor
from qkvault.transfer import SaveReport, Transfer
from qkvault.types import CacheKind, Outcome

_log = RateLimited(get_logger("capture"))
_ORDER: Final = "LBNHPD"  # a ring's rows: all heads of a token together


def query_layout(kv: ChunkLayout, *, num_layers: int, num_heads: int, head_size: int, dtype: str) -> ChunkLayout:
    """How the chunks of a ring are laid out: chunks of the same tokens as those of ``kv``, in the engine's blocks.

    ``kv`` counts in the engine's blocks, into however many its kernels cut them. Heads are those of one rank.
    """
    return ChunkLayout(
        kind=CacheKind.QUERY,
        num_layers=num_layers,
        num_heads=num_heads,
        head_size=head_size,
        num_parts=1,
        dtype=dtype,
        block_size=kv.block_size,
        chunk_size=kv.chunk_size,
        order=_ORDER,
    )


def query_space(kv: KeySpace, layout: ChunkLayout, layers: Sequence[int] | None = None) -> KeySpace:
    """The space of queries beside ``kv``: the same model, weights, rank and hashes (row 106).

    ``layers`` are the numbers of the layers that are captured, in order, if they are not all: queries of others are
    other tensors, however alike in shape.
    """
    tensors = layout.logical + ("" if layers is None else ":" + ",".join(map(str, layers)))
    return replace(kv.with_kind(CacheKind.QUERY), dtype=layout.dtype, tensors=tensors)


class _Lent(NamedTuple):
    """Blocks that a copy reads, which ends when so many copies of its transfer have ended."""

    transfer: Transfer
    num_ended: int
    block_ids: tuple[int, ...]


class QRingBufferAdapter:
    """A ring, the rows that are collected in it, and its session with the store. Owned by the model's thread.

    Nothing raises for the store's sake: what cannot be stored is dropped, counted, and told in the log.
    """

    def __init__(
        self,
        ring: QRingBuffer,
        layout: ChunkLayout,
        space: KeySpace,
        link: Link,
        *,
        num_engine_blocks: int,
        paged: PagedConnector | None = None,
    ) -> None:
        """``layout`` is that of the ring's chunks, ``space`` that of their keys; ``link`` is closed by ``shutdown``.

        Raises LayoutMismatch if the ring's rows are not those of the layout.
        """
        if layout.kind is not CacheKind.QUERY or space.kind is not CacheKind.QUERY:
            msg = f"a ring holds queries, not {layout.kind.value} in a space of {space.kind.value}"
            raise LayoutMismatch(msg)
        self.ring = ring
        self.layout = layout
        self.space = space
        self.counters = CaptureCounters()
        self._drops = DropLog(self.counters)
        self.paged = paged or PagedConnector(list(ring.tensors.values()), layout)
        self.collector = Collector(
            ring,
            chunk_size=layout.chunk_size,
            num_engine_blocks=num_engine_blocks,
            counters=self.counters,
            reclaim=self.reclaim,
        )
        self._link = link
        self._stats = StatsMonitor()
        self._transfer: Transfer | None = None
        self._lent: deque[_Lent] = deque()  # oldest first
        self._num_reserved = self._num_published = 0  # chunks of the session, as far as they are counted

    def register(self) -> None:
        """Open the session (row 94): a store that is not there yet is looked for from now on."""
        self._link.start()

    def submit(self) -> None:
        """Store all chunks that have become whole: one reserve and one commit for all requests of a step (row 84)."""
        wholes = self.collector.take_whole()
        if wholes:
            self._save(wholes)
            self.reclaim()
        self._drops.tell(self.collector.take_holes())

    def reclaim(self) -> None:
        """Commit what a device has copied, and free its ring blocks, without waiting (row 96)."""
        try:
            if self._transfer is not None:
                self._transfer.settle()
        except Exception as error:  # thread top: what is not committed is a later miss
            self._lost(error)
        self._free_ended()

    def reregister(self) -> None:
        """The store may have been restarted: if it does not answer, begin a new session, which registers (row 97)."""
        try:
            self._link.session().ping()
        except Exception as error:  # thread top: the link goes on looking
            self._lost(error)

    def shutdown(self) -> None:
        """Finish the copies that were begun, end the session, free all blocks (row 98). Idempotent."""
        try:
            self.collector.clear()
            if self._transfer is not None:
                self._transfer.wait()
        except Exception as error:  # thread top: what is not committed is a later miss
            self._lost(error)
        try:
            self._abandon()
            self._free_ended()
            self._drops.tell(self.collector.take_holes(), is_end=True)
        finally:
            self._link.close()

    def check(self) -> None:
        """Raise InvariantError unless every block of the ring is free, collected in, or read by a copy: once."""
        self.ring.check()
        num_lent = sum(len(lent.block_ids) for lent in self._lent)
        counts = (self.ring.num_free_blocks(), self.collector.num_blocks, num_lent)
        if sum(counts) != self.ring.num_blocks:
            msg = f"ring blocks free, collected in and lent: {counts} of {self.ring.num_blocks}"
            raise InvariantError(msg)

    def _save(self, wholes: Sequence[Whole]) -> None:
        # What was collected names chunks of KV, of rank 0.
        items = [each.item.in_space(self.space.space_id)._replace(block_ids=each.ring_block_ids) for each in wholes]
        block_ids = tuple(block_id for item in items for block_id in item.block_ids)
        transfer, num_left = self._transfer, len(wholes)
        try:
            transfer = self._session()
            for report in transfer.save(items):
                self._count(report)
                num_left -= len(report.outcomes)
        except Exception as error:  # thread top: what is not stored is a later miss
            self.counters.dropped[Reason.NOT_STORED] += num_left
            self._lend(transfer, block_ids)
            self._lost(error)
            return
        self._lend(transfer, block_ids)

    def _count(self, report: SaveReport) -> None:
        outcomes = Counter(report.outcomes)
        self._num_reserved += outcomes.pop(Outcome.RESERVED, 0)
        self.counters.num_present += outcomes.pop(Outcome.PRESENT, 0)
        self.counters.dropped[Reason.NO_ROOM] += sum(outcomes.values())

    def _lend(self, transfer: Transfer | None, block_ids: tuple[int, ...]) -> None:
        if transfer is None:
            self.ring.free(block_ids)
        else:
            self._lent.append(_Lent(transfer, transfer.num_begun, block_ids))

    def _free_ended(self) -> None:
        if self._transfer is not None:
            self.counters.num_stored += self._transfer.num_published - self._num_published
            self._num_published = self._transfer.num_published
        while self._lent and self._lent[0].transfer.num_ended >= self._lent[0].num_ended:
            self.ring.free(self._lent.popleft().block_ids)

    def _session(self) -> Transfer:
        if self._link.is_superseded and (self._transfer is None or self._transfer.is_idle):
            self._lost(Unavailable("the store was restarted"))
        client = self._link.session()
        if self._transfer is None or self._transfer.client is not client:
            self._abandon()
            self._transfer = Transfer(client, self.paged, self.space, stats=self._stats)
        return self._transfer

    def _lost(self, error: Exception) -> None:
        _log.warning("query_store_failed", error=f"{type(error).__name__}: {error}")
        if isinstance(error, (Unavailable, ProtocolError)):
            self._abandon()
            self._free_ended()
            self._link.lost(error)

    def _abandon(self) -> None:
        # With the session its slots go to others, and ring blocks to new rows: not while a device is copying.
        self._free_ended()
        self.counters.dropped[Reason.NOT_STORED] += max(0, self._num_reserved - self._num_published)
        self._num_reserved = self._num_published = 0
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            with suppress(Exception):  # thread top: a device that fails copies nothing any more
                transfer.abandon()
