"""Every transport keeps the contract."""

from __future__ import annotations

from contextlib import closing, contextmanager

from qkvault.testing.transport_contract import TransportContract
from qkvault.wire.inproc import InprocTransport
from qkvault.wire.sockets import SocketServer, SocketTransport


class TestInprocTransport(TransportContract):
    @contextmanager
    def serve(self, driver, folder):
        yield lambda: InprocTransport(driver, driver.pool, driver.wait_change, "test")


class TestSocketTransport(TransportContract):
    @contextmanager
    def serve(self, driver, folder):
        address = f"unix://{folder}/s"
        with closing(SocketServer(driver, driver.pool, address, epoch=7)):
            yield lambda: SocketTransport(address, "test", timeout_seconds=20.0)
