"""Clients of a server in a process of its own: one that is killed, one that ends, and one whose server is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing

import psutil
import pytest

from qkvault.client import StoreClient
from qkvault.errors import DeadlineExceeded, Unavailable
from qkvault.link import Link
from qkvault.testing.transport_contract import find, until
from qkvault.wire.messages import Instance
from qkvault.wire.sockets import SocketTransport

INSTANCE = Instance("engine", "worker", "model")
TIMEOUT_SECONDS = 0.3
BACK_SECONDS = 2.0  # after that a server that is well again is used again
MISS_SECONDS = 0.02  # 99 of 100 misses are faster, on a machine that others use as well; one takes microseconds
EXIT_SECONDS = 10.0  # 2 on a machine of one's own
# An engine of that name: it is told when to connect, reserves a chunk, and has never closed anything when it ends.
ENGINE = """
import os, sys
from qkvault.client import StoreClient
from qkvault.link import Link
from qkvault.testing.transport_contract import prompt
from qkvault.wire.messages import Instance
from qkvault.wire.sockets import SocketTransport

address = sys.argv[1]
print("imported", flush=True)
sys.stdin.readline()
instance = Instance("engine", "worker", "model", pid=os.getpid())
link = Link(lambda: StoreClient(SocketTransport(address, "engine", timeout_seconds=20.0)), instance, ping_seconds=0.01)
outcomes = link.session().reserve([prompt("aa")[0].new()]).outcomes
print("reserved", outcomes[0].value, flush=True)
sys.stdin.readline()
print("ends", flush=True)
"""


class Engine:
    """A process of ``ENGINE``."""

    def __init__(self, address):
        self._process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        assert self.hear() == "imported"

    def hear(self):
        return self._process.stdout.readline().strip()

    def tell(self):
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def connect(self):
        self.tell()
        return self.hear()

    def end(self, timeout_seconds=None):
        return self._process.wait(timeout_seconds)

    def close(self):
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


@pytest.fixture
def server(start):
    return start("--set", "prefault=false").wait_ready()


def test_an_engine_that_is_killed_registers_again_at_once(server, connect):
    """B473: under the same name, beside nobody, and what it held is free."""
    client = connect(server.address)
    with closing(Engine(server.address)) as first, closing(Engine(server.address)) as second:
        assert first.connect() == "reserved reserved"
        assert [each.instance.pid for each in client.status().instances] == [first.pid]
        os.kill(first.pid, signal.SIGKILL)
        first.end()
        killed = time.monotonic()
        assert second.connect() == "reserved reserved"
        assert [each.instance.pid for each in client.status().instances] == [second.pid]
        assert time.monotonic() - killed < BACK_SECONDS
        assert client.status().num_leases == 1
        client.check()


@pytest.mark.parametrize("is_stopped", [False, True], ids=["well", "stopped"])
def test_an_interpreter_with_a_connected_client_ends(server, is_stopped):
    """B474: though nobody has closed it, and whether or not its server answers."""
    with closing(Engine(server.address)) as engine:
        assert engine.connect() == "reserved reserved"
        if is_stopped:
            server.send(signal.SIGSTOP)
        engine.tell()
        assert engine.hear() == "ends"
        assert engine.end(EXIT_SECONDS) == 0


class Owner:
    """Asks a link for a chunk again and again, and keeps how long each answer took."""

    def __init__(self, link):
        self._link = link
        self.num_late = 0

    def ask(self):
        """Whether the store has answered."""
        try:
            find(self._link.session(), "aa")
        except Unavailable as error:
            self.num_late += isinstance(error, DeadlineExceeded)
            self._link.lost(error)
            return False
        return True

    def misses_of(self, seconds):
        """The seconds that each of many misses took, in order of length."""
        took, end = [], time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.perf_counter()
            assert not self.ask()
            took.append(time.perf_counter() - began)
            time.sleep(0.001)
        return sorted(took)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_calls_are_fast_misses_while_a_server_is_stopped_or_gone(start, server, number):
    """B475: one of them waits for the timeout, if any; it is used again soon after it is well."""

    def connect():
        return StoreClient(SocketTransport(server.address, "test", timeout_seconds=TIMEOUT_SECONDS))

    link = Link(connect, INSTANCE, ping_seconds=5.0, timeout_seconds=TIMEOUT_SECONDS)
    with closing(link):
        owner = Owner(link)
        assert owner.ask()
        server.send(number)
        if number is signal.SIGKILL:
            server.wait()
        else:
            until(lambda: psutil.Process(server.pid).status() == psutil.STATUS_STOPPED)
        took = owner.misses_of(3.0)
        assert took[len(took) * 99 // 100] < MISS_SECONDS
        assert took[-1] < TIMEOUT_SECONDS + MISS_SECONDS * 10
        assert owner.num_late <= (number is signal.SIGSTOP)  # none, if a sign of life was what waited
        if number is signal.SIGSTOP:
            server.send(signal.SIGCONT)
        else:
            start("--set", "prefault=false").wait_ready()
        well = time.monotonic()
        until(owner.ask)
        assert time.monotonic() - well < BACK_SECONDS
