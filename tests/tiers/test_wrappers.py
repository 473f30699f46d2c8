"""The shipped wrappers are slow and wrong in the ways they say, and in no other."""

from __future__ import annotations

import threading
import time

import pytest

from qkvault.testing import DictTier, FaultyTier, LatencyTier
from qkvault.testing.tier_contract import TierDesk, key_of
from qkvault.tiers.base import JobKind

WAIT_SECONDS = 20.0


@pytest.fixture
def tier():
    return FaultyTier(DictTier())


@pytest.fixture
def desk(tier):
    return TierDesk(tier)


@pytest.fixture
def stored(desk, slots):
    pieces = [slots.image(n, 500) for n in range(6)]
    desk.store(*pieces)
    return pieces


def test_every_nth_load_fails(tier, desk, stored, slots):
    tier.fail_every_load, tier.fail_reason = 3, "absent"
    result = desk.load(*map(slots.blank_for, stored))
    assert result.failed == ((stored[2].key, "absent"), (stored[5].key, "absent"))
    assert len(result.done) == 4
    assert desk.store(stored[2]).done


def test_a_mute_tier_answers_when_released(tier, desk, stored, slots):
    told = threading.Event()
    tier.notify(told.set)
    tier.is_mute = True
    job_id = desk.submit(JobKind.LOAD, [slots.blank_for(stored[0])])
    assert tier.poll() == []
    assert not tier.drain(0.01)
    told.clear()
    tier.release()
    assert told.is_set()
    assert [result.job_id for result in tier.poll()] == [job_id]


def test_a_vanished_tier_fails_everything_and_comes_back(tier, desk, stored, slots):
    tier.has_vanished = True
    assert not tier.is_healthy
    assert tier.contains(stored[0].key) is None
    assert desk.load(slots.blank_for(stored[0])).failed == ((stored[0].key, "unavailable"),)
    assert desk.store(slots.image(9)).failed == ((key_of(9), "unavailable"),)
    tier.has_vanished = False
    assert tier.is_healthy
    assert desk.load(slots.blank_for(stored[0])).done


def test_a_slow_tier_takes_its_time(slots):
    tier = LatencyTier(DictTier(), 0.05)
    told = threading.Event()
    tier.notify(told.set)
    desk = TierDesk(tier)
    start = time.monotonic()
    job_id = desk.submit(JobKind.STORE, [slots.image(1)])
    results = tier.poll()
    assert results == []
    while not results:
        assert told.wait(WAIT_SECONDS)
        told.clear()
        results = tier.poll()
    assert time.monotonic() - start >= 0.05
    assert [result.job_id for result in results] == [job_id]
    tier.close()
