"""Residents: what lies in one medium, by kind. How many bytes it takes, and who leaves first.

Queries are several times the bytes of KV, and less is lost with them: they have a quota, and are the first to leave.
The same for RAM and for every tier. Knows no slots, jobs or leases.
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
        """Nobody is here yet. ``query_bytes`` is the quota of queries; None: a quarter of the capacity."""
        self.capacity_bytes = capacity_bytes
        self.query_bytes = capacity_bytes // _QUERY_PART if query_bytes is None else min(query_bytes, capacity_bytes)
        self.policies = {kind: new_policy() for kind in CacheKind}
        queries, kv = self.policies[_QUERY], self.policies[_KV]
        self._leaving = {_KV: [queries, kv], _QUERY: [queries]}  # for whom who leaves, in this order
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
        index: Index,
        wanted_bytes: int,
        *,
        is_here: Callable[[Entry], bool],
        is_held: Callable[[Entry], bool],
        cost: Callable[[Entry], int],
    ) -> list[Entry]:
        """Entries to evict for one of ``kind``, in order, that free ``wanted_bytes`` or all that can be freed.

        Queries first, each kind in its policy's order, except that a chunk never leaves before its descendants that are
        here too: without its head a chain's tail cannot be hit. Held entries, and so whatever they hang on, stay.
        """
        chosen: dict[bytes, Entry] = {}
        blocked: set[bytes] = set()  # held, or with a held descendant
        freed_bytes = 0
        leaving = self._leaving[kind]
        keeps_kv = self.policies[_KV] not in leaving
        for policy in leaving:
            for key in policy.victims():
                head = index.get(key)
                if head is None or key in chosen or key in blocked:
                    continue
                path = [(head, iter(head.children))]  # a walk without recursion: chains are as long as contexts
                while path:
                    entry, children = path[-1]
                    if entry.key in blocked or is_held(entry) or (keeps_kv and entry.kind is _KV):
                        blocked.update(ancestor.key for ancestor, _ in path)
                        break
                    child = next((c for c in children if is_here(c) and c.key not in chosen), None)
                    if child is not None:
                        path.append((child, iter(child.children)))
                        continue
                    path.pop()
                    chosen[entry.key] = entry
                    freed_bytes += cost(entry)
                    if freed_bytes >= wanted_bytes:
                        return list(chosen.values())
        return list(chosen.values())

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
