"""``qkvault top``: a store at work, tick by tick. Rates are differences of its counters."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from qkvault.cli.config import FileOption, SetOption
from qkvault.cli.output import PIPE_COLUMNS, JsonOption, drawing, printable
from qkvault.cli.store import AddressOption, instance_rows, reach
from qkvault.units import approximate_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Group

    from qkvault.client import StoreClient
    from qkvault.wire.messages import Status

_BAR_CELLS: Final = 40
# what a line of rates says: its name, and the counters that are summed, by the beginning of their names
_RATES: Final = {
    "lookups": "lookups",
    "chunks asked": "chunks_asked",
    "chunks found": "chunks_found",
    "chunks stored": "stored.ram",
    "bytes stored": "stored_bytes.ram",
    "chunks from tiers": "loaded.",
    "bytes from tiers": "loaded_bytes.",
    "chunks evicted": "removed.ram.evicted",
    "failures": "failed.",
}


class Tick(NamedTuple):
    """A status, and what happened per second since the one before; nothing yet at the first."""

    status: Status
    rates: dict[str, float]
    hit_rate: float | None  # of the chunks asked for since then


def top(
    *,
    interval: Annotated[float, typer.Option(min=0.1, max=86400, metavar="SECONDS", help="Between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One look at an interval, then end.")] = False,
    address: AddressOption = None,
    file: FileOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch a store: how full its media are, what happens per second, who is connected. With --json a line a tick."""
    with reach(address, file, settings) as client:
        ticks = _ticks(client, interval, once=once)
        if as_json:
            for tick in ticks:
                typer.echo(json.dumps(_plain(tick), allow_nan=False))
            return
        _show(ticks, once=once)


def _ticks(client: StoreClient, interval_seconds: float, *, once: bool) -> Iterator[Tick]:
    before, seen_seconds = client.status(), time.monotonic()
    if not once:
        yield Tick(before, {}, None)
    while True:
        time.sleep(interval_seconds)
        now, now_seconds = client.status(), time.monotonic()
        yield tick_between(before, now, now_seconds - seen_seconds)
        if once:
            return
        before, seen_seconds = now, now_seconds


def tick_between(before: Status, now: Status, seconds: float) -> Tick:
    """What happened between two looks, ``seconds`` apart."""
    done = {name: _sum(now, start) - _sum(before, start) for name, start in _RATES.items()}
    asked = done["chunks asked"]
    hit_rate = done["chunks found"] / asked if asked > 0 else None
    return Tick(now, {name: count / seconds for name, count in done.items()}, hit_rate)


def _sum(status: Status, start: str) -> int:
    if not start.endswith("."):
        return status.counters.get(start, 0)
    return sum(count for name, count in status.counters.items() if name.startswith(start))


def _plain(tick: Tick) -> dict[str, object]:
    from qkvault.reports import status_report

    rates = {name.replace(" ", "_"): round(rate, 3) for name, rate in tick.rates.items()}
    return {
        **status_report(tick.status),
        "time_seconds": round(time.time(), 3),
        "rates_per_second": rates,
        "hit_rate_now": tick.hit_rate,
    }


def _show(ticks: Iterator[Tick], *, once: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None: it was closed
    try:
        if once or not is_terminal:
            console = Console(width=None if is_terminal else PIPE_COLUMNS)
            for tick in ticks:
                console.print(_picture(tick))
            return
        with drawing(Live(screen=True, auto_refresh=False)) as live:
            for tick in ticks:
                live.update(_picture(tick), refresh=True)
    except KeyboardInterrupt:
        return


def _picture(tick: Tick) -> Group:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    status = tick.status
    media = Table.grid(padding=(0, 2))
    for medium in status.media:
        note = "" if medium.is_healthy else "NOT WORKING"
        each = [(medium.name, medium.used_bytes, medium.capacity_bytes, f"{medium.num_chunks} chunks", note)]
        if medium.query_share_bytes:
            each.append(("  queries", medium.query_used_bytes, medium.query_share_bytes, "", ""))
        for name, used_bytes, most_bytes, *rest in each:
            share = used_bytes / most_bytes if most_bytes else 0.0
            size = f"{approximate_size(used_bytes)} of {approximate_size(most_bytes)}"
            bar = ProgressBar(total=1.0, completed=share, width=_BAR_CELLS)
            media.add_row(Text(name), bar, Text(f"{share:.0%}"), size, *rest)
    rates = Table("per second", "", box=None, pad_edge=False)
    for name, rate in tick.rates.items():
        rates.add_row(name, f"{approximate_size(int(rate))}" if name.startswith("bytes") else f"{rate:,.1f}")
    hits = "-" if tick.hit_rate is None else f"{tick.hit_rate:.1%}"
    instances = Table("instance", "role", "model", "rank", "pid", "heard", "leases", box=None, pad_edge=False)
    for row in instance_rows(status):
        instances.add_row(*(Text(printable(cell)) for cell in row))
    flags = "  FROZEN" if status.is_frozen else ""
    line = (
        f"hit rate {hits}   clients {status.num_sessions}   leases {status.num_leases}   jobs {status.num_jobs}{flags}"
    )
    return Group(media, Text(line), rates, *([instances] if status.instances else []))
