"""Least recently used, and its two neighbours that need the same ordered dictionary."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from qkvault.policies.base import Policy


class FifoPolicy(Policy):
    """First in, first out: a use changes nothing."""

    def __init__(self) -> None:
        """Start empty."""
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def add(self, key: bytes) -> None:  # contract inherited
        if key in self._order:
            self.touch(key)
        else:
            self._order[key] = None

    def touch(self, key: bytes) -> None:
        pass

    def remove(self, key: bytes) -> None:
        self._order.pop(key, None)

    def victims(self) -> Iterator[bytes]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


class LruPolicy(FifoPolicy):
    """Least recently used leaves first."""

    def touch(self, key: bytes) -> None:
        if key in self._order:
            self._order.move_to_end(key)


class MruPolicy(LruPolicy):
    """Most recently used leaves first: for scans longer than the cache."""

    def victims(self) -> Iterator[bytes]:
        return reversed(self._order)
