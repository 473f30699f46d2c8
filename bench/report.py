"""What a run says: tables for people, JSON for comparisons, and one line of progress while it lasts."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from bench import machine
from bench.samples import Measure, Role, Row, Series, Spread, Target, Unit, ratio

FORMAT: Final = 1
WIDTH: Final = 150  # where there is no terminal to ask
_STYLES: Final = {Role.OURS: "bold", Role.LIMIT: "cyan", Role.PEER: "magenta"}


class Screen:
    """Where a run shows itself: progress on stderr, tables on stdout."""

    def __init__(self) -> None:
        """Ask the terminal, if there is one."""
        self.out = Console(highlight=False)
        if not self.out.is_terminal:
            self.out = Console(highlight=False, width=WIDTH)
        self._err = Console(stderr=True, highlight=False)
        self.skipped: list[dict[str, str]] = []

    def skip(self, case: str, why: str) -> None:
        """Say that a case could not run, and remember it."""
        self.out.print(Text.assemble(("not run ", "yellow"), f"{case}: {why}"))
        self.skipped.append({"case": case, "why": why})

    def say(self, text: str) -> None:
        """One line that is not a result."""
        self._err.print(Text(text, style="dim"))

    @contextmanager
    def task(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """Show progress in ``total`` steps; gives what is to be called after each."""
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        if not self._err.is_terminal:
            self.say(title)
        with Progress(*columns, console=self._err, transient=True, disable=not self._err.is_terminal) as progress:
            number = progress.add_task(title, total=total)
            yield lambda: progress.advance(number)

    def show(self, title: str, rows: Sequence[Row]) -> None:
        """One table."""
        table = Table(title=title, title_justify="left", title_style="bold", caption_justify="left", pad_edge=False)
        for header in ("what", "who", "median (min-max)", "rate", "ours against it", "by CPU time", "facts"):
            table.add_column(header, overflow="fold")
        for row in rows:
            _add_row(table, row)
            table.add_section()
        self.out.print(table)
        for row in rows:
            for target in row.targets:
                self.out.print(verdict(row, target))
        self.out.print()


def _add_row(table: Table, row: Row) -> None:
    ours = row.ours
    is_first = True
    for series in row.series:
        if not series.seconds:
            continue
        cells = [row.name if is_first else "", series.name, _seconds(Spread.of(series.seconds)), _rate(row, series)]
        is_first = False
        cells += _against(row, ours, series)
        cells.append(", ".join(f"{name} {value}" for name, value in series.facts.items()))
        table.add_row(*cells, style=_STYLES[series.role])


def _against(row: Row, ours: Series | None, series: Series) -> list[str]:
    if ours is None or series is ours:
        return ["", ""]
    is_speed = row.unit is not Unit.CALLS
    word = "of its speed" if is_speed else "of its time"
    by_clock = ratio(ours, series, is_speed=is_speed)
    cell = f"{by_clock.median:.2f} {word} ({by_clock.least:.2f}-{by_clock.most:.2f})"
    if not all(series.cpu_seconds) or not all(ours.cpu_seconds) or min(ours.cpu_seconds) < 1e-3:
        return [cell, ""]  # the clock of CPU time is too coarse
    return [cell, f"{ratio(ours, series, is_speed=is_speed, by_cpu=True).median:.2f}"]


def _seconds(spread: Spread) -> str:
    scale, unit = next((s, u) for s, u in ((1, "s"), (1e3, "ms"), (1e6, "us")) if spread.median * s >= 1 or u == "us")
    return f"{_short(spread.median * scale)} {unit} ({_short(spread.least * scale)}-{_short(spread.most * scale)})"


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _rate(row: Row, series: Series) -> str:
    rate = row.amount / statistics.median(series.seconds)
    if row.unit is Unit.BYTES:
        return f"{rate / 1e9:.2f} GB/s"
    return f"{rate / 1e6:.1f} M tokens/s" if row.unit is Unit.TOKENS else ""


def verdict(row: Row, target: Target) -> Text:
    """Whether a target is reached, in a line."""
    reached = row.reached(target)
    words = {
        Measure.SPEED: f"at least {target.bound:g} of the speed of {target.against}",
        Measure.TIME: f"at most {target.bound:g} of the time of {target.against}",
        Measure.RATE: f"at least {target.bound / 1e6:g} M {row.unit.value}/s",
        Measure.SECONDS: f"at most {target.bound * 1e3:g} ms",
        Measure.FACT: f"at most {target.bound:g} {target.against}",
    }
    scale = {Measure.RATE: 1e-6, Measure.SECONDS: 1e3}.get(target.measure, 1.0)
    if reached is None:
        return Text(f"  ?  {row.name}: {words[target.measure]}: not measured", style="yellow")
    is_met = bool(row.is_met(target))
    mark = "met" if is_met else "missed"
    return Text(
        f"  {mark:6}  {row.name}: {words[target.measure]}: {reached * scale:.3g}", style="green" if is_met else "red"
    )


def as_json(benches: dict[str, list[Row]], skipped: Sequence[dict[str, str]], settings: object) -> dict[str, object]:
    """Everything a later reader needs: machine, versions, command, samples, and what was summed up from them."""
    return {
        "format": FORMAT,
        **machine.moment(),
        "machine": machine.facts(),
        "versions": machine.versions(),
        "settings": settings,
        "benches": {name: [_row_json(row) for row in rows] for name, rows in benches.items()},
        "skipped": list(skipped),
    }


def _row_json(row: Row) -> dict[str, object]:
    ours = row.ours
    return {
        "name": row.name,
        "unit": row.unit.value,
        "amount": row.amount,
        "targets": [
            {
                "measure": target.measure.value,
                "bound": target.bound,
                "against": target.against,
                "reached": row.reached(target),
                "met": row.is_met(target),
            }
            for target in row.targets
        ],
        "series": [_series_json(row, ours, series) for series in row.series if series.seconds],
    }


def _series_json(row: Row, ours: Series | None, series: Series) -> dict[str, object]:
    spread = Spread.of(series.seconds)
    told: dict[str, object] = {
        "name": series.name,
        "role": series.role.value,
        "seconds": {
            "median": spread.median,
            "min": spread.least,
            "max": spread.most,
            "quantiles" if series.are_quantiles else "samples": series.seconds,
        },
        "cpu_seconds": series.cpu_seconds,
        "rate": row.amount / spread.median,
        "facts": series.facts,
    }
    if ours is not None and series is not ours:
        against = ratio(ours, series, is_speed=True)
        told["our_part_of_its_speed"] = {"median": against.median, "min": against.least, "max": against.most}
    return told


def write_json(path: Path, document: dict[str, object]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
