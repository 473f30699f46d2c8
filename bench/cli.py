"""The command: ``python -m bench list | micro | load | e2e | all``.

Micro benches take what is inside one process or two apart; load is many processes on one server; e2e is the time to the
first token of a real engine. The exit code is 1 if a bench could not run, or a target was missed.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from bench import machine, report
from bench.report import Screen
from bench.samples import Measure, Row, Skip
from bench.settings import Settings, Size, scratch_folder

if TYPE_CHECKING:
    from collections.abc import Callable


class Bench(NamedTuple):
    """One bench: ``module`` has ``run(settings, screen) -> list[Row]``."""

    suite: str
    module: str
    what: str


BENCHES = {
    "hash": Bench("micro", "bench.micro.hashing", "token ids to keys, beside SHA-256 of the same bytes"),
    "lookup": Bench("micro", "bench.micro.lookups", "what is cached of a long prompt, beside a dict"),
    "copy": Bench("micro", "bench.micro.copies", "store and retrieve in process, beside memcpy"),
    "socket": Bench("micro", "bench.micro.sockets", "the same from another process, and round trips"),
    "index": Bench("micro", "bench.micro.index", "a lookup among a million keys, and what a key takes in memory"),
    "disk": Bench("micro", "bench.micro.disks", "store to and load from disk, beside raw O_DIRECT files"),
    "load": Bench("load", "bench.load.mixed", "one server and 1 to 64 processes: each call's time, nothing lost"),
    "ttft": Bench("e2e", "bench.e2e.ttft", "time to the first token under vLLM: cold, from RAM, from disk"),
    "capture": Bench(
        "e2e", "bench.e2e.capture", "the same of a cold prompt while queries are captured, beside it without"
    ),
}


def parser() -> argparse.ArgumentParser:
    """All options."""
    text = "\n".join(f"  {name:8} {bench.suite:6} {bench.what}" for name, bench in BENCHES.items())
    made = argparse.ArgumentParser(
        prog="python -m bench",
        description=f"{(__doc__ or '').strip()}\n\n{text}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("suite", nargs="?", default="all", choices=["list", "micro", "load", "e2e", "all"])
    made.add_argument("--only", action="append", choices=list(BENCHES), help="this bench; may be repeated")
    made.add_argument("--quick", action="store_true", help="fewer rounds and smaller sizes")
    made.add_argument("--tiny", action="store_true", help="see whether it runs; the numbers mean nothing")
    made.add_argument("--rounds", type=int, help="of everything, instead of as many as the size says")
    made.add_argument("--seconds", type=float, help="of each number of clients, load bench")
    made.add_argument("--json", type=Path, metavar="FILE", help="write samples, machine and versions there")
    made.add_argument("--seed", type=int, default=1, help="of tokens, bytes and block tables")
    made.add_argument("--scratch", type=Path, default=scratch_folder(), help="folder for files; on the disk to measure")
    made.add_argument("--peer-venv", type=Path, help="environment with LMCache; bench/peers.md says how to make it")
    made.add_argument("--model", type=Path, help="model of the e2e bench; default: the one that make setup fetches")
    made.add_argument("--dtype", default="", help="of the e2e bench; default: what this CPU computes fast in")
    made.add_argument("--engine", choices=["mp", "inproc", "both"], default="both", help="vLLM's processes, e2e bench")
    made.add_argument("--case", action="append", default=[], help="of the e2e bench; may be repeated; default: all")
    return made


def settings_of(options: argparse.Namespace) -> Settings:
    """What the options ask for."""
    size = Size.TINY if options.tiny else Size.QUICK if options.quick else Size.FULL
    engines = ("mp", "inproc") if options.engine == "both" else (options.engine,)
    return Settings(
        size=size,
        seed=options.seed,
        scratch=options.scratch.absolute(),
        peer_venv=options.peer_venv.absolute() if options.peer_venv else None,
        model=options.model.absolute() if options.model else None,
        dtype=options.dtype or machine.default_dtype(),
        engines=engines,
        cases=tuple(options.case),
        rounds=options.rounds,
        seconds=options.seconds,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for. Returns 1 if a bench could not run, or a target was missed."""
    options = parser().parse_args(arguments)
    screen = Screen()
    chosen = [
        name for name, bench in BENCHES.items()
        if options.suite in ("all", "list", bench.suite) and (not options.only or name in options.only)
    ]  # fmt: skip
    if options.suite == "list":
        for name in chosen:
            screen.out.print(f"{name:8} {BENCHES[name].suite:6} {BENCHES[name].what}")
        return 0
    settings = settings_of(options)
    for name in [name for name in os.environ if name.startswith("QKVAULT_")]:
        del os.environ[name]  # a setting of somebody's shell is no part of a bench
    torch.set_num_threads(1)  # in this process everybody copies with one core, as memcpy does; engines have their own
    benches: dict[str, list[Row]] = {}
    for name in chosen:
        run: Callable[[Settings, Screen], list[Row]] = importlib.import_module(BENCHES[name].module).run
        try:
            benches[name] = run(settings, screen)
        except Skip as reason:
            screen.skip(name, str(reason))
            continue
        screen.show(f"{name}: {BENCHES[name].what}", benches[name])
    if options.json:
        report.write_json(options.json, report.as_json(benches, screen.skipped, settings.as_json()))
        screen.say(f"written to {options.json}")
    return 0 if len(benches) == len(chosen) and not is_missed(benches, settings.size) else 1


def is_missed(benches: dict[str, list[Row]], size: Size) -> bool:
    """Whether a target was missed that counts at this size."""
    targets = [(row, target) for rows in benches.values() for row in rows for target in row.targets]
    # The tiny numbers mean nothing, but what may not happen may not happen there either.
    return any(
        row.is_met(target) is False
        for row, target in targets
        if size is not Size.TINY or target.measure is Measure.FACT
    )
