"""The transitions that the calls of the store are made of: pin, promote, fork, publish."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from itertools import groupby
from typing import Final

from qkvault.image import sketch_of, tokens_in
from qkvault.pool import Pool
from qkvault.store.book import TierBook
from qkvault.store.forgotten import is_one_chain
from qkvault.store.index import Entry, Packed, Shape
from qkvault.store.leases import Lease, LeaseTable, Partial
from qkvault.store.leaving import RAM, Leaving
from qkvault.store.residents import Residents
from qkvault.store.tier_jobs import SUPERSEDED
from qkvault.types import (
    GRAIN_TOKENS,
    KEY_BYTES,
    SKETCH_BYTES,
    TOKEN_BYTES,
    CacheKind,
    ChunkRefs,
    ChunkState,
    Medium,
    RefRun,
    pack_offsets,
)
from qkvault.wire.messages import Inspected, Located

_READY: Final = ChunkState.READY  # a member of an enumeration takes ten times as long to look up
_GRAIN_BYTES: Final = GRAIN_TOKENS * TOKEN_BYTES


class Core(Leaving):
    """State of a store, and what can happen to one entry or lease."""

    def __init__(
        self,
        pool: Pool,
        residents: Residents,
        books: Sequence[TierBook] = (),
        *,
        lease_seconds: float = 60.0,
        hot_cache: bool = True,
    ) -> None:
        """``books`` describe the tiers, nearest first. Without ``hot_cache`` RAM is only a way through."""
        super().__init__(pool, residents, books, hot_cache=hot_cache)
        self.leases = LeaseTable(lease_seconds)
        self.is_frozen = False
        # (session, lease): slots that a late writer may still touch, and what kind they were for
        self.quarantine: dict[tuple[int, int], list[tuple[int, CacheKind]]] = {}

    def _is_reachable(self, entry: Entry, search_range: Container[str] | None) -> bool:
        if entry.doom or entry.state is ChunkState.WRITING:
            return False
        if entry.state is ChunkState.READY and (search_range is None or RAM in search_range):
            return True
        is_in_tier = self.tiering.book_of(entry, search_range) is not None
        if entry.state is ChunkState.ABSENT:
            return is_in_tier and not self.is_frozen
        return is_in_tier or search_range is None

    def _reachable(self, run: list[Entry], search_range: Container[str] | None) -> list[Entry]:
        # The leading entries of run that may be promised.
        if search_range is None or RAM in search_range:
            doubtful = not_ready(run) if self.num_doomed == 0 else list(range(len(run)))
        else:
            doubtful = list(range(len(run)))
        return run[: next((at for at in doubtful if not self._is_reachable(run[at], search_range)), len(run))]

    def _is_taken(self, keys: bytes, at: int, search_range: Container[str] | None) -> bool:
        # Whether key number at is in use for other tokens, or on another chain.
        entry = self.index.get(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES])
        return entry is not None and self._is_reachable(entry, search_range)

    def inspect(
        self, root: bytes, keys: bytes, checks: bytes, *, tail: bytes = b"", search_range: Container[str] | None = None
    ) -> Inspected:
        """What ``lookup`` would find, by medium; nothing is leased, promoted, touched or counted."""
        num_asked = min(len(keys) // KEY_BYTES, len(checks) // SKETCH_BYTES)
        run = self.index.run(root, keys[: num_asked * KEY_BYTES])
        num_alike = Packed(run).num_alike(checks)
        found = self._reachable(run[:num_alike], search_range)
        tokens, chunks = Counter[Medium](), Counter[Medium]()
        for entry in found:
            medium = self._medium(entry, search_range)
            tokens[medium] += entry.num_tokens
            chunks[medium] += 1
        last = found[-1] if found else self.index.get(root)
        can_fork = last is not None and last.has_children
        if last is not None and tail and len(found) == num_asked:
            can_fork = False
            best = self._best_child(last.key, tail, search_range)
            if best is not None and (shared := self._shared(*best, tail)):
                medium = self._medium(best[0], search_range)
                tokens[medium] += shared
                chunks[medium] += 1
        return Inspected(dict(tokens), dict(chunks), can_fork)

    def _shared(self, entry: Entry, grains: int, tokens: bytes) -> int:
        # Leading tokens of entry, in grains, that are those of ``tokens``: compared where its bytes are in RAM.
        num_tokens = min(grains * GRAIN_TOKENS, entry.num_tokens, len(tokens) // TOKEN_BYTES)
        if entry.state is not _READY:
            return num_tokens
        held = tokens_in(self.room.image(entry), num_tokens)
        return min(_same_grains(held, tokens[: len(held)]) * GRAIN_TOKENS, num_tokens)

    def _medium(self, entry: Entry, search_range: Container[str] | None) -> Medium:
        # Where it would be read from.
        if entry.state is _READY and (search_range is None or RAM in search_range):
            return Medium.RAM
        book = self.tiering.book_of(entry, search_range)
        return book.medium if book is not None else Medium.RAM

    def _best_child(
        self, parent: bytes, tokens: bytes, search_range: Container[str] | None
    ) -> tuple[Entry, int] | None:
        # Of those that may be promised: one that may not hides none that shares less.
        return self.index.best_child(parent, sketch_of(tokens), lambda entry: self._is_reachable(entry, search_range))

    def _fork(self, lease: Lease, parent: bytes, tokens: bytes, search_range: Container[str] | None) -> None:
        # Leases the child of parent that shares most of tokens, if there is one.
        best = self._best_child(parent, tokens, search_range)
        if best is None:
            return
        entry, grains = best
        num_before = len(lease.entries)
        self._pin_all(lease, [entry], search_range)
        if len(lease.entries) > num_before:
            num_tokens = min(grains * GRAIN_TOKENS, entry.num_tokens, len(tokens) // TOKEN_BYTES)
            lease.partial = Partial(num_tokens, tokens[: num_tokens * TOKEN_BYTES])

    def _pin_all(
        self, lease: Lease, entries: list[Entry], search_range: Container[str] | None, *, is_ready: bool = False
    ) -> None:
        # Pin all before giving slots to any: a prompt's own chunks must not make room for one another.
        start = len(lease.entries)
        for entry in entries:
            entry.pins += 1
        absent = [] if is_ready else [start + at for at in not_ready(entries)]
        lease.is_ready &= not absent
        lease.entries += entries
        lease.media += [Medium.RAM] * len(entries)
        for at in absent:
            lease.media[at] = self._medium(lease.entries[at], None)
        wanted: dict[int, list[Entry]] = {}  # by tier
        for at in absent:
            entry = lease.entries[at]
            if entry.state is not ChunkState.ABSENT:
                continue
            book = self.tiering.book_of(entry, search_range)
            if book is None or not self.room.give(entry, ChunkState.LOADING):
                self._cut(lease, at)
                break
            wanted.setdefault(book.number, []).append(entry)
        for number, entries_of in wanted.items():
            self.tiering.load(self.tiering.books[number], entries_of)
            self.ledger.counters.chunks_promoted += len(entries_of)

    def forget(self, parent: bytes, keys: bytes, tail: bytes = b"") -> int:
        """Forget the chunks ``keys`` (48 bytes each) and all that hangs on them: without a head no tail can be hit.

        Also those children of the last of them (without any, of ``parent``) that begin ``tail``, or begin with it.
        What is being read goes when its readers are done, what is being written never appears, nor does what a scan
        finds later. Returns how many known chunks are to go.
        """
        each = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        last = self.index.get(keys[-KEY_BYTES:] or parent)
        sketch = sketch_of(tail)
        self.forgotten.add(each)
        if not each:
            self.forgotten.add_tail(parent, sketch)
        children = last.children if last is not None else ()
        walk = [child for child in children if is_one_chain(child.sketch, sketch)]
        return self._forget_all(walk + [entry for key in reversed(each) if (entry := self.index.get(key)) is not None])

    def _forget_all(self, walk: list[Entry]) -> int:
        found: dict[Entry, None] = {}  # every chunk after the one it hangs on
        while walk:
            entry = walk.pop()
            if entry not in found:
                found[entry] = None
                walk += entry.children
        self.forgotten.add(entry.key for entry in found)
        going = [entry for entry in found if entry.is_somewhere and entry.doom in ("", SUPERSEDED)]
        for entry in reversed(going):
            self._doom(entry, "forgotten")
        return len(going)

    def _inherit(self, key: bytes, parent: bytes) -> None:
        # What a scan had found behind key goes: key turns out to hang on what was forgotten. What is in RAM is newer.
        if self.forgotten.inherits(key, parent) and (entry := self.index.get(key)) is not None:
            self._forget_all([child for child in entry.children if child.state is ChunkState.ABSENT])

    def slots_of(self, session_id: int, lease_id: int, keys: Sequence[bytes] | None) -> list[memoryview] | None:
        """The slots of a live write lease, those of ``keys`` or all, in the order they were reserved."""
        lease = self.leases.get(lease_id, session_id)
        if lease is None or not lease.is_write:
            return None
        named = None if keys is None else frozenset(keys)
        return [self.room.image(entry) for entry in lease.entries if named is None or entry.key in named]

    def open_download(self, session_id: int, keys: bytes, now: float) -> tuple[int, list[memoryview]]:
        """Lease those of ``keys`` (48 bytes each) that are READY; an empty view for each of the others."""
        each = [self.index.get(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)]
        here = [entry for entry in each if entry is not None and entry.state is ChunkState.READY and not entry.doom]
        if not here:
            return 0, [memoryview(b"")] * len(each)
        lease = self.leases.open(session_id, is_write=False, now=now)
        self._pin_all(lease, here, None)
        held = set(here)
        return lease.lease_id, [self.room.image(entry) if entry in held else memoryview(b"") for entry in each]

    def _located(
        self, lease: Lease, *, can_fork: bool = False, num_asked: int = 0, packed: Packed | None = None
    ) -> Located:
        # Without the keys of the first num_asked chunks, which the client has. ``packed``: by its entries, if known.
        pending = [] if lease.is_ready else not_ready(lease.entries)
        lease.is_ready = not pending
        for at in [at for at in pending if lease.entries[at].state is ChunkState.ABSENT][:1]:
            self._cut(lease, at)  # its load failed: nothing after it can be used
        if lease.partial is not None and not self._is_what_was_wanted(lease.entries[-1], lease.partial):
            self._cut(lease, len(lease.entries) - 1)
        if not lease.entries:
            self.leases.close(lease)
            return Located(0, ChunkRefs(), 0, can_fork)
        num_ready = min([*pending, len(lease.entries)])
        pending_tokens: Counter[Medium] = Counter()
        for at in range(num_ready, len(lease.entries)):
            pending_tokens[lease.media[at]] += lease.num_tokens_of(at)
        num_pending = len(lease.entries) - num_ready
        refs = _refs_of(lease, num_ready, num_asked, packed)
        return Located(lease.lease_id, refs, num_pending, can_fork, dict(pending_tokens))

    def _is_what_was_wanted(self, entry: Entry, partial: Partial) -> bool:
        wanted = partial.wanted
        if wanted is None or entry.state is not ChunkState.READY:
            return True  # compared already, or as soon as it arrives
        num_grains = _same_grains(tokens_in(self.room.image(entry), partial.num_tokens), wanted)
        self.ledger.counters.collisions += num_grains * _GRAIN_BYTES < len(wanted)
        partial.num_tokens = min(num_grains * GRAIN_TOKENS, partial.num_tokens)
        partial.wanted = None
        return partial.num_tokens > 0

    def _cut(self, lease: Lease, start: int) -> None:
        # Ends the lease on its chunks from number start on: they count as used.
        dropped = lease.cut(start)
        if not dropped:
            return
        dropped.reverse()  # the tail first: under a recency order it then leaves first
        kind, keys = dropped[0].kind, [entry.key for entry in dropped]  # a chain is of one kind
        self.room.residents.policies[kind].touch_all(keys)
        for book in self.tiering.books:
            book.residents.policies[kind].touch_all(keys)
        if self.hot_cache and not self.num_doomed and lease.is_ready:  # nearly always
            for entry in dropped:
                entry.pins -= 1
            return
        for entry in dropped:
            entry.pins -= 1
            self._settle(entry)

    def _give_under_parent(self, entry: Entry) -> bool:
        # Pins ``entry``, if it gets a slot. Its parent does not leave for it: a tail without its head is no use.
        held = [entry] if entry.parent is None else [entry, entry.parent]
        for node in held:
            node.pins += 1
        is_given = self.room.give(entry, ChunkState.WRITING)
        for node in held:
            node.pins -= 1
        entry.pins += is_given
        return is_given

    def _is_lost(self, entry: Entry, shape: Shape) -> bool:
        # In tiers only, and all of them are down: the same image may be kept in RAM meanwhile.
        is_in_tiers_only = entry.state is ChunkState.ABSENT and not entry.doom
        return is_in_tiers_only and entry.shape == shape and self.tiering.book_of(entry) is None

    def _publish(self, entries: Sequence[Entry]) -> None:
        for entry in reversed(entries):  # the tail first: under an order of arrival it then leaves first
            self.room.publish(entry)
        for entry in entries:
            self.ledger.stored(entry, Medium.RAM, RAM)

    def _extend_all(self, entries: Sequence[Entry]) -> None:
        # What newly stored entries hang on is as young as they are. Of several chains a common head is told once.
        seen = set(entries)
        chains: dict[CacheKind, list[bytes]] = {}  # each from its tail to its head
        for entry in reversed(entries):
            node = entry.parent
            while node is not None and node not in seen:
                seen.add(node)
                chains.setdefault(entry.kind, []).append(node.key)
                node = node.parent
        for residents in (self.room.residents, *(book.residents for book in self.tiering.books)):
            for kind, keys in chains.items():
                residents.policies[kind].extend(keys)

    def _abort_entry(self, entry: Entry, *, keep_slot: bool = False) -> None:
        entry.pins -= 1
        self.room.take(entry, keep_slot=keep_slot)
        self._settle(entry)

    def _supersede_all(self, entries: Sequence[Entry]) -> None:
        # What is shorter than one of them and the beginning of it goes: from a tier only when that one is there.
        for entry in entries:
            for sibling in () if entry.doom else self.index.covered_siblings(entry):
                self._doom(sibling, SUPERSEDED)

    def _end_quarantine(self, session_id: int, lease_id: int) -> None:
        for offset, kind in self.quarantine.pop((session_id, lease_id), ()):
            self.room.free(offset, kind)


def not_ready(entries: Sequence[Entry]) -> list[int]:
    """Positions of those that are not READY."""
    states = [entry.state for entry in entries]
    if states.count(_READY) == len(states):  # nearly always, and a fifth of the time of looking at each
        return []
    return [at for at, state in enumerate(states) if state is not _READY]


def _same_grains(held: memoryview, wanted: bytes) -> int:
    # In how many leading grains they agree; the last one may be shorter.
    num_grains = 0
    for start in range(0, len(wanted), _GRAIN_BYTES):
        if wanted[start : start + _GRAIN_BYTES] != held[start : start + _GRAIN_BYTES]:
            break
        num_grains += 1
    return num_grains


def _refs_of(lease: Lease, count: int, num_asked: int, packed: Packed | None) -> ChunkRefs:
    # The first count chunks of a lease, which are READY.
    entries, partial = lease.entries[:count], lease.partial
    num_whole = count - 1 if partial is not None and count == len(lease.entries) else count
    shapes, media = [entry.shape for entry in entries[:num_whole]], lease.media
    is_even = bool(shapes) and shapes.count(shapes[0]) == num_whole  # as nearly always
    if is_even and media.count(media[0]) == len(media):
        runs = [RefRun(num_whole, *shapes[0][:2], media[0])]
    else:
        grouped = groupby(zip(shapes, media, strict=False))
        runs = [RefRun(sum(1 for _ in group), *shape[:2], medium) for (shape, medium), group in grouped]
    if num_whole < count and partial is not None:
        runs.append(RefRun(1, partial.num_tokens, entries[-1].image_bytes, media[num_whole]))
    num_even = num_whole if is_even else 0
    if packed is None or len(packed) != num_even:
        packed = Packed(entries[:num_even])
    offsets = packed.offsets() + pack_offsets([entry.offset for entry in entries[num_even:]])
    keys = b"".join([entry.key for entry in entries[num_asked:]])
    return ChunkRefs(keys, offsets, tuple(runs))
