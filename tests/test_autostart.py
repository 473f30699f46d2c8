"""Autostart: of many engines that find no server one starts it, and it goes on when they have gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from qkvault import autostart
from qkvault.config import Config
from qkvault.connecting import open_client
from qkvault.errors import ConfigError, Unavailable

CHILD = """
import sys
from qkvault import autostart
from qkvault.config import Config
from qkvault.connecting import open_client

config = Config(address=sys.argv[1], autostart=True, ram_bytes=1 << 22, prefault=False)
autostart.ensure_server(config)
client = open_client(config, "child")
print(client.pool.capacity_bytes, flush=True)
"""


@pytest.fixture
def address(tmp_path):
    """An address whose servers are ended after the test."""
    address = f"unix://{tmp_path}/s"
    yield address
    for process in servers_at(address):
        process.kill()
        process.wait(10)


def servers_at(address):
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with suppress(psutil.Error):
            if address in (process.info["cmdline"] or []) and "serve" in process.info["cmdline"]:
                found.append(process)
    return found


def test_of_many_that_start_at_a_time_one_starts_a_server(address):
    """B270: all use it, with the settings of the first; it outlives them, and one that comes later finds it."""
    command = [sys.executable, "-c", CHILD, address]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [child.communicate(timeout=60)[0] for child in children] == [f"{1 << 22}\n"] * 4
    (server,) = servers_at(address)
    assert server.ppid() != os.getpid()
    autostart.ensure_server(Config(address=address, autostart=True))
    assert [process.pid for process in servers_at(address)] == [server.pid]


def test_a_server_that_was_killed_is_started_again(address):
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


def test_a_server_that_cannot_start_says_why(address):
    """B270: at once, with its last words and where the rest of them is."""
    config = Config(address=address, autostart=True, ram_bytes=1 << 50)
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"the pool needs .* \(all of it in .*s\.log\)"):
        autostart.ensure_server(config)
    assert time.monotonic() - started < 20


def test_only_servers_of_this_machine_are_started():
    """B270: what another machine runs is not ours to start."""
    with pytest.raises(ConfigError, match="start that server yourself"):
        autostart.ensure_server(Config(address="tcp://10.0.0.1:9400", autostart=True))
