"""What switches capture on, for which requests and layers; what is refused; and that off there is nothing of it."""

from __future__ import annotations

import time
from functools import partial
from types import SimpleNamespace

import pytest

from qkvault.embedded import socket_address
from qkvault.errors import ConfigError
from qkvault.sdk import connect
from qkvault.types import CacheKind

pytestmark = pytest.mark.vllm

SWITCH = "qkvault.transfer_intermediate_tensors"
ON = {SWITCH: True}


@pytest.fixture
def new_engine(toy_engine, toy_queries):
    """Starts toy engines with two attention layers; ``settings`` switch capture on, or not."""
    return lambda settings, **options: toy_engine(
        settings=settings | {"qkvault.ram_bytes": "16MiB"}, num_layers=2, layers=toy_queries.Layers, **options
    )


@pytest.fixture
def new_worker(new_engine):
    """Makes a second worker's half beside an engine without capture, with other settings; it is not started yet."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    workers = []

    def make(settings, of_store=None):
        engine = new_engine(of_store or {})
        engine.config.kv_transfer_config.kv_connector_extra_config.update(settings)
        workers.append(
            KVConnectorFactory.create_connector(engine.config, KVConnectorRole.WORKER, engine.kv_cache_config)
        )
        return engine, workers[-1]

    yield make
    for worker in workers:
        worker.shutdown()


def pages_of(engine):
    return dict.fromkeys(engine.layers.modules, engine.pages)


def forwards_of(engine):
    return ["forward" in vars(module.impl) for module in engine.layers.modules.values()]


def roles_of(engine):
    return sorted(each.instance.role for each in engine.status().instances)


def asks(value):
    return {"extra_args": {"kv_transfer_params": {"qkvault.queries": value}}}


@pytest.mark.parametrize("settings", [{}, {SWITCH: "false"}, {SWITCH: "off"}, {SWITCH: 0}], ids=str)
def test_off_there_is_nothing(new_engine, prompts, settings):
    """B111, B118: no ring, no wrapper, no plan, no session, no call, and full graphs, whatever word says no."""
    from qkvault.integrations.vllm.connector import QKVaultConnector

    engine = new_engine(settings)
    engine.ask(prompts(200))
    assert engine.worker._queries is None
    assert engine.worker._reporter.queries is None
    assert engine.connector._scheduler._queries is None
    assert forwards_of(engine) == [False, False]
    assert all(not plan.query_steps and not plan.query_drops for plan in engine.plans)
    assert roles_of(engine) == ["scheduler", "worker"]
    assert not QKVaultConnector.requires_piecewise_for_cudagraph(settings)
    engine.assert_clean()


def test_on_attention_runs_in_python(new_engine, prompts):
    """B76, B99, B111: a ring as the engine's pages are, a wrapper on each layer, a session; all gone at the end."""
    from qkvault.integrations.vllm.connector import QKVaultConnector

    engine = new_engine(ON)
    engine.ask(prompts(30))
    assert QKVaultConnector.requires_piecewise_for_cudagraph({SWITCH: "yes"})
    assert forwards_of(engine) == [True, True]
    assert roles_of(engine) == ["queries", "scheduler", "worker"]
    engine.worker.shutdown()
    engine.worker.shutdown()
    assert forwards_of(engine) == [False, False]
    assert roles_of(engine) == ["scheduler"]


def test_the_ring_is_as_the_engines_pages_are(new_engine, toy_queries):
    """B67, B78, B79: blocks of the engine, heads and dtype of the model, two steps of the largest size."""
    engine = new_engine(ON, max_num_batched_tokens=100)
    adapter = toy_queries.capture_of(engine).adapter
    assert (adapter.ring.block_size, adapter.ring.hidden_dim) == (16, 4 * 32)
    assert (adapter.ring.num_layers, adapter.ring.num_blocks) == (2, 14)
    assert (adapter.layout.num_heads, adapter.layout.head_size, adapter.layout.dtype) == (4, 32, "float32")


@pytest.mark.parametrize(
    ("mode", "value", "num_chunks"),
    [("all", None, 4), ("all", "no", 0), ("all", True, 4), ("asked", None, 0), ("asked", "on", 4), ("asked", False, 0)],
)
def test_requests_are_captured_as_they_ask(new_engine, toy_queries, mode, value, num_chunks):
    """B356: all but those that say no, or only those that say yes; K and V are stored either way."""
    engine = new_engine(ON | {"qkvault.q_requests": mode})
    prompt = list(range(3, 90)) + list(range(3, 90)) + list(range(3, 39))
    engine.ask(prompt, 1, sampling={} if value is None else asks(value))
    assert len(list(toy_queries.stored(engine))) == num_chunks
    assert engine.num_cached(prompt) == 208
    engine.assert_clean()
    toy_queries.assert_ring_is_free(engine)


def test_a_word_that_is_none_keeps_the_request_out_of_the_cache(new_engine, prompts, toy_queries, log_lines):
    """B356: with the reason in the log; the engine goes on."""
    engine = new_engine(ON)
    prompt = prompts(210)
    engine.ask(prompt, sampling=asks("perhaps"))
    assert any("qkvault.queries: expected one of" in line for line in log_lines)
    assert (engine.num_cached(prompt), list(toy_queries.stored(engine))) == (0, [])
    toy_queries.assert_ring_is_free(engine)


def test_a_request_that_asks_has_its_queries_and_no_others(new_engine, toy, toy_queries, prompts):
    """B356: among others that do not ask, in the same steps."""
    engine = new_engine(ON | {"qkvault.q_requests": "asked"}, max_num_batched_tokens=60)
    for number in range(6):
        engine.add(f"{number}", prompts(150), 20, sampling=asks(number == 3))
    engine.run()
    prompt = list(engine.requests["3"].all_token_ids)
    digests = toy.digests(prompt)
    found = {key for key, _ in toy_queries.stored(engine)}
    assert len(found) == 3
    assert found <= set(toy_queries.names_of(engine, prompt, digests))
    toy_queries.assert_stored_is_right(engine, toy.digests, (0, 1))


class TestLayers:
    """Some layers only."""

    def test_those_that_are_named_are_captured(self, new_engine, toy, toy_queries, prompts):
        """B77, B355: layer 1 of 0 and 1; the SDK numbers it as the model does."""
        engine = new_engine(ON | {"qkvault.q_layers": "1"})
        prompt = prompts(210)
        engine.ask(prompt, 1)
        assert forwards_of(engine) == [False, True]
        assert len(toy_queries.assert_stored_is_right(engine, toy.digests, (1,))) == 4
        with connect(socket_address(engine.connector._instance_id), kind=CacheKind.QUERY) as context:
            found = context.retrieve(prompt, layers=[1])
            assert found.layers == (1,)
            assert found.num_tokens == 208
            wanted = toy_queries.queries_of(toy.digests(prompt[:208]), 1)
            assert (found.q[0].flatten(1).numpy() == wanted).all()
            with pytest.raises(ValueError, match=r"layers \[0\] are wanted, there are \[1\]"):
                context.retrieve(prompt, layers=[0])

    def test_all_by_number_are_all(self, new_engine):
        """B355: naming every layer is naming none: the same space."""
        by_number, plain = new_engine(ON | {"qkvault.q_layers": "0-1"}), new_engine(ON)
        spaces = [engine.worker._queries._dispatcher.features["transfer_query"].capture.adapter.space
                  for engine in (by_number, plain)]  # fmt: skip
        assert spaces[0] == spaces[1]

    def test_one_that_there_is_not_is_an_error_at_start(self, new_worker):
        """B355."""
        engine, worker = new_worker(ON | {"qkvault.q_layers": "1-2"})
        with pytest.raises(ConfigError, match="q_layers: there is no layer 2 among 2: they count from 0"):
            worker.register_kv_caches(pages_of(engine))
        assert forwards_of(engine) == [False, False]

    @pytest.mark.parametrize("text", ["x", "1,0", "3-1", "-1"])
    def test_text_that_is_no_numbers_is_an_error_at_start(self, new_worker, text):
        with pytest.raises(ConfigError, match="q_layers"):
            new_worker(ON | {"qkvault.q_layers": text})


class TestRefused:
    """What cannot be captured is said at start, with what to change."""

    @pytest.fixture
    def refusal(self, new_engine):
        """The message with which layers are refused, after ``change`` has been made to the second of two."""
        from qkvault.integrations.vllm.query_tap import attention_layers

        def refuse(change, *, eager=True, replaced=None):
            engine = new_engine({})
            layer = engine.layers.modules["layer.1"]
            for name, value in change.items():
                setattr(layer, name, value)
            context = engine.config.compilation_config.static_forward_context
            if replaced is not None:
                context["layer.1"] = replaced
            engine.config.model_config.enforce_eager = eager
            with pytest.raises(ConfigError) as raised:
                attention_layers(engine.config, ["layer", "layer.1"], None)
            assert list(attention_layers(engine.config, ["layer", "layer.1"], (0,))) == ["layer"]
            return str(raised.value)

        return refuse

    def test_latents_and_states(self, refusal):
        """B357: MLA has no layer that we know how to tap."""
        mla = type("MLAAttention", (), {})()
        message = refusal({}, replaced=mla)
        assert "cannot capture the queries of layer.1, a MLAAttention" in message
        assert "MLA, state spaces" in message
        assert "set transfer_intermediate_tensors to no" in message

    @pytest.mark.parametrize("kind", ["encoder", "encoder_only", "encoder_decoder"])
    def test_encoders(self, refusal, kind):
        """B357."""
        assert f"of kind {kind}: name only decoder layers in q_layers" in refusal({"attn_type": kind})

    def test_queries_that_are_quantised(self, refusal):
        """B357: they would not be the model's."""
        assert "use another --kv-cache-dtype" in refusal({"query_quant": lambda *_: None})

    def test_attention_inside_the_compiled_graph(self, refusal, new_engine):
        """B357: where Python is not asked, there is nothing to tap; in eager mode there is."""
        from qkvault.integrations.vllm.query_tap import attention_layers

        assert "use --enforce-eager" in refusal({"use_direct_call": True}, eager=False)
        engine = new_engine({})
        engine.layers.modules["layer"].use_direct_call = True
        assert len(attention_layers(engine.config, ["layer", "layer.1"], None)) == 2

    def test_layers_of_unequal_heads(self, refusal):
        """B357."""
        assert "the model's 4 heads of 32 elements only, some have [(8, 32)]" in refusal({"num_heads": 8})

    def test_heads_that_are_not_the_models(self, new_worker):
        """B78, B357: a model whose configuration tells other heads than its layers have."""
        engine, worker = new_worker(ON)
        for layer in engine.layers.modules.values():
            layer.num_heads = 8
        with pytest.raises(ConfigError, match="4 heads of 32 elements"):
            worker.register_kv_caches(pages_of(engine))
        assert forwards_of(engine) == [False, False]

    def test_a_ring_that_memory_has_no_room_for(self, new_worker):
        """B79, B358: also by its name with dots; the message says what to change."""
        engine, worker = new_worker(ON | {"qkvault.q.ring_blocks": 10**9})
        with pytest.raises(
            ConfigError,
            match=r"the ring of queries needs \d+ bytes, \d+ are free (on|in) this .* q_ring_blocks .now 10*",
        ):
            worker.register_kv_caches(pages_of(engine))
        assert forwards_of(engine) == [False, False]

    def test_a_store_that_takes_none(self, new_worker):
        """B113: an error at start, in the words that users know."""
        engine, worker = new_worker(ON, {"qkvault.query_bytes": 0})
        with pytest.raises(ValueError, match="Connector enables transfer_query but server does not"):
            worker.register_kv_caches(pages_of(engine))


def test_settings_with_dots_are_those_with_lines(new_engine, toy_queries):
    """B79: as LMCache writes them."""
    engine = new_engine(ON | {"qkvault.q.ring_blocks": 33})
    assert toy_queries.capture_of(engine).adapter.ring.num_blocks == 33
    engine = new_engine(ON | {"qkvault.q.ring_depth": 3}, max_num_batched_tokens=64)
    assert toy_queries.capture_of(engine).adapter.ring.num_blocks == 12


def test_an_engine_that_only_loads_captures_nothing(new_engine, prompts):
    """B80: what it computes it does not store."""
    engine = new_engine(ON, kv_role="kv_consumer")
    engine.ask(prompts(200))
    assert engine.worker._queries is None
    assert forwards_of(engine) == [False, False]
    assert not any(plan.query_steps for plan in engine.plans)


class TestTap:
    """The wrapper of a layer's forward."""

    def test_two_engines_do_not_see_each_other(self, new_engine, toy, toy_queries, prompts):
        """B359: each has its layers; the end of one is not the other's."""
        one, other = new_engine(ON), new_engine(ON)
        one.ask(prompts(210), 1)
        other.ask(prompts(130), 1)
        assert len(toy_queries.assert_stored_is_right(one, toy.digests, (0, 1))) == 4
        assert len(toy_queries.assert_stored_is_right(other, toy.digests, (0, 1))) == 2
        one.worker.shutdown()
        assert (forwards_of(one), forwards_of(other)) == ([False, False], [True, True])
        other.ask(prompts(130), 1)
        assert len(toy_queries.assert_stored_is_right(other, toy.digests, (0, 1))) == 4

    def test_what_somebody_else_has_put_there_is_there_again(self, new_worker):
        """B359: also if they came first."""
        engine, worker = new_worker(ON)
        impl = engine.layers.modules["layer"].impl
        before = impl.forward
        impl.forward = theirs = partial(before)
        worker.register_kv_caches(pages_of(engine))
        assert impl.forward is not theirs
        worker.shutdown()
        assert impl.forward is theirs

    def test_after_the_engine_shows_queries_itself_the_end_changes_nothing(self, new_engine, prompts):
        """B81, B359."""
        engine = new_engine(ON)
        engine.layers.passes = "q"
        engine.ask(prompts(100))
        assert forwards_of(engine) == [False, False]
        engine.worker.shutdown()
        assert forwards_of(engine) == [False, False]

    def test_one_that_somebody_took_away_is_not_missed(self, new_worker):
        """B416: of two layers one has lost ours; the end gives back the other."""
        engine, worker = new_worker(ON)
        worker.register_kv_caches(pages_of(engine))
        del engine.layers.modules["layer"].impl.forward
        worker._queries.close()
        assert forwards_of(engine) == [False, False]
        assert worker._queries._dispatcher.num_faults.total() == 0

    def test_a_wrapper_over_ours_stays(self, new_engine, prompts, toy_queries):
        """B416: and calls what it has always called, which shows nothing any more."""
        engine = new_engine(ON)
        impl, calls = engine.layers.modules["layer"].impl, []
        ours = impl.forward

        def theirs(*args, **options):
            calls.append(1)
            return ours(*args, **options)

        impl.forward = theirs
        engine.ask(prompts(210), 1)
        assert len(list(toy_queries.stored(engine))) == 4
        num_calls = len(calls)
        engine.worker._queries.close()
        assert impl.forward is theirs
        engine.ask(prompts(40))
        assert len(calls) > num_calls
        assert engine.worker._queries._dispatcher.num_faults.total() == 0

    def test_forwards_outside_of_a_step_are_not_shown(self, new_engine, toy, toy_queries, prompts):
        """B118: a warm-up, a profile, a step that captures nothing: the wrapper asks, and that is all."""
        engine = new_engine(ON | {"qkvault.q_requests": "asked"})
        capture, shown = toy_queries.capture_of(engine), []
        capture.save_q_layer = lambda *args: shown.append(args)
        engine.layers.run(engine.worker, [(at, b"warm up") for at in range(40)])
        engine.ask(prompts(100))
        assert shown == []

    def test_a_fault_of_ours_is_none_of_vllms(self, new_engine, toy_queries, prompts, log_lines):
        """B112: the forward runs, the text is true, the fault is counted, and the chunks of the step are not stored."""
        engine = new_engine(ON)
        ring = toy_queries.capture_of(engine).adapter.ring

        def broken(*args):
            raise RuntimeError

        ring.scatter = broken
        engine.ask(prompts(100))
        del ring.scatter
        engine.ask(prompts(210), 1)
        assert toy_queries.capture_of(engine).num_faults > 0
        assert len(list(toy_queries.stored(engine))) == 4
        engine.assert_clean()


def test_queries_are_an_instance_beside_kv(new_engine, prompts):
    """B93, B103, B107: one instance id, roles apart, each with what it stores; at the end both are gone."""
    engine = new_engine(ON)
    engine.ask(prompts(100))
    told = [each.instance for each in engine.status().instances if each.instance.role != "scheduler"]
    assert {each.role for each in told} == {"worker", "queries"}
    assert len({each.instance_id for each in told}) == 1
    kinds = {each.role: SimpleNamespace(spaces=each.spaces) for each in told}
    assert b"query" in kinds["queries"].spaces[0]
    assert b"query" not in kinds["worker"].spaces[0]
    engine.worker.shutdown()
    assert (roles_of(engine), engine.status().num_leases) == (["scheduler"], 0)


def test_salts_and_kinds_have_keys_of_their_own(new_engine, toy, toy_queries, prompts):
    """B95, B106: the queries of a salted prompt are found under its salt only, and never as K and V."""
    from qkvault.keys import RequestIdentity

    engine = new_engine(ON)
    prompt = prompts(210)
    engine.ask(prompt, 1, cache_salt="mine")
    address = socket_address(engine.connector._instance_id)
    mine, theirs = RequestIdentity(cache_salt="mine"), RequestIdentity(cache_salt="theirs")
    with connect(address, kind=CacheKind.QUERY) as queries, connect(address) as kv:
        assert queries.lookup(prompt, identity=mine) == 208
        assert kv.lookup(prompt, identity=mine) == 208
        for identity in (theirs, RequestIdentity()):
            assert queries.retrieve(prompt, identity=identity) is None
            assert kv.retrieve(prompt, identity=identity) is None
    engine.identity = mine
    assert len(toy_queries.assert_stored_is_right(engine, toy.digests, (0, 1))) == 4


def test_an_instance_of_queries_is_reaped_when_it_is_silent(new_engine, prompts, toy_queries):
    """B100, B104: one that pings after two minutes, one that never did after an hour; registering anew is no second."""
    engine = new_engine(ON)
    engine.ask(prompts(100))
    sessions, now = engine.store.driver._sessions, engine.store.driver._clock()
    link = toy_queries.capture_of(engine).adapter._link
    for _ in range(2):
        link.session().register(link._instance)
    assert roles_of(engine) == ["queries", "scheduler", "worker"]
    link.session().ping()
    assert sessions.reap(now + 100) == []
    assert [each.role for each in sessions.reap(now + 200)] == ["queries"]
    assert roles_of(engine) == ["scheduler", "worker"]
    link.session().register(link._instance)
    assert roles_of(engine) == ["queries", "scheduler", "worker"]


def test_a_server_that_comes_late_is_given_queries_from_then_on(new_engine, toy, toy_queries, prompts, tmp_path):
    """B94: at the start nobody answers; that is no error, and what is captured until then is lost and counted."""
    from qkvault.config import load
    from qkvault.server.server import Server

    address = f"unix://{tmp_path}/s"
    engine = new_engine(ON | {"qkvault.address": address})
    engine.ask(prompts(210), 1)
    capture = toy_queries.capture_of(engine)
    assert capture.adapter.counters.dropped["not_stored"] == 4
    server = Server(load(env={}, cli={"listen": address, "ram_bytes": 16 << 20, "prefault": False, "chunk_size": 64}))
    try:
        prompt, deadline = prompts(210), time.monotonic() + 20
        while not capture.adapter._link.is_up:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        engine.ask(prompt, 1)
        with connect(address, kind=CacheKind.QUERY) as context:
            found = context.retrieve(prompt)
        assert (found.q[1].flatten(1).numpy() == toy_queries.queries_of(toy.digests(prompt[:208]), 1)).all()
        engine.worker.shutdown()
        toy_queries.assert_ring_is_free(engine)
    finally:
        server.close()
