"""Tiers as the store sees them: what is in which tier, how full it is, which jobs are under way.

Emits jobs and takes their results; moves no bytes itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import chain, islice
from typing import Final

from qkvault.errors import InvariantError, UnknownMedium
from qkvault.image import sketch_bytes_for
from qkvault.spaces import kind_in
from qkvault.store.book import TierBook
from qkvault.store.index import Entry, Index
from qkvault.store.missed import is_wanted
from qkvault.store.room import Room
from qkvault.store.tier_jobs import ABSENT, CORRUPT, REFUSED, SUPERSEDED, UNAVAILABLE, TierJobs
from qkvault.tiers.base import Found, JobKind, JobResult, Tier
from qkvault.types import CacheKind, ChunkState, Medium

_SLICE: Final = 256  # entries that are looked at in one go while a tier catches up, or was emptied
_CATCH_UP_BYTES: Final = 64 << 20  # of images that one tier is given to catch up with: they cannot leave RAM meanwhile
_REST_SECONDS: Final = 2.0  # before a tier that did not take what it missed is given any of it again


class Tiering(TierJobs):
    """All tiers of one store, nearest first."""

    def __init__(
        self, books: list[TierBook], index: Index, room: Room, on_lost: Callable[[TierBook, Entry, str], None]
    ) -> None:
        """Start with empty tiers; ``adopt`` tells what they hold.

        ``on_lost(book, entry, reason)`` is called after an entry has left a tier.
        """
        super().__init__(books, index, room, on_lost)
        self._again: list[tuple[TierBook, bytes]] = []
        room.on_taken(self._left_ram)

    @property
    def is_behind(self) -> bool:
        """Whether ``catch_up`` has something to do by now."""
        return any(book.is_emptied or book.is_behind for book in self.books)

    def book_of(self, entry: Entry, search_range: Container[str] | None = None) -> TierBook | None:
        """The nearest healthy tier, of those named in ``search_range`` (None: of all), that holds ``entry``."""
        if entry.tiers:
            for book in self.books:
                if entry.tiers & book.bit and book.is_healthy and (search_range is None or book.name in search_range):
                    return book
        return None

    def require_media(self, names: Iterable[str]) -> None:
        """Raise UnknownMedium unless each of ``names`` is RAM or a tier."""
        known = [Medium.RAM.value, *(book.name for book in self.books)]
        if unknown := [name for name in names if name not in known]:
            msg = f"search_range names {', '.join(map(repr, unknown))}: the media of this store are {', '.join(known)}"
            raise UnknownMedium(msg)

    def hear(self, book: TierBook, tier: Tier) -> None:
        """Take over how ``tier``, that of ``book``, is now."""
        book.is_healthy, book.can_store = tier.is_healthy, tier.can_store
        if tier.num_losses != book.num_losses:
            book.num_losses, book.is_emptied = tier.num_losses, True
            for pending in self._pending.values():
                pending.is_void |= pending.book is book and pending.kind is JobKind.STORE
        book.is_healthy &= not book.is_emptied

    def store(self, entries: Iterable[Entry]) -> None:
        """Write ``entries`` (READY, heads first) to every healthy tier that lacks them. Pins their slots.

        A tier that is down, has no room or lacks what an entry hangs on has missed it: ``catch_up`` comes back to it.
        """
        entries = list(entries)
        for book in self.books:
            lacking = [entry for entry in entries if not book.holds(entry)]
            if book.is_healthy:
                self._store_to(book, lacking)
            for entry in lacking:
                self._miss(book, entry)
                self._miss_children(book, entry)

    def miss(self, entry: Entry) -> None:
        """``entry`` was wanted again: tiers that lack it are given it from RAM."""
        for book in self.books:
            if not entry.tiers & book.bit:
                self._miss(book, entry)

    def catch_up(self, now: float, *, is_frozen: bool = False) -> bool:
        """Give tiers that are well some of what they missed and RAM still has: the heads first, one job a tier.

        Also takes what a tier has lost off its book, and only that if ``is_frozen``. To be called now and then;
        returns whether there is more to do at once.
        """
        is_more = False
        for book in self.books:
            if book.is_emptied:
                self._empty(book)
                is_more = True
            elif is_frozen:
                continue
            elif book.is_resting:
                book.rest_until = now + _REST_SECONDS if book.rest_until is None else book.rest_until
                book.is_resting = now < book.rest_until
            elif book.is_behind and not book.catching_up:
                book.catching_up = self._store_to(book, self._next_missed(book))
                is_more |= not book.catching_up and book.is_behind
        return is_more

    def unwritten(self, *, is_over: bool) -> set[bytes]:
        """Keys of what is in RAM and should be in a tier. Once all jobs are over, a tier that is well has no room."""
        lacking = set()
        for book in self.books:
            has_no_room = is_over and book.is_healthy and book.can_store
            lacking |= book.storing | (set() if has_no_room else {*book.missed})
        return {key for key in lacking if (entry := self._index.get(key)) is not None and not entry.doom}

    def unremoved(self, book: TierBook) -> set[bytes]:
        """Keys of what is to be gone from the tier of ``book``, and has not been removed as far as is known."""
        doomed = {entry.key for entry in self._index if entry.doom not in ("", SUPERSEDED) and book.holds(entry)}
        keys = book.unremoved | book.deleting.keys()
        return doomed | {key for key in keys if (entry := self._index.get(key)) is None or not book.holds(entry)}

    def supersede(self, entry: Entry) -> None:
        """Remove ``entry`` from every tier that has a longer chunk with all its tokens, and from no other."""
        for book in self.books:
            if entry.tiers & book.bit and any(e.tiers & book.bit for e in self._index.longer_siblings(entry)):
                self._remove(book, entry, SUPERSEDED)

    def adopt(self, book: TierBook, chunk: Found, *, is_forgotten: bool = False) -> Entry | None:
        """Enter what a scan found in ``book``; it is used later than what was entered before.

        Removed instead is what ``is_forgotten`` or malformed, what does not fit the capacity, and what differs from a
        chunk of that key. What was stored there since is left alone.
        """
        known = self._index.get(chunk.key)
        if book.is_emptied or chunk.key in book.deleting or (known is not None and book.holds(known)):
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
        book.missed.discard(entry.key)
        self._miss_children(book, entry)
        return entry

    def finish(self, result: JobResult) -> tuple[JobKind, TierBook, list[Entry], list[tuple[Entry, str]]] | None:
        """Take a job off the book: unpin, count, and return its kind, tier, the entries done and those failed.

        An entry that the result does not tell of has failed. None for a job that is not under way.
        """
        pending = self._pending.pop(result.job_id, None)
        if pending is None:
            return None
        book, done, failed = pending.book, [], []
        if book.catching_up == result.job_id:
            book.catching_up = 0
        results = [*((key, "") for key in result.done), *result.failed]
        for key, reason in [*results, *((key, UNAVAILABLE) for key in pending.entries)]:
            if (entry := pending.entries.pop(key, None)) is None:
                continue
            self._unpin(pending, entry)
            is_done = not reason and not pending.is_void
            if is_done:
                done.append(entry)
            else:
                failed.append((entry, reason or UNAVAILABLE))
            if pending.kind is JobKind.STORE:
                self._end_store(book, entry, reason, is_done=is_done)
            elif reason not in ("", UNAVAILABLE) and entry.tiers & book.bit:
                self._forget(book, entry, reason)
        book.unremoved.difference_update(result.done)
        if pending.kind is not JobKind.STORE or not result.done:  # else all that was to go first has gone
            absent = {key for key, reason in result.failed if reason == ABSENT}
            book.unremoved |= {*pending.deleted} - {*result.done} - absent
        self._again += [(book, key) for key in pending.deleted if book.deleting.pop(key, False)]
        return pending.kind, book, done, failed

    def store_again(self) -> None:
        """Write what was committed while an older copy was being removed."""
        again, self._again = self._again, []
        for book, key in again:
            entry = self._index.get(key)
            if entry is not None and is_wanted(entry, book.holds):
                if book.is_healthy:
                    self._store_to(book, [entry])
                self._miss(book, entry)
                self._miss_children(book, entry)

    def check(self) -> None:
        """Raise InvariantError unless every tier's bytes are the sum of its entries and under its cap."""
        for book in self.books:
            held = [entry for entry in self._index if book.holds(entry)]
            held_bytes = Counter[CacheKind]()
            for entry in held:
                held_bytes[entry.kind] += book.stored_bytes(entry.image_bytes)
            num_chunks = Counter(entry.kind for entry in held if entry.tiers & book.bit)
            book.residents.check(f"tier {book.name}", held_bytes, num_chunks)
            for key in book.missed:
                known = self._index.get(key)
                if known is None or known.state is not ChunkState.READY or book.holds(known):
                    msg = f"tier {book.name} is said to have missed {key.hex()[-16:]}"
                    raise InvariantError(msg)

    def _store_to(self, book: TierBook, entries: Iterable[Entry]) -> int:
        # Those whose parent is there or goes with them, and that find room. Returns the job, or 0.
        stored: list[Entry] = []
        full: set[CacheKind] = set()
        num_dropped = len(book.to_delete)
        for entry in entries:
            if entry.key in book.deleting:
                book.deleting[entry.key] = True
            elif not book.holds_parent(entry):
                continue
            elif entry.kind in full or not self._make_room(book, entry.shape, entry.parent):
                full.add(entry.kind)  # nothing else can leave
                book.missed.put_off(entry.key)
                book.rest()
            else:
                book.count(entry, 1)
                book.storing.add(entry.key)
                book.missed.discard(entry.key)
                stored.append(entry)
        if not stored:
            return 0
        evicted = tuple(book.to_delete[num_dropped:])
        del book.to_delete[num_dropped:]
        return self._submit(book, JobKind.STORE, stored, delete_first=evicted)

    def _next_missed(self, book: TierBook) -> Iterator[Entry]:
        # Whoever takes one begins to store it before he takes the next: then come its children.
        num_bytes = 0
        for _ in range(_SLICE):
            if not book.missed or num_bytes >= _CATCH_UP_BYTES:
                return
            entry = self._index.get(book.missed.take())
            if entry is not None and is_wanted(entry, book.holds):
                yield entry
                if book.holds(entry):
                    num_bytes += entry.image_bytes
                    book.missed.add_first(child for child in entry.children if is_wanted(child, book.holds))

    def _miss(self, book: TierBook, entry: Entry) -> None:
        if entry.key in book.deleting:
            book.deleting[entry.key] = True
        else:
            book.missed.add(entry, book.holds)

    def _miss_children(self, book: TierBook, entry: Entry) -> None:
        # What hangs on ``entry`` may have waited for it.
        if book.holds(entry):
            for child in entry.children:
                self._miss(book, child)

    def _left_ram(self, entry: Entry) -> None:
        for book in self.books:
            book.missed.discard(entry.key)

    def _empty(self, book: TierBook) -> None:
        orders = [policy.victims() for policy in book.residents.policies.values()]
        keys = list(islice(chain.from_iterable(orders), _SLICE))
        for key in keys:
            if (entry := self._index.get(key)) is not None:
                self._forget(book, entry, ABSENT)
                self._miss(book, entry)
        book.is_emptied = bool(keys)

    def _end_store(self, book: TierBook, entry: Entry, reason: str, *, is_done: bool) -> None:
        if is_done:
            entry.tiers |= book.bit
            book.residents.policies[entry.kind].add(entry.key)
            return
        book.count(entry, -1)
        if not reason:
            self._drop(book, entry.key, again=True)
        elif reason not in (CORRUPT, REFUSED):
            self._miss(book, entry)
            book.rest()
