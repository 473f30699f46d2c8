"""A link: whoever uses it never waits for a store that is away, and has it back soon after it came back."""

from __future__ import annotations

import threading
import time
from contextlib import closing, contextmanager

import pytest

from qkvault.client import StoreClient
from qkvault.errors import Unavailable
from qkvault.link import Link
from qkvault.testing.transport_contract import find, make_driver, read, save
from qkvault.wire.messages import Instance
from qkvault.wire.server import SocketServer
from qkvault.wire.sockets import SocketTransport

SOON_SECONDS = 0.2  # far less than any timeout here
INSTANCE = Instance("engine", "worker", "model")


@contextmanager
def serving(address, epoch=1):
    with closing(make_driver()) as driver, closing(SocketServer(driver, driver.pool, address, epoch=epoch)):
        yield driver


def until(holds):
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.001)


@pytest.fixture
def address(tmp_path):
    return f"unix://{tmp_path}/s"


@pytest.fixture
def link(address):
    with closing(Link(lambda: StoreClient(SocketTransport(address, "test")), INSTANCE, ping_seconds=0.02)) as link:
        yield link


def test_a_store_that_is_there_is_used_from_the_first_call_on(address, link):
    """The first call connects and registers; later ones give the same session."""
    with serving(address):
        client = link.session()
        assert link.session() is client
        assert [each.instance for each in client.status().instances] == [INSTANCE]


def test_while_the_store_is_away_nobody_waits(link):
    """B97: every call raises at once, the first one too where nobody listens."""
    started = time.monotonic()
    for _ in range(1000):
        with pytest.raises(Unavailable, match="no store answers"):
            link.session()
    assert time.monotonic() - started < SOON_SECONDS


def test_a_store_that_comes_is_found(address, link):
    """B97: by the link's own thread, and registered before it is used."""
    with pytest.raises(Unavailable):
        link.session()
    with serving(address):
        until(lambda: link.is_up)
        assert [each.instance for each in link.session().status().instances] == [INSTANCE]


def test_a_restart_is_noticed_with_the_next_call(address, link):
    """B104, LIVE-03: the next call fails, and soon a new session of the new store is there, registered again."""
    with serving(address):
        first = link.session()
        assert save(first, "aa") == 1
    with serving(address, epoch=2):
        with pytest.raises(Unavailable) as caught:
            first.status()
        link.lost(caught.value)
        until(lambda: link.is_up)
        second = link.session()
        assert second is not first
        assert find(second, "aa").lease_id == 0
        assert save(second, "aa") == 1
        assert read(second, find(second, "aa"), "aa") == 32
        assert [each.instance for each in second.status().instances] == [INSTANCE]


def test_a_session_is_not_ended_before_its_owner_says_so(address, link):
    """He may still be copying: until ``lost`` the store keeps its slots for it, though pings have failed long ago."""
    with serving(address) as driver:
        client = link.session()
        client._transport._stream.shutdown()
        until(lambda: not client._transport._is_usable)
        assert link.session() is client
        link.lost(Unavailable("seen"))
        until(lambda: link.is_up and link.session() is not client)
        driver.check()


def test_an_instance_that_was_forgotten_registers_again(address, link):
    """LIVE-04: silence costs a place on the register, and the next sign of life gets it back."""
    with serving(address) as driver:
        client = link.session()
        for session in driver._sessions._sessions.values():
            session.instance = None
        until(lambda: client.status().instances)


def test_a_link_that_is_lost_twice_looks_once(address, link):
    """Whoever reports a loss while there is no session changes nothing."""
    with serving(address):
        link.session()
        for _ in range(3):
            link.lost(Unavailable("again"))
        until(lambda: link.is_up)
        assert sum(thread.name == "qkvault-link" for thread in threading.enumerate()) == 1


def test_a_link_closes_whether_or_not_the_store_is_there(address):
    """LIVE-09: at once, and twice is fine."""
    for serves in (True, False):
        link = Link(lambda: StoreClient(SocketTransport(address, "test")), ping_seconds=0.02)
        if serves:
            with serving(address):
                link.session()
                link.close()
        else:
            with pytest.raises(Unavailable):
                link.session()
        started = time.monotonic()
        link.close()
        link.close()
        assert time.monotonic() - started < SOON_SECONDS
