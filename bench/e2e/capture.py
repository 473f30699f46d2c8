"""What capture of queries costs: time to the first token of a cold prompt, without it, with it, and for some layers.

All engines live at the same time and answer every prompt in an order that turns, as in ``ttft``, so that ratios are
taken between neighbours in time. Also told: what is captured of a prompt, and that nothing of it was dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bench.e2e.engines import Connector, capturing, none
from bench.e2e.life import BLOCK_TOKENS
from bench.e2e.ttft import MOST_COLD, Mode, Runner
from bench.report import Screen
from bench.samples import Role, Row, Skip
from bench.settings import Settings

MOST_CAPTURE: Final = 1.05
LAYERS_BETWEEN: Final = 4
NUM_LAYERS: Final = 30  # of the model that make setup fetches
ON: Final = {"qkvault.transfer_intermediate_tensors": True}
SOME: Final = ON | {"qkvault.q_layers": ",".join(map(str, range(0, NUM_LAYERS, LAYERS_BETWEEN)))}
OFF_NAME: Final = "QKVault, capture off"
NO_HOLE: Final = "dropped_chunks.ended"  # of a request that is shorter than a block: there is nothing to capture


def connectors() -> list[Connector]:
    """No connector, ours without capture, with it, and with it in one layer of four."""
    return [
        none(),
        capturing("off", OFF_NAME, Role.OURS, {}),
        capturing("on", "QKVault, capture on", Role.OURS, ON),
        capturing("some", f"QKVault, capture of one layer in {LAYERS_BETWEEN}", Role.OURS, SOME),
    ]


def run(settings: Settings, screen: Screen) -> list[Row]:
    """All rows, for each of vLLM's modes."""
    rows = [row for engine in settings.engines for row in CaptureMode(settings, screen, engine).cold()]
    if not rows:
        msg = "no engine could be measured"
        raise Skip(msg)
    return rows


class CaptureMode(Mode):
    """Cold prompts under one of vLLM's modes."""

    bench = "capture"

    def cold(self) -> list[Row]:
        """Each row is one of ours against the engine that lacks only what the row is about."""
        runners = [Runner(connector) for connector in connectors()]
        without, off, *capturing_ones = runners
        with self._lives(runners) as alive, self._task("cold", len(self._numbers)) as advance:
            before = self._count(alive, capturing_ones)
            for number in self._numbers:
                for runner in self._turn(alive, number):
                    with self._attempt(alive, runner):
                        self._ask_cold(runner, number)
                for runner in alive[1:] if alive[:1] == runners[:1] else []:
                    runner.cold.compare(runner.answers[number], without.answers[number])
                advance()
            after = self._count(alive, capturing_ones)
        for name in after:
            runner = next(one for one in capturing_ones if one.connector.case == name)
            runner.cold.series.facts |= self._facts(before[name], after[name])
        pairs = [("capture off", off, without, MOST_COLD)]
        whats = ("capture on", f"capture of one layer in {LAYERS_BETWEEN}")
        pairs += [(what, runner, off, MOST_CAPTURE) for what, runner in zip(whats, capturing_ones, strict=True)]
        return [
            self._pair(what, ours, other, most)
            for what, ours, other, most in pairs
            if ours.cold.series.seconds and other.cold.series.seconds
        ]

    def _count(self, alive: list[Runner], runners: Sequence[Runner]) -> dict[str, dict[str, float]]:
        found = {}
        for runner in runners:
            if runner in alive:
                with self._attempt(alive, runner):
                    found[runner.connector.case] = runner.running.numbers()
        return found

    def _facts(self, before: dict[str, float], after: dict[str, float]) -> dict[str, int | float | bool | str]:
        """Of all prompts together, but the bytes, which are of one."""
        grown = {name: value - before.get(name, 0) for name, value in after.items()}
        num_blocks = self._settings.sizes.ttft_tokens // BLOCK_TOKENS
        num_bytes = after["ring_bytes"] / after["ring_blocks"] * num_blocks
        dropped = sum(value for name, value in grown.items() if name.startswith("dropped_chunks") and name != NO_HOLE)
        return {
            "MB a prompt": round(num_bytes / 1e6, 1),
            "KB a token": round(num_bytes / 1e3 / BLOCK_TOKENS / num_blocks, 1),
            "chunks stored": int(grown["chunks.stored"]),
            "chunks dropped": int(dropped),
            "faults": int(grown["faults"]),
            "ring MB": round(after["ring_bytes"] / 1e6),
        }

    def _pair(self, what: str, ours: Runner, other: Runner, most: float) -> Row:
        against = other.cold.series
        limit = type(against)(name=against.name, role=Role.LIMIT, seconds=against.seconds, facts=against.facts)
        limit.cpu_seconds = against.cpu_seconds
        return self._row(f"cold, {what}", [ours.cold.series, limit], most, limit.name)
