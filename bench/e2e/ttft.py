"""Time to the first token of one prompt: cold, from vLLM's own prefix cache, and from a connector.

Every prompt is new. Cold it is sent twice, to an engine with our connector and to one without, in an order that turns;
then vLLM's own cache is dropped and it is sent again, so that what is found comes from the connector; then once more,
when vLLM's own cache has it. A disk hit comes after a restart of the engine, its files dropped from the page cache.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench.e2e.engines import Answer, Connector, Life, example, lmcache, ours
from bench.e2e.prompts import prompt_text
from bench.rawfiles import drop_page_cache
from bench.report import Screen
from bench.samples import Measure, Role, Row, Series, Skip, Target, Unit
from bench.settings import Settings

OWN = "vLLM's own prefix cache, same engine"
NONE = "vLLM without a connector"
MOST_COLD, MOST_RAM, MOST_DISK = 1.02, 1.2, 2.2
HITS = 3  # of each prompt, where nothing has to be computed for them
LONG_ANSWER = 16  # tokens that are compared
WARMUP_PROMPT, ANSWER_PROMPT = 1000, 2000  # numbers far from the measured ones
ENGINES = {"mp": "default engine", "inproc": "engine in process"}


class Prompts:
    """Prompts by number, made by the first engine that is up."""

    def __init__(self, settings: Settings) -> None:
        """None yet."""
        self._settings = settings
        self._ids: dict[int, list[int]] = {}

    def get(self, life: Life, number: int) -> list[int]:
        """Token ids, as many as the settings say."""
        if number not in self._ids:
            count = self._settings.sizes.ttft_tokens
            self._ids[number] = life.tokenize(prompt_text(self._settings.seed, number, count))[:count]
        return self._ids[number]


class Asked:
    """Answers to the same prompts in one way, as a series."""

    def __init__(self, name: str, role: Role) -> None:
        """None yet."""
        self.series = Series(name=name, role=role)

    def add(self, answer: Answer, *, like: Answer | None = None) -> None:
        """One more; notes whether all had the tokens of those they should be ``like``."""
        facts = self.series.facts
        self.series.add(answer.sample)
        facts["found"] = answer.cached
        if like is not None:
            facts["same tokens"] = bool(facts.get("same tokens", True)) and answer.tokens == like.tokens


@contextlib.contextmanager
def lives(settings: Settings, connectors: Sequence[Connector], *, is_multiprocess: bool) -> Iterator[list[Life]]:
    """Engines that run at the same time, of which one works while the others wait."""
    started: list[Life] = []
    try:
        for connector in connectors:
            started.append(Life(settings, connector, is_multiprocess=is_multiprocess))
            started[-1].wait_ready()
        yield started
    finally:
        for life in started:
            life.close()


def run(settings: Settings, screen: Screen) -> list[Row]:
    """All rows, for each of vLLM's modes."""
    rows: list[Row] = []
    for engine in settings.engines:
        mode = Mode(settings, screen, engine)
        mode.run_all()
        rows += mode.rows()
    if not any(row.series for row in rows):
        msg = "no engine could be measured"
        raise Skip(msg)
    return [row for row in rows if row.series]


class Mode:
    """All measurements under one of vLLM's modes."""

    def __init__(self, settings: Settings, screen: Screen, engine: str) -> None:
        """``engine`` is a key of ENGINES."""
        self._settings = settings
        self._screen = screen
        self._engine = engine
        self._prompts = Prompts(settings)
        self._numbers = range(settings.sizes.ttft_rounds)
        self._cold: list[Series] = []
        self._ram: list[Series] = []
        self._disk: list[Series] = []

    def run_all(self) -> None:
        """Every case; one that cannot run is told about."""
        with tempfile.TemporaryDirectory(prefix="qkvault-bench-", dir=self._settings.scratch) as name:
            folder = Path(name)
            on_disk = Connector("disk", "QKVault", ours("1GiB", folder / "ours"), {}, folder=folder / "ours")
            of_vllm = example(folder / "example")
            cases: dict[str, Callable[[], None]] = {
                "ram": self._against_none,
                "disk": lambda: self._over_restart(on_disk, Role.OURS),
                of_vllm.case: lambda: self._over_restart(of_vllm, Role.PEER),
            }
            if self._settings.peer_venv is not None:
                for peer in (lmcache(256), lmcache(256, is_tuned=True), lmcache(32)):
                    cases[peer.case] = lambda peer=peer: self._peer_in_ram(peer)
            for case, measure in cases.items():
                if self._settings.cases and case not in self._settings.cases:
                    continue
                try:
                    measure()
                except Skip as reason:
                    self._screen.skip(f"ttft, {ENGINES[self._engine]}, {case}", str(reason))

    def rows(self) -> list[Row]:
        """What was found."""
        mode = ENGINES[self._engine]
        told = [
            (f"cold, {mode}", self._cold, Target(Measure.TIME, MOST_COLD, NONE)),
            (f"hit in RAM, {mode}", self._ram, Target(Measure.TIME, MOST_RAM, OWN)),
            (f"hit on disk after a restart, {mode}", self._disk, Target(Measure.TIME, MOST_DISK, OWN)),
        ]
        return [
            Row(name=name, unit=Unit.CALLS, amount=1, series=series, target=target) for name, series, target in told
        ]

    def _against_none(self) -> None:
        """Ours in RAM beside no connector at all, both running, by turns."""
        none = Connector("none", NONE, None, {})
        in_ram = Connector("ram", "QKVault", ours("2GiB"), {})
        cold, bare = Asked("QKVault", Role.OURS), Asked(NONE, Role.LIMIT)
        hit, own = Asked("QKVault", Role.OURS), Asked(OWN, Role.LIMIT)
        with self._lives(none, in_ram) as (without, with_ours), self._task("RAM", len(self._numbers)) as advance:
            for life in (without, with_ours):
                self._warm_up(life)
            for number in self._numbers:
                ids = self._prompts.get(without, number)
                turns = [(without, bare), (with_ours, cold)]
                answers = {}
                for life, asked in turns if number % 2 else reversed(turns):
                    answers[asked] = life.ask(ids)
                bare.add(answers[bare])
                cold.add(answers[cold], like=answers[bare])
                for _ in range(HITS):
                    with_ours.drop()
                    hit.add(with_ours.ask(ids), like=answers[cold])
                    own.add(with_ours.ask(ids), like=answers[cold])
                advance()
            hit.series.facts[f"same {LONG_ANSWER} tokens"] = self._has_same_answer(with_ours)
        self._cold += [cold.series, bare.series]
        self._ram += [hit.series, own.series]

    def _over_restart(self, connector: Connector, role: Role) -> None:
        """Store in one life, hit in the next; for a peer also the hit without a restart."""
        cold, warm = Asked(connector.name, role), Asked(f"{connector.name}, page cache", role)
        hit, own = Asked(connector.name, role), Asked(OWN, Role.LIMIT)
        answers: dict[int, Answer] = {}
        with self._lives(connector) as (life,), self._task("first life", len(self._numbers)) as advance:
            self._warm_up(life)
            for number in self._numbers:
                ids = self._prompts.get(life, number)
                answers[number] = life.ask(ids)
                cold.add(answers[number])
                life.drop()
                for _ in range(HITS if role is Role.PEER else 0):
                    warm.add(life.ask(ids), like=answers[number])
                    life.drop()
                advance()
            life.settle_on_disk()
            life.end()
        with self._lives(connector) as (life,), self._task("after the restart", len(self._numbers)) as advance:
            self._warm_up(life)
            for number in self._numbers:
                if connector.folder is not None:
                    drop_page_cache(connector.folder)
                ids = self._prompts.get(life, number)
                hit.add(life.ask(ids), like=answers[number])
                own.add(life.ask(ids), like=answers[number])
                life.drop()
                advance()
        if role is Role.PEER:
            self._cold.append(cold.series)
            self._ram.append(warm.series)
            self._disk.append(hit.series)
        else:
            self._disk += [hit.series, own.series]

    def _peer_in_ram(self, connector: Connector) -> None:
        cold, hit = Asked(connector.name, Role.PEER), Asked(connector.name, Role.PEER)
        with self._lives(connector) as (life,), self._task("RAM", len(self._numbers)) as advance:
            self._warm_up(life)
            for number in self._numbers:
                ids = self._prompts.get(life, number)
                answer = life.ask(ids)
                cold.add(answer)
                life.drop()
                for _ in range(HITS):
                    hit.add(life.ask(ids), like=answer)
                    life.drop()
                advance()
            hit.series.facts[f"same {LONG_ANSWER} tokens"] = self._has_same_answer(life)
        self._cold.append(cold.series)
        self._ram.append(hit.series)

    def _warm_up(self, life: Life) -> None:
        """What a process pays for once: a cold prompt and, with a connector, a hit."""
        ids = self._prompts.get(life, WARMUP_PROMPT)
        for _ in range(1 if life.connector.config is None else 2):
            life.ask(ids)
            life.drop()

    def _has_same_answer(self, life: Life) -> bool:
        """Whether a longer answer after a hit is the one after a hit in vLLM's own cache.

        Not the cold one: there the last block is computed in another batch, and floats do not add up alike.
        """
        ids = self._prompts.get(life, ANSWER_PROMPT)
        life.ask(ids)
        life.drop()
        return life.ask(ids, LONG_ANSWER).tokens == life.ask(ids, LONG_ANSWER).tokens

    def _lives(self, *connectors: Connector) -> contextlib.AbstractContextManager[list[Life]]:
        names = " and ".join(connector.name for connector in connectors)
        self._screen.say(f"starting {names}, {ENGINES[self._engine]}")
        return lives(self._settings, connectors, is_multiprocess=self._engine == "mp")

    def _task(self, what: str, total: int) -> contextlib.AbstractContextManager[Callable[[], None]]:
        return self._screen.task(f"ttft, {ENGINES[self._engine]}, {what}", total)
