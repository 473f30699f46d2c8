"""What happened, by outcome: counters that only rise. The feed hears of it too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from qkvault.store.feed import Feed
from qkvault.store.index import Entry
from qkvault.tiers.base import Found
from qkvault.types import Medium, Outcome


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
    """Counters, and the feed."""

    def __init__(self, feed: Feed) -> None:
        self.counters = Counters()
        self.feed = feed

    def count_outcomes(self, outcomes: Iterable[Outcome]) -> None:
        """What became of the chunks of one reserve."""
        self.counters.outcomes.update(outcomes)

    def stored(self, entry: Entry, medium: Medium, tier: str, found: Found | None = None) -> None:
        """``entry`` has become readable in ``tier``, which is a ``medium``; ``found`` there by a scan."""
        self.counters.stored[medium] += 1
        self.counters.stored_bytes[medium] += entry.image_bytes
        self.feed.tell(entry, medium, tier, stored=True, found=found)

    def removed(self, entry: Entry, medium: Medium, tier: str, reason: str) -> None:
        """``entry`` has left ``tier``."""
        self.counters.removed[medium, reason] += 1
        self.feed.tell(entry, medium, tier, stored=False, reason=reason)

    def loaded(self, tier: str, entry: Entry) -> None:
        """``entry`` came up from ``tier``."""
        self.counters.loaded[tier] += 1
        self.counters.loaded_bytes[tier] += entry.image_bytes

    def failed(self, tier: str, reason: str) -> None:
        """A job of ``tier`` failed for one chunk."""
        self.counters.failed[tier, reason] += 1
