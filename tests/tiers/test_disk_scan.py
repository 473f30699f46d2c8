"""What a disk tier finds in its directory when it is opened again."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from qkvault.image import Header, header_bytes_for, sketch_of, write_header
from qkvault.testing.tier_contract import key_of, tokens_of
from qkvault.tiers import disk_files, disk_listing
from qkvault.tiers import disk_listing as listing
from qkvault.tiers.base import JobKind


def file_of(root, key):
    return Path(disk_files.path_of(str(root), key))


def keys_of(desk):
    return [found.key for found in desk.scan()]


@pytest.fixture
def stored(disk, slots):
    pieces = [slots.image(n, 3000) for n in range(6)]
    disk.store(*pieces)
    return pieces


def test_two_thousand_files_are_found(disk, root, slots):
    template = bytearray(slots.image(0, 100).image)
    for n in range(2000):
        header = Header(key_of(n), key_of(n - 1), tokens_of(n), b"space", 4096, 100, 0)
        write_header(memoryview(template), header)
        path = file_of(root, key_of(n))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(template + bytes(8192 - len(template)))
    found = {chunk.key: chunk for chunk in disk.scan()}
    assert found.keys() == {key_of(n) for n in range(2000)}
    for n in (0, 1234, 1999):
        assert found[key_of(n)].sketch == sketch_of(tokens_of(n))
        assert found[key_of(n)].parent == key_of(n - 1)


def test_the_oldest_use_comes_first(disk, stored, root, slots):
    for n, piece in enumerate(stored):
        os.utime(file_of(root, piece.key), (1000 + n, 1000 + n))
    disk.load(slots.blank_for(stored[2]))
    order = [0, 1, 3, 4, 5, 2]
    assert keys_of(disk) == [stored[n].key for n in order]


def test_order_holds_over_batches(disk, stored, root, monkeypatch):
    monkeypatch.setattr("qkvault.tiers.disk_scan.SCAN_BATCH", 4)
    for n, piece in enumerate(stored):
        os.utime(file_of(root, piece.key), (1000 - n, 1000 - n))
    batches = [[found.key for found in batch] for batch in disk.tier.scan()]
    assert [len(batch) for batch in batches] == [4, 2]
    assert [key for batch in batches for key in batch] == [piece.key for piece in reversed(stored)]


def test_a_scan_writes_nothing(make_disk, disk, stored, root):
    """An index that is lost costs nothing but a scan: no file is written again."""
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in root.rglob("*.qkv")}
    disk.tier.close()
    again = make_disk()
    assert len(keys_of(again)) == len(stored)
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in root.rglob("*.qkv")} == before


def test_leftovers_of_a_dead_process_are_removed(disk, stored, root):
    path = file_of(root, stored[0].key)
    leftover = Path(disk_files.temporary_of(str(path), "0123abcd", 7))
    leftover.write_bytes(path.read_bytes()[:5000])
    assert len(keys_of(disk)) == len(stored)
    assert not leftover.exists()
    assert disk.tier.counters.scan_removed == {"leftover": 1}


def test_a_scan_that_outlives_its_tier_removes_nothing(disk, stored, root, monkeypatch):
    """B510: it hung, and the directory may have another owner by now, whose files are no leftovers."""
    path = file_of(root, stored[0].key)
    theirs = Path(disk_files.temporary_of(str(path), "0123abcd", 7))
    theirs.write_bytes(b"being written")
    take_stock = disk_listing.take_stock
    monkeypatch.setattr(disk_listing, "take_stock", lambda *args: (disk.tier.close(), take_stock(*args))[1])
    assert len(keys_of(disk)) == len(stored)
    assert theirs.exists()
    assert disk.tier.counters.scan_removed == {"leftover": 0}


def test_a_file_that_is_being_written_is_left_alone(make_disk, slots, root, gate, monkeypatch):
    write = os.pwritev
    disk = make_disk()
    monkeypatch.setattr(os, "pwritev", lambda *args: (gate.pass_through(), write(*args))[1])
    piece = slots.image(1)
    job_id = disk.submit(JobKind.STORE, [piece])
    gate.wait_for()
    assert keys_of(disk) == []
    assert list(root.rglob("*.tmp"))
    gate.open()
    assert disk.settle()[job_id].done == (piece.key,)
    assert keys_of(disk) == [piece.key]


def cut(path):
    os.truncate(path, 4096)


def lengthen(path):
    os.truncate(path, 1 << 20)


def empty(path):
    os.truncate(path, 0)


def flip_header(path):
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)


def other_format(path):
    content = bytearray(path.read_bytes())
    content[4] += 1
    path.write_bytes(content)


def other_name(path):
    content = path.read_bytes()
    path.unlink()
    other = path.with_name(path.name[:2] + "f" * 62 + ".qkv")
    other.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (cut, "truncated"),
        (lengthen, "truncated"),
        (empty, "truncated"),
        (flip_header, "corrupt"),
        (other_format, "format"),
        (other_name, "misnamed"),
    ],
)
def test_what_is_not_a_whole_chunk_is_removed(disk, stored, root, damage, fault):
    """B123, B437: and counted by what is wrong with it."""
    damage(file_of(root, stored[0].key))
    assert set(keys_of(disk)) == {piece.key for piece in stored[1:]}
    assert len(list(root.rglob("*.qkv"))) == len(stored) - 1
    assert disk.tier.counters.scan_removed == {fault: 1, "leftover": 0}


def test_foreign_files_are_left_alone(disk, stored, root):
    shard = file_of(root, stored[0].key).parent
    digits = stored[0].key[16:].hex()
    names = [
        root / "readme", root / "lost+found" / "file", root / ("z" * 32) / "00" / f"{digits}.qkv",
        shard.parent / "notes", shard / "notes.qkv", shard / f"{digits}.qkv.bak", shard / f"{digits.upper()}x.qkv",
        shard / f"{'0' * 62}.qkv", shard / f"{digits}.tmp",
    ]  # fmt: skip
    wrong_shard = shard.parent / ("00" if shard.name != "00" else "01") / f"{digits}.qkv"
    for path in [*names, wrong_shard]:
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("mine")
    assert set(keys_of(disk)) == {piece.key for piece in stored}
    assert {path.read_text() for path in [*names, wrong_shard]} == {"mine"}


def test_a_folder_that_may_not_be_looked_into_is_passed_by(disk, stored, root, monkeypatch):
    """Such as lost+found, when the directory is a file system of its own."""
    (root / "lost+found").mkdir()
    look = os.scandir

    def refuse(path):
        if str(path).endswith("lost+found"):
            raise PermissionError(13, "Permission denied", path)
        return look(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert len(keys_of(disk)) == len(stored)


def refusing(monkeypatch, *folders, code=errno.EACCES):
    """Has listing one of ``folders`` fail, until it is taken off the list that is returned."""
    look, refused = os.scandir, [str(folder) for folder in folders]

    def refuse(path):
        if str(path) in refused:
            raise OSError(code, os.strerror(code), path)
        return look(path)

    monkeypatch.setattr(os, "scandir", refuse)
    return refused


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_one_folder_that_could_not_be_listed_ended_a_scan_with_nothing_found(
    disk, stored, root, slots, *, monkeypatch, caplog, code
):
    """B502: the others are scanned, and emptied when all is to go."""
    other = slots.image(9, key=key_of(9, bytes([9]) * 16))
    disk.store(other)
    shard = file_of(root, stored[0].key).parent
    refusing(monkeypatch, shard, file_of(root, other.key).parent.parent, code=code)
    rest = {piece.key for piece in stored if file_of(root, piece.key).parent != shard}
    assert set(keys_of(disk)) == rest
    assert disk.tier.is_healthy
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("disk_scan_skipped tier=disk num_skipped=2 first=")
    assert {found.key[:16] for found in disk.tier.sample()} == {stored[0].key[:16]}
    assert disk.tier.purge() == len(rest)


def test_one_file_that_could_not_be_looked_at_ended_a_scan(disk, stored, root, monkeypatch):
    """B502: as in a folder that may be listed and not entered."""
    entry_of = listing._entry

    class Closed:
        """A directory's entry whose file may not be looked at."""

        def __init__(self, name):
            self.name = name

        def stat(self, **_):
            raise PermissionError(errno.EACCES, "Permission denied", self.name)

    def refuse(file, *args):
        return entry_of(Closed(file.name) if stored[0].key[16:].hex() in file.name else file, *args)

    monkeypatch.setattr(listing, "_entry", refuse)
    assert set(keys_of(disk)) == {piece.key for piece in stored[1:]}


def test_a_disk_that_could_not_be_read_for_a_while_was_never_scanned(disk, stored, root, monkeypatch, caplog):
    """B503."""
    refused = refusing(monkeypatch, root, code=errno.EIO)
    found = []
    for number, batch in enumerate(disk.tier.scan()):
        found += [chunk.key for chunk in batch]
        if number == 2:
            refused.clear()
        assert disk.tier.is_healthy in (True, False)  # which also looks whether the disk can be read again
    assert set(found) == {piece.key for piece in stored}
    assert "disk_scan_ended_early" not in caplog.text


def test_a_scan_does_not_wait_for_a_disk_without_end(disk, stored, root, monkeypatch, caplog):
    """B503."""
    monkeypatch.setattr("qkvault.tiers.disk_scan._MAX_RESTS", 2)
    refusing(monkeypatch, root, code=errno.EIO)
    assert list(disk.tier.scan()) == [[], []]
    assert caplog.text.count("disk_scan_ended_early") == 1


def test_links_are_not_followed(disk, stored, root, tmp_path):
    outside = tmp_path / "outside"
    path = file_of(root, stored[0].key)
    outside.mkdir()
    path.rename(outside / path.name)
    path.symlink_to(outside / path.name)
    (root / ("a" * 32)).symlink_to(root / stored[0].key[:16].hex(), target_is_directory=True)
    assert set(keys_of(disk)) == {piece.key for piece in stored[1:]}
    disk.tier.purge()
    assert (outside / path.name).exists()


def test_a_scan_can_be_left_and_begun_again(disk, stored, monkeypatch):
    monkeypatch.setattr("qkvault.tiers.disk_scan.SCAN_BATCH", 1)
    scan = disk.tier.scan()
    assert len(next(scan)) == 1
    scan.close()
    assert len(keys_of(disk)) == len(stored)


def test_a_chunk_deleted_during_a_scan_is_left_out(disk, stored, monkeypatch):
    monkeypatch.setattr("qkvault.tiers.disk_scan.SCAN_BATCH", 1)
    scan = disk.tier.scan()
    first = next(scan)[0].key
    rest = [piece.key for piece in stored if piece.key != first]
    disk.delete(rest[0])
    assert sorted(found.key for batch in scan for found in batch) == sorted(rest[1:])


def test_a_long_header_is_read(disk, slots):
    """Chunks of thousands of tokens have headers of more than a page."""
    tokens = tokens_of(1, 8192)
    header_bytes = header_bytes_for(8192, 100)
    for n in range(3):
        piece = slots.blank(key_of(n), header_bytes + 1000)
        write_header(piece.image, Header(piece.key, key_of(9), tokens, b"s" * 100, header_bytes, 1000, 0))
        assert disk.store(piece).done
    found = disk.scan()
    assert {chunk.key for chunk in found} == {key_of(0), key_of(1), key_of(2)}
    assert {(chunk.num_tokens, chunk.sketch) for chunk in found} == {(8192, sketch_of(tokens))}


def test_chunks_are_found_by_key_before_a_scan_has_come_to_them(make_disk, disk, stored, root):
    keys = [piece.key for piece in stored]
    disk.tier.close()
    again = make_disk()
    scanned = {found.key: found for found in again.scan()}
    cut(file_of(root, keys[1]))
    flip_header(file_of(root, keys[2]))
    assert again.tier.find([*keys, key_of(77)]) == [scanned[key] for key in (keys[0], *keys[3:])]
    again.tier._reads.report("test")
    assert again.tier.find(keys) == []


def test_a_sample_reads_one_header_of_each_space(disk, slots, monkeypatch):
    """B331: and of a space of thousands of files one folder."""
    others = [bytes([n]) * 16 for n in range(5)]
    for space in others:
        disk.store(*(slots.image(n, 100, key=key_of(n, space)) for n in range(10)))
    read, listed = listing.read_headers, []
    monkeypatch.setattr(listing, "read_headers", lambda paths, size: (listed.extend(paths), read(paths, size))[1])
    assert sorted(chunk.key[:16] for chunk in disk.tier.sample()) == others
    assert len(listed) == len(others)


def test_a_sample_passes_over_what_is_damaged(disk, stored, root):
    """B331."""
    (keys,) = map(list, listing.keys_by_space(str(root)))
    assert sorted(keys) == sorted(piece.key for piece in stored)
    flip_header(file_of(root, keys[0]))
    assert [chunk.key for chunk in disk.tier.sample()] == [keys[1]]
    for key in keys[1:]:
        flip_header(file_of(root, key))
    assert disk.tier.sample() == []
    disk.tier._reads.report("test")
    assert disk.tier.sample() == []


def test_jobs_run_during_a_scan(disk, stored, slots):
    """A thread scans, as the store's does, while another stores and deletes."""
    seen = []
    scanning = threading.Thread(target=lambda: [seen.extend(disk.scan()) for _ in range(20)])
    scanning.start()
    for n in range(100, 140):
        assert disk.store(slots.image(n, 2000), delete_first=[key_of(n - 1)]).done
    scanning.join()
    assert {piece.key for piece in stored} <= {found.key for found in seen}
    assert {found.key for found in seen} <= {key_of(n) for n in [*range(6), *range(99, 140)]}


def test_a_directory_without_anything_is_empty(disk):
    assert keys_of(disk) == []


def test_a_directory_that_is_gone_is_empty(disk, stored, root):
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    root.rmdir()
    assert keys_of(disk) == []


def test_chunks_of_an_earlier_process_are_loaded(make_disk, slots, stored, disk):
    disk.tier.close()
    again = make_disk()
    for found in again.scan():
        target = slots.blank(found.key, found.image_bytes)
        assert again.load(target).done
        assert target.image == next(piece.image for piece in stored if piece.key == found.key)
