"""A link: whoever uses it never waits for a store that is away, and has it back soon after it came back."""

from __future__ import annotations

import threading
import time
from contextlib import closing, contextmanager

import pytest

from qkvault import link as links
from qkvault.client import StoreClient
from qkvault.errors import DeadlineExceeded, Unavailable
from qkvault.link import Link
from qkvault.testing.transport_contract import find, make_driver, read, save, until
from qkvault.wire.messages import Instance, Lookup
from qkvault.wire.remote import RemoteTransport
from qkvault.wire.server import SocketServer
from qkvault.wire.sockets import SocketTransport

SOON_SECONDS = 0.2  # far less than any timeout here
TIMEOUT_SECONDS = 0.3  # of a server that is half mute
BACK_SECONDS = 2.0  # after that a store that is well again is used again
INSTANCE = Instance("engine", "worker", "model")


@contextmanager
def serving(address, epoch=1):
    with closing(make_driver()) as driver, closing(SocketServer(driver, driver.pool, address, epoch=epoch)):
        yield driver


def instances_of(driver):
    return [each.instance for each in driver._sessions.instances(0.0, lambda _: 0)]


@pytest.fixture
def address(tmp_path):
    return f"unix://{tmp_path}/s"


@pytest.fixture
def link(address):
    with closing(Link(lambda: StoreClient(SocketTransport(address, "test")), INSTANCE, ping_seconds=0.02)) as link:
        yield link


class Owner:
    """Asks again and again, as an engine does, and says what that cost."""

    def __init__(self, link):
        self._link = link
        self.num_late = 0
        self.waited_seconds = 0.0

    def ask(self):
        """Whether something is found."""
        started = time.monotonic()
        try:
            return find(self._link.session(), "aa").lease_id > 0
        except Unavailable as error:
            self.num_late += isinstance(error, DeadlineExceeded)
            self._link.lost(error)
            return False
        finally:
            self.waited_seconds += time.monotonic() - started

    def ask_for(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert not self.ask()
            time.sleep(0.005)


@pytest.fixture
def far(network):
    """A network before a server that has a chunk, and a link through it."""
    with (
        closing(make_driver()) as driver,
        closing(SocketServer(driver, driver.pool, "tcp://127.0.0.1:0", epoch=1)) as server,
    ):
        network = network(server.address)
        with closing(StoreClient(RemoteTransport(network.address, "test", timeout_seconds=20.0))) as client:
            save(client, "aa")

        def connect():
            return StoreClient(RemoteTransport(network.address, "test", timeout_seconds=TIMEOUT_SECONDS))

        with closing(Link(connect, INSTANCE, ping_seconds=5.0, timeout_seconds=TIMEOUT_SECONDS)) as link:
            yield network, link


def test_a_store_that_is_there_is_used_from_the_first_call_on(address, link):
    """The first call connects and registers; later ones give the same session."""
    with serving(address):
        client = link.session()
        assert link.session() is client
        assert [each.instance for each in client.status().instances] == [INSTANCE]


def test_while_the_store_is_away_nobody_waits(link):
    """B97: every call raises at once, the first one too where nobody listens."""
    took = []
    for _ in range(1000):
        started = time.monotonic()
        with pytest.raises(Unavailable, match="no store answers"):
            link.session()
        took.append(time.monotonic() - started)
    assert took[0] < SOON_SECONDS
    assert sorted(took)[990] < SOON_SECONDS / 100
    assert sum(took) < 5.0


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
        until(lambda: not client.is_usable)
        assert link.session() is client
        link.lost(Unavailable("seen"))
        until(lambda: link.is_up and link.session() is not client)
        driver.check()


def test_an_idle_link_follows_its_store(address, link):
    """B396: nobody asks anything, and the new store has its instance; the owner changes when he calls."""
    with serving(address):
        first = link.session()
    for epoch in (2, 3):
        with serving(address, epoch=epoch) as driver:
            until(lambda: link.is_superseded and instances_of(driver) == [INSTANCE])
            assert link.session() is first
    with serving(address, epoch=4) as driver:
        until(lambda: link.is_superseded and instances_of(driver) == [INSTANCE])
        link.lost(Unavailable("superseded"))
        assert (link.is_superseded, link.num_sessions) == (False, 2)
        assert save(link.session(), "aa") == 1
        assert link.session() is not first


def test_a_loss_goes_on_with_what_is_ready(address, link):
    """B396: whoever notices a restart by a failed call has the next session at once."""
    with serving(address):
        first = link.session()
    with serving(address, epoch=2):
        until(lambda: link.is_superseded)
        with pytest.raises(Unavailable) as caught:
            first.status()
        link.lost(caught.value)
        assert link.session().status().num_sessions == 1


def test_a_session_that_is_in_use_is_no_lost_one(address, link):
    """B396: a sign of life that gets no turn while the owner's call takes long says nothing of the store."""
    with serving(address) as driver:
        client = link.session()
        client._transport._timeout_seconds = 0.05
        with client._transport._lock:
            time.sleep(0.3)
            assert not link.is_superseded
            assert client.is_usable
        assert len(instances_of(driver)) == 1


def test_a_link_that_has_started_is_registered(address, link):
    """B397: before any call; where nobody listens it takes no time and raises nothing."""
    with serving(address) as driver:
        link.start()
        assert instances_of(driver) == [INSTANCE]
        first = link.session()
        assert instances_of(driver) == [INSTANCE]
        assert link.session() is first


def test_a_start_where_nobody_listens_is_none(address, link):
    """B397: the store is found when it comes."""
    started = time.monotonic()
    link.start()
    assert time.monotonic() - started < SOON_SECONDS
    with serving(address) as driver:
        until(lambda: instances_of(driver) == [INSTANCE])


def test_all_of_an_attempt_has_one_timeout(address):
    """B390: what it takes to connect is not left to register."""

    def connect():
        if tried:
            raise Unavailable
        tried.append(True)
        client = StoreClient(SocketTransport(address, "test", timeout_seconds=20.0))
        time.sleep(0.2)
        driver._lock.acquire()
        return client

    tried = []
    with serving(address) as driver, closing(Link(connect, INSTANCE, timeout_seconds=0.3)) as link:
        started = time.monotonic()
        try:
            link.start()
            assert 0.3 <= time.monotonic() - started < 2.0
            assert not link.is_up
        finally:
            driver._lock.release()


def test_a_successor_that_nobody_took_is_closed(address):
    """B396: with its link."""
    link = Link(lambda: StoreClient(SocketTransport(address, "test")), INSTANCE, ping_seconds=0.02)
    with serving(address):
        link.session()
    with serving(address, epoch=2) as driver:
        until(lambda: link.is_superseded)
        link.close()
        until(lambda: len(driver._sessions) == 0)


def test_a_store_that_is_gone_is_revived_by_the_links_own_thread(address):
    """B398: never by whoever calls; when an attempt has failed, and no more when the link is closed."""
    threads, over = [], []

    def revive(is_over):
        threads.append(threading.current_thread().name)
        over.append(is_over())

    link = Link(lambda: StoreClient(SocketTransport(address, "test")), ping_seconds=0.02, revive=revive)
    with serving(address):
        link.session()
        time.sleep(0.1)
        assert threads == []
    until(lambda: len(threads) >= 2)
    link.lost(Unavailable("gone"))
    with pytest.raises(Unavailable):
        link.session()
    link.close()
    count = len(threads)
    time.sleep(0.1)
    assert len(threads) == count
    assert set(threads) == {"qkvault-link"}
    assert over[0] is False


def test_a_server_that_answers_all_but_lookups_costs_one_timeout(far):
    """B470: it says hello and registers, again and again; its next call is the link's own, and waits for nobody."""
    network, link = far
    owner = Owner(link)
    assert owner.ask()
    network.loses = lambda request: isinstance(request, Lookup)
    owner.ask_for(3.0)
    assert owner.num_late == 1
    assert owner.waited_seconds < TIMEOUT_SECONDS + SOON_SECONDS
    network.loses = lambda _: False
    well = time.monotonic()
    until(owner.ask)
    assert time.monotonic() - well < BACK_SECONDS


def test_a_server_that_answers_only_short_questions_is_tried_less_and_less(far):
    """B470: the link's own lookup is answered, the owner's never: pauses double, and each costs one timeout."""
    network, link = far
    owner = Owner(link)
    network.loses = lambda request: isinstance(request, Lookup) and request.keys
    owner.ask_for(3.0)
    assert owner.num_late <= 3
    assert owner.waited_seconds < owner.num_late * TIMEOUT_SECONDS + SOON_SECONDS
    network.loses = lambda _: False
    until(owner.ask)


def test_timeouts_that_lie_far_apart_are_not_summed(far, monkeypatch):
    """B470: each costs the shortest pause."""
    network, link = far
    monkeypatch.setattr(links, "_FORGIVEN_SECONDS", 0.0)
    for _ in range(6):
        until(lambda: link.is_up or link.num_sessions == 0)
        link.session()
        link.lost(DeadlineExceeded("late"))
    lost = time.monotonic()
    until(lambda: link.is_up)
    assert time.monotonic() - lost < BACK_SECONDS
    assert network.address


def test_a_restart_ends_the_pause(address, link, monkeypatch):
    """B470: another life of the store owes nothing."""
    monkeypatch.setattr(links, "_FIRST_REST_SECONDS", 600.0)
    monkeypatch.setattr(links, "_MAX_REST_SECONDS", 600.0)
    with serving(address):
        link.session()
        link.lost(DeadlineExceeded("late"))
        time.sleep(0.3)
        with pytest.raises(Unavailable, match="did not answer in time"):
            link.session()
    with serving(address, epoch=2):
        began = time.monotonic()
        until(lambda: link.is_up)
        assert time.monotonic() - began < BACK_SECONDS


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
