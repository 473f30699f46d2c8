"""A served store, and the means to speak to it without a client."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, closing, suppress

import pytest

from qkvault.client import StoreClient
from qkvault.testing import DictTier, transport_contract
from qkvault.testing.transport_contract import WAIT_SECONDS, make_driver
from qkvault.wire import codec
from qkvault.wire import messages as m
from qkvault.wire.server import SocketServer
from qkvault.wire.sockets import SocketTransport

EPOCH = 7


@pytest.fixture
def path(tmp_path):
    return tmp_path / "s"


@pytest.fixture
def address(path):
    return f"unix://{path}"


@pytest.fixture
def driver():
    with closing(make_driver(DictTier(), lease_seconds=600.0)) as driver:
        yield driver


@pytest.fixture
def server(driver, address):
    with closing(SocketServer(driver, driver.pool, address, epoch=EPOCH)) as server:
        yield server


@pytest.fixture
def connect(server, address):
    """Makes clients of the server; they are closed after the test."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(
            closing(StoreClient(SocketTransport(address, "test", timeout_seconds=WAIT_SECONDS)))
        )


@pytest.fixture
def client(connect):
    return connect()


@pytest.fixture
def raw(server, path):
    """Makes plain sockets to the server."""
    with ExitStack() as stack:

        def make():
            plain = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            plain.connect(str(path))  # waits for a place in the queue, as long as there is no timeout
            plain.settimeout(WAIT_SECONDS)
            return plain

        yield make


@pytest.fixture
def welcomed(raw):
    """Makes plain sockets on which the hello has been said and answered."""

    def make():
        plain = raw()
        plain.sendall(codec.encode(m.Hello(m.PROTOCOL_VERSION, "raw"), 1, 0))
        receive(plain)
        return plain

    return make


def receive(plain):
    """One reply, with its head; what comes after it stays where it is."""
    data, end = b"", codec.HEAD.size
    while len(data) < end:
        data += plain.recv(end - len(data)) or pytest.fail("the connection ended")
        if len(data) == codec.HEAD.size:
            end += codec.decode_head(data).body_bytes
    return codec.decode_head(data), codec.decode_reply(data[codec.HEAD.size :])


@pytest.fixture(name="receive")
def _receive():
    """One reply of a plain socket, with its head."""
    return receive


@pytest.fixture
def ask():
    """Send bytes on a plain socket, and receive a reply."""

    def ask(plain, frame):
        plain.sendall(frame)
        return receive(plain)[1]

    return ask


@pytest.fixture
def is_cut_off():
    """Whether the server has closed a plain socket."""

    def is_cut_off(plain):
        try:
            while plain.recv(65536):
                pass
        except ConnectionResetError:
            pass
        except TimeoutError:
            return False
        return True

    return is_cut_off


@pytest.fixture
def until():
    """Wait for a condition."""

    return transport_contract.until


class FakeServer:
    """Welcomes one client with a memory of its own, then runs a script: a function of the connection."""

    def __init__(self, path, descriptor, script, *, welcome=None):
        self._descriptor = descriptor
        self._script = script
        self._welcome = welcome or m.Welcome(m.PROTOCOL_VERSION, 4096)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self.ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        connection, _ = self._listener.accept()
        with connection:
            if self._welcome != "none":
                connection.recv(65536)
                frame = codec.encode(self._welcome, 1, EPOCH)
                if self._descriptor is None:
                    connection.sendall(frame)
                else:
                    socket.send_fds(connection, [frame], [self._descriptor])
            with suppress(OSError):  # the client has gone
                self._script(connection)
            self.ends.wait(WAIT_SECONDS)

    def close(self):
        self.ends.set()
        self._thread.join()
        self._listener.close()


@pytest.fixture
def fake_server(path, driver):
    """Makes servers that do what a script says after the welcome."""
    with ExitStack() as stack:

        def make(script=lambda _: None, *, has_pool=True, welcome=None):
            descriptor = driver.pool.descriptor if has_pool else None
            return stack.enter_context(closing(FakeServer(path, descriptor, script, welcome=welcome)))

        yield make
