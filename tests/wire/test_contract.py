"""Every transport keeps the contract."""

from __future__ import annotations

from contextlib import closing, contextmanager

import pytest

from qkvault.testing.transport_bytes import TransportBytesContract
from qkvault.testing.transport_contract import TransportContract
from qkvault.wire.inproc import InprocTransport
from qkvault.wire.remote import RemoteTransport
from qkvault.wire.server import SocketServer
from qkvault.wire.sockets import SocketTransport


class Inproc:
    @contextmanager
    def serve(self, driver, folder):
        yield lambda: InprocTransport(driver, driver.pool, driver.wait_change, "test")


class Unix:
    @contextmanager
    def serve(self, driver, folder):
        address = f"unix://{folder}/s"
        with closing(SocketServer(driver, driver.pool, address, epoch=7)):
            yield lambda: SocketTransport(address, "test", timeout_seconds=20.0)


class Tcp:
    @contextmanager
    def serve(self, driver, folder):
        with closing(SocketServer(driver, driver.pool, "tcp://127.0.0.1:0", epoch=7, token="sesame")) as server:
            yield lambda: RemoteTransport(server.address, "test", timeout_seconds=20.0, token="sesame")


class Tls:
    @pytest.fixture(autouse=True)
    def ends(self, tls):
        self.tls = tls

    @contextmanager
    def serve(self, driver, folder):
        address, token = "tcp://127.0.0.1:0", "sesame"
        with closing(SocketServer(driver, driver.pool, address, epoch=7, token=token, tls=self.tls.server)) as server:
            yield lambda: RemoteTransport(
                server.address, "test", timeout_seconds=20.0, token=token, tls=self.tls.client
            )


class TestInprocTransport(Inproc, TransportContract):
    pass


class TestInprocBytes(Inproc, TransportBytesContract):
    pass


class TestUnixTransport(Unix, TransportContract):
    pass


class TestUnixBytes(Unix, TransportBytesContract):
    pass


class TestTcpTransport(Tcp, TransportContract):
    pass


class TestTcpBytes(Tcp, TransportBytesContract):
    pass


class TestTlsTransport(Tls, TransportContract):
    pass


class TestTlsBytes(Tls, TransportBytesContract):
    pass
