"""An engine whose store is behind a network that has become slow: a step is kept waiting so long, and no longer."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack, suppress

import pytest

pytestmark = pytest.mark.vllm

LOAD_SECONDS = 0.5
DRIP_SECONDS = 0.02


class Network:
    """Between clients and a server: bytes pass, or only a few of those to clients when it ``is_slow``."""

    def __init__(self, address, stack):
        self._target = address.removeprefix("tcp://").rsplit(":", 1)
        self._stack = stack
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.is_slow = False
        self._ends = [self._listener]
        self._threads = []
        self._start(self._accept)
        stack.callback(self._close)

    def _start(self, run, *args):
        self._threads.append(threading.Thread(target=run, args=args))
        self._threads[-1].start()

    def _accept(self):
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((self._target[0], int(self._target[1])))
                self._ends += [client, server]
                self._start(self._pass, client, server, False)
                self._start(self._pass, server, client, True)

    def _pass(self, source, sink, to_client):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                while data and to_client and self.is_slow and len(data) > 1000:
                    sink.sendall(data[:10])
                    data = data[10:]
                    time.sleep(DRIP_SECONDS)
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _close(self):
        self.is_slow = False
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()


@pytest.fixture
def network():
    from qkvault.config import load
    from qkvault.server.server import Server

    settings = {"listen": "tcp://127.0.0.1:0", "ram_bytes": 16 << 20, "prefault": False, "chunk_size": 64}
    with ExitStack() as stack:
        server = Server(load(env={}, cli=settings))
        stack.callback(server.close)
        yield Network(server.addresses[0], stack)


def test_a_load_that_drips_ends_at_its_deadline(toy_engine, prompts, network):
    """B390: the step goes on after ``load_deadline_seconds``, and the tokens are computed."""
    engine = toy_engine(
        settings={
            "qkvault.address": network.address,
            "qkvault.load_deadline_seconds": LOAD_SECONDS,
            "qkvault.timeout_seconds": 5,
        }
    )
    prompt = prompts(300)
    engine.ask(prompt)
    engine.forget_own_prefixes()
    network.is_slow = True
    started = time.monotonic()
    engine.ask(prompt)
    assert LOAD_SECONDS <= time.monotonic() - started < LOAD_SECONDS + 4.0
    assert len(engine.loads_of("ask-1")[0].block_ids) == 18
    network.is_slow = False
    engine.assert_texts()
    assert engine.violations == []
