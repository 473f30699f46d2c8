"""An engine that asks for nothing while its server comes and goes: it is on the register, and its first prompt hits."""

from __future__ import annotations

import socket
import time
from contextlib import closing

import pytest

from qkvault.testing.transport_contract import until

pytestmark = pytest.mark.vllm

ROLES = ["scheduler", "worker"]


@pytest.fixture
def address(tmp_path):
    return f"unix://{tmp_path}/s"


@pytest.fixture
def serve(address, tmp_path):
    """Starts a server with a disk; to be closed by the test."""
    from qkvault.config import load
    from qkvault.server.server import Server

    settings = {"listen": address, "ram_bytes": 16 << 20, "prefault": False, "chunk_size": 64}
    return lambda: closing(Server(load(env={}, cli=settings | {"disk_path": str(tmp_path / "disk")})))


def roles_at(server):
    with closing(server.connect("test")) as client:
        return sorted(each.instance.role for each in client.status().instances)


def test_an_engine_is_registered_when_it_has_started(toy_engine, serve, address):
    """B397: both halves, before any request."""
    with serve() as server:
        toy_engine(settings={"qkvault.address": address})
        assert roles_at(server) == ROLES


def test_a_start_waits_for_a_mute_server_no_longer_than_told(toy_engine, prompts, address):
    """B397: it does not fail either."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mute:
        mute.bind(address.removeprefix("unix://"))
        mute.listen(8)
        engine = toy_engine(settings={"qkvault.address": address, "qkvault.timeout_seconds": 0.2})
        started = time.monotonic()
        engine.ask(prompts(100))
        assert time.monotonic() - started < 5.0
        engine.assert_texts()
        engine.worker.shutdown()


def test_the_first_prompt_after_a_restart_hits(toy_engine, prompts, serve, address, monkeypatch):
    """B396: an idle engine has registered with the new server, and what is on its disk is loaded."""
    from qkvault.integrations.vllm import links

    monkeypatch.setattr(links, "_PING_SECONDS", 0.05)
    prompt = prompts(300)
    with serve():
        engine = toy_engine(settings={"qkvault.address": address})
        engine.ask(prompt)
    for number in (1, 2):
        with serve() as server:
            until(lambda: roles_at(server) == ROLES)
            engine.forget_own_prefixes()
            engine.ask(prompt)
            assert len(engine.loads_of(f"ask-{number}")[0].block_ids) == 18
            engine.assert_texts()
    assert engine.violations == []
