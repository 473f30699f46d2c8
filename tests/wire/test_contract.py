"""Every transport keeps the contract."""

from __future__ import annotations

from contextlib import closing, contextmanager

import pytest

pytest.register_assert_rewrite("qkvault.testing.transport_contract")

from qkvault.testing.transport_contract import TransportContract  # noqa: E402  # its asserts are rewritten at import
from qkvault.wire.inproc import InprocTransport  # noqa: E402  # stands with the one above
from qkvault.wire.sockets import SocketServer, SocketTransport  # noqa: E402  # stands with the one above


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
