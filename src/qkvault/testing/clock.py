"""Time for tests."""

from __future__ import annotations


class FakeClock:
    """Seconds that pass when told to. Call it to read them."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds
