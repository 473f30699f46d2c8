"""A disk that is full, read-only, gone, broken or stuck: what fails, what goes on, and how it comes back."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from qkvault.errors import ConfigError
from qkvault.testing.tier_contract import key_of
from qkvault.tiers import disk_files
from qkvault.tiers.base import JobKind
from qkvault.tiers.disk import DiskTier

WAIT_SECONDS = 20.0
PAYLOAD_BYTES = 100_000


@pytest.fixture(autouse=True)
def _log(caplog):
    caplog.set_level(logging.INFO)


def lines(caplog, event):
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(event)]


def wait_until(holds):
    """Look again and again, as the store's driver does."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.005)


def file_of(root, key):
    return Path(disk_files.path_of(str(root), key))


class FaultyOs:
    """Makes calls of the system raise in our threads, for as long as ``faults`` says so."""

    def __init__(self, monkeypatch):
        self.faults = {}
        for home, name in ((os, "pwritev"), (os, "preadv"), (os, "open"), (Path, "unlink")):
            monkeypatch.setattr(home, name, self._wrap(name, getattr(home, name)))

    def _wrap(self, name, call):
        def wrapped(*args, **kwargs):
            if (code := self.faults.get(name)) is not None and threading.current_thread().name.startswith("qkvault-"):
                raise OSError(code, os.strerror(code))
            return call(*args, **kwargs)

        return wrapped


@pytest.fixture
def faulty_os(monkeypatch):
    return FaultyOs(monkeypatch)


# Full


def fill(disk, slots, first=0):
    """Store until no more fits; returns what was stored, and the piece that was not."""
    stored = []
    for n in range(first, first + 100):
        piece = slots.image(n, PAYLOAD_BYTES)
        if disk.store(piece).failed:
            return stored, piece
        stored.append(piece)
    pytest.fail("the disk does not fill")


def test_a_full_disk_still_loads(make_disk, slots, small_disk, caplog):
    """B124."""
    disk = make_disk(small_disk / "tier", probe_seconds=1000.0)
    stored, too_many = fill(disk, slots)
    for _ in range(3):
        assert disk.store(too_many).failed == ((too_many.key, "unavailable"),)
    assert disk.tier.is_healthy
    assert disk.tier.problems == {"writing": "No space left on device"}
    targets = [slots.blank_for(piece) for piece in stored]
    assert len(disk.load(*targets).done) == len(stored)
    assert all(target.image == piece.image for target, piece in zip(targets, stored, strict=True))
    assert disk.load(slots.blank_for(too_many)).failed == ((too_many.key, "absent"),)
    assert len(lines(caplog, "tier_unavailable")) == 1
    assert not list((small_disk / "tier").rglob("*.tmp"))


def test_a_full_disk_comes_back_when_chunks_are_deleted(make_disk, slots, small_disk, caplog):
    """Without waiting for the next probe: a deletion hastens it."""
    disk = make_disk(small_disk / "tier", probe_seconds=1000.0)
    stored, too_many = fill(disk, slots)
    disk.delete(stored[0].key, stored[1].key)
    wait_until(lambda: disk.tier.is_healthy and not disk.tier.problems)
    assert disk.store(too_many).done
    assert len(lines(caplog, "tier_available")) == 1


def test_a_full_disk_takes_a_store_that_makes_room(make_disk, slots, small_disk):
    """What it deletes first is deleted though the store itself may fail, and the next one finds the room."""
    disk = make_disk(small_disk / "tier", probe_seconds=1000.0)
    stored, too_many = fill(disk, slots)
    disk.store(too_many, delete_first=[piece.key for piece in stored[:3]])
    assert disk.load(slots.blank_for(stored[0])).failed == ((stored[0].key, "absent"),)
    wait_until(lambda: disk.tier.is_healthy and not disk.tier.problems)
    assert disk.store(too_many).done


def test_a_full_disk_comes_back_when_others_make_room(make_disk, slots, small_disk):
    """But not before there is room for what did not fit."""
    disk = make_disk(small_disk / "tier")
    other = small_disk / "other"
    other.write_bytes(bytes(400_000))
    _, too_many = fill(disk, slots)
    for _ in range(20):
        disk.tier.poll()
        time.sleep(0.002)
    assert disk.tier.problems
    other.unlink()
    wait_until(lambda: disk.tier.is_healthy and not disk.tier.problems)
    assert disk.store(too_many).done


# Read-only


def remount(path, mode):
    subprocess.run(["mount", "-o", f"remount,{mode}", str(path)], check=True)


def test_a_read_only_disk_still_loads(make_disk, slots, small_disk, caplog):
    """B124."""
    disk = make_disk(small_disk / "tier")
    stored, other, old = slots.image(1), slots.image(2), slots.image(3)
    disk.store(stored, old)
    remount(small_disk, "ro")
    assert disk.store(other).failed == ((other.key, "unavailable"),)
    assert disk.delete(old.key).failed == ((old.key, "unavailable"),)
    target = slots.blank_for(stored)
    assert disk.load(target).done
    assert target.image == stored.image
    assert disk.tier.is_healthy
    assert disk.tier.problems == {"writing": "Read-only file system"}
    remount(small_disk, "rw")
    wait_until(lambda: disk.tier.is_healthy and not disk.tier.problems)
    assert disk.store(other).done
    assert [len(lines(caplog, event)) for event in ("tier_unavailable", "tier_available")] == [1, 1]
    # What was to be deleted meanwhile is deleted before anything new is stored.
    assert disk.load(slots.blank_for(old)).failed == ((old.key, "absent"),)


def test_a_corrupt_file_on_a_read_only_disk_is_not_taken(make_disk, slots, small_disk):
    disk = make_disk(small_disk / "tier")
    stored = slots.image(1)
    disk.store(stored)
    with file_of(small_disk / "tier", stored.key).open("r+b") as file:
        file.write(b"QKVX")
    remount(small_disk, "ro")
    for _ in range(2):
        assert disk.load(slots.blank_for(stored)).failed == ((stored.key, "corrupt"),)


def test_a_read_only_disk_at_start_serves_loads(make_disk, slots, small_disk, caplog):
    """B436: it says once that it cannot write, and stores when it can."""
    first = make_disk(small_disk / "tier")
    stored, other = slots.image(1), slots.image(2)
    first.store(stored)
    first.tier.close()
    remount(small_disk, "ro")
    disk = make_disk(small_disk / "tier")
    assert (disk.tier.is_healthy, disk.tier.can_store) == (True, False)
    assert disk.tier.problems == {"writing": "Read-only file system"}
    assert [found.key for found in disk.scan()] == [stored.key]
    assert disk.load(slots.blank_for(stored)).done
    assert disk.store(other).failed == ((other.key, "unavailable"),)
    with pytest.raises(ConfigError, match="in use by process"):
        make_disk(small_disk / "tier")
    remount(small_disk, "rw")
    wait_until(lambda: disk.tier.is_healthy and disk.tier.can_store)
    assert disk.store(other).done
    assert len(lines(caplog, "tier_unavailable")) == 1


def test_a_full_disk_at_start_serves_loads(make_disk, slots, small_disk):
    """B436."""
    first = make_disk(small_disk / "tier")
    stored, too_many = fill(first, slots)
    first.tier.close()
    with suppress(OSError), (small_disk / "rest").open("wb", buffering=0) as rest:
        while rest.write(bytes(4096)):
            pass
    disk = make_disk(small_disk / "tier")
    assert disk.tier.problems == {"writing": "No space left on device"}
    assert disk.load(slots.blank_for(stored[0])).done
    disk.delete(*(piece.key for piece in stored[1:3]))
    wait_until(lambda: disk.tier.can_store)
    assert disk.store(too_many).done


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES])
def test_what_a_start_may_not_be_without(root, monkeypatch, code):
    """B436: a disk that cannot be written for lack of room is used, one that is broken or not ours is refused."""

    def fail(*_args, **_kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(disk_files, "probe_write", fail)
    if code in disk_files.CANNOT_WRITE:
        with closing(DiskTier(root, 1 << 20)) as tier:
            assert tier.problems == {"writing": os.strerror(code)}
    else:
        with pytest.raises(ConfigError, match="cannot be the disk tier's directory"):
            DiskTier(root, 1 << 20)


def test_a_disk_that_can_be_neither_written_nor_read_is_refused_at_start(root, monkeypatch):
    """B436."""

    def fail(code):
        def failing(*_args, **_kwargs):
            raise OSError(code, os.strerror(code))

        return failing

    monkeypatch.setattr(disk_files, "probe_write", fail(errno.EROFS))
    monkeypatch.setattr(disk_files, "probe_read", fail(errno.EIO))
    with pytest.raises(ConfigError, match="Input/output error"):
        DiskTier(root, 1 << 20)


def test_a_read_only_disk_without_a_directory_is_refused_at_start(small_disk):
    """B436: there is nothing to load, and nothing to lock."""
    remount(small_disk, "ro")
    with pytest.raises(ConfigError, match="Read-only file system"):
        DiskTier(small_disk / "tier", 1 << 20)
    remount(small_disk, "rw")


# Gone


def test_a_directory_that_vanishes_is_made_again(make_disk, slots, root, caplog):
    """B124."""
    disk = make_disk()
    stored = slots.image(1)
    disk.store(stored)
    shutil.rmtree(root)
    assert disk.load(slots.blank_for(stored)).failed == ((stored.key, "unavailable"),)
    wait_until(lambda: disk.tier.is_healthy)
    assert disk.load(slots.blank_for(stored)).failed == ((stored.key, "absent"),)
    wait_until(lambda: not disk.tier.problems)
    assert disk.tier.num_losses == 1
    assert disk.store(stored).done
    assert disk.load(slots.blank_for(stored)).done
    assert len(lines(caplog, "tier_unavailable")) == 2  # reading, writing
    assert len(lines(caplog, "tier_available")) == 2
    with pytest.raises(ConfigError, match="in use by process"):
        make_disk()


def test_a_directory_that_came_back_was_filled_beyond_its_cap_and_outlived_a_clear(make_disk, slots, root, caplog):
    """B501: as a mount does. No book knows what it holds by then: it goes before anything is read or written."""
    disk, away = make_disk(), root.with_name("away")
    stored = [slots.image(n) for n in range(3)]
    disk.store(*stored)
    root.rename(away)
    assert disk.load(slots.blank_for(stored[0])).failed == ((stored[0].key, "unavailable"),)
    wait_until(lambda: disk.tier.is_healthy and not disk.tier.problems)
    shutil.rmtree(root)
    away.rename(root)
    assert disk.load(slots.blank(key_of(9), 5000)).failed == ((key_of(9), "unavailable"),)
    wait_until(lambda: disk.tier.is_healthy and not disk.tier.problems)
    assert disk.tier.num_losses == 2
    assert not list(root.rglob("*.qkv"))
    assert len(lines(caplog, f"directory_replaced tier=disk path={root} removed=3")) == 1
    assert disk.store(stored[0]).done
    assert disk.load(slots.blank_for(stored[0])).done


def test_a_directory_that_came_back_and_cannot_be_emptied_is_not_used_until_it_can(make_disk, slots, root, faulty_os):
    """B501."""
    disk, away = make_disk(), root.with_name("away")
    stored = slots.image(1)
    disk.store(stored)
    shutil.copytree(root, away)
    root.rename(root.with_name("first"))
    away.rename(root)
    faulty_os.faults["unlink"] = errno.EROFS
    assert disk.load(slots.blank(key_of(2), 5000)).failed == ((key_of(2), "unavailable"),)
    wait_until(lambda: not disk.tier.is_healthy and disk.tier.num_losses == 1)
    assert not disk.tier.can_store
    faulty_os.faults.clear()
    wait_until(lambda: disk.tier.is_healthy and disk.tier.can_store)
    assert not list(root.rglob("*.qkv"))


def test_the_parent_of_a_directory_is_not_made_again(make_disk, slots, tmp_path):
    """It may be where a disk was mounted: the one below would be filled instead."""
    disk = make_disk(tmp_path / "mount" / "tier")
    stored = slots.image(1)
    (tmp_path / "mount").rename(tmp_path / "away")
    for _ in range(3):
        assert disk.store(stored).failed == ((stored.key, "unavailable"),)
        time.sleep(0.02)
    assert not disk.tier.is_healthy
    assert disk.tier.contains(stored.key) is None
    assert not (tmp_path / "mount").exists()
    (tmp_path / "away").rename(tmp_path / "mount")
    wait_until(lambda: disk.tier.is_healthy and not disk.tier.problems)
    assert disk.tier.num_losses == 0
    assert disk.store(stored).done


def test_folders_that_vanish_are_made_again(disk, slots, root):
    stored = slots.image(1)
    disk.store(stored)
    for path in root.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    assert disk.load(slots.blank_for(stored)).failed == ((stored.key, "absent"),)
    assert disk.store(stored).done
    assert disk.tier.is_healthy


def test_a_directory_that_another_process_has_made_its_own_is_left_to_it(make_disk, slots, root):
    disk = make_disk()
    stored = slots.image(1)
    shutil.rmtree(root)
    make_disk()  # the new owner
    assert disk.store(stored).failed == ((stored.key, "unavailable"),)
    wait_until(lambda: not disk.tier.is_healthy and "in use by process" in disk.tier.problems["writing"])
    assert disk.load(slots.blank_for(stored)).failed == ((stored.key, "unavailable"),)
    assert not list(root.rglob("*.qkv"))


def test_a_lock_that_vanishes_is_taken_again(make_disk, slots, root):
    disk = make_disk()
    stored = slots.image(1)
    (root / ".lock").unlink()
    disk.store(stored)
    wait_until(lambda: disk.tier.is_healthy and not disk.tier.problems)
    assert disk.tier.num_losses == 0  # the files are there
    assert disk.store(stored).done
    with pytest.raises(ConfigError, match="in use by process"):
        make_disk()


# Broken


def test_one_unreadable_file_is_removed_and_the_tier_goes_on(disk, slots, root, monkeypatch):
    bad, good = slots.image(1, 9000), slots.image(2, 5000)
    disk.store(bad, good)
    read = os.preadv

    def failing(descriptor, parts, offset):
        if os.fstat(descriptor).st_size == disk.tier.stored_bytes(len(bad.image)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, parts, offset)

    monkeypatch.setattr(os, "preadv", failing)
    result = disk.load(slots.blank_for(bad), slots.blank_for(good))
    assert (result.done, result.failed) == ((good.key,), ((bad.key, "corrupt"),))
    assert disk.tier.is_healthy
    assert not file_of(root, bad.key).exists()


@pytest.mark.parametrize("fault", [("preadv", errno.EIO), ("open", errno.EMFILE), ("open", errno.EIO)])
def test_a_disk_that_cannot_be_read_keeps_its_files(disk, slots, faulty_os, caplog, fault):
    stored = slots.image(1)
    disk.store(stored)
    faulty_os.faults.update([fault])
    for _ in range(5):
        assert disk.load(slots.blank_for(stored)).failed == ((stored.key, "unavailable"),)
    assert not disk.tier.is_healthy
    assert len(lines(caplog, "tier_unavailable tier=disk what=reading")) == 1
    faulty_os.faults.clear()
    wait_until(lambda: disk.tier.is_healthy)
    target = slots.blank_for(stored)
    assert disk.load(target).done
    assert target.image == stored.image


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_cannot_be_written_fails_stores_and_says_so_once(disk, slots, faulty_os, caplog, code):
    stored, other = slots.image(1), slots.image(2)
    disk.store(stored)
    faulty_os.faults["pwritev"] = code
    for _ in range(5):
        assert disk.store(other).failed == ((other.key, "unavailable"),)
    assert disk.load(slots.blank_for(stored)).done
    assert disk.tier.is_healthy
    assert len(lines(caplog, "tier_unavailable tier=disk what=writing")) == 1
    faulty_os.faults.clear()
    wait_until(lambda: disk.tier.is_healthy and not disk.tier.problems)
    assert disk.store(other).done


def test_a_deletion_that_failed_is_made_up_for(disk, slots, faulty_os, root):
    """The store counts it as gone, so it must not stay."""
    old, new = slots.image(1), slots.image(2, 3000)  # of another size, lest it is written over the old one
    disk.store(old)
    faulty_os.faults["unlink"] = errno.EIO
    assert disk.store(new, delete_first=[old.key]).failed == ((new.key, "unavailable"),)
    assert file_of(root, old.key).exists()
    faulty_os.faults.clear()
    wait_until(lambda: disk.tier.is_healthy and not disk.tier.problems)
    assert not file_of(root, old.key).exists()
    assert disk.store(new).done


def test_what_came_after_a_deletion_that_failed_was_left_on_the_disk(make_disk, slots, small_disk):
    """B500."""
    disk = make_disk(small_disk / "tier")
    old, new = [slots.image(n) for n in range(4)], slots.image(4)
    disk.store(*old)
    remount(small_disk, "ro")
    assert disk.store(new, delete_first=[piece.key for piece in old]).failed == ((new.key, "unavailable"),)
    assert len(list((small_disk / "tier").rglob("*.qkv"))) == len(old)
    remount(small_disk, "rw")
    wait_until(lambda: disk.tier.is_healthy and not disk.tier.problems)
    assert not list((small_disk / "tier").rglob("*.qkv"))


# Not the disk's fault


def make_immovable(root, piece):
    """A directory in the place of its file, which can neither be removed nor replaced as a file can."""
    path = file_of(root, piece.key)
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)
    return path


def test_one_file_that_cannot_be_removed_kept_writing_down(disk, slots, root, caplog):
    """B505: its removal is tried again now and then, and told of once."""
    stuck, other = slots.image(1), slots.image(2)
    path = make_immovable(root, stuck)
    for _ in range(3):
        assert disk.delete(stuck.key).failed == ((stuck.key, "unavailable"),)
        assert disk.tier.can_store
    assert disk.store(other, delete_first=[stuck.key]).failed == ((other.key, "unavailable"),)
    assert disk.store(other).done
    assert len(lines(caplog, "file_refused tier=disk what=delete")) == 1
    assert not lines(caplog, "tier_unavailable")
    path.rmdir()
    path.write_text("")
    disk.tier.close()
    assert not path.exists()


def test_one_file_that_cannot_be_removed_did_not_let_writing_recover(disk, slots, root, faulty_os, caplog):
    """B505."""
    stuck, other, new = slots.image(1), slots.image(2), slots.image(3)
    disk.store(stuck, other)
    faulty_os.faults["unlink"] = errno.EIO
    disk.delete(stuck.key, other.key)
    make_immovable(root, stuck)
    faulty_os.faults.clear()
    wait_until(lambda: disk.tier.is_healthy and disk.tier.can_store)
    assert not file_of(root, other.key).exists()
    assert disk.store(new).done
    assert len(lines(caplog, "file_refused tier=disk what=delete")) == 1


def test_one_file_that_cannot_be_replaced_took_writing_down(disk, slots, root):
    """B505: it is refused, as is what would go into a folder that is none."""
    stuck, homeless, other = (slots.image(n) for n in range(3))
    make_immovable(root, stuck)
    file_of(root, homeless.key).parent.write_text("mine")
    for piece in (stuck, homeless):
        assert disk.store(piece).failed == ((piece.key, "refused"),)
    assert disk.tier.can_store
    assert disk.store(other).done
    assert not list(root.rglob("*.tmp"))


def test_what_was_stored_anew_is_not_removed_with_what_had_to_go(disk, slots, root, faulty_os):
    """B505: an old removal that is still owed does not concern it."""
    piece = slots.image(1)
    path = make_immovable(root, piece)
    disk.delete(piece.key)
    path.rmdir()
    assert disk.store(piece).done
    faulty_os.faults["pwritev"] = errno.EIO
    disk.store(slots.image(2))
    faulty_os.faults.clear()
    wait_until(lambda: disk.tier.is_healthy and disk.tier.can_store)
    assert disk.load(slots.blank_for(piece)).done


def test_a_directory_that_came_back_with_a_file_that_cannot_be_removed_is_used(make_disk, slots, root, monkeypatch):
    """B505."""
    disk, away, unlink = make_disk(), root.with_name("away"), Path.unlink
    stuck, other = slots.image(1), slots.image(2)
    disk.store(stuck, other)
    shutil.copytree(root, away)
    root.rename(root.with_name("first"))
    away.rename(root)

    def refuse(path, **kwargs):
        if path == file_of(root, stuck.key):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        unlink(path, **kwargs)

    monkeypatch.setattr(Path, "unlink", refuse)
    assert disk.load(slots.blank(key_of(9), 5000)).failed == ((key_of(9), "unavailable"),)
    wait_until(lambda: disk.tier.is_healthy and disk.tier.can_store)
    assert list(root.rglob("*.qkv")) == [file_of(root, stuck.key)]


# Stuck


@pytest.fixture
def stuck_read(monkeypatch, gate):
    read = os.preadv

    def waiting(descriptor, parts, offset):
        gate.pass_through()
        return read(descriptor, parts, offset)

    monkeypatch.setattr(os, "preadv", waiting)
    return gate


def test_a_read_that_hangs_fails_what_waits_and_keeps_its_slot(make_disk, slots, stuck_read):
    """B124: Its job is returned, and its slot free for others, only when the system has let go of it."""
    disk = make_disk(workers=1, read_deadline_seconds=0.01)
    first, second = slots.image(1), slots.image(2)
    disk.store(first, second)
    target = slots.blank_for(first)
    hanging = disk.submit(JobKind.LOAD, [target])
    stuck_read.wait_for()
    waiting = disk.submit(JobKind.LOAD, [slots.blank_for(second)])
    results = []
    wait_until(lambda: results.extend(disk.tier.poll()) or results)
    assert [(result.job_id, result.failed) for result in results] == [(waiting, ((second.key, "unavailable"),))]
    assert not disk.tier.is_healthy
    at_once = disk.submit(JobKind.LOAD, [slots.blank_for(second)])
    assert [result.job_id for result in disk.tier.poll()] == [at_once]
    assert not disk.tier.drain(0.0)
    stuck_read.open()
    assert disk.settle()[hanging].done == (first.key,)
    assert target.image == first.image
    wait_until(lambda: disk.tier.is_healthy)


def test_one_read_that_hangs_does_not_keep_a_tier_of_several_workers_down(make_disk, slots, stuck_read, monkeypatch):
    disk = make_disk(workers=2, read_deadline_seconds=0.01)
    first, second = slots.image(1), slots.image(2)
    disk.store(first, second)
    hanging = disk.submit(JobKind.LOAD, [slots.blank_for(first)])
    stuck_read.wait_for()
    wait_until(lambda: not disk.tier.is_healthy)
    monkeypatch.undo()
    wait_until(lambda: disk.tier.is_healthy)
    waiting = disk.submit(JobKind.LOAD, [slots.blank_for(second)])
    results = []
    wait_until(lambda: results.extend(disk.tier.poll()) or results)
    assert [(result.job_id, result.done) for result in results] == [(waiting, (second.key,))]
    stuck_read.open()
    assert disk.settle()[hanging].done


def test_writes_that_hang_in_every_thread_fail_loads_too(make_disk, slots, gate, monkeypatch):
    """B124."""
    disk = make_disk(workers=2, write_deadline_seconds=0.01)
    stored = slots.image(1)
    disk.store(stored)
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *args: (gate.pass_through(), write(*args))[1])
    hanging = disk.submit(JobKind.STORE, [slots.image(2), slots.image(3)])
    gate.wait_for(2)
    waiting = disk.submit(JobKind.LOAD, [slots.blank_for(stored)])
    results = []
    wait_until(lambda: results.extend(disk.tier.poll()) or results)
    assert [(result.job_id, result.failed) for result in results] == [(waiting, ((stored.key, "unavailable"),))]
    gate.open()
    assert set(disk.settle()[hanging].done) == {key_of(2), key_of(3)}
    wait_until(lambda: disk.tier.is_healthy and not disk.tier.problems)
    assert disk.load(slots.blank_for(stored)).done
