"""Residents: what lies in one medium. How many bytes it takes, and who leaves first.

The same for RAM and for every tier. Knows no slots, jobs or leases.
"""

from __future__ import annotations

from collections.abc import Callable

from qkvault.errors import InvariantError
from qkvault.policies.base import Policy
from qkvault.store.index import Entry, Index


class Residents:
    """The chunks of one medium: their bytes, the medium's capacity, and the order in which they leave."""

    def __init__(self, policy: Policy, capacity_bytes: int) -> None:
        """Nobody is here yet."""
        self.policy = policy
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0  # whoever takes or gives back room counts it here

    def __len__(self) -> int:
        """How many chunks may be read."""
        return len(self.policy)

    def excess_bytes(self, num_bytes: int) -> int:
        """How many bytes have to leave before ``num_bytes`` more may come; none if that is not positive."""
        return self.used_bytes + num_bytes - self.capacity_bytes

    def victims(
        self,
        index: Index,
        wanted_bytes: int,
        *,
        is_here: Callable[[Entry], bool],
        is_held: Callable[[Entry], bool],
        cost: Callable[[Entry], int],
    ) -> list[Entry]:
        """Entries to evict, in order, that free ``wanted_bytes`` or all that can be freed.

        The policy's order, except that a chunk never leaves before its descendants that are here too: without its head
        a chain's tail cannot be hit. Held entries, and so whatever they hang on, stay.
        """
        chosen: dict[bytes, Entry] = {}
        blocked: set[bytes] = set()  # held, or with a held descendant
        freed_bytes = 0
        for key in self.policy.victims():
            head = index.get(key)
            if head is None or key in chosen or key in blocked:
                continue
            path = [(head, iter(head.children))]  # a walk without recursion: chains are as long as contexts
            while path:
                entry, children = path[-1]
                if entry.key in blocked or is_held(entry):
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

    def check(self, name: str, sum_bytes: int, num_chunks: int) -> None:
        """Raise InvariantError unless ``sum_bytes`` are in use, under the capacity, by ``num_chunks`` to be read."""
        if sum_bytes != self.used_bytes or self.used_bytes > self.capacity_bytes:
            msg = f"{name}: {self.used_bytes} bytes, its chunks take {sum_bytes}, it holds {self.capacity_bytes}"
            raise InvariantError(msg)
        if len(self.policy) != num_chunks:
            msg = f"{name}: the policy orders {len(self.policy)} chunks, {num_chunks} are here"
            raise InvariantError(msg)
