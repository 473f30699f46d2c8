"""The running store: threads, tiers that misbehave, scans, and an end that always comes."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest

from qkvault.testing import DictTier, FakeClock, FaultyTier, LatencyTier, WrapperTier
from qkvault.testing.spaces import described
from qkvault.testing.transport_contract import (
    WAIT_SECONDS,
    connect,
    find,
    make_driver,
    prompt,
    read,
    reserve,
    save,
    until,
)
from qkvault.tiers.base import Found
from qkvault.types import ChunkRefs, Medium
from qkvault.wire import messages as m


@pytest.fixture
def start():
    """Starts stores over tiers; they are checked and closed after the test."""
    drivers = []

    def start(*tiers, **kwargs):
        drivers.append(make_driver(*tiers, **kwargs))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.check()
        driver.close(drain_seconds=0.0)


def filled(*words):
    """A tier that holds the chunks of ``words`` from an earlier run."""
    tier = DictTier()
    with closing(make_driver(tier)) as driver:
        client = connect(driver)
        for word in words:
            save(client, word)
        assert driver.drain(WAIT_SECONDS)
        images = dict(tier.images)
    tier.images = images  # close() has emptied it
    return tier


class Broken(WrapperTier):
    """Raises wherever it is told to."""

    def __init__(self, inner, *where):
        super().__init__(inner)
        self.where = set(where)

    def raise_at(self, place):
        if place in self.where:
            msg = f"broken at {place}"
            raise RuntimeError(msg)

    def submit(self, job):
        self.raise_at("submit")
        super().submit(job)

    def poll(self):
        self.raise_at("poll")
        return super().poll()

    def scan(self):
        self.raise_at("scan")
        return super().scan()

    def sample(self):
        self.raise_at("sample")
        return super().sample()

    def find(self, keys):
        self.raise_at("find")
        return super().find(keys)

    def close(self):
        super().close()
        self.raise_at("close")


class Gated(WrapperTier):
    """Scans when the gate opens; what it holds may be asked for by key before."""

    def __init__(self, inner):
        super().__init__(inner)
        self.gate, self.is_scanning = threading.Event(), threading.Event()

    def scan(self):
        found = list(self.inner.scan())
        self.is_scanning.set()
        assert self.gate.wait(WAIT_SECONDS)
        yield from found

    def find(self, keys):
        return [chunk for batch in self.inner.scan() for chunk in batch if chunk.key in keys]


class Sampled(WrapperTier):
    """Says that it holds a chunk of each space, with a description; waits for the gate, which is open."""

    def __init__(self, *each):
        super().__init__(DictTier())
        self.gate = threading.Event()
        self.gate.set()
        self.each = each

    def sample(self):
        assert self.gate.wait(WAIT_SECONDS)
        return [
            Found(space.space.space_id + bytes(32), b"", b"", 0, 0, 0, space=description.encode())
            for space, description in self.each
        ]


class TestReading:
    def test_a_reader_sees_all_of_a_chunk_or_nothing(self, start):
        """B121: while it is written, stored slowly, evicted and loaded, each read is a miss or the full bytes."""
        driver = start(LatencyTier(DictTier(), 0.002), pool_bytes=6 * 8192)
        words = ["aabbc", "aabbdd", "xxyy", "zzzzz"]
        is_over = threading.Event()
        seen, wrong = [], []

        def read_on():
            client = connect(driver)
            while not is_over.is_set():
                for word in words:
                    located = client.wait(find(client, word), WAIT_SECONDS, time.monotonic)
                    try:
                        seen.append(read(client, located, word))
                    except AssertionError as error:
                        wrong.append(error)
                    client.release(located.lease_id)

        readers = [threading.Thread(target=read_on) for _ in range(8)]
        for reader in readers:
            reader.start()
        client = connect(driver)
        try:
            for _ in range(15):
                for word in words:
                    save(client, word)
                driver.check()
        finally:
            is_over.set()
            for reader in readers:
                reader.join()
        assert wrong == []
        assert 0 in seen
        assert max(seen) >= 64

    def test_a_wait_ends_although_the_load_ended_before_it_began(self, start):
        """A result that came between the look and the wait is not slept through."""
        driver = start(FaultyTier(DictTier()))
        client = connect(driver)
        save(client, "aa")
        assert driver.drain(WAIT_SECONDS)
        client.clear(lower_tiers=False)
        located = find(client, "aa")
        assert driver.drain(WAIT_SECONDS)
        located = client.wait(located, 10 * WAIT_SECONDS, time.monotonic)
        assert read(client, located, "aa") == 32


class TestTiersThatRaise:
    def test_a_job_that_is_not_taken_has_failed(self, start, caplog):
        """Its slots are free again, and the chunk stays in RAM."""
        driver = start(Broken(DictTier(), "submit"))
        client = connect(driver)
        assert save(client, "aa") == 1
        assert driver.drain(WAIT_SECONDS)  # the scan may still be under way
        assert client.status().counters["failed.dict.unavailable"] == 1
        assert read(client, find(client, "aa"), "aa") == 32
        caplog.clear()  # the traceback holds the slot's memory

    def test_one_tiers_fault_is_not_the_others(self, start):
        """It counts as down; the other one is used, and leases go on ending."""
        broken, good = Broken(DictTier(), "poll"), DictTier()
        good.name = "good"
        driver = start(broken, good, lease_seconds=0.01)
        client = connect(driver)
        save(client, "aa")
        until(lambda: client.status().counters["stored.disk"] == 1)
        find(client, "aa")
        until(lambda: client.status().num_leases == 0)
        assert [medium.is_healthy for medium in client.status().media] == [True, False, True]
        broken.where.clear()
        until(lambda: all(medium.is_healthy for medium in client.status().media))
        assert driver.drain(WAIT_SECONDS)

    def test_a_tier_that_cannot_be_scanned_starts_empty(self, start):
        """The store runs."""
        driver = start(Broken(filled("aa"), "scan", "find", "sample"))
        client = connect(driver)
        assert driver.drain(WAIT_SECONDS)
        assert find(client, "aa").lease_id == 0
        assert save(client, "aa") == 1

    def test_a_tier_that_cannot_be_closed_does_not_keep_the_others_open(self):
        """Nor the memory."""
        broken, good = Broken(DictTier(), "close"), DictTier()
        good.name = "good"
        driver = make_driver(broken, good)
        save(connect(driver), "aa")
        assert driver.drain(WAIT_SECONDS)
        driver.close()
        assert good.images == {}
        with pytest.raises(ValueError, match="released"):
            driver.pool.view(0, 1)

    def test_a_tier_that_comes_and_goes_is_followed(self, start):
        """While it is away nothing of it is promised."""
        tier = FaultyTier(DictTier())
        driver = start(tier)
        client = connect(driver)
        save(client, "aa")
        assert driver.drain(WAIT_SECONDS)
        client.clear(lower_tiers=False)
        tier.has_vanished = True
        until(lambda: not client.status().media[1].is_healthy)
        assert find(client, "aa").lease_id == 0
        tier.has_vanished = False
        until(lambda: client.status().media[1].is_healthy)
        assert read(client, client.wait(find(client, "aa"), WAIT_SECONDS, time.monotonic), "aa") == 32


class TestScans:
    def test_what_was_there_before_is_found(self, start):
        """B126: a store serves what its tiers kept."""
        driver = start(filled("aabbc"))
        client = connect(driver)
        assert driver.drain(WAIT_SECONDS)
        assert read(client, client.wait(find(client, "aabbc"), WAIT_SECONDS, time.monotonic), "aabbc") == 80

    def test_what_a_scan_has_not_come_to_is_asked_for_by_key(self, start):
        """B126: a prompt need not wait for the whole directory to be read."""
        tier = Gated(filled("aabb"))
        driver = start(tier)
        client = connect(driver)
        assert tier.is_scanning.wait(WAIT_SECONDS)
        assert client.status().is_scanning
        assert read(client, client.wait(find(client, "aabb"), WAIT_SECONDS, time.monotonic), "aabb") == 64
        tier.gate.set()
        assert driver.drain(WAIT_SECONDS)
        assert client.status().media[1].num_chunks == 2

    def test_a_disk_that_hangs_holds_up_one_question_for_a_moment(self, start, monkeypatch):
        """B389: others are misses at once; when it answers, what it knew is known."""
        monkeypatch.setattr("qkvault.store.scan._EARLY_SECONDS", 0.01)
        tier = Gated(filled("aabb"))
        is_asked, may_answer = threading.Semaphore(0), threading.Event()
        find_by_key = tier.find

        def find_late(keys):
            is_asked.release()
            assert may_answer.wait(WAIT_SECONDS)
            return find_by_key(keys)

        tier.find = find_late
        driver = start(tier)
        client = connect(driver)
        assert tier.is_scanning.wait(WAIT_SECONDS)
        for _ in range(3):
            assert find(client, "aabb").lease_id == 0
        assert is_asked.acquire(timeout=WAIT_SECONDS)
        assert not is_asked.acquire(blocking=False)
        may_answer.set()
        until(lambda: client.status().media[1].num_chunks == 2)
        located = client.wait(find(client, "aabb"), WAIT_SECONDS, time.monotonic)
        assert read(client, located, "aabb") == 64
        assert find(client, "xx").lease_id == 0
        assert is_asked.acquire(timeout=WAIT_SECONDS)
        assert not is_asked.acquire(blocking=False)  # those that were misses left no question behind
        tier.gate.set()
        assert driver.drain(WAIT_SECONDS)

    def test_a_tail_is_found_when_the_scan_has_come_to_it(self, start):
        """B439: its key is not among those of the whole chunks, which are found before."""
        tier = Gated(filled("aabbc"))
        driver = start(tier)
        client = connect(driver)
        assert tier.is_scanning.wait(WAIT_SECONDS)
        for is_over, num_tokens in ((False, 64), (True, 80)):
            located = client.wait(find(client, "aabbc"), WAIT_SECONDS, time.monotonic)
            assert read(client, located, "aabbc") == num_tokens
            client.release(located.lease_id)
            if not is_over:
                tier.gate.set()
                assert driver.drain(WAIT_SECONDS)

    def test_a_clear_covers_what_a_scan_has_not_come_to(self, start):
        """Neither the scan nor a question by key brings it back, and it is removed."""
        tier = Gated(filled("aabb"))
        driver = start(tier)
        client = connect(driver)
        assert tier.is_scanning.wait(WAIT_SECONDS)
        client.clear()
        assert find(client, "aa").lease_id == 0
        tier.gate.set()
        assert driver.drain(WAIT_SECONDS)
        assert find(client, "aabb").lease_id == 0
        assert tier.inner.images == {}

    def test_what_is_forgotten_is_removed_when_the_scan_comes_to_it(self, start, monkeypatch):
        """B332: and is not found by key before; what is left of it is whole."""
        monkeypatch.setattr("qkvault.store.scan._MAX_EARLY", 1)
        tier = Gated(filled("aabbcc", "aabbxx", "zz"))
        driver = start(tier)
        client = connect(driver)
        assert tier.is_scanning.wait(WAIT_SECONDS)
        chunks = prompt("aabb")
        client.forget(chunks[0].key, chunks[1].key)
        for word in ("aabb", "aabbcc", "aabbxx"):
            located = client.wait(find(client, word), WAIT_SECONDS, time.monotonic)
            assert read(client, located, word) == 32
            client.release(located.lease_id)
        tier.gate.set()
        assert driver.drain(WAIT_SECONDS)
        assert sorted(tier.inner.images) == sorted(prompt(word)[0].key for word in ("aa", "zz"))

    def test_spaces_in_a_tier_are_known_from_the_start(self, start):
        """B330: before those that an engine describes; what does not describe its own chunk is not believed."""
        spaces = [described(name) for name in ("one", "two", "three")]
        tier = Sampled(*((space, space) for space in spaces[:2]), (spaces[2], spaces[0]))
        client = connect(start(tier))
        encoded = [space.encode() for space in spaces]
        assert client.status().spaces == tuple(encoded[:2])
        client.register(m.Instance("i", "worker", "one", spaces=(encoded[0], encoded[2])))
        assert client.status().spaces == (encoded[1], encoded[0], encoded[2])

    def test_a_start_does_not_wait_for_a_tier_that_hangs(self, start, monkeypatch):
        """B330: what it holds is known when it answers, and comes before what engines have described meanwhile."""
        monkeypatch.setattr("qkvault.store.driver._SAMPLE_SECONDS", 0.01)
        one, two = described("one"), described("two")
        tier = Sampled((one, one))
        tier.gate.clear()
        client = connect(start(tier))
        client.register(m.Instance("i", "worker", "two", spaces=(two.encode(),)))
        assert client.status().spaces == (two.encode(),)
        tier.gate.set()
        until(lambda: client.status().spaces == (one.encode(), two.encode()))

    def test_closing_does_not_wait_for_a_scan(self, start):
        """What it would still find is found the next time."""
        tier = Gated(filled("aabb"))
        driver = start(tier)
        assert tier.is_scanning.wait(WAIT_SECONDS)
        closer = threading.Thread(target=lambda: driver.close(drain_seconds=10 * WAIT_SECONDS))
        closer.start()
        until(lambda: driver._is_closing)
        tier.gate.set()
        closer.join(WAIT_SECONDS)
        assert not closer.is_alive()

    def test_a_scan_that_hangs_does_not_stop_the_end(self, monkeypatch, caplog):
        """B510: of a disk that has gone, say. What it finds when it comes back nobody is told."""
        monkeypatch.setattr("qkvault.store.scan._END_SECONDS", 0.05)
        tier = Gated(filled("aabb"))
        driver = make_driver(tier)
        assert tier.is_scanning.wait(WAIT_SECONDS)
        closer = threading.Thread(target=driver.close)
        closer.start()
        closer.join(WAIT_SECONDS)
        is_closed = not closer.is_alive()
        tier.gate.set()
        until(lambda: not any(thread.is_alive() for thread in driver.threads))
        assert is_closed
        assert "closed_while_hanging threads=qkvault-scan" in caplog.text
        assert len(driver.manager.index) == 0


class TestRequests:
    def test_a_fault_of_ours_is_the_answer_to_one_request(self, start, monkeypatch):
        """The store goes on."""
        driver = start()
        session = driver.open_session("test")
        with monkeypatch.context() as patch:
            patch.setattr(driver.manager, "poll", lambda *_: 1 / 0)
            reply = driver.call(session, m.Poll(1))
        assert (type(reply), reply.code) == (m.Failed, "internal")
        assert driver.call(session, m.Poll(1)) == m.Located(0, ChunkRefs(), 0)

    def test_only_open_sessions_are_answered(self, start):
        """What comes after the end of a session would never be given back."""
        driver = start()
        session = driver.open_session("test")
        driver.close_session(session)
        driver.close_session(session)
        for unknown in (session, session + 1):
            assert driver.call(unknown, m.Reserve((prompt("aa")[0].new(),))).code == "closed"
        assert driver.pool.used_bytes == 0

    def test_leases_end_by_the_clock(self):
        """Without any request."""
        clock = FakeClock()
        driver = make_driver(lease_seconds=10.0, clock=clock)
        with closing(driver):
            client = connect(driver)
            save(client, "aa")
            find(client, "aa")
            reserve(client, "xx")
            assert client.status().num_leases == 2
            clock.advance(11.0)
            until(lambda: client.status().num_leases == 0)
            assert client.status().counters["leases_expired"] == 2

    def test_events_are_taken_as_they_come(self, start):
        """For routers, from another thread."""
        driver = start(DictTier())
        client = connect(driver)
        save(client, "aa")
        assert driver.drain(WAIT_SECONDS)
        assert {(event.stored, event.medium) for event in driver.take_events()} == {
            (True, Medium.RAM),
            (True, Medium.DISK),
        }
        client.clear()
        assert {event.reason for event in driver.take_events()} == {"cleared"}

    def test_a_reset_beats_a_store_that_is_under_way(self, start):
        """Whatever the tier is doing, nothing from before is found afterwards."""
        tier = FaultyTier(DictTier())
        driver = start(tier)
        client = connect(driver)
        tier.is_mute = True
        save(client, "aa")
        reserved = reserve(client, "bb")
        client.clear()
        assert client.commit(reserved.lease_id) == 0
        tier.release()
        assert driver.drain(WAIT_SECONDS)
        assert (find(client, "aa").lease_id, find(client, "bb").lease_id, tier.inner.images) == (0, 0, {})


class TestTheEnd:
    def test_drain_waits_for_jobs_and_no_longer_than_told(self, start):
        """True when everything committed is in its tiers."""
        tier = FaultyTier(DictTier())
        driver = start(tier)
        assert driver.drain(0.0)
        tier.is_mute = True
        save(connect(driver), "aa")
        assert not driver.drain(0.01)
        threading.Timer(0.02, tier.release).start()
        assert driver.drain(WAIT_SECONDS)
        assert len(tier.inner.images) == 1

    def test_closing_finishes_what_was_begun(self):
        """Also when several close at a time, and with clients that are still there."""
        tier = DictTier()
        images = []
        tier.close = lambda: images.append(dict(tier.images))
        driver = make_driver(LatencyTier(tier, 0.02))
        client = connect(driver)
        save(client, "aabb")
        find(client, "aabb")
        closers = [threading.Thread(target=driver.close) for _ in range(4)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
        assert [len(held) for held in images] == [2]

    def test_a_tier_that_does_not_answer_does_not_stop_the_end(self):
        """B133: the store is closed when its patience is over."""
        tier = FaultyTier(DictTier())
        tier.is_mute = True
        driver = make_driver(tier)
        save(connect(driver), "aa")
        assert driver.close(drain_seconds=0.01) == 1

    def test_what_a_tier_that_is_away_has_missed_is_told(self, caplog):
        """B480: nothing is under way, and yet it is lost."""
        tier = FaultyTier(DictTier())
        tier.has_vanished = True
        driver = make_driver(tier)
        until(lambda: not driver.manager.tiering.books[0].is_healthy)
        client = connect(driver)
        save(client, "aabb")
        save(client, "aacc")
        assert driver.close() == 3
        assert "chunks_not_written chunks=3 tiers=dict" in caplog.text
        assert driver.close() == 0

    def test_what_is_purged_or_cleared_is_not_missed(self):
        """B480: nor what the tiers have."""
        tier = FaultyTier(DictTier())
        driver = make_driver(tier)
        save(connect(driver), "aa")
        assert driver.close() == 0
        for is_cleared in (True, False):
            tier = FaultyTier(DictTier())
            tier.is_mute = True
            driver = make_driver(tier)
            client = connect(driver)
            save(client, "aa")
            if is_cleared:
                client.clear()
            assert driver.close(drain_seconds=0.0, purge=not is_cleared) == 0

    def cleared_in_vain(self):
        """A store whose tier was away when two chunks were cleared, a client, and the tier, whose images outlive it."""
        tier = FaultyTier(DictTier())
        tier.inner.close = lambda: None
        driver = make_driver(tier)
        client = connect(driver)
        save(client, "aabb")
        assert driver.drain(WAIT_SECONDS)
        tier.has_vanished = True
        client.clear()
        assert driver.drain(WAIT_SECONDS)
        tier.has_vanished = False
        return driver, client, tier

    def test_what_was_cleared_and_not_removed_came_back_and_nobody_said_so(self, caplog):
        """B504: counted is what was never removed and what no thread had come to, unless the tier denies to have it."""
        for is_removed in (False, True):
            caplog.clear()
            driver, _, tier = self.cleared_in_vain()
            if is_removed:
                tier.inner.images.clear()
            assert driver.close() == (0 if is_removed else 2)
            assert ("chunks_not_removed chunks=2 tiers=dict" in caplog.text) is not is_removed

    def test_what_leaves_by_and_by_and_had_not_gone_was_not_told(self, monkeypatch):
        """B504."""
        monkeypatch.setattr("qkvault.store.leaving.Leaving.work_off", lambda *_: None)
        tier = DictTier()
        tier.close = lambda: None
        driver = make_driver(tier)
        client = connect(driver)
        save(client, "aabb")
        assert driver.drain(WAIT_SECONDS)
        client.clear()
        assert driver.close(drain_seconds=0.0) == 2

    def test_what_was_stored_anew_is_not_counted_as_left(self):
        """B504."""
        driver, client, _ = self.cleared_in_vain()
        until(lambda: driver.manager.tiering.books[0].is_healthy)
        save(client, "aabb")
        assert driver.drain(WAIT_SECONDS)
        assert driver.close() == 0

    def test_purging_empties_the_tiers(self):
        """After the last job, lest it writes once more."""
        calls = []

        class Purged(WrapperTier):
            def purge(self):
                calls.append(len(self.inner.images))
                return 0

        tier = DictTier()
        driver = make_driver(Purged(tier))
        save(connect(driver), "aabb")
        driver.close(purge=True)
        assert calls == [2]
