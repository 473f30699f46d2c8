"""A clear of more than goes at once: gone for everybody from the call on, and out of memory by and by."""

from __future__ import annotations

from contextlib import closing

import pytest

from qkvault.client import StoreClient
from qkvault.store import leaving
from qkvault.testing import DictTier
from qkvault.testing.transport_contract import WAIT_SECONDS, find, make_driver, save
from qkvault.wire import messages as m
from qkvault.wire.inproc import InprocTransport

SLICE = leaving._SLICE


@pytest.fixture
def slow(make_desk, monkeypatch):
    """Makes desks whose clears wait: nothing goes before it is told to."""

    def make(**options):
        desk = make_desk(**options)
        work_off = desk.store.work_off
        monkeypatch.setattr(desk.store, "work_off", lambda limit=0: work_off(limit))
        return desk

    return make


def test_what_waits_to_go_is_not_found_and_not_stored_again(slow, outcome):
    """B388: nor does what hangs on it count, whoever asks and however."""
    desk = slow(caps=[8])
    desk.save("aabb")
    desk.end_jobs()
    held = desk.lookup("aa")
    assert desk.store.clear() == 2
    desk.settle()
    assert desk.found("aabb") == 0
    assert not desk.match(0, "aabb", 0).ready
    assert desk.reserve("aabb").outcomes == outcome("BB")
    desk.assert_cache(ram="aa aabb")
    desk.store.work_off(2)
    desk.settle()
    desk.assert_cache(ram="aa")
    assert desk.read(held) == [("aa", 32)]
    desk.release(held)
    desk.end_jobs()
    desk.assert_cache(ram="", disk="")
    assert desk.reserve("aabb").outcomes == outcome("RR")


def test_what_is_evicted_before_its_turn_is_gone(slow):
    """B388: from RAM and from a tier; stored anew it stays."""
    desk = slow(slots=2, caps=[2])
    desk.save("aa")
    desk.save("bb")
    desk.end_jobs()
    desk.store.clear()
    desk.save("cc")
    desk.save("dd")
    desk.end_jobs()
    desk.assert_cache(ram="cc dd", disk="cc dd")
    desk.save("aa")
    desk.end_jobs()
    desk.store.work_off(9)
    desk.settle()
    desk.end_jobs()
    assert desk.found("aa") == 32


def test_a_hot_cache_that_is_on_again_keeps_what_has_not_gone(slow):
    """B388."""
    desk = slow()
    desk.save("aa")
    desk.save("bb")
    desk.store.set_hot_cache(enabled=False)
    desk.store.work_off(1)
    desk.store.set_hot_cache(enabled=True)
    desk.store.work_off(1)
    desk.settle()
    assert desk.found("aa") + desk.found("bb") == 32


@pytest.mark.parametrize("kind", ["all", "RAM", "cooled"])
def test_a_large_cache_goes_by_and_by(kind):
    """B388: the call lets go of a slice, the store's own thread of the rest, and files too."""
    tier = DictTier()
    with closing(make_driver(tier, pool_bytes=32 << 20)) as driver:
        transport = InprocTransport(driver, driver.pool, driver.wait_change, "test")
        client = StoreClient(transport)
        for letter in "abcdef":
            save(client, letter * 800)
        assert driver.drain(WAIT_SECONDS)
        num_chunks = client.status().media[0].num_chunks
        assert num_chunks > 3 * SLICE
        if kind == "cooled":
            transport.call(m.Switch(hot_cache=False))
        else:
            assert client.clear(lower_tiers=kind == "all") == num_chunks
            assert kind == "RAM" or find(client, "aa").lease_id == 0
        assert driver.drain(WAIT_SECONDS)
        assert client.status().media[0].num_chunks == 0
        assert len(tier.images) == (0 if kind == "all" else num_chunks)


def test_a_check_of_a_large_cache_is_refused(monkeypatch):
    """B388: it would hold up everybody; a fault of one client's making."""
    monkeypatch.setattr("qkvault.store.driver._MAX_CHECKED", 2)
    with closing(make_driver()) as driver:
        transport = InprocTransport(driver, driver.pool, driver.wait_change, "test")
        client = StoreClient(transport)
        save(client, "aa")
        assert isinstance(transport.call(m.Check()), m.Done)
        save(client, "aabbcc")
        refusal = transport.call(m.Check())
        assert isinstance(refusal, m.Failed)
        assert refusal.code == "busy"


def test_what_is_cleared_does_not_come_back_when_it_is_superseded(slow):
    """B388: a longer chunk with all its tokens is stored before its turn, and does not reach the tier."""
    desk = slow(caps=[8])
    desk.save("aab")
    desk.end_jobs()
    desk.store.clear()
    assert desk.save("aabb", start=1) == 1
    desk.settle()
    desk.end_jobs({"aabb": "unavailable"})
    desk.store.work_off(9)
    desk.settle()
    desk.end_jobs()
    desk.assert_cache(ram="aabb", disk="")


def test_what_is_stored_anew_before_the_turn_of_the_old_stays(slow):
    """B388: under the same key, in RAM and in the tier."""
    desk = slow(slots=2, caps=[2])
    desk.save("aabb")
    desk.end_jobs()
    desk.store.clear()
    desk.save("ccdd")
    desk.end_jobs()
    desk.save("aabb")
    desk.end_jobs()
    desk.store.work_off(9)
    desk.settle()
    desk.end_jobs()
    assert desk.found("aabb") == 64
