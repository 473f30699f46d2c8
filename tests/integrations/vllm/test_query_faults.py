"""Capture under vLLM when something is not as it should be: a hook that fails, a store without room, a full GPU."""

from __future__ import annotations

import time
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch

from qkvault.errors import ConfigError
from qkvault.sdk import connect
from qkvault.types import CacheKind

pytestmark = pytest.mark.vllm

ON = {"qkvault.transfer_intermediate_tensors": True}


@pytest.fixture
def new_engine(toy_engine, toy_queries):
    """Starts toy engines with two attention layers whose queries are captured."""
    return lambda settings=ON: toy_engine(
        settings=settings | {"qkvault.ram_bytes": "16MiB"}, num_layers=2, layers=toy_queries.Layers
    )


def roles_of(engine):
    return sorted(each.instance.role for each in engine.status().instances)


class TestHooks:
    """What vLLM does in another way than we know ends in the log, never in a forward."""

    def test_a_look_up_that_fails(self, new_engine, toy_queries, prompts, monkeypatch, log_lines):
        """B415: the texts are true, the fault is counted for all to see, and the next step is captured."""
        engine = new_engine()
        with monkeypatch.context() as patch:
            patch.setattr("vllm.forward_context.get_forward_context", SimpleNamespace)
            engine.ask(prompts(100))
        queries, num_faults = engine.worker._queries, engine.worker._queries._dispatcher.num_faults["tap"]
        assert num_faults >= 2
        assert queries.numbers()["faults"] == {(): num_faults}
        assert len([line for line in log_lines if "feature_failed hook=tap" in line]) <= 1
        engine.ask(prompts(210), 1)
        assert len(list(toy_queries.stored(engine))) == 4
        engine.assert_clean()

    def test_queries_that_are_handed_over_in_another_way(self, new_engine, prompts):
        """B415: by name, where they were by place."""
        engine = new_engine()
        queries = engine.worker._queries
        engine.layers.run = lambda worker, rows: [
            module.impl.forward(layer=module, query=torch.ones(1), output=torch.ones(1))
            for module in engine.layers.modules.values()
        ]
        engine.ask(prompts(100))
        assert queries._dispatcher.num_faults["tap"] >= 2
        engine.assert_clean()

    def test_tensors_of_an_engine_that_are_none(self, new_engine, prompts):
        """B415."""
        engine = new_engine()
        engine.worker.save_kv_layer("layer", engine.pages, None, intermediate_tensors=UserDict(q=None))
        engine.worker.save_kv_layer("layer", engine.pages, None, intermediate_tensors=Spoilt())
        assert engine.worker._queries._dispatcher.num_faults == {"given": 1}

    def test_hooks_that_fail_outside_of_the_dispatcher(self, new_engine, prompts):
        """B415: the step's plan is bound all the same, its loads and stores are done."""
        engine = new_engine()
        prompt = prompts(210)
        engine.worker._queries.start_step = engine.worker._queries.save_kv_layer = lambda *args: 1 / 0
        engine.layers.passes = "q"
        engine.ask(prompt)
        assert engine.num_cached(prompt) == 208
        engine.assert_clean()

    @pytest.mark.parametrize("part", ["_queries", "_worker"])
    def test_each_part_of_a_worker_ends(self, new_engine, prompts, part, log_lines):
        """B417."""
        engine = new_engine()
        engine.ask(prompts(100))
        broken = getattr(engine.worker, part)
        close, broken.close = broken.close, lambda: 1 / 0
        engine.worker.shutdown()
        assert any("shutdown_failed" in line for line in log_lines)
        role = {"_queries": "queries", "_worker": "worker"}[part]
        assert roles_of(engine) == sorted(["scheduler", role])
        close()
        assert roles_of(engine) == ["scheduler"]
        broken.close = close

    def test_the_store_ends_when_the_schedulers_side_does_not(self, new_engine, log_lines):
        """B417: as does each part of capture when another one fails."""
        engine = new_engine()
        engine.ask([5, 6, 7])
        queries, side = engine.worker._queries, engine.connector._scheduler
        queries._tap.close = lambda: 1 / 0
        engine.worker.shutdown()
        assert (queries._dispatcher.num_faults, roles_of(engine)) == ({"tap.close": 1}, ["scheduler"])
        close, side.close = side.close, lambda: 1 / 0
        engine.connector.shutdown()
        assert engine.connector._store is None
        assert any("shutdown_failed" in line for line in log_lines)
        side.close = close


class Spoilt(UserDict):
    def __contains__(self, name):
        raise AttributeError(name)


@pytest.fixture
def new_server(tmp_path):
    """Starts a server at one address; ``query_bytes`` is the share of queries."""
    from qkvault.config import load
    from qkvault.server.server import Server

    settings = {"listen": f"unix://{tmp_path}/s", "ram_bytes": 16 << 20, "prefault": False, "chunk_size": 64}
    return lambda query_bytes: Server(load(env={}, cli=settings | {"query_bytes": query_bytes}))


def test_a_store_that_comes_back_without_room_for_queries_ends_their_capture(
    new_engine, new_server, toy_queries, prompts, tmp_path
):
    """B419: with one warning; nothing is captured meanwhile, and one that has room is given queries again."""
    address = f"unix://{tmp_path}/s"
    engine = new_engine(ON | {"qkvault.address": address})
    capture = toy_queries.capture_of(engine)
    told = []

    def until(is_so):
        deadline = time.monotonic() + 20
        while not is_so():
            assert time.monotonic() < deadline
            engine.ask(prompts(20), 2)
            time.sleep(0.01)

    queries = engine.worker._queries
    feature, kv_link = queries._dispatcher.features["transfer_query"], queries._kv_link
    for query_bytes, is_wanted in ((0, False), (8 << 20, True), (0, False), (8 << 20, True)):
        engine.add("long", prompts(100), max_tokens=300)  # is under way when the store comes
        engine.step()
        server = new_server(query_bytes)
        try:
            until(lambda: kv_link.is_up and feature._is_wanted == is_wanted)  # noqa: B023  # it is called at once
            until(lambda: capture.adapter._link.is_up)
            engine.run()
            num_captured = capture.adapter.counters.num_captured
            prompt = prompts(210)
            engine.ask(prompt, 1)
            told.append(capture.adapter.counters.num_captured - num_captured)
            assert capture.adapter.ring.num_free_blocks() == capture.adapter.ring.num_blocks
            if is_wanted:
                with connect(address, kind=CacheKind.QUERY) as context:
                    assert context.lookup(prompt) == 208
        finally:
            server.close()
        until(lambda: not kv_link.is_up)
    assert told == [0, 4, 0, 4]
    engine.worker.shutdown()
    toy_queries.assert_ring_is_free(engine)


def test_one_warning_tells_that_queries_are_not_wanted(new_engine, prompts, log_lines):
    """B419: each time that it changes."""
    engine = new_engine()
    engine.ask(prompts(40))
    dispatcher = engine.worker._queries._dispatcher
    for advertised in ([], [], ["transfer_query"], ["transfer_query"]):
        dispatcher.reregister(advertised)
    events = [line.split()[0] for line in log_lines]
    assert [event for event in events if "wanted" in event] == ["queries_not_wanted", "queries_wanted_again"]


class TestRoomOfAGpu:
    """What a ring may take of a GPU."""

    @pytest.mark.parametrize(
        ("free", "total", "utilization", "room"),
        [(30, 100, 0.9, 10), (4, 100, 0.9, 4), (30, 100, 0.5, 30), (30, 100, 1.0, 0), (30, 100, 1.2, 0)],
    )
    def test_it_is_what_nobody_uses(self, free, total, utilization, room):
        """B418: of what is free a step of vLLM needs its peak again."""
        from qkvault.integrations.vllm.queries import room_beside

        gib = 1 << 30
        assert room_beside(free * gib, total * gib, utilization) == pytest.approx(room * gib, abs=1)

    def test_a_ring_that_would_take_the_peak_of_a_step_is_refused(self, new_engine, toy_queries, monkeypatch):
        """B418: with what to change."""
        from qkvault.integrations.vllm import queries

        layout, device = toy_queries.capture_of(new_engine()).adapter.layout, torch.device("cuda", 0)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (50 << 20, 100 << 20))
        queries._require_room(layout, 500, device, 0.9)
        with pytest.raises(ConfigError, match=r"\d+ are free on cuda:0 beside vLLM: .*--gpu-memory-utilization"):
            queries._require_room(layout, 1500, device, 0.9)
