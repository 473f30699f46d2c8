"""What a client sends where: a token goes to other machines through TLS only."""

from __future__ import annotations

import time

import pytest
from typer.testing import CliRunner

from qkvault.cli.app import app
from qkvault.config import load
from qkvault.connecting import open_client
from qkvault.errors import ConfigError, Unavailable
from qkvault.integrations.vllm.links import open_link
from qkvault.wire.messages import Instance

FAR = ["192.0.2.1", "[2001:db8::1]", "host.example", "0.0.0.0"]
NEAR = ["127.0.0.1", "127.1.2.3", "[::1]", "localhost"]


def config_of(host, **settings):
    told = {"address": f"tcp://{host}:1", "token": "geheim", "timeout_seconds": 0.05, **settings}
    return load(env={}, cli=told).config


def engine(config):
    pytest.importorskip("torch")
    from qkvault.builder import CacheEngineBuilder

    CacheEngineBuilder.get_or_create("far", config, None, [])  # a session comes first


def sdk(config):
    pytest.importorskip("torch")
    from qkvault.sdk import connect

    connect(config)


DOORS = {
    "client": lambda config: open_client(config, "test"),
    "connector": lambda config: open_link(config, Instance("engine", "worker", "model"), None),
    "engine": engine,
    "sdk": sdk,
}


@pytest.mark.parametrize("host", FAR)
def test_a_token_does_not_leave_the_machine_in_clear_text(host):
    """B471: it is refused at once, with what to set."""
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"clear text.*tls_ca_path.*insecure"):
        open_client(config_of(host), "test")
    assert time.monotonic() - started < 0.05


@pytest.mark.parametrize("door", DOORS)
def test_no_door_lets_it_out(door):
    """B471: nor the connector at its start, which waits for servers that are only away."""
    with pytest.raises(ConfigError, match="tls_ca_path"):
        DOORS[door](config_of("192.0.2.1"))


@pytest.mark.parametrize("command", [["status"], ["lookup", "1"], ["clear"], ["top", "--once"], ["doctor"]])
def test_no_command_lets_it_out(command, monkeypatch):
    """B471: also where the address is the command's own."""
    monkeypatch.setenv("QKVAULT_TOKEN", "geheim")
    monkeypatch.setenv("QKVAULT_TIMEOUT_SECONDS", "0.05")
    done = CliRunner().invoke(app, [*command, "--address", "tcp://192.0.2.1:1"])
    assert done.exit_code
    assert "tls_ca_path" in done.output + str(done.exception)


def test_a_certificate_that_is_none_stops_the_connector(tmp_path):
    """B471: at its start too, as all that is wrong with settings does."""
    with pytest.raises(ConfigError, match="tls_ca_path"):
        open_link(config_of("192.0.2.1", tls_ca_path=str(tmp_path)), Instance("engine", "worker", "model"), None)


def test_a_unix_socket_needs_none(tmp_path):
    """B471: what is set for other addresses does not matter there."""
    config = config_of("192.0.2.1", tls_ca_path=str(tmp_path))
    with pytest.raises(Unavailable):
        open_client(config, "test", address=f"unix://{tmp_path}/s")


@pytest.mark.parametrize("settings", [{"insecure": True}, {"token": ""}])
def test_on_request_it_goes_out_and_without_one_there_is_nothing_to_keep(settings):
    """B471: no store answers there; that is all."""
    with pytest.raises(Unavailable):
        open_client(config_of("192.0.2.1", **settings), "test")


@pytest.mark.parametrize("host", NEAR)
def test_on_this_machine_it_may_be_in_clear_text(host):
    """B471: nobody answers there."""
    with pytest.raises(Unavailable):
        open_client(config_of(host), "test")
