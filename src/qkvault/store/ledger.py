"""What happened, by outcome: counters that only rise, and the events that routers and tests read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from qkvault.store.index import Entry
from qkvault.types import Medium, Outcome


class StoreEvent(msgspec.Struct, frozen=True):
    """A chunk has become readable in a medium, or has left it.

    ``reason`` says why it left: ``evicted``, ``cooled`` (the hot cache is off), ``cleared``, ``superseded`` (a longer
    chunk holds its tokens), ``absent`` or ``corrupt`` (the tier did not have what it should). ``tier`` is the tier's
    name, ``ram`` for RAM.
    """

    stored: bool
    medium: Medium
    key: bytes
    parent: bytes
    num_tokens: int
    reason: str = ""
    tier: str = ""


@dataclass(slots=True)
class Counters:
    """Totals since start. Chunks unless the name says bytes."""

    lookups: int = 0
    chunks_asked: int = 0
    chunks_found: int = 0
    chunks_promoted: int = 0
    collisions: int = 0
    leases_expired: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)  # of reserve
    stored: Counter[Medium] = field(default_factory=Counter)
    stored_bytes: Counter[Medium] = field(default_factory=Counter)
    removed: Counter[tuple[Medium, str]] = field(default_factory=Counter)  # by medium and reason
    loaded: Counter[str] = field(default_factory=Counter)  # by tier
    loaded_bytes: Counter[str] = field(default_factory=Counter)
    failed: Counter[tuple[str, str]] = field(default_factory=Counter)  # by tier and reason


class Ledger:
    """Counters and, once somebody wants them, events."""

    def __init__(self) -> None:
        """All zero; events off."""
        self.counters = Counters()
        self.wants_events = False
        self._events: list[StoreEvent] = []

    def take_events(self) -> list[StoreEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def count_outcomes(self, outcomes: Iterable[Outcome]) -> None:
        """What became of the chunks of one reserve."""
        self.counters.outcomes.update(outcomes)

    def stored(self, entry: Entry, medium: Medium, tier: str) -> None:
        """``entry`` has become readable in ``tier``, which is a ``medium``."""
        self.counters.stored[medium] += 1
        self.counters.stored_bytes[medium] += entry.image_bytes
        self.tell(entry, medium, tier, stored=True)

    def removed(self, entry: Entry, medium: Medium, tier: str, reason: str) -> None:
        """``entry`` has left ``tier``."""
        self.counters.removed[medium, reason] += 1
        self.tell(entry, medium, tier, stored=False, reason=reason)

    def loaded(self, tier: str, entry: Entry) -> None:
        """``entry`` came up from ``tier``."""
        self.counters.loaded[tier] += 1
        self.counters.loaded_bytes[tier] += entry.image_bytes

    def failed(self, tier: str, reason: str) -> None:
        """A job of ``tier`` failed for one chunk."""
        self.counters.failed[tier, reason] += 1

    def tell(self, entry: Entry, medium: Medium, tier: str, *, stored: bool, reason: str = "") -> None:
        """Note an event, if anybody wants them."""
        if self.wants_events:
            parent = entry.parent.key if entry.parent is not None else b""
            self._events.append(StoreEvent(stored, medium, entry.key, parent, entry.num_tokens, reason, tier))
