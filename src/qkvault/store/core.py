"""The transitions that the calls of the store are made of: pin, promote, doom, settle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from typing import Final

from qkvault.image import tokens_in
from qkvault.policies.base import Policy
from qkvault.pool import Pool
from qkvault.store.index import Entry, Index
from qkvault.store.leases import Lease, LeaseItem, LeaseTable
from qkvault.store.ledger import Ledger
from qkvault.store.room import Room
from qkvault.store.tiering import TierBook, Tiering
from qkvault.types import GRAIN_TOKENS, TOKEN_BYTES, ChunkRef, ChunkState, Medium
from qkvault.wire.messages import Located

RAM: Final = Medium.RAM.value  # what RAM is called where tiers are called by name
_GRAIN_BYTES: Final = GRAIN_TOKENS * TOKEN_BYTES


class Core:
    """State of a store, and what can happen to one entry or lease."""

    def __init__(
        self, pool: Pool, policy: Policy, books: Sequence[TierBook], *, lease_seconds: float, hot_cache: bool
    ) -> None:
        """Everything starts empty."""
        self.index = Index()
        self.room = Room(pool, policy, self.index)
        self.room.on_evicted(self._slot_lost)
        self.tiering = Tiering(list(books), self.index, self.room, self._tier_lost)
        self.leases = LeaseTable(lease_seconds)
        self.ledger = Ledger()
        self.hot_cache = hot_cache
        self.is_frozen = False
        self.quarantine: dict[tuple[int, int], list[int]] = {}  # (session, lease): slots a late writer may still touch

    def _is_reachable(self, entry: Entry, search_range: Container[str] | None) -> bool:
        if entry.doom or entry.state is ChunkState.WRITING:
            return False
        if entry.state is ChunkState.READY and (search_range is None or RAM in search_range):
            return True
        is_in_tier = self.tiering.book_of(entry, search_range) is not None
        if entry.state is ChunkState.ABSENT:
            return is_in_tier and not self.is_frozen
        return is_in_tier or search_range is None

    def _pin_all(self, lease: Lease, entries: Sequence[Entry], search_range: Container[str] | None) -> None:
        # Pin all before giving slots to any: a prompt's own chunks must not make room for one another.
        start = len(lease.items)
        for entry in entries:
            entry.pins += 1
            medium = Medium.RAM if entry.state is ChunkState.READY else self._source(entry)
            lease.items.append(LeaseItem(entry, medium, entry.num_tokens))
        wanted: dict[int, list[Entry]] = {}
        for at, item in enumerate(lease.items[start:], start):
            if item.entry.state is not ChunkState.ABSENT:
                continue
            book = self.tiering.book_of(item.entry, search_range)
            if book is None or not self.room.give(item.entry, ChunkState.LOADING):
                self._drop_items(lease, at)
                break
            wanted.setdefault(book.number, []).append(item.entry)
        for number, absent in wanted.items():
            self.tiering.load(self.tiering.books[number], absent)
            self.ledger.counters.chunks_promoted += len(absent)

    def _source(self, entry: Entry) -> Medium:
        book = self.tiering.book_of(entry)
        return book.medium if book is not None else Medium.RAM

    def _located(self, lease: Lease, *, can_fork: bool = False) -> Located:
        ready: list[ChunkRef] = []
        is_run = True
        for at, item in enumerate(lease.items):
            entry = item.entry
            if entry.state is ChunkState.READY:
                if item.wanted is not None and not self._is_what_was_wanted(item, item.wanted):
                    self._drop_items(lease, at)
                    break
                if is_run:
                    ready.append(ChunkRef(entry.key, entry.offset, entry.image_bytes, item.num_tokens, item.medium))
            elif entry.state is ChunkState.LOADING:
                is_run = False
            else:  # its load failed: nothing after it can be used
                self._drop_items(lease, at)
                break
        pending_tokens: Counter[Medium] = Counter()
        for item in lease.items[len(ready) :]:
            pending_tokens[item.medium] += item.num_tokens
        if not lease.items:
            self.leases.close(lease)
            return Located(0, (), 0, can_fork)
        num_pending = len(lease.items) - len(ready)
        return Located(lease.lease_id, tuple(ready), num_pending, can_fork, dict(pending_tokens))

    def _is_what_was_wanted(self, item: LeaseItem, wanted: bytes) -> bool:
        held = tokens_in(self.room.image(item.entry), item.num_tokens)
        num_grains = 0
        for start in range(0, len(wanted), _GRAIN_BYTES):
            if wanted[start : start + _GRAIN_BYTES] != held[start : start + _GRAIN_BYTES]:
                self.ledger.counters.collisions += 1
                break
            num_grains += 1
        item.num_tokens = min(num_grains * GRAIN_TOKENS, item.num_tokens)
        item.wanted = None
        return item.num_tokens > 0

    def _drop_items(self, lease: Lease, start: int) -> None:
        dropped = lease.items[start:]
        del lease.items[start:]
        for item in reversed(dropped):  # the tail first: under a recency order it then leaves first
            item.entry.pins -= 1
            self.room.policy.touch(item.entry.key)
            for book in self.tiering.books:
                book.policy.touch(item.entry.key)
            self._settle(item.entry)

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

    def _is_lost(self, entry: Entry, image_bytes: int) -> bool:
        # In tiers only, and all of them are down: the same image may be kept in RAM meanwhile.
        is_in_tiers_only = entry.state is ChunkState.ABSENT and not entry.doom
        return is_in_tiers_only and entry.image_bytes == image_bytes and self.tiering.book_of(entry) is None

    def _publish(self, entries: Sequence[Entry]) -> None:
        for entry in reversed(entries):  # the tail first: under an order of arrival it then leaves first
            self.room.publish(entry)
        for entry in entries:
            self.ledger.stored(entry, Medium.RAM, RAM)

    def _abort_entry(self, entry: Entry, *, keep_slot: bool = False) -> None:
        entry.pins -= 1
        self.room.take(entry, keep_slot=keep_slot)
        self._settle(entry)

    def _doom(self, entry: Entry, reason: str) -> None:
        if entry.pins:
            entry.doom = entry.doom or reason
            return
        entry.doom = ""
        if entry.state is ChunkState.READY:
            self.room.take(entry)
            self.ledger.removed(entry, Medium.RAM, RAM, reason)
        self.tiering.delete(entry, reason)
        self.index.prune(entry)

    def _settle(self, entry: Entry) -> None:
        # What is due once nobody needs the slot any more.
        if entry.pins:
            return
        if entry.doom:
            self._doom(entry, entry.doom)
        elif entry.state is not ChunkState.READY:
            self.index.prune(entry)
        elif not self.hot_cache:
            self.room.take(entry)
            self._slot_lost(entry, "cooled")

    def _slot_lost(self, entry: Entry, reason: str = "evicted") -> None:
        self.ledger.removed(entry, Medium.RAM, RAM, reason)
        self.index.prune(entry)

    def _tier_lost(self, book: TierBook, entry: Entry, reason: str) -> None:
        self.ledger.removed(entry, book.medium, book.name, reason)
        self.index.prune(entry)

    def _end_quarantine(self, session_id: int, lease_id: int) -> None:
        for offset in self.quarantine.pop((session_id, lease_id), ()):
            self.room.pool.free(offset)
