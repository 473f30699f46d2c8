"""Time to the first token of one prompt: cold, from vLLM's own prefix cache, and from a connector.

All engines of a comparison live at the same time, each in a process of its own, and one works while the others wait:
every prompt is given to all of them in an order that turns, so that a noisy minute hits all. Cold it is new to all.
Then vLLM's own cache is dropped and it is sent again, so that what is found comes from the connector; then once more,
when vLLM's own cache has it. A disk hit comes after a restart of the engine, its files dropped from the page cache.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from bench.e2e.engines import LIFE_BYTES, Answer, Connector, Life, example, lmcache, none, ours
from bench.e2e.prompts import prompt_text
from bench.machine import available_bytes
from bench.rawfiles import drop_page_cache
from bench.report import Screen
from bench.samples import Measure, Role, Row, Series, Skip, Target, Unit
from bench.settings import Settings

OWN = "vLLM's own prefix cache, same engine"
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
    """Answers in one way, as a series."""

    def __init__(self, name: str, role: Role) -> None:
        """None yet."""
        self.series = Series(name=name, role=role)

    def add(self, answer: Answer) -> None:
        """One more."""
        self.series.add(answer.sample)
        self.series.facts["found"] = answer.cached

    def compare(self, answer: Answer, other: Answer) -> None:
        """Note whether the tokens are, and always were, those of another answer."""
        facts = self.series.facts
        facts["same tokens"] = bool(facts.get("same tokens", True)) and answer.tokens == other.tokens


class Runner:
    """One engine among those that are compared, and what it answered."""

    def __init__(self, connector: Connector) -> None:
        """Not running yet."""
        self.connector = connector
        self.life: Life | None = None
        self.cold = Asked(connector.name, connector.role)
        self.hit = Asked(connector.name, connector.role)
        self.own = Asked(OWN, Role.LIMIT)
        self.answers: dict[int, Answer] = {}  # cold, by number of the prompt

    @property
    def running(self) -> Life:
        """Its engine. Raises Skip if it has none."""
        if self.life is None:
            msg = "it is not running"
            raise Skip(msg)
        return self.life

    def stop(self) -> None:
        """End its process."""
        if self.life is not None:
            self.life.close()
            self.life = None


def run(settings: Settings, screen: Screen) -> list[Row]:
    """All rows, for each of vLLM's modes."""
    rows: list[Row] = []
    for engine in settings.engines:
        mode = Mode(settings, screen, engine)
        if not settings.cases or "ram" in settings.cases:
            rows += mode.in_ram()
        if not settings.cases or "disk" in settings.cases:
            rows += mode.on_disk()
    rows = [row for row in rows if row.ours is not None]
    if not rows:
        msg = "no engine could be measured"
        raise Skip(msg)
    return rows


class Mode:
    """The measurements under one of vLLM's modes."""

    bench = "ttft"

    def __init__(self, settings: Settings, screen: Screen, engine: str) -> None:
        """``engine`` is a key of ENGINES."""
        self._settings = settings
        self._screen = screen
        self._engine = engine
        self._title = ENGINES[engine]
        self._prompts = Prompts(settings)
        self._numbers = range(settings.sizes.ttft_rounds)

    def in_ram(self) -> list[Row]:
        """Cold, and found in RAM."""
        with tempfile.TemporaryDirectory(prefix="qkvault-bench-", dir=self._settings.scratch) as folder:
            peers = [example(Path(folder)), lmcache(256), lmcache(256, is_tuned=True), lmcache(32)]
            runners = [Runner(none()), Runner(ours()), *map(Runner, filter(self._is_wanted, peers))]
            with self._lives(runners) as alive, self._task("RAM", len(self._numbers)) as advance:
                for number in self._numbers:
                    for runner in self._turn(alive, number):
                        with self._attempt(alive, runner):
                            self._ask_cold(runner, number)
                    for runner in alive[1:] if alive[:1] == runners[:1] else []:
                        runner.cold.compare(runner.answers[number], runners[0].answers[number])
                    for _ in range(HITS):
                        for runner in self._turn(alive, number):
                            with self._attempt(alive, runner):
                                self._ask_again(runner, number)
                    advance()
                for runner in list(alive):
                    with self._attempt(alive, runner):
                        self._compare_long(runner)
        owns = [runner.own.series for runner in runners if runner.connector.role is Role.OURS]
        hits = [runner.hit.series for runner in runners[1:]]
        return [
            self._row("cold", [runner.cold.series for runner in runners], MOST_COLD, runners[0].connector.name),
            self._row("hit in RAM", hits[:1] + owns + hits[1:], MOST_RAM, OWN),
        ]

    def on_disk(self) -> list[Row]:
        """Found on disk by an engine that was started anew."""
        with tempfile.TemporaryDirectory(prefix="qkvault-bench-", dir=self._settings.scratch) as folder:
            peers = [example(Path(folder) / "example")]
            runners = [Runner(ours(Path(folder) / "ours")), *map(Runner, filter(self._is_wanted, peers))]
            with self._lives(runners) as alive, self._task("before the restart", len(self._numbers)) as advance:
                for number in self._numbers:
                    for runner in self._turn(alive, number):
                        with self._attempt(alive, runner):
                            self._ask_cold(runner, number)
                            runner.running.drop()
                    advance()
                for runner in list(alive):
                    with self._attempt(alive, runner):
                        runner.running.settle_on_disk()
                        runner.running.end()
            stored = [runner for runner in runners if len(runner.answers) == len(self._numbers)]
            with self._lives(stored) as alive, self._task("after the restart", len(self._numbers)) as advance:
                for number in self._numbers:
                    for runner in self._turn(alive, number):
                        with self._attempt(alive, runner):
                            drop_page_cache(Path(folder))
                            self._ask_again(runner, number)
                    advance()
        hits = [runner.hit.series for runner in runners]
        return [self._row("hit on disk after a restart", [hits[0], runners[0].own.series, *hits[1:]], MOST_DISK, OWN)]

    def _ask_cold(self, runner: Runner, number: int) -> None:
        answer = runner.running.ask(self._prompts.get(runner.running, number))
        runner.answers[number] = answer
        runner.cold.add(answer)

    def _ask_again(self, runner: Runner, number: int) -> None:
        """From the connector, then from vLLM's own cache."""
        if runner.connector.config is None:
            return
        ids = self._prompts.get(runner.running, number)
        runner.running.drop()
        for asked in (runner.hit, runner.own):
            answer = runner.running.ask(ids)
            asked.add(answer)
            asked.compare(answer, runner.answers[number])

    def _compare_long(self, runner: Runner) -> None:
        """Note whether a longer answer after a hit is the one after a hit in vLLM's own cache.

        Not the cold one: there the last block is computed in another batch, and floats do not add up alike.
        """
        if runner.connector.config is None:
            return
        ids = self._prompts.get(runner.running, ANSWER_PROMPT)
        runner.running.ask(ids)
        runner.running.drop()
        hit, own = runner.running.ask(ids, LONG_ANSWER), runner.running.ask(ids, LONG_ANSWER)
        runner.hit.series.facts[f"same {LONG_ANSWER} tokens"] = hit.tokens == own.tokens

    @contextmanager
    def _lives(self, runners: Sequence[Runner]) -> Iterator[list[Runner]]:
        """Start all, as many at once as there is memory for; gives those that run."""
        alive: list[Runner] = []
        starting: list[Runner] = []

        def wait_ready() -> None:
            runner = starting.pop(0)
            with self._attempt(alive, runner):
                runner.running.wait_ready()

        try:
            for runner in runners:
                while starting and available_bytes() < (len(starting) + 1) * LIFE_BYTES:
                    wait_ready()
                self._screen.say(f"starting {runner.connector.name}, {self._title}")
                alive.append(runner)
                with self._attempt(alive, runner):
                    runner.life = Life(self._settings, runner.connector, is_multiprocess=self._engine == "mp")
                    starting.append(runner)
            while starting:
                wait_ready()
            for runner in tuple(alive):
                with self._attempt(alive, runner):
                    self._warm_up(runner)
            yield alive
        finally:
            for runner in runners:
                runner.stop()

    def _warm_up(self, runner: Runner) -> None:
        """What a process pays for once: a cold prompt and, with a connector, a hit."""
        ids = self._prompts.get(runner.running, WARMUP_PROMPT)
        for _ in range(1 if runner.connector.config is None else 2):
            runner.running.ask(ids)
            runner.running.drop()

    @contextmanager
    def _attempt(self, alive: list[Runner], runner: Runner) -> Iterator[None]:
        """Go on without ``runner`` if it fails."""
        try:
            yield
        except Skip as reason:
            self._screen.skip(f"{self.bench}, {self._title}, {runner.connector.name}", str(reason))
            runner.stop()
            alive.remove(runner)

    @staticmethod
    def _turn(alive: list[Runner], number: int) -> list[Runner]:
        first = number % max(1, len(alive))
        return alive[first:] + alive[:first]

    def _is_wanted(self, peer: Connector) -> bool:
        cases = self._settings.cases
        if peer.is_foreign and self._settings.peer_venv is None:
            return False
        return not cases or peer.case in cases

    def _row(self, what: str, series: list[Series], most: float, against: str) -> Row:
        targets = (Target(Measure.TIME, most, against),)
        order = {Role.OURS: 0, Role.LIMIT: 1, Role.PEER: 2}
        told = sorted((one for one in series if one.seconds), key=lambda one: order[one.role])
        return Row(name=f"{what}, {self._title}", unit=Unit.CALLS, amount=1, series=told, targets=targets)

    def _task(self, what: str, total: int) -> AbstractContextManager[Callable[[], None]]:
        return self._screen.task(f"{self.bench}, {self._title}, {what}", total)
