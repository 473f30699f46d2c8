"""What a tier has missed: it is given that when it is well again, and nothing that nobody would find there."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from qkvault.testing.store_model import ROOT
from qkvault.testing.transport_contract import (
    WAIT_SECONDS,
    connect,
    find,
    make_driver,
    prompt,
    read,
    save,
    until,
)
from qkvault.tiers.base import JobKind, JobResult
from qkvault.tiers.disk import DiskTier
from qkvault.tiers.disk_files import path_of


def num_stores(desk):
    return sum(job.kind is JobKind.STORE for _, job in desk.jobs)


def replaced_while_read(desk):
    """A tail is read while a longer one takes its place, which the tier does not get. Returns what is read."""
    desk.save("aab")
    desk.end_jobs()
    held = desk.find("aab")
    desk.is_told(can_store=False)
    desk.save("aabb")
    desk.end_jobs(fail={"aabb": "unavailable"})
    return held


class TestOutage:
    def test_what_failed_is_written_when_the_tier_takes_it_again(self, make_desk):
        """B430: and not before, nor what hangs on it, which nobody would find."""
        desk = make_desk(caps=[8])
        desk.is_told(can_store=False)
        desk.save("aa")
        desk.end_jobs(fail={"aa": "unavailable"})
        desk.save("aabb", start=1)
        assert desk.jobs == []
        desk.catch_up()
        desk.assert_cache(ram="aa aabb", disk="")
        desk.is_told()
        desk.catch_up()
        desk.assert_cache(disk="aa aabb", pins="")
        assert len(desk.books[0].missed) == 0

    def test_what_came_while_a_tier_was_down_is_written(self, make_desk):
        """B430: heads first, in one job."""
        desk = make_desk(caps=[8])
        desk.is_told(is_healthy=False)
        desk.save("aabbcc")
        desk.is_told()
        assert desk.store.tiering.is_behind
        desk.store.catch_up(desk.clock())
        desk.settle()
        ((_, job),) = desk.jobs
        assert [desk.names[piece.key] for piece in job.pieces] == ["aa", "aabb", "aabbcc"]
        desk.end_jobs()
        desk.assert_cache(disk="aa aabb aabbcc")
        assert not desk.store.tiering.is_behind

    def test_what_comes_while_the_old_is_being_removed_from_a_tier_that_is_down_is_written(self, make_desk):
        """B430: when the removal has ended, and the tier is well again."""
        desk = make_desk(caps=[8])
        desk.save("aa")
        desk.end_jobs()
        desk.store.clear()
        desk.settle()
        desk.is_told(is_healthy=False)
        desk.save("aa")
        desk.end_jobs()
        desk.is_told()
        desk.catch_up()
        desk.assert_cache(ram="aa", disk="aa")

    def test_nothing_is_written_below_what_is_to_go(self, make_desk):
        """B430: a head that was forgotten while it was being written; what hangs on it comes with the next one."""
        desk = make_desk(caps=[8])
        desk.save("aa")
        desk.store.forget(ROOT, desk.chunks("aa")[0].key)
        assert desk.save("aabb", start=1) == 1
        assert num_stores(desk) == 1
        desk.end_jobs()
        desk.assert_cache(ram="aabb", disk="")
        desk.save("aa")
        desk.end_jobs()
        desk.catch_up()
        desk.assert_cache(ram="aa aabb", disk="aa aabb")

    def test_a_tail_that_arrived_before_its_head_waits_for_it(self, make_desk):
        """B431: of a job that failed in part, the rest is written after its head."""
        desk = make_desk(caps=[8])
        desk.save("aabbcc")
        desk.end_jobs(fail={"aa": "unavailable", "aabbcc": "unavailable"})
        desk.assert_cache(disk="aabb")
        desk.catch_up()
        desk.assert_cache(disk="aa aabb aabbcc")

    def test_a_tail_that_is_told_of_before_its_head_follows_it(self, make_desk):
        """B430: a job's result is in any order."""
        desk = make_desk(caps=[8])
        desk.save("aabbcc")
        ((_, job),) = desk.jobs
        desk.jobs = []
        failed = tuple((piece.key, "unavailable") for piece in reversed(job.pieces))
        desk.store.on_job_done(JobResult(job.job_id, (), failed))
        desk.catch_up()
        desk.assert_cache(disk="aa aabb aabbcc")

    def test_nothing_is_written_below_what_a_tier_cannot_get(self, make_desk):
        """B431: a head that is in no tier and not in RAM any more would leave its tail where nobody finds it."""
        desk = make_desk(slots=2, caps=[8], policy="mru")
        desk.is_told(is_healthy=False)
        desk.save("aabb")
        head = desk.store.index.get(desk.chunks("aa")[0].key)
        desk.store.room.take(head)
        desk.store.ledger.removed(head, desk.books[0].medium.RAM, "ram", "evicted")
        desk.is_told()
        desk.catch_up()
        desk.assert_cache(ram="aabb", disk="")
        desk.save("aa")
        desk.catch_up()
        desk.assert_cache(disk="aa aabb")

    def test_a_tier_that_fails_again_and_again_is_left_alone_for_a_while(self, make_desk):
        """B432: one job at a time, of some hundred chunks, and none for two seconds after one has failed."""
        desk = make_desk(slots=8, caps=[8])
        desk.save("aabb")
        fail = {"aa": "unavailable", "aabb": "unavailable"}
        desk.end_jobs(fail=fail)
        num_failed = desk.counters.failed["disk", "unavailable"]
        for _ in range(100):  # flapping all the while
            desk.is_told(is_healthy=False)
            desk.store.catch_up(desk.clock())
            desk.is_told()
            desk.store.catch_up(desk.clock())
            desk.settle()
            assert num_stores(desk) <= 1
            desk.end_jobs(fail=fail)
            desk.clock.advance(0.25)
        assert desk.counters.failed["disk", "unavailable"] - num_failed <= 2 * 13
        desk.catch_up()
        desk.assert_cache(disk="aa aabb")

    def test_catching_up_is_done_in_slices(self, make_desk, monkeypatch):
        """B432: the lock is held, and RAM pinned, for some of it at a time."""
        monkeypatch.setattr("qkvault.store.tiering._SLICE", 2)
        desk = make_desk(slots=8, caps=[8])
        desk.is_told(is_healthy=False)
        desk.save("aabbccdd")
        desk.save("xx")
        desk.is_told()
        desk.store.catch_up(desk.clock())
        desk.settle()
        assert len(desk.jobs[0][1].pieces) == 2
        assert not desk.store.catch_up(desk.clock())  # one job at a time
        desk.settle()
        assert len(desk.jobs) == 1
        desk.end_jobs()
        desk.catch_up()
        desk.assert_cache(disk="aa aabb aabbcc aabbccdd xx")

    def test_what_has_left_ram_is_not_missed(self, make_desk):
        """However long a tier is down, the list is no longer than what RAM holds."""
        desk = make_desk(slots=2, caps=[8])
        desk.is_told(is_healthy=False)
        for letter in "abcdefgh":
            desk.save(letter * 2)
        assert len(desk.books[0].missed) == 2

    def test_frozen_nothing_is_written(self, make_desk):
        """B51: what was missed is written when it is thawed."""
        desk = make_desk(caps=[8])
        desk.is_told(is_healthy=False)
        desk.save("aa")
        desk.is_told()
        desk.store.is_frozen = True
        desk.catch_up()
        desk.assert_cache(disk="")
        desk.store.is_frozen = False
        desk.catch_up()
        desk.assert_cache(disk="aa")

    def test_what_one_tier_gives_another_gets(self, make_desk):
        """B430: a chunk that is loaded from one tier is written to one that lacks it."""
        desk = make_desk(caps=[8, 8])
        desk.is_told(is_healthy=False)
        desk.save("aa")
        desk.end_jobs()
        desk.store.clear(lower_tiers=False)
        desk.is_told()
        assert desk.found("aa") == 32
        desk.end_jobs()
        desk.assert_cache(ram="aa", disk="aa")


class TestWantedAgain:
    def test_what_is_present_and_not_in_a_tier_is_written(self, make_desk, outcome):
        """B433: there was no room for it when it was stored."""
        desk = make_desk(slots=8, caps=[2])
        desk.save("aabbcc")
        desk.end_jobs()
        desk.assert_cache(ram="aa aabb aabbcc", disk="aa aabb")
        desk.save("xx")
        desk.end_jobs()
        desk.assert_cache(disk="aa xx")
        assert desk.reserve("aabb").outcomes == outcome("PP")
        desk.catch_up()
        desk.assert_cache(disk="aa aabb")

    def test_what_a_full_tier_has_no_room_for_is_not_tried_without_end(self, make_desk):
        """B432: it is looked at again after a while."""
        desk = make_desk(slots=8, caps=[2])
        desk.save("aabbcc")
        desk.end_jobs()
        desk.store.catch_up(desk.clock())
        desk.settle()
        assert (desk.store.tiering.is_behind, desk.jobs) == (False, [])
        desk.catch_up()
        desk.assert_cache(disk="aa aabb")


class TestLoss:
    def test_a_tier_that_lost_all_is_emptied_and_filled_again(self, make_desk):
        """B434: nothing of it is promised, what RAM has is written again, heads first."""
        desk = make_desk(slots=3, caps=[8])
        for word in ("xx", "aabb", "yy"):  # xx leaves RAM
            desk.save(word)
            desk.end_jobs()
        desk.store.take_events()
        desk.files[0].clear()
        desk.is_told(num_losses=1)
        assert desk.find("xx").lease_id == 0
        desk.store.catch_up(desk.clock())
        desk.settle()
        gone = {desk.names[event.key] for event in desk.store.take_events() if event.reason == "absent"}
        assert gone == {"xx", "yy", "aa", "aabb"}
        desk.is_told(num_losses=1)
        desk.catch_up()
        desk.is_told(num_losses=1)
        desk.catch_up()
        desk.assert_cache(ram="yy aa aabb", disk="yy aa aabb")

    def test_a_store_that_ended_before_the_loss_and_is_told_after_it_does_not_count(self, make_desk):
        """B434: its file is gone, or written twice."""
        desk = make_desk(caps=[8])
        desk.save("aabb")
        ((_, job),) = desk.jobs
        desk.jobs = []
        desk.is_told(num_losses=1)
        desk.store.on_job_done(JobResult(job.job_id, tuple(piece.key for piece in job.pieces), ()))
        desk.settle()
        desk.assert_cache(disk="")
        desk.catch_up()
        desk.is_told(num_losses=1)
        desk.catch_up()
        desk.assert_cache(ram="aa aabb", disk="aa aabb")

    def test_a_book_is_emptied_in_slices(self, make_desk, monkeypatch):
        """B432: a tier may hold a million chunks; nothing goes there meanwhile."""
        monkeypatch.setattr("qkvault.store.tiering._SLICE", 2)
        desk = make_desk(slots=8, caps=[8])
        for word in ("aabb", "xx", "yy"):
            desk.save(word)
        desk.end_jobs()
        desk.files[0].clear()
        desk.is_told(num_losses=1)
        assert desk.store.catch_up(desk.clock())
        assert len(desk.books[0].residents) == 2
        desk.save("zz")
        assert desk.jobs == []
        while desk.store.catch_up(desk.clock()):
            desk.settle()
        desk.is_told(num_losses=1)
        desk.catch_up()
        desk.assert_cache(disk="aa aabb xx yy zz")


class TestSuperseded:
    def test_a_tail_stays_in_a_tier_until_the_longer_one_is_there(self, make_desk):
        """B435: during an outage it is what a restart would find."""
        desk = make_desk(caps=[8])
        desk.save("aab")
        desk.end_jobs()
        desk.is_told(can_store=False)
        desk.save("aabb")
        desk.end_jobs(fail={"aabb": "unavailable"})
        desk.assert_cache(ram="aa aabb", disk="aa aab")
        desk.is_told()
        desk.catch_up()
        desk.assert_cache(ram="aa aabb", disk="aa aabb")

    def test_a_tail_that_is_read_goes_when_its_readers_are_done(self, make_desk):
        """B435: from RAM, and from the tier only if the longer one is there."""
        desk = make_desk(caps=[8])
        held = replaced_while_read(desk)
        desk.release(held)
        desk.assert_cache(ram="aa aabb", disk="aa aab")

    def test_a_tail_that_a_tier_lost_meanwhile_is_written_if_the_longer_one_has_gone_first(self, make_desk):
        """B433, B430: it counts again, and no longer as one that is to go."""
        desk = make_desk(caps=[8])
        desk.save("aab")
        desk.end_jobs()
        held = desk.lookup("aa")
        held = desk.match(held.lease_id, "aab", 1)
        desk.save("aabb", start=1)
        desk.end_jobs()
        for _ in range(2):
            desk.is_told(num_losses=1)
            desk.catch_up()
        desk.store.forget(desk.chunks("aa")[0].key, desk.chunks("aabb")[1].key)
        desk.release(held)
        desk.catch_up()
        desk.assert_cache(ram="aa aab", disk="aa aab")

    def test_a_tail_and_what_takes_its_place_are_told_in_order(self, make_desk):
        """B433: both may come to a tier with one job."""
        desk = make_desk(caps=[8])
        desk.store.take_events()
        desk.is_told(is_healthy=False)
        desk.save("aab")
        held = desk.lookup("aa")
        held = desk.match(held.lease_id, "aab", 1)
        desk.save("aabb", start=1)
        desk.is_told()
        desk.catch_up()
        desk.release(held)
        desk.end_jobs()
        here = set()
        for event in desk.store.take_events():
            assert ((event.tier, event.key) in here) != event.stored
            (here.add if event.stored else here.discard)((event.tier, event.key))
        names = {(tier, desk.names[key]) for tier, key in here}
        assert names == {(tier, name) for tier in ("ram", "disk") for name in ("aa", "aabb")}

    def test_a_tail_that_is_kept_below_is_cleared_all_the_same(self, make_desk):
        """Although it was to go from RAM already when the reset came."""
        desk = make_desk(caps=[8])
        held = replaced_while_read(desk)
        desk.store.clear()
        desk.release(held)
        desk.end_jobs()
        desk.assert_cache(ram="", disk="")

    def test_a_tail_stays_if_the_longer_one_has_gone_first(self, make_desk):
        """B435: a reader has held it meanwhile."""
        desk = make_desk(caps=[8])
        desk.save("aab")
        held = desk.find("aab")
        desk.save("aabb")
        desk.end_jobs(fail={"aabb": "corrupt"})
        desk.release(held)
        desk.end_jobs()
        assert desk.found("aab") == 48


# With real files


@pytest.fixture
def faults(monkeypatch):
    """What a write to a file raises, in the threads of tiers."""
    codes, write = [], os.pwritev

    def writing(*args):
        if codes and threading.current_thread().name.startswith("qkvault-"):
            raise OSError(codes[0], os.strerror(codes[0]))
        return write(*args)

    monkeypatch.setattr(os, "pwritev", writing)
    return codes


def run(root):
    return closing(make_driver(DiskTier(root, 1 << 30, probe_seconds=0.01)))


def found_after_restart(root, word):
    with run(root) as driver:
        client = connect(driver)
        assert driver.drain(WAIT_SECONDS)
        located = client.wait(find(client, word), WAIT_SECONDS, time.monotonic)
        return read(client, located, word)


def num_on_disk(client):
    return client.status().media[1].num_chunks


def test_what_an_outage_missed_is_found_after_a_restart(tmp_path, faults):
    """B430: the head was stored during the outage, the rest of the chain after it."""
    with run(tmp_path) as driver:
        client = connect(driver)
        faults.append(errno.ENOSPC)
        save(client, "aabb")
        until(lambda: not driver.manager.tiering.num_pending)
        faults.clear()
        save(client, "aabbccdd")
        until(lambda: num_on_disk(client) == 4)
        assert driver.drain(WAIT_SECONDS)
    assert found_after_restart(tmp_path, "aabbccdd") == 128


def test_a_directory_that_was_removed_is_filled_again(tmp_path):
    """B434: what RAM has is found after a restart."""
    root = tmp_path / "tier"
    with run(root) as driver:
        client = connect(driver)
        save(client, "aabb")
        assert driver.drain(WAIT_SECONDS)
        shutil.rmtree(root)
        save(client, "xx")  # which shows that it has gone
        until(lambda: driver.tiers[0].num_losses == 1 and num_on_disk(client) == 3 and not driver.tiers[0].problems)
        assert driver.drain(WAIT_SECONDS)
    assert found_after_restart(root, "aabb") == 64


def test_a_tail_outlives_an_outage(tmp_path, faults):
    """B435: the longer chunk that replaced it in RAM never reached the disk."""
    with run(tmp_path) as driver:
        client = connect(driver)
        save(client, "aab")
        assert driver.drain(WAIT_SECONDS)
        faults.append(errno.EIO)
        save(client, "aabb")
        until(lambda: not driver.manager.tiering.num_pending)
    faults.clear()
    assert found_after_restart(tmp_path, "aab") == 48


def test_draining_waits_for_what_a_tier_has_missed(tmp_path, faults):
    """What is to be written when a server is told to stop is on disk when it has stopped."""
    with run(tmp_path) as driver:
        client = connect(driver)
        faults.append(errno.EIO)
        save(client, "aabb")
        until(lambda: not driver.manager.tiering.num_pending)
        faults.clear()
        until(lambda: driver.manager.tiering.is_behind or num_on_disk(client) == 2)
        assert driver.drain(WAIT_SECONDS)
        assert num_on_disk(client) == 2


@pytest.fixture
def unreadable(tmp_path, monkeypatch):
    """Listing this directory, and reading what is in it, fails until it is taken off the list."""
    look, read, roots = os.scandir, os.preadv, []

    def fail_if(*, holds):
        if roots and holds and threading.current_thread().name.startswith("qkvault-"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "scandir", lambda path: (fail_if(holds=path in roots), look(path))[1])
    monkeypatch.setattr(os, "preadv", lambda *args: (fail_if(holds=True), read(*args))[1])
    return roots


def test_what_a_disk_that_could_not_be_read_at_start_holds_is_found_later(tmp_path, unreadable):
    """B503."""
    with run(tmp_path) as driver:
        save(connect(driver), "aabb")
        assert driver.drain(WAIT_SECONDS)
    unreadable.append(str(tmp_path))
    with run(tmp_path) as driver:
        client = connect(driver)
        until(lambda: not driver.tiers[0].is_healthy)
        assert num_on_disk(client) == 0
        unreadable.clear()
        assert driver.drain(WAIT_SECONDS)
        assert num_on_disk(client) == 2
        driver.check()


def test_closing_does_not_wait_for_a_disk_that_cannot_be_scanned(tmp_path, unreadable):
    """B503."""
    unreadable.append(str(tmp_path))
    with run(tmp_path) as driver:
        until(lambda: not driver.tiers[0].is_healthy)
        start = time.monotonic()
        driver.close()
        assert time.monotonic() - start < WAIT_SECONDS / 4


@pytest.mark.parametrize("threads", ["qkvault-", ""], ids=["until the end", "for ever"])
def test_files_that_could_not_be_removed_outlived_a_clear(tmp_path, monkeypatch, caplog, threads):
    """B504: they are tried once more at the end, and counted; a restart finds them, and a clear removes them then."""
    unlink, refused = Path.unlink, [threads]

    def refuse(path, **kwargs):
        if path.suffix == ".qkv" and any(threading.current_thread().name.startswith(name) for name in refused):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return unlink(path, **kwargs)

    monkeypatch.setattr(Path, "unlink", refuse)
    with run(tmp_path) as driver:
        client = connect(driver)
        save(client, "aabb")
        assert driver.drain(WAIT_SECONDS)
        client.clear()
        assert driver.drain(WAIT_SECONDS)
        num_left = 0 if threads else 2
        assert driver.close() == num_left
    assert len(list(tmp_path.rglob("*.qkv"))) == num_left
    assert ("chunks_not_removed chunks=2 tiers=disk" in caplog.text) is (not threads)
    refused.clear()
    assert found_after_restart(tmp_path, "aabb") == num_left * 32
    with run(tmp_path) as driver:
        assert driver.drain(WAIT_SECONDS)
        connect(driver).clear()
    assert not list(tmp_path.rglob("*.qkv"))


def test_what_the_disk_refuses_stays_in_ram_and_is_not_tried_again_at_once(tmp_path):
    """B505."""
    with run(tmp_path) as driver:
        client = connect(driver)
        for chunk in prompt("aabb"):
            Path(path_of(str(tmp_path), chunk.key)).mkdir(parents=True)
        save(client, "aabb")
        assert driver.drain(WAIT_SECONDS)
        assert [medium.num_chunks for medium in client.status().media] == [2, 0]
        assert driver.manager.ledger.counters.failed["disk", "refused"] == 2
        assert not driver.tiers[0].problems
