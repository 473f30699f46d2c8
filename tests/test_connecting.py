"""Sessions from settings: where a token goes, and what of a server's settings does not fit an engine."""

from __future__ import annotations

import time
from contextlib import closing

import pytest
from typer.testing import CliRunner

from qkvault.cli.app import app
from qkvault.config import load
from qkvault.connecting import address_of, default_address, misfits, open_client
from qkvault.errors import ConfigError, Unavailable
from qkvault.integrations.vllm.links import open_link
from qkvault.server.server import Server
from qkvault.testing.transport_contract import until
from qkvault.wire.messages import Instance, Welcome

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


@pytest.fixture
def serve(tmp_path):
    """Serves a store at the address that ``settings`` of an engine name, which has settings of its own."""
    address = f"unix://{tmp_path}/s"

    def serve(**settings):
        told = {"listen": address, "ram_bytes": 1 << 20, "prefault": False, **settings}
        return closing(Server(load(env={}, cli=told)))

    serve.address = address
    return serve


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if "server_does_not_fit" in record.getMessage()]


@pytest.mark.parametrize(
    ("servers", "engines", "why"),
    [
        ({"chunk_size": 64}, {}, "chunk_size=256 here, 64 at the server"),
        ({}, {"hash_algorithm": "blake3"}, "hash_algorithm=blake3 here, sha256 at the server"),
        ({"lease_seconds": 15}, {"load_deadline_seconds": 20}, "load_deadline_seconds=20 here, lease_seconds=15 at"),
    ],
)
def test_an_engine_is_told_what_does_not_fit(serve, caplog, servers, engines, why):
    """B472: by a link when it starts, and once however often it connects."""
    config = load(env={}, cli={"address": serve.address, **engines}).config
    with serve(**servers), closing(open_link(config, Instance("engine", "worker", "model"), None)) as link:
        assert [why in line for line in warnings_of(caplog)] == [True]
        link.lost(Unavailable("again"))
        until(lambda: link.is_up)
        assert len(warnings_of(caplog)) == 1


def test_what_fits_or_is_not_told_is_not_warned_of(serve, caplog):
    """B472: nor is an older server that does not say how long its leases live."""
    config = load(env={}, cli={"address": serve.address}).config
    with serve(), closing(open_link(config, Instance("engine", "worker", "model"), None)) as link:
        assert link.is_up
    assert warnings_of(caplog) == []
    assert list(misfits(config, Welcome(1, 4096))) == []


def test_an_engine_of_the_builder_is_told_too(serve, caplog):
    """B472: it has one session."""
    with serve(chunk_size=64), pytest.raises(AttributeError):  # there is no engine to be built of nothing
        engine(load(env={}, cli={"address": serve.address}).config)
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize(
    ("listen", "asked"),
    [
        ("tcp://0.0.0.0:9", "tcp://127.0.0.1:9"),
        ("tcp://[::]:9", "tcp://[::1]:9"),
        ("tcp://192.0.2.1:9", "tcp://192.0.2.1:9"),
        ("tcp://0.0.0.0:9,tcp://127.0.0.1:8", "tcp://127.0.0.1:8"),
        ("tcp://0.0.0.0:9,unix:///s", "unix:///s"),
        ("tcp://0.0.0.0:0", None),
    ],
)
def test_who_has_the_servers_own_settings_finds_it(listen, asked):
    """B555: also one that listens only beyond loopback; what is nearer comes first."""
    assert address_of(load(env={}, cli={"listen": listen}).config) == (asked or default_address())
