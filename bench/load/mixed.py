"""Many processes on one server: each looks prompts up, loads what is cached, stores the rest, and looks at each byte.

Prompts come in families with a beginning in common, some asked for often and many seldom; together they are more than
the pool holds, so that somebody is evicted all the time.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from typing import Any

from bench.children import Child
from bench.load.client import CALLS, IMAGE_BYTES
from bench.report import Screen
from bench.rig import require_memory
from bench.samples import Role, Row, Series, Skip, Unit
from bench.settings import Settings

START_SECONDS = 120.0
_KEPT_SAMPLES = 999  # of each call, evenly over all of them in order


def run(settings: Settings, screen: Screen) -> list[Row]:
    """All rows."""
    ram_bytes = settings.sizes.load_chunks * IMAGE_BYTES
    require_memory(2 * ram_bytes)
    rows: list[Row] = []
    for count in settings.sizes.load_clients:
        try:
            rows += _with_clients(settings, screen, count, ram_bytes)
        except Skip as reason:
            screen.skip(f"load, {count} clients", str(reason))
    return rows


def _with_clients(settings: Settings, screen: Screen, count: int, ram_bytes: int) -> list[Row]:
    seconds = settings.load_seconds
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="qkvault-bench-"))
        address = f"unix://{folder}/store"
        start = [sys.executable, "-m", "bench.micro.server", address, f"{folder}/echo", str(ram_bytes)]
        server = stack.enter_context(contextlib.closing(Child("the store's process", start)))
        server.receive(START_SECONDS)
        command = [sys.executable, "-m", "bench.load.client", address]
        clients = [
            stack.enter_context(contextlib.closing(Child(f"client {number}", [*command, str(settings.seed + number)])))
            for number in range(count)
        ]
        for client in clients:
            client.receive(START_SECONDS)
        with screen.task(f"load, {count} clients", count) as advance:
            for client in clients:
                client.send(do="run", seconds=seconds)
            answers = []
            for client in clients:
                answers.append(client.receive(seconds + START_SECONDS))
                advance()
    return _rows(count, seconds, answers)


def _rows(count: int, seconds: float, answers: list[dict[str, Any]]) -> list[Row]:
    totals = {name: sum(answer["counts"][name] for answer in answers) for name in answers[0]["counts"]}
    if totals["wrong"]:
        msg = f"{totals['wrong']} chunks were found with other bytes than were stored"
        raise RuntimeError(msg)
    rows = []
    for name in CALLS:
        taken = sorted(value for answer in answers for value in answer["seconds"][name])
        if taken:
            series = _series(name, taken, seconds)
            series.facts |= totals if name == "lookup" else {}
            rows.append(Row(name=f"{count} clients, {name}", unit=Unit.CALLS, amount=1, series=[series]))
    return rows


def _series(name: str, taken: list[float], seconds: float) -> Series:
    kept = [_part(taken, at / _KEPT_SAMPLES) for at in range(_KEPT_SAMPLES)] if len(taken) > _KEPT_SAMPLES else taken
    series = Series(name="QKVault", role=Role.OURS, seconds=kept)
    series.facts = {"calls/s": round(len(taken) / seconds)}
    for label, part in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999)):
        series.facts[f"{label} us"] = round(_part(taken, part) * 1e6, 1)
    if name.startswith("copy"):
        series.facts["GB/s"] = round(len(taken) * IMAGE_BYTES / seconds / 1e9, 2)
    return series


def _part(values: list[float], part: float) -> float:
    return values[min(len(values) - 1, int(part * len(values)))]
