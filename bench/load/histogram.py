"""Times of very many calls, in a few hundred counts that any number of processes add up.

Buckets are as wide as a part of what is in them: a quantile is right to 1 %. The least, the most and the count are
exact.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Final

_BUCKETS_IN_OCTAVE: Final = 32


class Histogram:
    """Of seconds. For one thread."""

    def __init__(self) -> None:
        """Of nothing."""
        self.count = 0
        self.least_seconds = math.inf
        self.most_seconds = 0.0
        self._buckets: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        """One more call."""
        self.count += 1
        self.least_seconds = min(self.least_seconds, seconds)
        self.most_seconds = max(self.most_seconds, seconds)
        self._buckets[math.floor(math.log2(max(seconds, 1e-9)) * _BUCKETS_IN_OCTAVE)] += 1

    def merge(self, other: Histogram) -> None:
        """All of another's."""
        self.count += other.count
        self.least_seconds = min(self.least_seconds, other.least_seconds)
        self.most_seconds = max(self.most_seconds, other.most_seconds)
        self._buckets.update(other._buckets)

    def quantile(self, part: float) -> float:
        """Seconds that ``part`` of the calls took at most. Of at least one call."""
        if part <= 0:
            return self.least_seconds
        if part >= 1:
            return self.most_seconds
        left = part * self.count
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left < 0:
                middle = 2.0 ** ((bucket + 0.5) / _BUCKETS_IN_OCTAVE)
                return min(max(middle, self.least_seconds), self.most_seconds)
        return self.most_seconds

    def as_json(self) -> dict[str, Any]:
        """As an answer to an order."""
        if not self.count:
            return {}
        return {"least": self.least_seconds, "most": self.most_seconds, "buckets": list(self._buckets.items())}

    @classmethod
    def of_json(cls, told: dict[str, Any]) -> Histogram:
        """What ``as_json`` told."""
        made = cls()
        if told:
            made.least_seconds, made.most_seconds = told["least"], told["most"]
            made._buckets = Counter(dict(told["buckets"]))
            made.count = made._buckets.total()
        return made
