"""Room in RAM: slots of the pool, and who gives his up when there are none left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from qkvault.image import ALIGNMENT_BYTES, PREFIX_BYTES, align_up, key_in, wipe_header
from qkvault.pool import Pool
from qkvault.store.index import NOWHERE, Entry, Index
from qkvault.store.residents import Residents
from qkvault.types import CacheKind, ChunkState

_ABSENT: Final = ChunkState.ABSENT  # a member of an enumeration takes ten times as long to look up


class Room:
    """The pool and the order in which chunks leave it. The only place that gives slots to entries and takes them."""

    def __init__(self, pool: Pool, residents: Residents, index: Index) -> None:
        self.pool = pool
        self.residents = residents
        self._index = index
        self._on_evicted: Callable[[Entry], None] = lambda _: None
        self._on_taken: Callable[[Entry], None] = lambda _: None

    def on_evicted(self, callback: Callable[[Entry], None]) -> None:
        """Have ``callback(entry)`` called after an entry lost its slot to make room."""
        self._on_evicted = callback

    def on_taken(self, callback: Callable[[Entry], None]) -> None:
        """Have ``callback(entry)`` called after an entry lost its slot, for whatever reason."""
        self._on_taken = callback

    def give(self, entry: Entry, state: ChunkState) -> bool:
        """Give ``entry`` a slot for its image, evicting if need be. False, and nothing changed for it, if none is left.

        The caller has pinned it, lest it be pruned with those that leave. The slot's old header is wiped, so that a
        reader whose lease ran out cannot take the new bytes for the old.
        """
        kind, num_bytes = entry.kind, _slot_bytes(entry)
        offset = self._allocate(kind, num_bytes)
        if offset is None:
            return False
        self.residents.bytes_of[kind] += num_bytes
        wipe_header(self.pool.view(offset, entry.image_bytes))
        entry.offset = offset
        entry.state = state
        return True

    def publish(self, entry: Entry) -> None:
        """The slot's bytes are whole: from now on they may be read, and evicted."""
        entry.state = ChunkState.READY
        self.residents.policies[entry.kind].add(entry.key)

    def take(self, entry: Entry, *, keep_slot: bool = False) -> int:
        """Take the slot away from ``entry`` and free it, unless ``keep_slot`` (quarantine). Returns its offset."""
        offset, kind = entry.offset, entry.kind
        if not keep_slot:
            self.free(offset, kind)
        entry.offset = NOWHERE
        entry.state = ChunkState.ABSENT
        self.residents.policies[kind].remove(entry.key)
        self._on_taken(entry)
        return offset

    def free(self, offset: int, kind: CacheKind) -> None:
        """Free a slot that was given to a chunk of ``kind``.

        Its header is wiped, which a late writer may have written again: the next slot there may begin elsewhere, and
        would leave the old one to late readers.
        """
        wipe_header(self.pool.view(offset, PREFIX_BYTES))
        self.residents.bytes_of[kind] -= self.pool.free(offset)

    def image(self, entry: Entry) -> memoryview:
        return self.pool.view(entry.offset, entry.image_bytes)

    def _allocate(self, kind: CacheKind, num_bytes: int) -> int | None:
        here, wanted_bytes = self.residents, ALIGNMENT_BYTES
        if num_bytes > here.cap_bytes(kind):
            return None
        while True:
            excess_bytes = here.excess_bytes(kind, num_bytes)
            if excess_bytes <= 0 and (offset := self._find(num_bytes)) is not None:
                return offset
            wanted_bytes = max(excess_bytes, wanted_bytes)
            victims = here.victims(
                kind,
                num_bytes,
                self._index,
                wanted_bytes=wanted_bytes,
                is_here=_has_slot,
                is_held=_is_pinned,
                cost=_slot_bytes,
            )
            if not victims:
                return None  # it cannot be had: nobody leaves in vain
            for entry in victims:
                self.take(entry)
                self._on_evicted(entry)
            wanted_bytes *= 2  # what is held lies between: free more

    def _find(self, num_bytes: int) -> int | None:
        # A slot for so many bytes, of which there are enough: one that is free, or that is made free by moving others.
        if (offset := self.pool.allocate(num_bytes)) is not None:
            return offset
        owners: dict[int, Entry] = {}

        def is_movable(offset: int) -> bool:
            entry = self._index.get(key_in(self.pool.view(offset, PREFIX_BYTES)))  # no key while somebody is writing
            if entry is None or entry.offset != offset or entry.pins:
                return False
            owners[offset] = entry
            return True

        def move(offset: int, new_offset: int, num_bytes: int) -> None:
            old = self.pool.view(offset, num_bytes)
            self.pool.view(new_offset, num_bytes)[:] = old
            wipe_header(old)  # readers whose lease ran out see that it is gone
            owners[offset].offset = new_offset

        return self.pool.gather(num_bytes, is_movable, move)


def _has_slot(entry: Entry) -> bool:
    return entry.state is not _ABSENT


def _is_pinned(entry: Entry) -> bool:
    return entry.pins > 0


def _slot_bytes(entry: Entry) -> int:
    return align_up(entry.image_bytes)
