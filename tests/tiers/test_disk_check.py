"""``check_directory`` sees every wrong byte, and removes no more than what is wrong."""

from __future__ import annotations

import pytest

from qkvault.errors import ConfigError
from qkvault.testing.tier_contract import key_of
from qkvault.tiers import disk_files
from qkvault.tiers.disk_check import MAX_PROBLEMS, DiskReport, check_directory

FILE_BYTES = 12_288  # of an image with a payload of 8192


@pytest.fixture
def stored(make_disk, slots):
    """Six chunks of one chain, in a directory that nobody uses any more."""
    disk = make_disk()
    pieces = [slots.image(n, 8192) for n in range(6)]
    disk.store(*pieces)
    disk.tier.close()
    return pieces


def path_of(root, piece):
    return root / disk_files.path_of("", piece.key)[1:]


def spoil(root, stored):
    """One of each: flipped payload, cut, another's name, leftover, foreign."""
    flipped, short, other = (path_of(root, piece) for piece in stored[1:4])
    content = bytearray(flipped.read_bytes())
    content[9000] ^= 4
    flipped.write_bytes(content)
    short.write_bytes(short.read_bytes()[:5000])
    other.write_bytes(path_of(root, stored[0]).read_bytes())
    leftover = flipped.with_name(flipped.stem + ".00ff-3.tmp")
    leftover.write_bytes(b"half")
    (root / "notes.txt").write_text("mine")


def test_a_sound_directory_is_clean(stored, root):
    report = check_directory(root)
    # The chain's first chunk has a parent that is no chunk.
    assert report == DiskReport(whole=6, whole_bytes=6 * FILE_BYTES, without_parent=1)
    assert report.is_clean


def test_what_is_being_written_is_no_problem(stored, root, make_disk):
    """B551: while another uses the directory."""
    disk = make_disk()
    whole = path_of(root, stored[0])
    leftover = whole.with_name(whole.stem + ".00ff-3.tmp")
    leftover.write_bytes(b"half")
    report = check_directory(root)
    assert (report.in_use, report.temporary, report.problems, report.is_clean) == (True, 1, (), True)
    disk.tier.close()
    report = check_directory(root)
    assert (report.in_use, report.temporary, report.is_clean) == (False, 1, False)
    assert report.problems == ((str(leftover), "not finished"),)


def test_every_wrong_file_is_told(stored, root):
    spoil(root, stored)
    before = sorted(root.rglob("*"))
    report = check_directory(root)
    assert sorted(root.rglob("*")) == before
    assert (report.whole, report.whole_bytes) == (3, 3 * FILE_BYTES)
    assert (report.corrupt, report.corrupt_bytes) == (3, 2 * FILE_BYTES + 5000)
    assert (report.temporary, report.temporary_bytes) == (1, 4)
    assert (report.foreign, report.foreign_bytes) == (1, 4)
    assert (report.removed, report.is_clean) == (0, False)
    assert report.without_parent == 2  # the first one, and the one whose parent is corrupt
    problems = dict(report.problems)
    assert len(problems) == 4
    assert "check sum" in problems[str(path_of(root, stored[1]))]
    assert "5000 bytes" in problems[str(path_of(root, stored[2]))]
    assert "another chunk" in problems[str(path_of(root, stored[3]))]


def test_fixing_removes_what_is_wrong_and_nothing_else(stored, root, make_disk, slots):
    spoil(root, stored)
    report = check_directory(root, fix=True)
    assert (report.removed, report.removed_bytes) == (4, 2 * FILE_BYTES + 5000 + 4)
    assert report.is_clean
    assert {path.name for path in root.rglob("*") if path.is_file()} == {
        "notes.txt",
        *(path_of(root, stored[n]).name for n in (0, 4, 5)),
    }
    assert check_directory(root).is_clean
    assert {found.key for found in make_disk().scan()} == {key_of(0), key_of(4), key_of(5)}


def test_progress_is_told(stored, root):
    seen = []
    check_directory(root, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n, 6) for n in range(1, 7)]


def test_a_directory_in_use_can_be_looked_at_but_not_fixed(make_disk, slots, root):
    disk = make_disk()
    disk.store(slots.image(1))
    assert check_directory(root).whole == 1
    with pytest.raises(ConfigError, match="in use by process"):
        check_directory(root, fix=True)


def test_no_directory_is_no_report(tmp_path):
    with pytest.raises(ConfigError, match="not a directory"):
        check_directory(tmp_path / "nowhere")


def test_an_empty_directory_is_clean(tmp_path):
    assert check_directory(tmp_path, fix=True) == DiskReport()
    assert list(tmp_path.iterdir()) == []


def test_the_list_of_problems_is_bounded(stored, root):
    path = path_of(root, stored[0])
    for n in range(MAX_PROBLEMS + 5):
        path.with_name(f"{path.stem}.ab-{n}.tmp").touch()
    report = check_directory(root)
    assert report.temporary == MAX_PROBLEMS + 5
    assert len(report.problems) == MAX_PROBLEMS
