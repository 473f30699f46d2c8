"""Least recently used, and its two neighbours that need the same ordered dictionary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from qkvault.policies.base import Policy

_MIN_HOLES: Final = 64  # fewer are not worth a new dictionary


class FifoPolicy(Policy):
    """First in, first out: a use changes nothing."""

    def __init__(self) -> None:
        # A plain dictionary keeps the order at a third of an OrderedDict's memory. What leaves it leaves a hole that
        # ``victims`` steps over: it is made anew when there are more holes than keys.
        self._order: dict[bytes, None] = {}
        self._num_holes = 0

    def add(self, key: bytes) -> None:  # contract inherited
        if key in self._order:
            self.touch(key)
        else:
            self._order[key] = None

    def touch(self, key: bytes) -> None:
        pass

    def remove(self, key: bytes) -> None:
        if self._order.pop(key, self) is None:
            self._count_holes(1)

    def victims(self) -> Iterator[bytes]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def _count_holes(self, count: int) -> None:
        self._num_holes += count
        if self._num_holes > len(self._order) + _MIN_HOLES:
            self._order = dict.fromkeys(self._order)
            self._num_holes = 0


class LruPolicy(FifoPolicy):
    """Least recently used leaves first."""

    def touch(self, key: bytes) -> None:
        self.touch_all((key,))

    def touch_all(self, keys: Iterable[bytes]) -> None:
        order, pop, num_unknown = self._order, self._order.pop, 0
        touched = tuple(keys)
        for key in touched:
            if pop(key, self) is None:
                order[key] = None
            else:
                num_unknown += 1
        self._count_holes(len(touched) - num_unknown)


class MruPolicy(LruPolicy):
    """Most recently used leaves first: for scans longer than the cache."""

    def victims(self) -> Iterator[bytes]:
        return reversed(self._order)
