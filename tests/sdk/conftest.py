"""Stores with a context over them, and real tensors: K, V, Q and attention weights as transformers computes them."""

from __future__ import annotations

import itertools

import pytest

from qkvault import embedded
from qkvault.config import Config, load
from qkvault.sdk import connect
from qkvault.server.server import Server
from qkvault.testing.spaces import described
from qkvault.types import CacheKind

torch = pytest.importorskip("torch", reason="the SDK works on tensors")

_numbers = itertools.count()


def spaces_of(*, kind=CacheKind.KV, layers=2, heads=2, ranks=1, chunk_size=64, model="m", **more):
    """What the workers of an engine would say of what they store; ``heads`` are those of one rank."""
    return [
        described(
            model, kind=kind, num_layers=layers, num_heads=heads, chunk_size=chunk_size, world_size=ranks,
            worker_id=rank, **more,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def noise(num_tokens, *, layers=2, heads=2, head_size=8, parts=2, dtype=torch.float32):
    """Parts that nobody else has."""
    generator = torch.Generator().manual_seed(next(_numbers))
    shape = (layers, num_tokens, heads, head_size)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(parts)]


@pytest.fixture(params=["here", "unix", "tcp"])
def place(request, tmp_path, monkeypatch):
    """What ``connect`` takes, for each way to reach a store."""
    monkeypatch.setenv("QKVAULT_TIMEOUT_SECONDS", "20")  # no test here is about time
    yield from _place(request.param, tmp_path)


@pytest.fixture
def here(tmp_path):
    """A store in this process."""
    yield from _place("here", tmp_path)


def _place(way, folder, **settings):
    if way == "here":
        config = Config(
            instance_id=f"sdk-{next(_numbers)}", ram_bytes=32 << 20, query_bytes=24 << 20, prefault=False, **settings
        )
        store = embedded.acquire(config)
        try:
            yield config
            store.driver.check()
            assert len(store.driver.manager.leases) == 0, "a lease was not given back"
        finally:
            embedded.release(store)
    else:
        listen = f"unix://{folder}/s" if way == "unix" else "tcp://127.0.0.1:0"
        settings = {"listen": listen, "ram_bytes": 32 << 20, "query_bytes": 24 << 20, "prefault": False}
        server = Server(load(env={}, cli=settings | {"token": "sesame"}))
        try:
            (address,) = server.addresses
            yield address if way == "unix" else Config(address=address, token="sesame", timeout_seconds=20.0)
            server.driver.check()
            assert len(server.driver.manager.leases) == 0, "a lease was not given back"
        finally:
            server.close()


@pytest.fixture
def disk(tmp_path):
    """A store in this process, with a disk tier."""
    yield from _place("here", tmp_path, disk_path=str(tmp_path / "disk"))


@pytest.fixture
def make_spaces():
    return spaces_of


@pytest.fixture
def make_parts():
    return noise


@pytest.fixture
def open_context():
    """Contexts that are closed when the test is over."""
    opened = []

    def open_one(where, **options):
        opened.append(connect(where, **options))
        return opened[-1]

    yield open_one
    for context in opened:
        context.close()


@pytest.fixture
def run(model_run):
    return model_run.run_model


@pytest.fixture(scope="session")
def smollm(model_path, model_run):
    """The small model in float32, with attention that shows its weights."""
    pytest.importorskip("transformers")
    return model_run.load_model(model_path)


@pytest.fixture(scope="session")
def prompt(smollm, model_run):
    """What it computes for a text of some 160 tokens."""
    generator = torch.Generator().manual_seed(3)
    return model_run.run_model(smollm, torch.randint(100, 40_000, (160,), generator=generator).tolist())
