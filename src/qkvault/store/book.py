"""The store's book on one tier: what it knows of it, and what is under way there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from qkvault.store.index import Entry
from qkvault.store.missed import Missed
from qkvault.store.residents import Residents
from qkvault.types import Medium


@dataclass(slots=True)
class TierBook:
    """The store's book on one tier. ``bit`` is its bit in ``Entry.tiers``."""

    number: int
    name: str
    medium: Medium
    stored_bytes: Callable[[int], int]  # image bytes -> bytes it takes in the tier
    residents: Residents  # bytes: stored and being stored; order: stored
    is_healthy: bool = True
    can_store: bool = True
    num_losses: int = 0  # that the book knows of
    is_emptied: bool = False  # it has lost all, and the book is being emptied: nothing goes there meanwhile
    missed: Missed = field(default_factory=Missed)
    is_resting: bool = False  # it has not taken what it missed
    rest_until: float | None = None  # None: its rest has yet to begin
    catching_up: int = 0  # the job that gives it what it missed, or 0
    storing: set[bytes] = field(default_factory=set)  # being written to it
    deleting: dict[bytes, bool] = field(default_factory=dict)  # being removed -> whether to store it again afterwards
    to_delete: list[bytes] = field(default_factory=list)  # those of ``deleting`` that no job has yet
    unremoved: set[bytes] = field(default_factory=set)  # whose removal failed: it may have them, and they do not count

    @property
    def bit(self) -> int:
        return 1 << self.number

    @property
    def is_behind(self) -> bool:
        """Whether it is to be given what it missed."""
        return len(self.missed) > 0 and self.is_healthy and self.can_store and not self.is_resting

    def rest(self) -> None:
        """It did not take something: nothing that it missed is tried for a while."""
        self.is_resting, self.rest_until = True, None

    def count(self, entry: Entry, sign: int) -> None:
        """The bytes of ``entry`` come (1) or go (-1)."""
        self.residents.bytes_of[entry.kind] += sign * self.stored_bytes(entry.image_bytes)

    def holds(self, entry: Entry) -> bool:
        """Whether it has ``entry``, or is being given it."""
        return entry.tiers & self.bit != 0 or entry.key in self.storing

    def holds_parent(self, entry: Entry) -> bool:
        """Whether ``entry`` would be found there: what it hangs on is there, or is a root, or was never stored."""
        parent = entry.parent
        if parent is None or (parent.parent is None and not parent.is_somewhere):
            return True
        return self.holds(parent) and not parent.doom
