"""Least frequently used, ties by age: O(1) by one ordered dictionary for each use count."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from qkvault.policies.base import Policy


class LfuPolicy(Policy):
    """The fewest uses leave first; among equals whoever came to that count, or was extended, first."""

    def __init__(self) -> None:
        self._count: dict[bytes, int] = {}
        self._buckets: dict[int, OrderedDict[bytes, None]] = {}

    def add(self, key: bytes) -> None:  # contract inherited
        if key in self._count:
            self.touch(key)
        else:
            self._put(key, 1)

    def touch(self, key: bytes) -> None:
        count = self._count.get(key)
        if count is not None:
            self.remove(key)
            self._put(key, count + 1)

    def extend(self, keys: Iterable[bytes]) -> None:  # as young as what hangs on it, and used no more often
        for key in keys:
            if (count := self._count.get(key)) is not None:
                self._buckets[count].move_to_end(key)

    def remove(self, key: bytes) -> None:
        count = self._count.pop(key, None)
        if count is None:
            return
        bucket = self._buckets[count]
        del bucket[key]
        if not bucket:
            del self._buckets[count]

    def victims(self) -> Iterator[bytes]:
        for count in sorted(self._buckets):
            yield from self._buckets[count]

    def __len__(self) -> int:
        return len(self._count)

    def _put(self, key: bytes, count: int) -> None:
        self._count[key] = count
        self._buckets.setdefault(count, OrderedDict())[key] = None
