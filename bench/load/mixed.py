"""Many processes on one `qkvault serve`, with RAM only: each looks up, loads what is cached, and stores the rest.

Each byte is looked at. Prompts come in families with a beginning in common, some asked for often and many seldom;
together they are more than the pool holds, so that somebody is evicted all the time. A call that fails, or finds
anything but what was stored, is a target that is missed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Final

from bench.children import Child
from bench.load.client import CALLS, FAULTS, IMAGE_BYTES
from bench.load.histogram import Histogram
from bench.machine import ROOT
from bench.report import Screen
from bench.rig import require_memory
from bench.samples import Measure, Role, Row, Series, Skip, Target, Unit
from bench.settings import Settings
from qkvault.errors import Unavailable
from qkvault.wire.sockets import SocketTransport

START_SECONDS: Final = 120.0
_LOOK_SECONDS: Final = 0.05  # between two looks at a server that starts
_QUANTILES: Final = 20  # that are kept of each call, from the least to the most
_NO_FAULTS: Final = tuple(Target(Measure.FACT, 0, name) for name in FAULTS)


def run(settings: Settings, screen: Screen) -> list[Row]:
    """All rows."""
    ram_bytes = settings.sizes.load_chunks * IMAGE_BYTES
    require_memory(2 * ram_bytes)
    rows: list[Row] = []
    for count in settings.sizes.load_clients:
        answers: list[dict[str, Any]] = []
        try:
            answers = _answers(settings, screen, count, ram_bytes)
        except Skip as reason:
            screen.skip(f"load, {count} clients", str(reason))
        rows += rows_of(count, settings.load_seconds, answers)
    return rows


def _answers(settings: Settings, screen: Screen, count: int, ram_bytes: int) -> list[dict[str, Any]]:
    # Of those that came to the end. Raises Skip if not all can begin.
    seconds = settings.load_seconds
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="qkvault-bench-"))
        address = f"unix://{folder}/store"
        stack.enter_context(_serving(address, ram_bytes))
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
                try:
                    answers.append(client.receive(seconds + START_SECONDS))
                except Skip as reason:
                    screen.skip(f"load, {count} clients: {client.name}", str(reason))
                advance()
    return answers


@contextlib.contextmanager
def _serving(address: str, ram_bytes: int) -> Iterator[None]:
    # Raises Skip if it does not come up.
    command = [sys.executable, "-m", "qkvault", "serve", "--listen", address, "--ram", str(ram_bytes)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QKVAULT_")}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, env=environment | {"PYTHONPATH": str(ROOT / "src")}, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            deadline = time.monotonic() + START_SECONDS
            while not _answers_at(address):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    msg = f"qkvault serve did not start: {log.read().decode(errors='replace')}"
                    raise Skip(msg)
                time.sleep(_LOOK_SECONDS)
            yield
        finally:
            process.terminate()
            process.wait(START_SECONDS)


def _answers_at(address: str) -> bool:
    try:
        SocketTransport(address, "bench").close()
    except Unavailable:
        return False
    return True


def rows_of(count: int, seconds: float, answers: list[dict[str, Any]]) -> list[Row]:
    """One for each call. The lookups' has what went wrong, even if nobody came so far as to look up.

    ``answers``: those of the ``count`` clients that came to the end; each other one has failed.
    """
    totals = dict.fromkeys(FAULTS, 0) | {"failed": count - len(answers)}
    for answer in answers:
        for name, number in answer["counts"].items():
            totals[name] = totals.get(name, 0) + number
    rows = []
    for name in CALLS:
        took = Histogram()
        for answer in answers:
            took.merge(Histogram.of_json(answer["took"][name]))
        series = _series(name, took, seconds)
        targets: tuple[Target, ...] = ()
        if name == "lookup":
            series.facts |= totals
            targets = _NO_FAULTS
        if took.count or targets:
            row = Row(name=f"{count} clients, {name}", unit=Unit.CALLS, amount=1, series=[series], targets=targets)
            rows.append(row)
    return rows


def _series(name: str, took: Histogram, seconds: float) -> Series:
    series = Series(name="QKVault", role=Role.OURS, are_quantiles=True)
    if took.count:
        series.seconds = [took.quantile(at / _QUANTILES) for at in range(_QUANTILES + 1)]
        series.facts = {"calls": took.count, "calls/s": round(took.count / seconds)}
        for label, part in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999)):
            series.facts[f"{label} us"] = round(took.quantile(part) * 1e6, 1)
        if name.startswith("copy"):
            series.facts["GB/s"] = round(took.count * IMAGE_BYTES / seconds / 1e9, 2)
    return series
