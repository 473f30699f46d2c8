"""Engines that are told to start their server: the first one does, all share it, and it outlives them."""

from __future__ import annotations

import signal
from contextlib import closing
from pathlib import Path

import pytest

from qkvault.config import Config
from qkvault.connecting import open_client
from qkvault.errors import Unavailable
from qkvault.testing.transport_contract import until

pytestmark = pytest.mark.vllm

ROLES = ["scheduler", "worker"]


@pytest.fixture
def start(address, toy_engine, tmp_path):  # the engines end first, so that none starts a server again
    """Starts engines that start their server, one with a disk, if there is none."""
    settings = {"qkvault.address": address, "qkvault.autostart": True, "qkvault.disk_path": str(tmp_path / "disk")}
    return lambda: toy_engine(settings=settings)


def roles_at(address):
    try:
        with closing(open_client(Config(address=address, timeout_seconds=20.0), "test")) as client:
            return sorted(each.instance.role for each in client.status().instances)
    except Unavailable:
        return None


def num_loaded(engine, prompt):
    """How many tokens of ``prompt`` the engine loads when it is asked."""
    engine.forget_own_prefixes()
    request = engine.ask(prompt)
    return sum(len(op.block_ids) for op in engine.loads_of(request.request_id)) * 16


def test_engines_start_one_server_and_share_it(start, prompts, address, servers_at):
    """B465: with the settings of the first, such as its RAM and its disk; what one has computed the other hits."""
    one, other = start(), start()
    (server,) = servers_at(address)
    assert server.cmdline()[3] == "serve"
    assert roles_at(address) == sorted(2 * ROLES)
    with closing(open_client(Config(address=address, timeout_seconds=20.0), "test")) as client:
        assert client.pool.capacity_bytes == 4 << 20
        assert [medium.name for medium in client.status().media] == ["ram", "disk"]
    prompt = prompts(300)
    assert [num_loaded(engine, prompt) for engine in (one, other, one)] == [0, 288, 288]
    assert one.violations == other.violations == []


def test_the_server_stays_when_its_engines_go_and_ends_when_told(start, prompts, address, servers_at):
    """B465: who comes later hits at once; SIGTERM ends it with code 0, and its socket is gone."""
    prompt = prompts(300)
    engine = start()
    engine.ask(prompt)
    (server,) = servers_at(address)
    engine.close()
    until(lambda: roles_at(address) == [])
    later = start()
    assert num_loaded(later, prompt) == 288
    later.close()
    assert [process.pid for process in servers_at(address)] == [server.pid]
    server.send_signal(signal.SIGTERM)
    assert server.wait(30) == 0
    assert not Path(address.removeprefix("unix://")).exists()


def test_an_engine_starts_its_server_again(start, prompts, address, monkeypatch, servers_at):
    """B465, B398: one that was killed; the engine is registered anew, and hits what is on disk."""
    from qkvault.integrations.vllm import links

    monkeypatch.setattr(links, "_PING_SECONDS", 0.05)
    prompt = prompts(300)
    engine = start()
    engine.ask(prompt)
    (first,) = servers_at(address)
    with closing(open_client(Config(address=address, timeout_seconds=20.0), "test")) as client:
        until(lambda: client.status().counters["stored.disk"] == 5)
    first.send_signal(signal.SIGKILL)
    until(lambda: first.pid not in [process.pid for process in servers_at(address)])
    until(lambda: roles_at(address) == ROLES)
    assert num_loaded(engine, prompt) == 288
    engine.assert_texts()
    assert engine.violations == []
