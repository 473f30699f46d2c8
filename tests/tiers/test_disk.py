"""The disk tier's files: what is in them, where they are, whose they are, and that wrong bytes are never taken."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qkvault.errors import ConfigError
from qkvault.image import align_up
from qkvault.testing.tier_contract import SPACE, key_of
from qkvault.tiers import TIERS, disk_files
from qkvault.tiers.base import JobKind, Piece
from qkvault.tiers.disk import DiskTier
from qkvault.types import KEY_BYTES, ChunkKey

ANY_KEY = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)


def file_of(root, key):
    return Path(disk_files.path_of(str(root), key))


def files_below(root):
    return {path for path in root.rglob("*") if not path.is_dir() and path.name != ".lock"}


def load(desk, slots, stored):
    """What became of loading ``stored`` again: its outcome, and whether the slot has its bytes."""
    slot = slots.blank_for(stored)
    result = desk.load(slot)
    return result.failed[0][1] if result.failed else "done", slot.image == stored.image


# What a file is


@pytest.mark.parametrize("payload_bytes", [8192, 10_000, 3])
def test_a_file_is_its_image_padded_with_zeros(disk, slots, root, payload_bytes):
    stored = slots.image(1, payload_bytes)
    disk.store(stored)
    content = file_of(root, stored.key).read_bytes()
    assert content[: len(stored.image)] == stored.image
    assert content[len(stored.image) :] == bytes(align_up(len(stored.image)) - len(stored.image))
    assert len(content) == disk.tier.stored_bytes(len(stored.image))


def test_only_the_owner_may_read(disk, slots, root):
    stored = slots.image(1)
    disk.store(stored)
    path = file_of(root, stored.key)
    modes = {stat.S_IMODE(place.stat().st_mode) for place in (path.parent, path.parent.parent, root)}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert modes == {0o700}


def test_a_slot_may_be_longer_than_its_image(disk, slots):
    """The pool rounds slots up; what is behind the image is not stored."""
    stored = slots.image(1, 10_000)
    (offset,) = slots.pool.slots
    rounded = slots.pool.view(offset, align_up(len(stored.image)))
    rounded[len(stored.image) :] = b"\xff" * (len(rounded) - len(stored.image))
    assert disk.store(Piece(stored.key, rounded)).done
    slot = slots.blank(stored.key, len(rounded))
    assert disk.load(slot).done
    assert slot.image[: len(stored.image)] == stored.image
    assert slot.image[len(stored.image) :] == bytes(len(rounded) - len(stored.image))


def test_an_image_of_another_key_is_not_stored(disk, slots, root):
    stored = slots.image(1)
    assert disk.store(Piece(key_of(2), stored.image)).failed == ((key_of(2), "corrupt"),)
    assert not files_below(root)


@pytest.mark.parametrize("most", [4096, 4096 * 3 + 512])
def test_the_system_may_move_fewer_bytes_than_asked(disk, slots, monkeypatch, most):
    def few(move):
        def moved(descriptor, parts, offset):
            return move(descriptor, [parts[0][:most]], offset)

        return moved

    monkeypatch.setattr(os, "pwritev", few(os.pwritev))
    monkeypatch.setattr(os, "preadv", few(os.preadv))
    stored = slots.image(1, 100_000)
    assert disk.store(stored).done
    assert load(disk, slots, stored) == ("done", True)


def test_memory_that_is_not_aligned_goes_through_the_page_cache(disk, slots):
    stored = slots.image(1)
    shifted = memoryview(bytearray(len(stored.image) + 1))[1:]
    shifted[:] = stored.image
    assert disk.store(Piece(stored.key, shifted)).done
    target = memoryview(bytearray(len(stored.image) + 1))[1:]
    assert disk.load(Piece(stored.key, target)).done
    assert target == shifted


@pytest.mark.parametrize("direct_io", [True, False])
def test_the_page_cache_is_gone_around_if_asked(make_disk, slots, monkeypatch, direct_io):
    flags = []

    def watch(move):
        def moved(descriptor, parts, offset):
            flags.append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT))
            return move(descriptor, parts, offset)

        return moved

    disk = make_disk(direct_io=direct_io)
    monkeypatch.setattr(os, "pwritev", watch(os.pwritev))
    monkeypatch.setattr(os, "preadv", watch(os.preadv))
    stored = slots.image(1)
    disk.store(stored)
    disk.load(slots.blank_for(stored))
    if direct_io and flags != [True, True]:
        pytest.skip("this file system has no O_DIRECT")
    assert flags == [direct_io] * 2


# Where files are


@given(key=ANY_KEY)
def test_no_key_reaches_outside_of_the_root(key):
    path = Path(disk_files.path_of("/root/of/tier", key))
    assert ".." not in path.parts
    assert path.parts[:4] == ("/", "root", "of", "tier")
    assert len(path.parts) == 7


@given(keys=st.lists(ANY_KEY, unique=True, max_size=20))
def test_two_keys_never_share_a_file(keys):
    assert len({disk_files.path_of("/root", key) for key in keys}) == len(keys)


@pytest.mark.parametrize("name", [b"a/b", b"../x", b"..", b"%2F", b"-SEP-", b"\0", "ключ".encode()])
def test_nothing_in_a_key_is_taken_for_a_path(disk, slots, root, tmp_path, name):
    key = ChunkKey((name * KEY_BYTES)[:KEY_BYTES])
    stored = slots.image(1, key=key)
    assert disk.store(stored).done
    assert load(disk, slots, stored) == ("done", True)
    assert {path for path in tmp_path.rglob("*") if not path.is_dir()} == {file_of(root, key), root / ".lock"}


@pytest.mark.parametrize("kind", list(JobKind))
def test_what_is_no_key_fails(disk, slots, kind):
    ((key, _),) = disk.do(kind, [Piece(b"short", slots.image(1).image)]).failed
    assert key == b"short"
    with pytest.raises(ValueError, match="48 bytes"):
        disk.tier.contains(b"short")


def test_bytes_on_disk_are_those_accounted_for(disk, slots, root):
    """After ten times of storing, overwriting and removing, what is on disk is what is told."""
    sizes = {}
    for n in range(100):
        stored = slots.image(n % 15, 500 * (n % 7), version=n)
        assert disk.store(stored, delete_first=list(sizes)[:1] if len(sizes) > 8 else []).done
        if len(sizes) > 8:
            del sizes[next(iter(sizes))]
        sizes[stored.key] = disk.tier.stored_bytes(len(stored.image))
    assert sum(path.stat().st_size for path in files_below(root)) == sum(sizes.values())
    assert {found.key: found.stored_bytes for found in disk.scan()} == sizes


# Wrong bytes


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), payload_bytes=st.sampled_from([1, 4000, 8192, 12_345]))
def test_a_file_gives_the_right_bytes_or_none(disk, slots, root, data, payload_bytes):
    """Whatever happened to it: flipped, cut, lengthened, overwritten. A wrong one is removed."""
    for offset in slots.pool.slots:
        slots.pool.free(offset)
    stored = slots.image(1, payload_bytes)
    disk.store(stored)
    path = file_of(root, stored.key)
    content = bytearray(path.read_bytes())
    whole = bytes(content)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content)))
        damage = data.draw(st.sampled_from(["flip", "cut", "lengthen", "zero"]))
        if damage == "cut":
            del content[at:]
        elif damage == "lengthen":
            content += bytes(at)
        elif at < len(content):
            content[at] = content[at] ^ (1 << data.draw(st.integers(0, 7))) if damage == "flip" else 0
    path.write_bytes(content)
    slot = slots.blank_for(stored)
    result = disk.load(slot)
    if result.done:
        assert slot.image == stored.image
        assert content[: len(stored.image)] == whole[: len(stored.image)]
    else:
        assert result.failed == ((stored.key, "corrupt"),)
        assert not path.exists()


def test_one_flipped_byte_in_each_file(disk, slots, root):
    """B123."""
    pieces = [slots.image(n, 5000 + n) for n in range(10)]
    disk.store(*pieces)
    for n, piece in enumerate(pieces):
        with file_of(root, piece.key).open("r+b") as file:
            file.seek(4096 + 499 * n)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
    result = disk.load(*map(slots.blank_for, pieces))
    assert sorted(result.failed) == sorted((piece.key, "corrupt") for piece in pieces)
    assert not files_below(root)


def test_a_file_of_another_chunk_is_not_taken(disk, slots, root):
    """As when names of files were mixed up: sizes and check sums are right, the key is not."""
    ours, other = slots.image(1), slots.image(2)
    disk.store(ours, other)
    file_of(root, ours.key).write_bytes(file_of(root, other.key).read_bytes())
    assert load(disk, slots, ours)[0] == "corrupt"
    assert load(disk, slots, ours)[0] == "absent"
    assert load(disk, slots, other) == ("done", True)


@pytest.mark.parametrize("version", [0, 1, 3, 99])
def test_a_file_of_another_format_is_removed(disk, slots, root, version):
    stored = slots.image(1)
    disk.store(stored)
    path = file_of(root, stored.key)
    content = bytearray(path.read_bytes())
    struct.pack_into("<H", content, 4, version)
    path.write_bytes(content)
    assert load(disk, slots, stored)[0] == "corrupt"
    assert not path.exists()


def test_a_directory_of_another_layout_is_a_miss(make_disk, slots, root):
    """The layout is part of the space, so of each key; what was there stays."""
    disk = make_disk()
    stored = slots.image(1)
    disk.store(stored)
    disk.tier.close()
    again = make_disk()
    other = ChunkKey(bytes(len(SPACE)) + stored.key[len(SPACE) :])
    assert again.load(slots.blank(other, len(stored.image))).failed == ((other, "absent"),)
    assert load(again, slots, stored) == ("done", True)


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_file_does_not_hold_us_up(disk, slots, root, tmp_path, kind):
    stored = slots.image(1)
    disk.store(stored)
    path = file_of(root, stored.key)
    target = path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(target)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    assert load(disk, slots, stored)[0] == "corrupt"
    assert target.read_bytes()[: len(stored.image)] == stored.image
    assert disk.tier.is_healthy


def test_a_chunk_is_never_seen_half_written(make_disk, slots, monkeypatch):
    """A slow writer and eight readers: each read is a miss, or all of one version."""
    disk = make_disk(workers=9)
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda descriptor, parts, at: write(descriptor, [parts[0][:4096]], at))
    versions = [slots.image(1, 60_000, version=n) for n in range(12)]
    targets = [slots.blank_for(versions[0]) for _ in range(8)]
    whole = {bytes(piece.image[4096:]) for piece in versions}
    num_read = 0
    for piece in versions:
        store_id = disk.submit(JobKind.STORE, [piece])
        results = {}
        while store_id not in results:
            loads = {disk.submit(JobKind.LOAD, [target]): target for target in targets}
            results = disk.settle()
            for load_id, target in loads.items():
                assert results[load_id].done or results[load_id].failed == ((piece.key, "absent"),)
                if results[load_id].done:
                    num_read += 1
                    assert bytes(target.image[4096:]) in whole
    assert num_read


# What has to leave


def inode_of(root, key):
    return file_of(root, key).stat().st_ino


def test_a_store_writes_over_what_had_to_leave_for_it(disk, slots, root):
    old = [slots.image(n) for n in range(3)]
    new = [slots.image(n, version=1) for n in range(10, 13)]
    disk.store(*old)
    inodes = {inode_of(root, piece.key) for piece in old}
    assert len(disk.store(*new, delete_first=[piece.key for piece in old]).done) == 3
    assert {inode_of(root, piece.key) for piece in new} == inodes
    assert files_below(root) == {file_of(root, piece.key) for piece in new}
    assert [load(disk, slots, piece) for piece in new] == [("done", True)] * 3
    assert [load(disk, slots, piece)[0] for piece in old] == ["absent"] * 3


def test_what_leaves_is_not_kept_for_more_than_its_place(disk, slots, root):
    """Of another size, or more of them than are stored: never more on disk than is accounted for."""
    large, small = [slots.image(n, 50_000) for n in range(4)], [slots.image(n, 100) for n in range(4, 8)]
    disk.store(*large, *small)
    stored = slots.image(9, 50_000)
    assert disk.store(stored, delete_first=[piece.key for piece in [*small, *large]]).done
    assert files_below(root) == {file_of(root, stored.key)}


def test_what_left_for_a_store_that_is_refused_is_removed(disk, slots, root):
    old = slots.image(1)
    disk.store(old)
    assert disk.store(slots.blank(key_of(2), len(old.image)), delete_first=[old.key]).failed
    assert not files_below(root)


def test_what_left_is_removed_when_the_tier_closes_before_the_store(disk, slots, root, gate, monkeypatch):
    old, hold = slots.image(1), slots.image(2, 3000)
    disk.store(old)
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *args: (gate.pass_through(), write(*args))[1])
    for n in range(3):
        disk.submit(JobKind.STORE, [slots.image(10 + n, 3000)])
    gate.wait_for(3)
    disk.submit(JobKind.STORE, [hold, slots.image(3)], delete_first=[old.key])
    gate.wait_for(4)
    assert not file_of(root, old.key).exists()
    closing = threading.Thread(target=disk.tier.close)
    closing.start()
    gate.open()
    closing.join()
    assert not list(root.rglob("*.tmp"))


def test_a_read_of_what_is_written_over_meanwhile_fails(make_disk, slots, gate, monkeypatch):
    disk = make_disk()
    old, new = slots.image(1, 100_000), slots.image(2, 100_000)
    disk.store(old)
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: (gate.pass_through(), read(*args))[1])
    load_id = disk.submit(JobKind.LOAD, [slots.blank_for(old)])
    gate.wait_for()
    store_id = disk.submit(JobKind.STORE, [new], delete_first=[old.key])
    results = []
    while not results:
        results = disk.tier.poll()
    assert [result.job_id for result in results] == [store_id]
    gate.open()
    assert disk.settle()[load_id].failed == ((old.key, "corrupt"),)
    assert load(disk, slots, new) == ("done", True)


# Whose the directory is


def test_a_directory_has_one_owner(make_disk, root):
    make_disk()
    with pytest.raises(ConfigError, match=f"{root} is in use by process {os.getpid()}:"):
        make_disk()


def test_another_process_is_named(make_disk, root):
    script = f"""
from qkvault.tiers.disk import DiskTier
tier = DiskTier({str(root)!r}, 1 << 30)
print("ready", flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"ready\n"
        with pytest.raises(ConfigError, match=f"in use by process {other.pid}:"):
            make_disk()
        other.kill()
    assert make_disk().tier.is_healthy


def test_a_directory_is_free_when_its_owner_has_closed(make_disk):
    first = make_disk()
    first.tier.close()
    make_disk()


@pytest.mark.parametrize("settings", [{"workers": 0}, {"capacity_bytes": 0}, {"capacity_bytes": -1}])
def test_a_tier_without_cap_or_workers_is_refused(root, settings):
    with pytest.raises(ConfigError):
        DiskTier(root, **{"capacity_bytes": 1 << 20} | settings)


def test_a_path_that_cannot_be_a_directory_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/tier cannot be the disk tier's directory: Not a directory"):
        DiskTier(tmp_path / "file" / "tier", 1 << 20)


# Keep or purge


def test_a_directory_is_kept_at_close(disk, slots, root):
    stored = slots.image(1)
    disk.store(stored)
    disk.tier.close()
    assert files_below(root) == {file_of(root, stored.key)}


def test_a_purge_leaves_an_empty_directory(disk, slots, root):
    disk.store(*(slots.image(n) for n in range(10)))
    assert disk.tier.purge() == 10
    disk.tier.close()
    assert list(root.iterdir()) == []


def test_a_purge_leaves_what_is_not_ours(disk, slots, root):
    stored = slots.image(1)
    disk.store(stored)
    kept = {root / "notes.txt", file_of(root, stored.key).with_name("notes.txt"), root / "mine" / "deep" / "file"}
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert disk.tier.purge() == 1
    assert files_below(root) == kept


def test_a_purged_tier_can_go_on(disk, slots):
    stored = slots.image(1)
    disk.store(stored)
    disk.tier.purge()
    assert load(disk, slots, stored)[0] == "absent"
    assert disk.store(stored).done
    assert load(disk, slots, stored) == ("done", True)


def test_a_tier_is_known_by_its_name():
    assert TIERS.load("disk") is DiskTier
