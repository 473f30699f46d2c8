"""How chunks leave: doomed ones as soon as nobody needs them, of many a slice at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from qkvault.pool import Pool
from qkvault.store.book import TierBook
from qkvault.store.feed import Feed
from qkvault.store.forgotten import Forgotten
from qkvault.store.index import Entry, Index
from qkvault.store.ledger import Ledger
from qkvault.store.residents import Residents
from qkvault.store.room import Room
from qkvault.store.tier_jobs import SUPERSEDED
from qkvault.store.tiering import Tiering
from qkvault.types import SPACE_BYTES, ChunkState, Medium

RAM: Final = Medium.RAM.value  # what RAM is called where tiers are called by name
COOLED: Final = "cooled"  # why a chunk has left RAM that is no cache any more
_PERHAPS: Final = ("", SUPERSEDED)  # dooms of what may stay
_READY: Final = ChunkState.READY  # a member of an enumeration takes ten times as long to look up
_ABSENT: Final = ChunkState.ABSENT
_SLICE: Final = 500  # chunks that are let go of at a time: 2 to 5 ms


class Leaving:
    """What a store holds, and how it goes."""

    def __init__(self, pool: Pool, residents: Residents, books: Sequence[TierBook], *, hot_cache: bool) -> None:
        self.index = Index()
        self.room = Room(pool, residents, self.index)
        self.room.on_evicted(self._slot_lost)
        self.tiering = Tiering(list(books), self.index, self.room, self._tier_lost)
        self.ledger = Ledger(Feed(self.index, self.room.image, self.tiering.books))
        self.forgotten = Forgotten(is_on=bool(books))
        self.hot_cache = hot_cache
        self.num_doomed = 0  # entries that are to go
        self._doomed: deque[Entry] = deque()  # who is to go when it is his turn
        self._idle: deque[Entry] = deque()  # who is to leave RAM when it is his turn, if nobody needs him then
        self._idle_reason = ""

    @property
    def due(self) -> int:
        """How many chunks ``work_off`` has yet to look at."""
        return len(self._doomed) + len(self._idle)

    def waiting(self) -> set[int]:
        """Which doomed entries wait for their turn, by ``id``: for checks."""
        return set(map(id, self._doomed))

    def clear(self, *, lower_tiers: bool = True, spaces: Sequence[bytes] = ()) -> int:
        """Forget everything (``lower_tiers=False``: only what lies idle in RAM). Returns how many chunks are to go.

        With ``spaces`` only what is in these. Nothing of it is found from now on; the bytes of many chunks go by and by
        (``work_off``). A chunk that is being read goes when its readers are done; one that is being written never
        appears, nor does one that a scan finds later.
        """
        entries = self.index  # ``is_somewhere`` is written out: a call for each takes three times as long
        known = [each for each in entries if (each.tiers or each.state is not _ABSENT) and each.doom in _PERHAPS]
        if spaces:
            known = [entry for entry in known if entry.key[:SPACE_BYTES] in spaces]
        if lower_tiers:
            self.forgotten.add_all(spaces)
            self.num_doomed += len(known) if self.num_doomed == 0 else sum(not entry.doom for entry in known)
            for entry in known:
                entry.doom = "cleared"
            self._doomed.extend(known)
        else:
            known = [entry for entry in known if entry.state is _READY and not entry.pins]
            self._idle.extend(known)
            self._idle_reason = "cleared"
        self.work_off()
        return len(known)

    def set_hot_cache(self, *, enabled: bool) -> None:
        """Switch the hot cache (row 52). Off: RAM is emptied of what nobody reads, and keeps nothing from then on."""
        self.hot_cache = enabled
        if not enabled:
            self._idle_reason = COOLED
            self._idle.extend([entry for entry in self.index if entry.state is _READY])
            self.work_off()

    def work_off(self, limit: int = _SLICE) -> None:
        """Let go of the next ``limit`` chunks that are ``due``: some milliseconds, whatever there is to go."""
        for _ in range(min(limit, len(self._doomed))):
            if (entry := self._doomed.popleft()).doom and not entry.pins:  # else whoever unpins it settles it
                self._doom(entry, entry.doom)
        for _ in range(min(limit, len(self._idle))):
            entry = self._idle.popleft()
            is_due = self._idle_reason != COOLED or not self.hot_cache
            if is_due and entry.state is _READY and not entry.pins and not entry.doom:
                self.room.take(entry)
                self._slot_lost(entry, self._idle_reason)

    def _doom(self, entry: Entry, reason: str) -> None:
        reason = reason if entry.doom in _PERHAPS else entry.doom  # what is superseded may be kept below
        if entry.pins:
            self.num_doomed += not entry.doom
            entry.doom = reason
            return
        self._pardon(entry)
        if entry.state is _READY:
            self.room.take(entry)
            self.ledger.removed(entry, Medium.RAM, RAM, reason)
        if reason == SUPERSEDED:
            self.tiering.supersede(entry)
        else:
            self.tiering.delete(entry, reason)
        self.index.prune(entry)

    def _pardon(self, entry: Entry) -> None:
        self.num_doomed -= bool(entry.doom)
        entry.doom = ""

    def _settle(self, entry: Entry) -> None:
        # What is due once nobody needs the slot any more.
        if entry.pins:
            return
        if entry.doom == SUPERSEDED and not any(each.is_usable for each in self.index.longer_siblings(entry)):
            self._pardon(entry)  # the longer one has gone first
            self.tiering.miss(entry)
        if entry.doom:
            self._doom(entry, entry.doom)
        elif entry.state is not _READY:
            self.index.prune(entry)
        elif not self.hot_cache:
            self.room.take(entry)
            self._slot_lost(entry, COOLED)

    def _slot_lost(self, entry: Entry, reason: str = "evicted") -> None:
        self.ledger.removed(entry, Medium.RAM, RAM, reason)
        self._leave(entry)

    def _tier_lost(self, book: TierBook, entry: Entry, reason: str) -> None:
        self.ledger.removed(entry, book.medium, book.name, reason)
        self._leave(entry)

    def _leave(self, entry: Entry) -> None:
        if entry.doom and not entry.pins and not entry.is_somewhere:  # it was evicted before its turn
            self._pardon(entry)
        self.index.prune(entry)
