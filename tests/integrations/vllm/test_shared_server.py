"""Real engines that share a server: what one computes the others hit, and whoever dies, they go on."""

from __future__ import annotations

import random
import signal
import threading
import time
from contextlib import ExitStack

import pytest

from qkvault.testing.transport_contract import until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

HITS_WITHIN_SECONDS = 2.0
SLOWER = 10  # times, at most, while there is no server: two engines share the cores, and one call may wait a second


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start_engines(stack, engine_process, tiny_model):
    """Starts so many engines at the same time."""

    def start(settings, count):
        engines = [engine_process(tiny_model, settings) for _ in range(count)]
        for engine in engines:
            stack.callback(engine.close)
            assert engine.told() == "ready"
        return engines

    return start


def timed(engine, prompt, **more):
    """What the engine tells, and how long that took."""
    started = time.monotonic()
    return engine.ask(prompt, **more) | {"seconds": time.monotonic() - started}


@pytest.fixture
def address(tmp_path):
    return f"unix://{tmp_path}/s"


def test_engines_share_a_server_and_outlive_it(stack, server_process, start_engines, tmp_path, address):
    """B97, B104: a prompt that one has computed the other hits, with the same text; the server is killed under load and
    both go on without an error, and not much slower; it is started again, and hits are back in two seconds, from disk
    for what was stored.
    """
    rng = random.Random(6)
    prompt, *others = ([rng.randrange(3, 500) for _ in range(300)] for _ in range(12))
    server = server_process(address, tmp_path / "disk")
    settings = {"qkvault.address": address, "qkvault.ram_bytes": "5GiB", "qkvault.prefault": True}
    one, other = start_engines(settings, 2)

    first = timed(one, prompt)
    second = other.ask(prompt)
    assert (first["cached"], second["cached"]) == ([0], [288])
    assert first["texts"] == second["texts"]
    status = server.status()
    assert sorted(each.instance.role for each in status.instances) == ["scheduler", "scheduler", "worker", "worker"]
    assert len({each.instance.instance_id for each in status.instances}) == 2

    told = []
    load = threading.Thread(target=lambda: told.extend(timed(other, each) for each in others))
    load.start()
    until(lambda: told)
    num_calls = server.status().counters["chunks_asked"]
    until(lambda: server.status().counters["chunks_asked"] > num_calls)  # a request has begun
    num_told = len(told)
    server.end(signal.SIGKILL)
    assert 0 < num_told <= len(told) < len(others)
    assert load.is_alive()
    during = [timed(one, each, forgets=True) for each in (prompt, *others)]
    load.join()
    assert len(told) == len(others)
    slowest = max(each["seconds"] for each in told[num_told:] + during)
    assert slowest < SLOWER * first["seconds"]
    assert [each["texts"] for each in told] == [each["texts"] for each in during[1:]]
    assert during[0]["texts"] == first["texts"]

    server = server_process(address, tmp_path / "disk")
    stack.callback(lambda: server.process.poll() is None and server.end())
    started = time.monotonic()
    while (third := one.ask(prompt, forgets=True))["cached"] == [0]:
        assert time.monotonic() - started < HITS_WITHIN_SECONDS
    assert (third["cached"], third["texts"]) == ([288], first["texts"])
    assert server.status().counters["loaded.disk"] >= 4
    until(lambda: len(server.status().instances) == 4)
    assert server.end() == 0
    assert one.ask(prompt, forgets=True)["texts"] == first["texts"]
