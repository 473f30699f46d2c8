"""The jobs of tiers: what is given to them and taken from them, and the room that it takes there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from qkvault.store.book import TierBook
from qkvault.store.index import Entry, Index, Shape
from qkvault.store.room import Room
from qkvault.tiers.base import JobKind, Piece, TierJob
from qkvault.types import ChunkState

UNAVAILABLE: Final = "unavailable"
CORRUPT: Final = "corrupt"
REFUSED: Final = "refused"
EVICTED: Final = "evicted"
ABSENT: Final = "absent"
SUPERSEDED: Final = "superseded"
_LOAD_BYTES: Final = 8 << 20  # of images in a job, at least: what keeps a disk busy for some milliseconds


@dataclass(slots=True)
class Pending:
    """A job under way."""

    book: TierBook
    kind: JobKind
    entries: dict[bytes, Entry]  # pinned, and not told of yet
    deleted: tuple[bytes, ...]
    is_void: bool = False  # the tier has lost all since: what it has stored may be gone


class TierJobs:
    """The jobs of all tiers of one store, nearest first."""

    def __init__(
        self, books: list[TierBook], index: Index, room: Room, on_lost: Callable[[TierBook, Entry, str], None]
    ) -> None:
        """No job is under way. ``on_lost(book, entry, reason)`` is called after an entry has left a tier."""
        self.books = books
        self._index = index
        self._room = room
        self._on_lost = on_lost
        self._pending: dict[int, Pending] = {}
        self._jobs: list[tuple[int, TierJob]] = []
        self._next_id = 1

    def take_jobs(self) -> list[tuple[int, TierJob]]:
        """Jobs to submit, each with the number of its tier. What makes room comes before what needs it."""
        later, self._jobs = self._jobs, []
        for book in self.books:
            if book.to_delete:
                keys, book.to_delete = tuple(book.to_delete), []
                self._submit(book, JobKind.DELETE, [], keys=keys)
        jobs, self._jobs = self._jobs + later, []
        return jobs

    @property
    def num_pending(self) -> int:
        """Jobs submitted or about to be, whose result is not in."""
        return len(self._pending) + sum(bool(book.to_delete) for book in self.books)

    def load(self, book: TierBook, entries: list[Entry]) -> None:
        """Fill the slots of ``entries`` (LOADING) from ``book``, in jobs of some MB. Pins their slots.

        A job's result comes when all of it is there: what comes first can be copied while the rest is on its way.
        """
        book.residents.policies[entries[0].kind].touch_all([entry.key for entry in entries])
        batch: list[Entry] = []
        batch_bytes = 0
        for entry in entries:
            batch.append(entry)
            batch_bytes += entry.image_bytes
            if batch_bytes >= _LOAD_BYTES:
                self._submit(book, JobKind.LOAD, batch)
                batch, batch_bytes = [], 0
        if batch:
            self._submit(book, JobKind.LOAD, batch)

    def delete(self, entry: Entry, reason: str) -> None:
        """Remove ``entry`` from every tier that has it. It counts as gone at once; the file goes with the job."""
        for book in self.books:
            if entry.tiers & book.bit:
                self._remove(book, entry, reason)

    def pins(self) -> Counter[bytes]:
        """How many jobs under way pin each entry, by key."""
        return Counter(key for pending in self._pending.values() for key in pending.entries)

    def _make_room(self, book: TierBook, shape: Shape, parent: Entry | None) -> bool:
        # Evicts for a child of ``parent``, which therefore stays. Nobody leaves in vain.
        _, image_bytes, kind = shape
        num_bytes = book.stored_bytes(image_bytes)
        if book.residents.excess_bytes(kind, num_bytes) <= 0:
            return True
        victims = book.residents.victims(
            kind,
            num_bytes,
            self._index,
            is_here=book.holds,
            is_held=lambda e: e is parent or e.state is ChunkState.LOADING or e.key in book.storing,
            cost=lambda entry: book.stored_bytes(entry.image_bytes),
        )
        for victim in victims:
            self._remove(book, victim, EVICTED)
        return bool(victims)

    def _remove(self, book: TierBook, entry: Entry, reason: str) -> None:
        self._drop(book, entry.key)
        self._forget(book, entry, reason)

    def _drop(self, book: TierBook, key: bytes, *, again: bool = False) -> None:
        book.deleting[key] = again
        book.to_delete.append(key)

    def _unpin(self, pending: Pending, entry: Entry) -> None:
        entry.pins -= 1
        if pending.kind is JobKind.STORE:
            pending.book.storing.discard(entry.key)

    def _submit(
        self,
        book: TierBook,
        kind: JobKind,
        entries: list[Entry],
        *,
        keys: tuple[bytes, ...] = (),
        delete_first: tuple[bytes, ...] = (),
    ) -> int:
        pieces = [Piece(entry.key, self._room.image(entry)) for entry in entries]
        pieces += [Piece(key, memoryview(b"")) for key in keys]
        for entry in entries:
            entry.pins += 1
        by_key = {entry.key: entry for entry in entries}
        self._pending[self._next_id] = Pending(book, kind, by_key, keys + delete_first)
        self._jobs.append((book.number, TierJob(self._next_id, kind, tuple(pieces), delete_first)))
        self._next_id += 1
        return self._next_id - 1

    def _forget(self, book: TierBook, entry: Entry, reason: str) -> None:
        entry.tiers &= ~book.bit
        book.residents.policies[entry.kind].remove(entry.key)
        book.count(entry, -1)
        self._on_lost(book, entry, reason)
