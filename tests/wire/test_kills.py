"""Clients that are killed or stopped in the middle of a copy: nobody ever reads a byte of it, and the pool is whole.

QKV_KILLS=200 makes as many rounds of each.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import psutil
import pytest

from qkvault.image import key_in
from qkvault.testing.transport_contract import WAIT_SECONDS, connect, find, make_driver, prompt, read, save
from qkvault.wire.server import SocketServer

ROUNDS = int(os.environ.get("QKV_KILLS", "20"))
pytestmark = pytest.mark.timeout(300 + 5 * ROUNDS)
WORDS = ["aabbcc", "aabbdd", "xxyyz", "qq"]
AT_ONCE_SECONDS = 2.0  # on a machine that others use as well

# Forks a client for each line it is told. The client writes its headers first, and all else byte by byte: the worst
# that a client can do.
NURSERY = """
import os, random, sys, traceback
from qkvault.client import StoreClient
from qkvault.address import parse_address
from qkvault.config import load
from qkvault.connecting import tls_for
from qkvault.testing.transport_contract import find, prompt
from qkvault.wire.remote import RemoteTransport
from qkvault.wire.sockets import SocketTransport

ADDRESS, WORDS, PASSES, CA_PATH = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3]), sys.argv[4]

def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # at once: a line that is cut short would hide the next

def copy(client, word):
    chunks = prompt(word)
    reserved = client.reserve([chunk.new() for chunk in chunks])
    tell("reserved", reserved.lease_id)
    for chunk, offset in zip(chunks, reserved.offsets):
        if offset >= 0:
            image = client.pool.view(offset, chunk.new().image_bytes)
            whole = bytearray(len(image))
            chunk.write(memoryview(whole))
            image[:4096] = whole[:4096]
            image[4096:] = b"x" * (len(image) - 4096)
            for _ in range(PASSES):
                for at in range(4096, len(image)):
                    image[at] = whole[at]
    return reserved.lease_id

def work(seed):
    rng = random.Random(seed)
    make = SocketTransport if ADDRESS.startswith("unix") else RemoteTransport
    config = load(env={}, cli={"tls_ca_path": CA_PATH} if CA_PATH else {}).config
    tls = tls_for(config, parse_address(ADDRESS))
    client = StoreClient(make(ADDRESS, "victim", timeout_seconds=20.0, tls=tls))
    while True:
        word = rng.choice(WORDS)
        located = find(client, word)
        client.fetch(list(located.ready))
        lease_id = copy(client, word)
        tell("copied")
        tell("published", client.commit(lease_id))
        if rng.random() < 0.5:
            client.release(located.lease_id)

for line in sys.stdin:
    pid = os.fork()
    if not pid:
        try:
            work(int(line))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    tell("pid", pid)
    os.waitpid(pid, 0)
    tell("gone")
"""


class Nursery:
    """A process that starts clients, one at a time."""

    def __init__(self, served, words, *, num_passes):
        self.process = subprocess.Popen(
            [sys.executable, "-c", NURSERY, served.address, ",".join(words), str(num_passes), served.ca_path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def start(self, seed):
        """A new client's process id."""
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        return int(self.wait("pid"))

    def wait(self, word):
        """Read on until it has told ``word``; returns what stands behind it."""
        while line := self.process.stdout.readline():
            told, _, rest = line.strip().partition(" ")
            if told == word:
                return rest
            assert told != "gone", f"it ended before it told {word!r}"
        return pytest.fail("the nursery ended")

    def close(self):
        for child in psutil.Process(self.process.pid).children():
            child.kill()
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(WAIT_SECONDS)


@pytest.fixture(params=["unix", "tcp", "tls"])
def served(request, tmp_path):
    """A store with room for two prompts, where it is, and a client of this process."""
    tls = request.getfixturevalue("tls") if request.param == "tls" else SimpleNamespace(server=None, ca_path="")
    address = f"unix://{tmp_path}/s" if request.param == "unix" else "tcp://127.0.0.1:0"
    with (
        closing(make_driver(pool_bytes=6 * 8192, lease_seconds=60.0)) as driver,
        closing(SocketServer(driver, driver.pool, address, epoch=7, tls=tls.server)) as server,
        closing(connect(driver)) as client,
    ):
        yield SimpleNamespace(driver=driver, address=server.address, ca_path=tls.ca_path, client=client)
        driver.check()


def ready_bytes(driver):
    """What the chunks that may be read take."""
    return sum(-(-entry.image_bytes // 4096) * 4096 for entry in driver.manager.index if entry.state.value == "ready")


def test_nobody_reads_a_byte_of_a_client_that_is_killed(served):
    """B257, B490: whenever it dies, its session is gone at once, and the pool holds just what was committed."""
    driver, client = served.driver, served.client
    rng = random.Random(5)
    is_over, wrong, seen = threading.Event(), [], []

    def read_on():
        with closing(connect(driver, "reader")) as reader:
            while not is_over.is_set():
                for word in WORDS:
                    located = find(reader, word)
                    try:
                        seen.append(read(reader, located, word))
                    except AssertionError as error:
                        wrong.append(error)
                    reader.release(located.lease_id)
                time.sleep(0.002)

    def kill_one(nursery, number):
        # How long its session outlives it.
        pid = nursery.start(number)
        nursery.wait("reserved")
        time.sleep(rng.random() * 0.03)
        os.kill(pid, signal.SIGKILL)
        nursery.wait("gone")
        start = time.monotonic()
        while client.status().num_sessions > 2:
            assert time.monotonic() - start < WAIT_SECONDS
        with driver._lock:
            driver.manager.check()
            assert driver.pool.used_bytes == ready_bytes(driver)
            assert driver.manager.quarantine == {}
        return time.monotonic() - start

    thread = threading.Thread(target=read_on)
    with closing(Nursery(served, WORDS, num_passes=3)) as nursery:
        thread.start()
        try:
            slowest = max(kill_one(nursery, number) for number in range(ROUNDS))
        finally:
            is_over.set()
            thread.join()
    assert wrong == []
    assert max(seen) >= 32
    assert slowest < AT_ONCE_SECONDS
    for word in WORDS:
        save(client, word)
        located = find(client, word)
        assert read(client, located, word) == 16 * len(word)
        client.release(located.lease_id)


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
def test_a_client_that_is_stopped_loses_its_lease_and_harms_nobody(served, until, end):
    """B258, B490: its slots are nobody's until it confirms or dies; its late copy and its commit publish nothing."""
    driver, client = served.driver, served.client
    driver.manager.leases.lease_seconds = 0.3
    with closing(Nursery(served, ["aabbcc"], num_passes=1000)) as nursery:
        pid = nursery.start(1)
        nursery.wait("reserved")
        os.kill(pid, signal.SIGSTOP)
        until(lambda: client.status().num_leases == 0)
        (held,) = driver.manager.quarantine.values()
        slots = {offset for offset, _ in held}
        assert len(slots) == 3
        driver.check()
        save(client, "aabbcc")
        located = find(client, "aabbcc")
        assert read(client, located, "aabbcc") == 96
        assert not slots & {ref.offset for ref in located.ready}
        client.release(located.lease_id)
        driver.manager.leases.lease_seconds = 60.0
        os.kill(pid, end)
        if end is signal.SIGCONT:  # it copies on, and publishes
            assert nursery.wait("published") == "0"
        else:
            nursery.wait("gone")
        until(lambda: driver.manager.quarantine == {})
        driver.check()
        assert read(client, find(client, "aabbcc"), "aabbcc") == 96
        if end is signal.SIGCONT:
            os.kill(pid, signal.SIGKILL)
            nursery.wait("gone")
        until(lambda: client.status().num_sessions == 1)
        with driver._lock:
            assert driver.pool.used_bytes == ready_bytes(driver) == 3 * 8192
        assert all(key_in(driver.pool.view(at, 192)) in (bytes(48), b"x" * 48) for at in slots)
        assert prompt("aabbcc")[0].is_in(driver.pool.view(next(iter(find(client, "aabbcc").ready)).offset, 8192))
