"""What is timed, and how: in rounds, ours and what it is held against by turns, so that noise hits both.

Every sample is kept, but of a load, of which quantiles are. Ratios are taken within a round and then summed up by their
median, which a neighbour who comes and goes moves far less than the ratio of two medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

import msgspec


class Role(str, Enum):
    """What a series is to ours."""

    OURS = "ours"
    LIMIT = "limit"  # what cannot be beaten: a plain copy, a raw file, the engine's own cache
    PEER = "peer"


class Unit(str, Enum):
    """What the amount of a row counts."""

    BYTES = "bytes"
    TOKENS = "tokens"
    CALLS = "calls"


class Skip(Exception):
    """A bench or a case cannot run here; the message says why."""


class Sample(NamedTuple):
    """One run: seconds on the clock, and seconds of CPU of the whole process (or tree of processes)."""

    seconds: float
    cpu_seconds: float


class Series(msgspec.Struct, kw_only=True):
    """All samples of one thing, or quantiles of too many of them. ``facts`` are shown beside it."""

    name: str
    role: Role
    seconds: list[float] = msgspec.field(default_factory=list)
    are_quantiles: bool = False  # evenly, from the least to the most
    cpu_seconds: list[float] = msgspec.field(default_factory=list)
    facts: dict[str, int | float | bool | str] = msgspec.field(default_factory=dict)

    def add(self, sample: Sample) -> None:
        """One more."""
        self.seconds.append(sample.seconds)
        self.cpu_seconds.append(sample.cpu_seconds)


class Spread(NamedTuple):
    """A median, and how far the samples lie apart."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


class Measure(str, Enum):
    """What a target bounds."""

    SPEED = "speed"  # ours against another series: at least this part of its speed
    TIME = "time"  # ours against another series: at most this multiple of its time
    RATE = "rate"  # units a second, at least
    SECONDS = "seconds"  # at most
    FACT = "fact"  # a fact of ours, at most


class Target(msgspec.Struct, frozen=True):
    """What we want ours to reach. ``against`` names a series, or the fact."""

    measure: Measure
    bound: float
    against: str = ""


class Row(msgspec.Struct, kw_only=True):
    """One question: ours, and what it is held against. ``amount`` is what one sample moves."""

    name: str
    unit: Unit
    amount: float
    series: list[Series]
    targets: tuple[Target, ...] = ()

    @property
    def ours(self) -> Series | None:
        """Our series, if it could be measured."""
        return next((series for series in self.series if series.role is Role.OURS and series.seconds), None)

    def named(self, name: str) -> Series | None:
        """The series of that name, if it has samples."""
        return next((series for series in self.series if series.name == name and series.seconds), None)

    def reached(self, target: Target) -> float | None:
        """What ours reaches, in terms of ``target``; None if it was not measured."""
        if target.measure is Measure.FACT:
            found = [series.facts.get(target.against) for series in self.series if series.role is Role.OURS]
            return None if found[:1] in ([], [None]) else float(found[0] or 0)
        ours = self.ours
        if ours is None:
            return None
        if target.measure is Measure.SECONDS:
            return statistics.median(ours.seconds)
        if target.measure is Measure.RATE:
            return self.amount / statistics.median(ours.seconds)
        other = self.named(target.against)
        if other is None:
            return None
        return ratio(ours, other, is_speed=target.measure is Measure.SPEED).median

    def is_met(self, target: Target) -> bool | None:
        """Whether ``target`` is reached; None if that is not known."""
        reached = self.reached(target)
        if reached is None:
            return None
        is_least = target.measure in (Measure.SPEED, Measure.RATE)
        return reached >= target.bound if is_least else reached <= target.bound


def ratio(ours: Series, other: Series, *, is_speed: bool, by_cpu: bool = False) -> Spread:
    """Ours against another: part of its speed, or multiple of its time. Round by round where both have all rounds."""
    mine, theirs = (ours.cpu_seconds, other.cpu_seconds) if by_cpu else (ours.seconds, other.seconds)
    if len(mine) != len(theirs):
        mine, theirs = [statistics.median(mine)], [statistics.median(theirs)]
    top, bottom = (theirs, mine) if is_speed else (mine, theirs)
    return Spread.of([one / max(another, 1e-9) for one, another in zip(top, bottom, strict=True)])


class Case(NamedTuple):
    """Something to time. ``run`` returns a Sample if it was timed elsewhere, such as in another process."""

    row: str
    name: str
    role: Role
    run: Callable[[], Sample | None]


def nothing(_: int) -> None:
    """For a hook that is not needed."""


def timed(run: Callable[[], Sample | None]) -> Sample:
    """Run once."""
    cpu, start = time.process_time(), time.perf_counter()
    sample = run()
    if sample is not None:
        return sample
    return Sample(time.perf_counter() - start, time.process_time() - cpu)


def measure(
    groups: Sequence[Sequence[Case]],
    *,
    rounds: int,
    warmup: int = 1,
    advance: Callable[[], None],
    before: Callable[[int], None] = nothing,
    between: Callable[[int], None] = nothing,
    after: Callable[[int], None] = nothing,
) -> dict[str, list[Series]]:
    """Time all cases of all groups, ``warmup + rounds`` times; returns the series of each row.

    Groups run in order, the cases of a group in an order that turns from round to round. ``before``, ``between`` (two
    groups) and ``after`` are given the number of the round and are not timed.
    """
    series = {(case.row, case.name): Series(name=case.name, role=case.role) for group in groups for case in group}
    for number in range(-warmup, rounds):
        before(number)
        for at, group in enumerate(groups):
            if at:
                between(number)
            first = number % len(group)
            for case in [*group[first:], *group[:first]]:
                sample = timed(case.run)
                if number >= 0:
                    series[case.row, case.name].add(sample)
        after(number)
        advance()
    rows: dict[str, list[Series]] = {}
    for (row, _), of_case in series.items():
        rows.setdefault(row, []).append(of_case)
    return rows
