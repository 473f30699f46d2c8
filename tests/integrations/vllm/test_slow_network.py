"""An engine whose store is behind a network that has become slow, or loses some of what it is asked.

A step is kept waiting so long, and no longer.
"""

from __future__ import annotations

import time
from contextlib import closing

import pytest

pytestmark = pytest.mark.vllm

LOAD_SECONDS = 0.5
TIMEOUT_SECONDS = 0.3
BACK_SECONDS = 4.0  # after that a store that is well again is used again: two rests are over


@pytest.fixture
def behind(network):
    """A network before a server."""
    from qkvault.config import load
    from qkvault.server.server import Server

    settings = {"listen": "tcp://127.0.0.1:0", "ram_bytes": 16 << 20, "prefault": False, "chunk_size": 64}
    with closing(Server(load(env={}, cli=settings))) as server:
        yield network(server.addresses[0])


def test_a_load_that_drips_ends_at_its_deadline(toy_engine, prompts, behind):
    """B390: the step goes on after ``load_deadline_seconds``, and the tokens are computed."""
    engine = toy_engine(
        settings={
            "qkvault.address": behind.address,
            "qkvault.load_deadline_seconds": LOAD_SECONDS,
            "qkvault.timeout_seconds": 5,
        }
    )
    prompt = prompts(300)
    engine.ask(prompt)
    engine.forget_own_prefixes()
    behind.is_slow = True
    started = time.monotonic()
    engine.ask(prompt)
    assert LOAD_SECONDS <= time.monotonic() - started < LOAD_SECONDS + 4.0
    assert len(engine.loads_of("ask-1")[0].block_ids) == 18
    behind.is_slow = False
    engine.assert_texts()
    assert engine.violations == []


class Losing:
    """Loses the questions of one name, and counts those that somebody waits for."""

    def __init__(self, name):
        self._name = name
        self.num_lost = 0

    def __call__(self, request):
        if type(request).__name__ != self._name:
            return False
        asked = [getattr(request, field, None) for field in ("keys", "chunks", "lease_id", "lease_ids")]
        self.num_lost += any(value not in (None, b"", (), 0, (0,)) for value in asked)
        return True


@pytest.mark.parametrize("name", ["Lookup", "Reserve", "Commit", "Release"])
def test_a_server_that_answers_all_but_one_question_costs_one_timeout(toy_engine, prompts, behind, name):
    """B470: of the scheduler's side (Lookup, Release) or the worker's; what follows are misses, at once."""
    engine = toy_engine(settings={"qkvault.address": behind.address, "qkvault.timeout_seconds": TIMEOUT_SECONDS})
    engine.ask(prompts(100))

    def hits():
        prompt, before = prompts(100), engine.worker.stats.snapshot().loaded_tokens
        for _ in range(2):
            engine.ask(prompt, 1)
            engine.forget_own_prefixes()
        return engine.worker.stats.snapshot().loaded_tokens - before == 96

    assert hits()
    behind.loses = losing = Losing(name)
    fast, end = [], time.monotonic() + 3.0
    while time.monotonic() < end:
        started = time.monotonic()
        hits()
        fast.append(time.monotonic() - started < TIMEOUT_SECONDS)
    assert losing.num_lost == 1
    assert fast.count(False) <= 2, f"{fast.count(False)} of {len(fast)} pairs of prompts were kept waiting"
    behind.loses = lambda _: False
    well = time.monotonic()
    while not hits():
        assert time.monotonic() - well < BACK_SECONDS
    engine.assert_texts()
    assert engine.violations == []


@pytest.mark.parametrize("num_steps", range(1, 7))
def test_a_reset_that_is_refused_is_asked_for_once(toy_engine, prompts, behind, num_steps):
    """B484: not at every step, if saves were under way; and the session goes on, as what it can do it does."""
    engine = toy_engine(settings={"qkvault.address": behind.address}, asynchronous=True, runner=2, is_late=True)
    asked = []
    behind.loses = lambda request: asked.append(type(request).__name__)
    engine.add("old", prompts(200), max_tokens=6)
    for _ in range(num_steps):
        engine.step()
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run()
    assert asked.count("Clear") == 1
    assert asked.count("Hello") == 0
    engine.assert_texts()
    assert engine.violations == []
