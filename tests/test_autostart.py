"""Autostart: of many engines that find no server one starts it, and it goes on when they have gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from qkvault import autostart
from qkvault.address import parse_address
from qkvault.config import Config, load
from qkvault.connecting import open_client
from qkvault.errors import ConfigError, Unavailable
from qkvault.link import Link
from qkvault.wire.messages import Instance

CHILD = """
import sys
from qkvault import autostart
from qkvault.config import Config
from qkvault.connecting import open_client

config = Config(address=sys.argv[1], timeout_seconds=20.0, autostart=True, ram_bytes=1 << 22, prefault=False)
autostart.ensure_server(config)
client = open_client(config, "child")
print(client.pool.capacity_bytes, flush=True)
"""


def test_of_many_that_start_at_a_time_one_starts_a_server(address, servers_at):
    """B270: all use it, with the settings of the first; it outlives them, and one that comes later finds it."""
    command = [sys.executable, "-c", CHILD, address]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [child.communicate(timeout=60)[0] for child in children] == [f"{1 << 22}\n"] * 4
    (server,) = servers_at(address)
    assert server.ppid() != os.getpid()
    autostart.ensure_server(Config(address=address, autostart=True))
    assert [process.pid for process in servers_at(address)] == [server.pid]


def test_a_server_that_was_killed_is_started_again(address, servers_at):
    """B270: its socket's file is no server."""
    config = Config(address=address, autostart=True, ram_bytes=1 << 22, prefault=False)
    autostart.ensure_server(config)
    (first,) = servers_at(address)
    first.send_signal(signal.SIGKILL)
    first.wait(10)
    with pytest.raises(Unavailable):
        open_client(config, "test")
    autostart.ensure_server(config)
    (second,) = servers_at(address)
    assert second.pid != first.pid


def test_a_server_runs_nothing_of_the_engines_current_folder(address, servers_at, tmp_path, monkeypatch):
    """B513: whatever is called there as something that it imports; paths in its settings are those of the engine."""
    folder = tmp_path / "work"
    folder.mkdir()
    for name in ("typer", "json", "qkvault"):
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'run')!r}, 'w').close()\nraise SystemExit('not ours')"
        )
    monkeypatch.chdir(folder)
    autostart.ensure_server(
        Config(address=address, autostart=True, ram_bytes=1 << 22, prefault=False, disk_path="disk", disk_bytes=1 << 22)
    )
    assert len(servers_at(address)) == 1
    assert not (tmp_path / "run").exists()
    assert (folder / "disk").is_dir()


@pytest.fixture
def link(address):
    """A link to a server that it starts again, as an engine has it."""
    config = Config(address=address, autostart=True, ram_bytes=1 << 22, prefault=False)
    autostart.ensure_server(config)
    instance = Instance("engine", "worker", "model")
    with closing(
        Link(lambda: open_client(config, "test"), instance, ping_seconds=0.05, revive=autostart.Reviver(config))
    ) as link:
        link.start()
        yield link


def test_a_server_that_dies_later_is_started_by_who_needs_it(address, link, servers_at):
    """B398: by the link's own thread, though nobody calls; no caller waits, and the old one leaves no zombie."""
    for _ in range(2):
        (server,) = servers_at(address)
        server.send_signal(signal.SIGKILL)
        until(lambda: link.is_superseded)
        started = time.monotonic()
        link.lost(Unavailable("superseded"))
        told = link.session().status()
        assert time.monotonic() - started < 1.0
        assert [each.instance.role for each in told.instances] == ["worker"]
        assert [process.pid for process in servers_at(address)] != [server.pid]
    assert len(autostart._started & {child.pid for child in psutil.Process().children()}) == 1


def test_a_call_does_not_wait_for_a_server_that_is_being_started(address, link, servers_at):
    """B398: it fails at once, and what comes later is found."""
    (server,) = servers_at(address)
    server.send_signal(signal.SIGKILL)
    until(lambda: not link.session().is_usable or link.is_superseded)
    started = time.monotonic()
    link.lost(Unavailable("gone"))
    with suppress(Unavailable):
        link.session()
    assert time.monotonic() - started < 0.5
    until(lambda: link.is_up)


def test_a_server_that_cannot_be_started_again_is_tried_less_and_less(tmp_path, monkeypatch):
    """B398: no process a second, for ever."""
    monkeypatch.setattr(autostart, "_FIRST_PAUSE_SECONDS", 100.0)
    revive = autostart.Reviver(Config(address=f"unix://{tmp_path}/s", autostart=True, ram_bytes=1 << 50))
    revive(lambda: False)
    log = tmp_path / "s.log"
    said = log.stat().st_size
    assert said
    for _ in range(100):
        revive(lambda: False)
    assert log.stat().st_size == said


def test_the_log_of_a_server_that_is_started_again_and_again_does_not_grow_for_ever(tmp_path, monkeypatch):
    """B476: a long one is put aside at the next start, and the one before it is gone."""
    monkeypatch.setattr(autostart, "_FIRST_PAUSE_SECONDS", 0.0)
    log, old = tmp_path / "s.log", tmp_path / "s.log.old"
    revive = autostart.Reviver(Config(address=f"unix://{tmp_path}/s", autostart=True, ram_bytes=1 << 50))
    log.write_bytes(b"first\n")
    revive(lambda: False)
    assert log.read_bytes().startswith(b"first\n")
    assert not old.exists()
    for begin in (b"second\n", b"third\n"):
        log.write_bytes(begin.ljust(autostart._MAX_LOG_BYTES + 1))
        revive = autostart.Reviver(revive._config)
        revive(lambda: False)
        assert old.read_bytes().startswith(begin)
        assert b"the pool needs" in log.read_bytes()
    assert log.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.lock", "s.log", "s.log.old"]


def test_a_start_that_nobody_needs_any_more_is_not_waited_for(address):
    """B398: an engine that ends does not wait for it, nor one while another starts it."""
    config = Config(address=address, autostart=True, ram_bytes=1 << 22, prefault=False)
    started = time.monotonic()
    autostart.Reviver(config)(lambda: True)
    with autostart._turn(parse_address(address).path):
        autostart.Reviver(config)(lambda: False)
    assert time.monotonic() - started < 0.5
    until(lambda: autostart._answers(config))


@pytest.fixture
def fork():
    """Forks children that do nothing, as a data loader may between two batches; they end with the test."""
    pids = []

    def fork():
        pids.append(os.fork())
        if not pids[-1]:
            signal.pause()
            os._exit(0)

    yield fork
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_child_that_is_forked_during_a_start_is_in_nobodys_way(address, fork):
    """B514: it has the lock's descriptor for as long as it lives."""
    path = parse_address(address).path
    with autostart._turn(path) as is_ours:
        assert is_ours
        fork()
    with autostart._turn(path) as is_ours:
        assert is_ours


def test_an_engine_whose_turn_never_comes_says_who_has_it(address, monkeypatch):
    """B514: within the minute that a start may take; no process is started."""
    monkeypatch.setattr(autostart, "_START_SECONDS", 0.1)
    path = parse_address(address).path
    with autostart._turn(path), pytest.raises(ConfigError, match=rf"another process holds {path}\.lock"):
        autostart.ensure_server(Config(address=address, autostart=True))


def test_a_server_that_answers_is_enough_whoever_has_the_turn(address):
    """B514: an engine that comes while another one looks does not wait for it."""
    config = Config(address=address, autostart=True, ram_bytes=1 << 22, prefault=False)
    autostart.ensure_server(config)
    with autostart._turn(parse_address(address).path):
        autostart.ensure_server(config)


def test_a_server_that_has_ended_is_not_killed(address, monkeypatch):
    """Its number may be another process's by then."""
    killed = []
    monkeypatch.setattr(os, "kill", lambda *args: killed.append(args))
    with pytest.raises(ConfigError, match="the pool needs"):
        autostart.ensure_server(Config(address=address, autostart=True, ram_bytes=1 << 50))
    assert killed == []


def test_a_server_that_does_not_answer_in_time_is_killed(address, monkeypatch, servers_at):
    """B514: so that the next one finds the place free."""
    monkeypatch.setattr(autostart, "_START_SECONDS", 0.1)
    monkeypatch.setattr(autostart, "_MAIN", "import signal; signal.pause()")
    with pytest.raises(ConfigError, match=r"did not start \(no answer in time\): it said nothing"):
        autostart.ensure_server(Config(address=address, autostart=True))
    until(lambda: all(each.status() == psutil.STATUS_ZOMBIE for each in servers_at(address)))


def until(holds):
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def test_a_server_that_cannot_start_says_why(address):
    """B270: at once, with its last words and where the rest of them is."""
    config = Config(address=address, autostart=True, ram_bytes=1 << 50)
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"start \(exit code 2\): .*the pool needs .* \(all of it in .*s\.log\)"):
        autostart.ensure_server(config)
    assert time.monotonic() - started < 20


def test_a_server_that_was_killed_before_it_spoke_was_given_the_words_of_an_earlier_one(address, monkeypatch):
    """B564: what ended it is told, and that it said nothing."""
    Path(f"{parse_address(address).path}.log").write_text("server_stopped pid=1\n")
    monkeypatch.setattr(autostart, "_MAIN", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(ConfigError, match=r"did not start \(signal 9\): it said nothing"):
        autostart.ensure_server(Config(address=address, autostart=True))


def test_a_duration_that_is_very_short_kept_the_server_from_starting():
    """What is handed on is read as what was set."""
    config = load(env={}, cli={"drain_seconds": "50us", "lease_seconds": "90"}).config
    handed = [each for each in autostart._settings(config) if each != "--set"]
    assert load(env={}, cli=dict(each.split("=") for each in handed)).config == config


def test_only_servers_of_this_machine_are_started():
    """B270: what another machine runs is not ours to start."""
    with pytest.raises(ConfigError, match="start that server yourself"):
        autostart.ensure_server(Config(address="tcp://10.0.0.1:9400", autostart=True))
