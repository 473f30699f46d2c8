"""Tiers as the store sees them: what is in which tier, how full it is, which jobs are under way.

Emits jobs and takes their results; moves no bytes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Final

from qkvault.errors import InvariantError
from qkvault.policies.base import Policy
from qkvault.store.index import Entry, Index
from qkvault.store.room import Room, victims_of
from qkvault.tiers.base import Found, JobKind, JobResult, Piece, TierJob
from qkvault.types import ChunkState, Medium

UNAVAILABLE: Final = "unavailable"
EVICTED: Final = "evicted"


@dataclass(slots=True)
class TierBook:
    """The store's book on one tier. ``bit`` is its bit in ``Entry.tiers``."""

    number: int
    name: str
    medium: Medium
    capacity_bytes: int
    stored_bytes: Callable[[int], int]  # image bytes -> bytes it takes in the tier
    policy: Policy
    used_bytes: int = 0  # stored and being stored
    is_healthy: bool = True
    deleting: set[bytes] = field(default_factory=set)  # keys whose removal is under way: not to be stored meanwhile

    @property
    def bit(self) -> int:
        """Its bit in ``Entry.tiers``."""
        return 1 << self.number


@dataclass(slots=True)
class _Pending:
    book: TierBook
    kind: JobKind
    entries: dict[bytes, Entry]
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

    def take_jobs(self) -> list[tuple[int, TierJob]]:
        """Jobs to submit, each with the number of its tier."""
        jobs, self._jobs = self._jobs, []
        return jobs

    @property
    def num_pending(self) -> int:
        """Jobs submitted or about to be, whose result is not in."""
        return len(self._pending)

    def book_of(self, entry: Entry, search_range: Container[str] | None = None) -> TierBook | None:
        """The nearest healthy tier, of those named in ``search_range`` (None: of all), that holds ``entry``."""
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
            lacking = [e for e in entries if not (e.tiers | e.storing) & book.bit and e.key not in book.deleting]
            self._store_to(book, lacking)

    def load(self, book: TierBook, entries: list[Entry]) -> None:
        """Fill the slots of ``entries`` (LOADING) from ``book``. Pins their slots."""
        for entry in entries:
            book.policy.touch(entry.key)
        self._submit(book, JobKind.LOAD, entries)

    def delete(self, entry: Entry, reason: str) -> None:
        """Remove ``entry`` from every tier that has it. It counts as gone at once; the file goes with the job."""
        for book in self.books:
            if entry.tiers & book.bit:
                self._forget(book, entry, reason)
                self._submit(book, JobKind.DELETE, [], keys=(entry.key,))

    def adopt(self, book: TierBook, found: Iterable[Found]) -> list[Entry]:
        """Enter what a scan found in ``book``, oldest use first; what does not fit its capacity is deleted."""
        adopted = []
        for chunk in found:
            known = self._index.get(chunk.key)
            if known is not None and (
                (known.tiers | known.storing) & book.bit or (known.is_somewhere and known.sketch != chunk.sketch)
            ):
                continue
            entry = self._index.add(chunk.key, chunk.parent, chunk.sketch, chunk.num_tokens, chunk.image_bytes)
            entry.tiers |= book.bit
            book.used_bytes += book.stored_bytes(chunk.image_bytes)
            book.policy.add(chunk.key)
            adopted.append(entry)
        for victim in self._victims(book, book.used_bytes - book.capacity_bytes):
            self.delete(victim, EVICTED)
        return [entry for entry in adopted if entry.tiers & book.bit]

    def finish(self, result: JobResult) -> tuple[JobKind, TierBook, list[Entry], list[tuple[Entry, str]]]:
        """Take a job off the book: unpin, count, and return its kind, tier, the entries done and those failed."""
        pending = self._pending.pop(result.job_id)
        book, done, failed = pending.book, [], []
        book.deleting.difference_update(pending.deleted)
        for key in result.done:
            entry = pending.entries.get(key)
            if entry is not None:
                self._unpin(pending, entry)
                done.append(entry)
                if pending.kind is JobKind.STORE:
                    entry.tiers |= book.bit
                    book.policy.add(key)
        for key, reason in result.failed:
            entry = pending.entries.get(key)
            if entry is not None:
                self._unpin(pending, entry)
                failed.append((entry, reason))
                if pending.kind is JobKind.STORE:
                    book.used_bytes -= book.stored_bytes(entry.image_bytes)
                elif reason != UNAVAILABLE and entry.tiers & book.bit:
                    self._forget(book, entry, reason)
        return pending.kind, book, done, failed

    def check(self) -> None:
        """Raise InvariantError unless every tier's bytes are the sum of its entries and under its cap."""
        for book in self.books:
            held = [entry for entry in self._index if (entry.tiers | entry.storing) & book.bit]
            sum_bytes = sum(book.stored_bytes(entry.image_bytes) for entry in held)
            if sum_bytes != book.used_bytes or book.used_bytes > book.capacity_bytes:
                msg = f"tier {book.name}: {book.used_bytes} bytes, entries take {sum_bytes}, cap {book.capacity_bytes}"
                raise InvariantError(msg)
            if len(book.policy) != sum(bool(entry.tiers & book.bit) for entry in held):
                msg = f"tier {book.name}: the policy orders {len(book.policy)} chunks"
                raise InvariantError(msg)

    def pins_of(self, entry: Entry) -> int:
        """How many jobs under way pin ``entry``."""
        return sum(entry.key in pending.entries for pending in self._pending.values())

    def _store_to(self, book: TierBook, entries: list[Entry]) -> None:
        stored: list[Entry] = []
        evicted: list[bytes] = []
        for entry in entries:
            size = book.stored_bytes(entry.image_bytes)
            if (excess_bytes := book.used_bytes + size - book.capacity_bytes) > 0:
                victims = self._victims(book, excess_bytes)
                if sum(book.stored_bytes(victim.image_bytes) for victim in victims) < excess_bytes:
                    break  # nothing else can leave: the rest of the chain stays in RAM only
                for victim in victims:
                    self._forget(book, victim, EVICTED)
                    evicted.append(victim.key)
            book.used_bytes += size
            entry.storing |= book.bit
            stored.append(entry)
        if stored:
            self._submit(book, JobKind.STORE, stored, delete_first=tuple(evicted))

    def _unpin(self, pending: _Pending, entry: Entry) -> None:
        entry.pins -= 1
        if pending.kind is JobKind.STORE:
            entry.storing &= ~pending.book.bit

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
        book.deleting.update(keys, delete_first)
        by_key = {entry.key: entry for entry in entries}
        self._pending[self._next_id] = _Pending(book, kind, by_key, keys + delete_first)
        self._jobs.append((book.number, TierJob(self._next_id, kind, tuple(pieces), delete_first)))
        self._next_id += 1

    def _forget(self, book: TierBook, entry: Entry, reason: str) -> None:
        entry.tiers &= ~book.bit
        book.policy.remove(entry.key)
        book.used_bytes -= book.stored_bytes(entry.image_bytes)
        self._on_lost(book, entry, reason)

    def _victims(self, book: TierBook, wanted_bytes: int) -> list[Entry]:
        if wanted_bytes <= 0:
            return []
        return victims_of(
            book.policy,
            self._index,
            wanted_bytes,
            is_here=lambda entry: bool(entry.tiers & book.bit),
            is_held=lambda entry: entry.state is ChunkState.LOADING,
            cost=lambda entry: book.stored_bytes(entry.image_bytes),
        )
