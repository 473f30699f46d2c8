"""Tiers as the store sees them: what is in which tier, how full it is, which jobs are under way.

Emits jobs and takes their results; moves no bytes itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Final

from qkvault.image import sketch_bytes_for
from qkvault.spaces import kind_in
from qkvault.store.index import Entry, Index, Shape
from qkvault.store.residents import Residents
from qkvault.store.room import Room
from qkvault.tiers.base import Found, JobKind, JobResult, Piece, TierJob
from qkvault.types import CacheKind, ChunkState, Medium

UNAVAILABLE: Final = "unavailable"
CORRUPT: Final = "corrupt"
EVICTED: Final = "evicted"
_LOAD_BYTES: Final = 8 << 20  # of images in a job, at least: what keeps a disk busy for some milliseconds


@dataclass(slots=True)
class TierBook:
    """The store's book on one tier. ``bit`` is its bit in ``Entry.tiers``."""

    number: int
    name: str
    medium: Medium
    stored_bytes: Callable[[int], int]  # image bytes -> bytes it takes in the tier
    residents: Residents  # bytes: stored and being stored; order: stored
    is_healthy: bool = True
    storing: set[bytes] = field(default_factory=set)  # being written to it
    deleting: dict[bytes, bool] = field(default_factory=dict)  # being removed -> whether to store it again afterwards
    to_delete: list[bytes] = field(default_factory=list)  # those of ``deleting`` that no job has yet

    @property
    def bit(self) -> int:
        """Its bit in ``Entry.tiers``."""
        return 1 << self.number

    def count(self, entry: Entry, sign: int) -> None:
        """The bytes of ``entry`` come (1) or go (-1)."""
        self.residents.bytes_of[entry.kind] += sign * self.stored_bytes(entry.image_bytes)

    def holds(self, entry: Entry) -> bool:
        """Whether it has ``entry``, or is being given it."""
        return entry.tiers & self.bit != 0 or entry.key in self.storing


@dataclass(slots=True)
class _Pending:
    book: TierBook
    kind: JobKind
    entries: dict[bytes, Entry]  # pinned, and not told of yet
    deleted: tuple[bytes, ...]


class Tiering:
    """All tiers of one store, nearest first."""

    def __init__(
        self, books: list[TierBook], index: Index, room: Room, on_lost: Callable[[TierBook, Entry, str], None]
    ) -> None:
        """Start with empty tiers; ``adopt`` tells what they hold.

        ``on_lost(book, entry, reason)`` is called after an entry has left a tier.
        """
        self.books = books
        self._index = index
        self._room = room
        self._on_lost = on_lost
        self._pending: dict[int, _Pending] = {}
        self._jobs: list[tuple[int, TierJob]] = []
        self._next_id = 1
        self._again: list[tuple[TierBook, bytes]] = []

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

    def book_of(self, entry: Entry, search_range: Container[str] | None = None) -> TierBook | None:
        """The nearest healthy tier, of those named in ``search_range`` (None: of all), that holds ``entry``."""
        if entry.tiers:
            for book in self.books:
                if entry.tiers & book.bit and book.is_healthy and (search_range is None or book.name in search_range):
                    return book
        return None

    def store(self, entries: Iterable[Entry]) -> None:
        """Write ``entries`` (READY) to every healthy tier that lacks them and can make room. Pins their slots."""
        entries = list(entries)
        for book in self.books:
            if not book.is_healthy:
                continue
            lacking = [entry for entry in entries if not book.holds(entry)]
            book.deleting.update((entry.key, True) for entry in lacking if entry.key in book.deleting)
            self._store_to(book, [entry for entry in lacking if entry.key not in book.deleting])

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
                self._drop(book, entry.key)
                self._forget(book, entry, reason)

    def adopt(self, book: TierBook, chunk: Found, *, is_forgotten: bool = False) -> Entry | None:
        """Enter what a scan found in ``book``; it is used later than what was entered before.

        Removed instead is what ``is_forgotten`` or malformed, what does not fit the capacity, and what differs from a
        chunk of that key. What was stored there since is left alone.
        """
        known = self._index.get(chunk.key)
        if chunk.key in book.deleting or (known is not None and book.holds(known)):
            return None
        shape = (chunk.num_tokens, chunk.image_bytes, kind_in(chunk.space))
        is_same = known is None or not known.is_somewhere or known.shape == shape
        if (
            is_forgotten
            or len(chunk.sketch) != sketch_bytes_for(chunk.num_tokens)
            or not (is_same and self._index.accepts(chunk.key, chunk.parent, chunk.sketch, chunk.num_tokens))
            or not self._make_room(book, shape, self._index.get(chunk.parent))
        ):
            self._drop(book, chunk.key)
            return None
        entry = self._index.add(chunk.key, chunk.parent, chunk.sketch, shape)
        entry.tiers |= book.bit
        book.count(entry, 1)
        book.residents.policies[entry.kind].add(entry.key)
        return entry

    def finish(self, result: JobResult) -> tuple[JobKind, TierBook, list[Entry], list[tuple[Entry, str]]] | None:
        """Take a job off the book: unpin, count, and return its kind, tier, the entries done and those failed.

        An entry that the result does not tell of has failed. None for a job that is not under way.
        """
        pending = self._pending.pop(result.job_id, None)
        if pending is None:
            return None
        book, done, failed = pending.book, [], []
        for key in result.done:
            if (entry := pending.entries.pop(key, None)) is not None:
                self._unpin(pending, entry)
                done.append(entry)
                if pending.kind is JobKind.STORE:
                    entry.tiers |= book.bit
                    book.residents.policies[entry.kind].add(entry.key)
        for key, reason in [*result.failed, *((key, UNAVAILABLE) for key in pending.entries)]:
            if (entry := pending.entries.pop(key, None)) is not None:
                self._unpin(pending, entry)
                failed.append((entry, reason))
                if pending.kind is JobKind.STORE:
                    book.count(entry, -1)
                elif reason != UNAVAILABLE and entry.tiers & book.bit:
                    self._forget(book, entry, reason)
        self._again += [(book, key) for key in pending.deleted if book.deleting.pop(key, False)]
        return pending.kind, book, done, failed

    def store_again(self) -> None:
        """Write what was committed while an older copy was being removed."""
        again, self._again = self._again, []
        for book, key in again:
            entry = self._index.get(key)
            if entry is not None and entry.state is ChunkState.READY and not entry.doom and not book.holds(entry):
                self._store_to(book, [entry])

    def check(self) -> None:
        """Raise InvariantError unless every tier's bytes are the sum of its entries and under its cap."""
        for book in self.books:
            held = [entry for entry in self._index if book.holds(entry)]
            held_bytes = Counter[CacheKind]()
            for entry in held:
                held_bytes[entry.kind] += book.stored_bytes(entry.image_bytes)
            num_chunks = Counter(entry.kind for entry in held if entry.tiers & book.bit)
            book.residents.check(f"tier {book.name}", held_bytes, num_chunks)

    def pins(self) -> Counter[bytes]:
        """How many jobs under way pin each entry, by key."""
        return Counter(key for pending in self._pending.values() for key in pending.entries)

    def _store_to(self, book: TierBook, entries: list[Entry]) -> None:
        stored: list[Entry] = []
        num_dropped = len(book.to_delete)
        for entry in entries:
            if not self._make_room(book, entry.shape, entry.parent):
                break  # nothing else can leave: the rest of the chain stays in RAM only
            book.count(entry, 1)
            book.storing.add(entry.key)
            stored.append(entry)
        if stored:
            evicted = tuple(book.to_delete[num_dropped:])
            del book.to_delete[num_dropped:]
            self._submit(book, JobKind.STORE, stored, delete_first=evicted)

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
            self._drop(book, victim.key)
            self._forget(book, victim, EVICTED)
        return bool(victims)

    def _drop(self, book: TierBook, key: bytes) -> None:
        book.deleting[key] = False
        book.to_delete.append(key)

    def _unpin(self, pending: _Pending, entry: Entry) -> None:
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
    ) -> None:
        pieces = [Piece(entry.key, self._room.image(entry)) for entry in entries]
        pieces += [Piece(key, memoryview(b"")) for key in keys]
        for entry in entries:
            entry.pins += 1
        by_key = {entry.key: entry for entry in entries}
        self._pending[self._next_id] = _Pending(book, kind, by_key, keys + delete_first)
        self._jobs.append((book.number, TierJob(self._next_id, kind, tuple(pieces), delete_first)))
        self._next_id += 1

    def _forget(self, book: TierBook, entry: Entry, reason: str) -> None:
        entry.tiers &= ~book.bit
        book.residents.policies[entry.kind].remove(entry.key)
        book.count(entry, -1)
        self._on_lost(book, entry, reason)
