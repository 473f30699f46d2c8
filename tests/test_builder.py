"""CacheEngineBuilder: one engine an instance id, and what belongs to it goes when it is destroyed."""

from __future__ import annotations

import threading

import msgspec
import pytest

from qkvault import embedded
from qkvault.builder import CacheEngineBuilder
from qkvault.config import Config
from qkvault.embedded import EmbeddedStore
from qkvault.engine import EngineMetadata
from qkvault.errors import ConfigError, LayoutMismatch, Unavailable
from qkvault.layout import ChunkLayout
from qkvault.testing.fake_engine import FakeEngine
from qkvault.types import CacheKind

CHUNK = 64  # tokens
LAYOUT = ChunkLayout(
    kind=CacheKind.KV, num_layers=2, num_heads=2, head_size=4, num_parts=2, dtype="float16", block_size=16,
    chunk_size=CHUNK, order="LBHNPD",
)  # fmt: skip
METADATA = EngineMetadata(model_name="m", model_fingerprint="w", layout=LAYOUT)
CONFIG = Config(chunk_size=CHUNK, ram_bytes=1 << 20)


@pytest.fixture
def fake():
    return FakeEngine(LAYOUT, 16)


@pytest.fixture
def build(fake):
    """Build engines by id; all are destroyed in the end."""
    built = set()

    def make(instance_id="a", config=CONFIG, metadata=METADATA, tensors=None):
        built.add(instance_id)
        tensors = fake.tensors if tensors is None else tensors
        return CacheEngineBuilder.get_or_create(instance_id, config, metadata, tensors)

    yield make
    for instance_id in built:
        CacheEngineBuilder.destroy(instance_id)
        assert embedded.find(instance_id) is None


def test_the_first_call_builds_and_later_ones_return_it(build, fake):
    """B5: the same id gives the same engine, another id another one; it works."""
    engine = build()
    assert build() is engine
    assert build("b") is not engine
    tokens = list(range(CHUNK))
    table = fake.prefill(tokens)
    assert engine.store(tokens, block_ids=table).stored_tokens == CHUNK
    fake.scribble(table)
    assert engine.retrieve(tokens, block_ids=table).all()
    fake.verify(tokens, table)
    assert build("b").lookup(tokens) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"config": msgspec.structs.replace(CONFIG, lease_seconds=61.0)},
        {"metadata": msgspec.structs.replace(METADATA, model_name="n")},
        {"metadata": msgspec.structs.replace(METADATA, layout=msgspec.structs.replace(LAYOUT, order="LBNHPD"))},
        {"tensors": FakeEngine(LAYOUT, 16).tensors},
    ],
    ids=["config", "metadata", "layout", "tensors"],
)
def test_an_id_with_other_settings_is_refused(build, change):
    """B6: ValueError for another config, metadata or other tensors, and the engine stays as it was."""
    engine = build()
    with pytest.raises(ValueError, match="destroy it first"):
        build(**change)
    assert build() is engine


def test_after_destroy_an_id_can_be_built_anew(build, fake, tmp_path):
    """B6: destroy closes engine and store, so that other settings take effect; what is on disk is still there."""
    config = msgspec.structs.replace(CONFIG, disk_path=str(tmp_path), disk_bytes=1 << 20)
    engine = build(config=config)
    tokens = list(range(CHUNK))
    engine.store(tokens, block_ids=fake.prefill(tokens))
    CacheEngineBuilder.destroy("a")
    assert engine.lookup(tokens) == 0
    other = build(config=msgspec.structs.replace(config, lease_seconds=61.0))
    embedded.find("a").driver.drain(30.0)
    assert other is not engine
    assert other.lookup(tokens) == CHUNK


def test_destroying_an_unknown_id_is_nothing():
    """B6: ids that were never built, or are destroyed, are ignored."""
    CacheEngineBuilder.destroy("never")
    CacheEngineBuilder.destroy("never")


def test_a_store_that_others_use_outlives_its_engine(build):
    """The engine's store is closed by its last user."""
    build()
    store = embedded.acquire(embedded.find("a").config)
    CacheEngineBuilder.destroy("a")
    assert embedded.find("a") is store
    assert store.driver.manager.leases.all() == []
    embedded.release(store)


def test_what_cannot_be_built_leaves_nothing(build, fake):
    """LayoutMismatch or ConfigError: no store, no session, and the id is free."""
    with pytest.raises(LayoutMismatch):
        build(tensors=fake.tensors[:1])
    with pytest.raises(ConfigError, match="chunk_size"):
        build(config=msgspec.structs.replace(CONFIG, chunk_size=128))
    assert embedded.find("a") is None
    store = embedded.acquire(msgspec.structs.replace(CONFIG, instance_id="a"))
    with pytest.raises(LayoutMismatch):
        build(tensors=fake.tensors[:1])
    assert store.connect("test").status().num_sessions == 1
    embedded.release(store)
    build()


def test_an_impossible_id_is_refused(build):
    """ConfigError names the setting."""
    with pytest.raises(ConfigError, match="instance_id"):
        CacheEngineBuilder.get_or_create("a/b", CONFIG, METADATA, [])


def test_an_address_leads_to_a_server(build, fake, tmp_path):
    """With an address the engine uses that server's store; without one that answers it is Unavailable."""
    address = f"unix://{tmp_path}/s.sock"
    config = msgspec.structs.replace(CONFIG, address=address)
    with pytest.raises(Unavailable):
        build(config=config)
    store = EmbeddedStore(CONFIG, shared=True)
    try:
        store.serve(address)
        engine = build(config=config)
        tokens = list(range(CHUNK))
        engine.store(tokens, block_ids=fake.prefill(tokens))
        assert store.connect("test").status().media[0].num_chunks == 1
        CacheEngineBuilder.destroy("a")
        assert store.connect("test").status().media[0].num_chunks == 1
    finally:
        store.close()


def test_an_engine_that_may_start_a_server_raised_that_none_answers(build, fake, address, servers_at):
    """B560: it starts one, with its settings, and so does nobody after it."""
    config = msgspec.structs.replace(CONFIG, address=address, autostart=True, prefault=False, timeout_seconds=20.0)
    engine = build(config=config)
    build("b", config=config)
    assert len(servers_at(address)) == 1
    tokens = list(range(CHUNK))
    assert engine.store(tokens, block_ids=fake.prefill(tokens)).stored_tokens == CHUNK


def test_threads_that_build_at_once_get_one_engine(build):
    """B5: however many ask at the same time."""
    engines = []
    threads = [threading.Thread(target=lambda: engines.append(build())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(engines) == 8
    assert len(set(map(id, engines))) == 1
