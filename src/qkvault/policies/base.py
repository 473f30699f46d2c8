"""Who leaves first. A policy orders the chunks of one tier; the store asks it for victims and decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator


class Policy(ABC):
    """An eviction order over keys. No thread, clock or I/O; every method but ``victims`` is O(1).

    The store calls ``add`` when a chunk arrives, ``touch`` when it is used, ``extend`` when one arrives behind it and
    ``remove`` when it leaves. A prompt's chunks are told from its tail to its head, so that under a recency order the
    tail leaves first.
    """

    @abstractmethod
    def add(self, key: bytes) -> None:
        """``key`` has arrived. Adding a key that is here already is the same as touching it."""

    @abstractmethod
    def touch(self, key: bytes) -> None:
        """``key`` was used. Unknown keys are ignored."""

    def touch_all(self, keys: Iterable[bytes]) -> None:
        """``touch`` each of ``keys``, in that order. To be overridden where it can be done faster."""
        for key in keys:
            self.touch(key)

    def extend(self, keys: Iterable[bytes]) -> None:
        """A chunk has arrived behind ``keys``, a chain from its tail to its head: for a recency order they are used.

        To be overridden where that is no use: else the head is of the age of the first prompt that had it, and when its
        turn comes the newest chunk leaves, as the chain's tail.
        """
        self.touch_all(keys)

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """``key`` has left. Unknown keys are ignored."""

    @abstractmethod
    def victims(self) -> Iterator[bytes]:
        """Every key, the one that should leave first first.

        The caller removes none while it iterates, and may stop at any point.
        """

    @abstractmethod
    def __len__(self) -> int:
        """How many keys are ordered."""
