"""Residents: what lies in one medium, by kind. How many bytes it takes, and who leaves first.

Each kind has a share. KV borrows what queries do not use of theirs, and gives it back when they come; queries borrow
nothing. The same for RAM and for every tier. Knows no slots, jobs or leases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from qkvault.errors import InvariantError
from qkvault.policies.base import Policy
from qkvault.store.index import Entry, Index
from qkvault.types import CacheKind

_QUERY_PART: Final = 4  # one byte in so many is for queries, unless it is said how many are
_KV: Final = CacheKind.KV  # a member of an enumeration takes ten times as long to look up
_QUERY: Final = CacheKind.QUERY


class Residents:
    """The chunks of one medium: their bytes, how many there may be, and the order in which they leave."""

    def __init__(self, new_policy: Callable[[], Policy], capacity_bytes: int, query_bytes: int | None = None) -> None:
        """Nobody is here yet. ``query_bytes`` is the share of queries; None: a quarter of the capacity."""
        self.capacity_bytes = capacity_bytes
        self.query_bytes = capacity_bytes // _QUERY_PART if query_bytes is None else min(query_bytes, capacity_bytes)
        self.policies = {kind: new_policy() for kind in CacheKind}
        self.bytes_of = dict.fromkeys(CacheKind, 0)  # in use; whoever takes or gives back room counts it here

    def __len__(self) -> int:
        """How many chunks may be read."""
        return sum(map(len, self.policies.values()))

    @property
    def used_bytes(self) -> int:
        """Bytes in use by chunks of all kinds."""
        return self.bytes_of[_KV] + self.bytes_of[_QUERY]

    def cap_bytes(self, kind: CacheKind) -> int:
        """How many bytes chunks of ``kind`` may take."""
        return self.query_bytes if kind is _QUERY else self.capacity_bytes

    def excess_bytes(self, kind: CacheKind, num_bytes: int) -> int:
        """How many bytes have to leave before ``num_bytes`` of ``kind`` may come; none if that is not positive."""
        over_bytes = self.used_bytes - self.capacity_bytes
        if kind is _QUERY:
            over_bytes = max(over_bytes, self.bytes_of[kind] - self.query_bytes)
        return over_bytes + num_bytes

    def victims(
        self,
        kind: CacheKind,
        num_bytes: int,
        index: Index,
        *,
        wanted_bytes: int = 0,
        is_here: Callable[[Entry], bool],
        is_held: Callable[[Entry], bool],
        cost: Callable[[Entry], int],
    ) -> list[Entry]:
        """Entries to evict, in order, before ``num_bytes`` of ``kind`` may come; none if that cannot be had.

        They free ``wanted_bytes`` if that is more, and if so much can be freed. Of one kind they leave in its policy's
        order, except that a chunk never leaves before its descendants that are here too: without its head a chain's
        tail cannot be hit. Held entries, and so whatever they hang on, stay; so does what the other kind hangs on.
        """
        choice = _Choice(index, is_here, is_held, cost)
        excess_bytes = self.used_bytes + num_bytes - self.capacity_bytes
        wanted_bytes = max(excess_bytes, wanted_bytes)
        if kind is _QUERY:
            own_bytes = self.bytes_of[kind] + num_bytes - self.query_bytes
            if choice.take(kind, self.policies[kind], own_bytes) < own_bytes:
                return []
            borrowed_bytes = self.bytes_of[_KV] - (self.capacity_bytes - self.query_bytes)
            choice.take(_KV, self.policies[_KV], min(borrowed_bytes, wanted_bytes - choice.freed_bytes))
        choice.take(kind, self.policies[kind], wanted_bytes - choice.freed_bytes)
        return list(choice.entries.values()) if choice.freed_bytes >= excess_bytes else []

    def check(self, name: str, held_bytes: Mapping[CacheKind, int], num_chunks: Mapping[CacheKind, int]) -> None:
        """Raise InvariantError unless these are the bytes in use and the chunks to be read, and no more than may be."""
        for kind in CacheKind:
            used_bytes, num_ordered = self.bytes_of[kind], len(self.policies[kind])
            if used_bytes != held_bytes.get(kind, 0) or used_bytes > self.cap_bytes(kind):
                msg = f"{name}, {kind.value}: {used_bytes} of {self.cap_bytes(kind)} bytes, chunks take {held_bytes}"
                raise InvariantError(msg)
            if num_ordered != num_chunks.get(kind, 0):
                msg = f"{name}, {kind.value}: the policy orders {num_ordered} chunks, there are {num_chunks}"
                raise InvariantError(msg)
        if self.used_bytes > self.capacity_bytes:
            msg = f"{name}: {self.used_bytes} of {self.capacity_bytes} bytes are in use"
            raise InvariantError(msg)


class _Choice:
    """Who has been chosen to leave, and what that frees."""

    def __init__(
        self,
        index: Index,
        is_here: Callable[[Entry], bool],
        is_held: Callable[[Entry], bool],
        cost: Callable[[Entry], int],
    ) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.freed_bytes = 0
        self._index = index
        self._is_here = is_here
        self._is_held = is_held
        self._cost = cost
        self._blocked: set[bytes] = set()  # held or of another kind, or with such a descendant

    def take(self, kind: CacheKind, policy: Policy, wanted_bytes: int) -> int:
        """Choose entries of ``kind`` until they free ``wanted_bytes``, or there are no more. Returns what they free."""
        before_bytes = self.freed_bytes
        target_bytes = before_bytes + wanted_bytes
        if wanted_bytes > 0:
            for key in policy.victims():
                head = self._index.get(key)
                if head is not None and key not in self.entries and key not in self._blocked:
                    self._take_chain(kind, head, target_bytes)
                    if self.freed_bytes >= target_bytes:
                        break
        return self.freed_bytes - before_bytes

    def _take_chain(self, kind: CacheKind, head: Entry, target_bytes: int) -> None:
        path = [(head, iter(head.children))]  # a walk without recursion: chains are as long as contexts
        while path and self.freed_bytes < target_bytes:
            entry, children = path[-1]
            if entry.key in self._blocked or entry.kind is not kind or self._is_held(entry):
                self._blocked.update(ancestor.key for ancestor, _ in path)
                return
            child = next((c for c in children if self._is_here(c) and c.key not in self.entries), None)
            if child is not None:
                path.append((child, iter(child.children)))
                continue
            path.pop()
            self.entries[entry.key] = entry
            self.freed_bytes += self._cost(entry)
