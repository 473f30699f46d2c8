"""vLLM publishes what the store has to tell with its own events, when it is told to publish events at all."""

from __future__ import annotations

import pytest

from qkvault.types import ChunkState

pytestmark = pytest.mark.vllm


@pytest.fixture
def listening(toy_engine):
    """Starts engines whose vLLM publishes events; each has ``heard``, what it published of media other than its own."""
    from vllm.config.kv_events import KVEventsConfig

    def start(**options):
        published = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        engine = toy_engine(kv_events_config=published, **options)
        engine.heard = []
        engine.scheduler.kv_event_publisher.publish = lambda batch: engine.heard.extend(
            event for event in batch.events if getattr(event, "medium", "GPU") != "GPU"
        )
        return engine

    return start


def view_of(engine):
    """What a router makes of the events: medium and hash, to the event that told of it."""
    view = {}
    for event in engine.heard:
        for name in event.block_hashes:
            if type(event).__name__ == "BlockStored":
                view[event.medium, name] = event
            else:
                del view[event.medium, name]
    return view


def settled(engine, prompt):
    """All that is to tell is told: the tiers are done, and some steps more have been made."""
    assert engine.store.driver.drain(10)
    engine.ask(prompt)
    assert engine.store.driver.drain(10)
    engine.ask(prompt[:10])
    return view_of(engine)


def test_vllm_publishes_the_events_of_the_store(listening, prompts, tmp_path, toy):
    """B234: each chunk with its tokens, its parent and its medium, and its end."""
    engine = listening(settings={"qkvault.disk_path": str(tmp_path / "disk")})
    prompt = prompts(3 * toy.CHUNK)
    engine.ask(prompt)
    view = settled(engine, prompt)
    index = list(engine.store.driver.manager.index)
    assert {medium for medium, _ in view} == {"CPU", "STORAGE"}
    assert len(view) == sum(entry.state is ChunkState.READY for entry in index) + sum(bool(e.tiers) for e in index)
    for medium in ("CPU", "STORAGE"):
        parent = None
        for start in range(0, len(prompt), toy.CHUNK):
            tokens = prompt[start : start + toy.CHUNK]
            (event,) = [each for each in view.values() if each.token_ids == tokens and each.medium == medium]
            assert (event.parent_block_hash, event.block_size) == (parent, toy.CHUNK)
            (parent,) = event.block_hashes
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.ask(prompt[:10])
    assert view_of(engine) == {}
    engine.assert_clean()


def test_a_salted_prompt_is_a_hash_to_routers(listening, prompts, toy):
    """B232: its tokens go to nobody."""
    engine = listening()
    prompt = prompts(2 * toy.CHUNK)
    engine.ask(prompt, cache_salt="secret")
    view = settled(engine, prompts(5))
    assert {(tuple(event.token_ids), event.parent_block_hash) for event in view.values()} == {((), None)}
    assert len(view) == 2


def test_a_step_takes_a_bounded_number(listening, prompts, monkeypatch, toy):
    """B239: what a step does not take, the next ones do."""
    monkeypatch.setattr("qkvault.integrations.vllm.events._MAX_A_STEP", 1)
    engine = listening()
    prompt = prompts(5 * toy.CHUNK)
    engine.ask(prompt)
    for _ in range(6):
        assert len(engine.connector.take_events()) <= 1
    assert engine.connector.take_events() == []


def test_events_that_were_lost_do_not_void_those_of_vllm(listening, prompts, log_lines, toy):
    """B239: vLLM's own blocks are not cleared for it; what is here is told once more."""
    engine = listening()
    engine.store.driver.manager.ledger.feed.max_waiting = 2
    engine.connector.take_events()
    taken, engine.connector._events.take = engine.connector._events.take, list
    engine.ask(prompts(5 * toy.CHUNK))
    engine.connector._events.take = taken
    events = engine.connector.take_events()
    assert {type(event).__name__ for event in events} == {"BlockStored"}
    assert len(events) == 5


def test_what_goes_wrong_does_not_reach_vllm(listening, prompts, monkeypatch):
    """B129: events are lost, requests are not."""
    engine = listening()

    def broken(*_, **__):
        msg = "broken"
        raise RuntimeError(msg)

    monkeypatch.setattr(engine.store.driver, "take_events", broken)
    engine.ask(prompts(100))
    assert engine.connector.take_events() == ()
    engine.assert_clean()


@pytest.mark.slow
@pytest.mark.allow_leaks("vLLM's publisher never ends its ZeroMQ context")
def test_both_come_out_of_an_engine_of_stock_vllm(real, tiny_model, tmp_path):
    """B234: on vLLM's own socket, its blocks and our chunks, each with its medium."""
    import msgspec
    import zmq
    from vllm.config.kv_events import KVEventsConfig
    from vllm.distributed.kv_events import KVEventBatch

    endpoint = f"ipc://{tmp_path}/events"
    published = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)
    engine = real.RealEngine(tiny_model, {}, kv_events_config=published)
    heard = []
    with zmq.Context() as context, context.socket(zmq.SUB) as news:
        news.linger = 0
        news.connect(endpoint)
        news.subscribe("")
        prompt = list(range(10, 210))
        for _ in range(3):  # the first ones may come before we are connected
            engine.generate([prompt], 4)
            prompt = prompt[1:]
            while news.poll(500):
                _, _, payload = news.recv_multipart()
                heard += msgspec.msgpack.decode(payload, type=KVEventBatch).events
    engine.close()
    stored = [event for event in heard if type(event).__name__ == "BlockStored"]
    assert {event.medium for event in stored} == {"GPU", "CPU"}
    ours = [event for event in stored if event.medium == "CPU"]
    assert any(event.token_ids == list(range(11, 75)) and event.parent_block_hash is None for event in ours)


@pytest.mark.parametrize("is_published", [False, True])
def test_without_a_listener_the_store_keeps_no_events(toy_engine, listening, prompts, is_published):
    """B239: neither when vLLM publishes none, nor when the store does so itself."""
    engine = listening(settings={"qkvault.events_endpoint": "tcp://127.0.0.1:*"}) if is_published else toy_engine()
    engine.ask(prompts(100))
    assert engine.connector.take_events() == ()
    assert engine.worker.take_events() == ()
    assert (engine.store._publisher is not None) == is_published


@pytest.mark.parametrize("told", [True, False])
def test_through_a_server_it_is_said_where_events_come_from(toy, tiny_model, tmp_path, log_lines, *, told):
    """B455: a server's store is everybody's, so no engine tells its events; one line names what to use instead."""
    from vllm.config.kv_events import KVEventsConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    address = f"unix://{tmp_path}/server.sock"
    options = {"kv_events_config": KVEventsConfig(enable_kv_cache_events=told, publisher="null")}
    config = toy.engine_config(tiny_model, {"qkvault.chunk_size": toy.CHUNK, "qkvault.address": address}, **options)
    spec = toy.FullAttentionSpec(block_size=toy.BLOCK, num_kv_heads=1, head_size=toy.HEAD, dtype=toy.torch.float32)
    groups = toy.KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[toy.KVCacheGroupSpec(["layer"], spec)]
    )
    connector = KVConnectorFactory.create_connector(config, toy.KVConnectorRole.SCHEDULER, groups)
    lines = [line for line in log_lines if "store_events_not_published" in line]
    assert len(lines) == told
    assert all("events_endpoint" in line and address in line for line in lines)
    assert tuple(connector.take_events()) == ()
    connector.shutdown()
