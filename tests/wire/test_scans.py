"""While tiers are scanned: who asks for what they may hold waits for it, on his own connection and not on others'."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest

from qkvault.testing import DictTier, WrapperTier
from qkvault.testing.store_model import ROOT, checks_of, keys_of
from qkvault.testing.transport_contract import WAIT_SECONDS, find, make_driver, prompt, read, save, until
from qkvault.testing.transport_contract import connect as connect_inproc
from qkvault.wire import codec
from qkvault.wire import messages as m

FIND_SECONDS = 0.2


class Slow(WrapperTier):
    """Holds ``aabb`` from an earlier run. Its scan ends, and ``find`` answers, when the test says so."""

    def __init__(self):
        super().__init__(DictTier())
        with closing(make_driver(self.inner)) as driver:
            save(connect_inproc(driver), "aabb")
            assert driver.drain(WAIT_SECONDS)
            images = dict(self.inner.images)
        self.inner.images = images  # close() has emptied it
        self.may_end, self.may_answer, self.is_asked = threading.Event(), threading.Event(), threading.Semaphore(0)
        self.find_seconds = 0.0
        self.num_asked = 0

    def scan(self):
        found = list(self.inner.scan())
        assert self.may_end.wait(WAIT_SECONDS)
        yield from found

    def find(self, keys):
        self.num_asked += 1
        self.is_asked.release()
        assert self.may_answer.wait(WAIT_SECONDS)
        time.sleep(self.find_seconds)
        return [chunk for batch in self.inner.scan() for chunk in batch if chunk.key in keys]


@pytest.fixture
def tier():
    return Slow()


@pytest.fixture
def driver(tier):
    """One whose tier is being scanned until the test has ended."""
    with closing(make_driver(tier)) as driver:
        yield driver
        tier.may_answer.set()
        tier.may_end.set()
        assert driver.drain(WAIT_SECONDS)
        driver.check()


@pytest.fixture
def patient(monkeypatch):
    """Questions are waited for as long as it takes."""
    monkeypatch.setattr("qkvault.store.scan._EARLY_SECONDS", WAIT_SECONDS)


def in_thread(function, *args):
    """The thread, and the list that what ``function`` returns will be in."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*args)))
    thread.start()
    return thread, results


def hit(client):
    found = find(client, "xx")
    assert read(client, found, "xx") == 32
    client.release(found.lease_id)


def lookup_frame(word, sequence):
    chunks = prompt(word)
    return codec.encode(m.Lookup(ROOT, keys_of(chunks), checks_of(chunks)), sequence, 0)


def test_a_question_to_a_tier_does_not_stop_the_answers_to_others(patient, tier, connect):
    """B481: others are answered while the tier reads, and who has asked gets what it holds."""
    one, other = connect(), connect()
    tier.may_answer.set()
    assert save(other, "xx") == 1
    tier.may_answer.clear()
    while tier.is_asked.acquire(blocking=False):
        pass
    thread, located = in_thread(find, one, "aabb")
    assert tier.is_asked.acquire(timeout=WAIT_SECONDS)
    for _ in range(100):
        hit(other)
    assert located == []
    tier.may_answer.set()
    thread.join(WAIT_SECONDS)
    assert read(one, one.wait(located[0], WAIT_SECONDS, time.monotonic), "aabb") == 64


def test_cold_lookups_of_one_do_not_slow_down_the_hits_of_another(tier, connect):
    """B481: where a question takes 0.2 s, and each hit waited for half of one on average."""
    one, other = connect(), connect()
    tier.may_answer.set()
    assert save(other, "xx") == 1
    tier.find_seconds = FIND_SECONDS
    words = [letter * 2 for letter in "bcdefgh"]
    thread, located = in_thread(lambda: [find(one, word).lease_id for word in words])
    num_hits, began = 0, time.monotonic()
    while thread.is_alive():
        hit(other)
        num_hits += 1
    assert located == [[0] * len(words)]
    assert time.monotonic() - began > FIND_SECONDS * len(words) * 0.9  # the other was asked, and waited
    assert num_hits > 20 * len(words)


def test_what_comes_behind_a_question_is_answered_after_it(patient, tier, welcomed, receive):
    """B481: the replies of one connection are in order, whatever is sent meanwhile."""
    plain = welcomed()
    plain.sendall(lookup_frame("aabb", 2) + codec.encode(m.Ping(), 3, 0) + codec.encode(m.Ping(), 4, 0)[:7])
    assert tier.is_asked.acquire(timeout=WAIT_SECONDS)
    plain.sendall(codec.encode(m.Ping(), 4, 0)[7:])
    plain.settimeout(0.05)
    with pytest.raises(TimeoutError):
        plain.recv(1)
    plain.settimeout(WAIT_SECONDS)
    tier.may_answer.set()
    replies = [receive(plain) for _ in range(3)]
    assert [head.sequence for head, _ in replies] == [2, 3, 4]
    located, *pings = (reply for _, reply in replies)
    assert len(located.ready) + located.num_pending == 2
    assert pings == [m.Done(0), m.Done(0)]


def test_a_disk_that_hangs_is_waited_for_once(monkeypatch, tier, connect, server):
    """B389: for a moment, by who asked in it; then nobody asks or waits until it answers."""
    monkeypatch.setattr("qkvault.store.scan._EARLY_SECONDS", 0.05)
    one, other = connect(), connect()
    began = time.monotonic()
    assert find(one, "aabb").lease_id == 0
    assert time.monotonic() - began >= 0.05
    monkeypatch.setattr("qkvault.store.scan._EARLY_SECONDS", 0.0)  # the same question is still late
    for client in (one, other) * 3:
        assert find(client, "aabb").lease_id == 0
    assert tier.num_asked == 1
    tier.may_answer.set()
    until(lambda: one.status().media[1].num_chunks == 2)


def test_who_goes_while_he_waits_leaves_nothing(patient, tier, connect, welcomed, server):
    """B481: neither a session, nor a server that is busy with him until the tier answers."""
    client = connect()
    plain = welcomed()
    plain.sendall(lookup_frame("aabb", 2))
    assert tier.is_asked.acquire(timeout=WAIT_SECONDS)
    looks = []
    look = server._look
    server._look = lambda events: (looks.append(events), look(events))
    plain.close()
    time.sleep(0.3)
    assert 3 < len(looks) < 100  # it looks now and then
    tier.may_answer.set()
    until(lambda: client.status().num_sessions == 1)
    assert client.status().num_leases == 0


def test_a_server_closes_while_somebody_waits(patient, tier, server, welcomed, driver):
    """B481: at once."""
    welcomed().sendall(lookup_frame("aabb", 2))
    assert tier.is_asked.acquire(timeout=WAIT_SECONDS)
    server.close()
    tier.may_answer.set()
    assert driver._sessions.instances(0.0, lambda _: 0) == ()
    assert len(driver._sessions) == 0
