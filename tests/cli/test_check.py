"""`qkvault check`: it reports what is in a directory, and its code says whether that is clean."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from qkvault.cli import check as command
from qkvault.cli.app import app
from qkvault.tiers import disk_check
from qkvault.tiers.disk_check import DiskReport

runner = CliRunner()


@pytest.fixture
def report_as(monkeypatch):
    """Let the check find what the test says, and note how it was called."""
    calls = []

    def report_as(report: DiskReport):
        def check_directory(path, *, fix=False, progress=None):
            calls.append((str(path), fix))
            for number in range(1, 4):
                if progress is not None:
                    progress(number, 3)
            return report

        monkeypatch.setattr(disk_check, "check_directory", check_directory)
        return calls

    return report_as


BROKEN = DiskReport(
    whole=3, whole_bytes=3 << 20, corrupt=2, corrupt_bytes=8192, problems=(("/kv/a", "bad sum"), ("/kv/[b]", "short"))
)
FIXED = DiskReport(whole=3, corrupt=2, corrupt_bytes=8192, removed=2, removed_bytes=8192)


def test_an_empty_directory_is_clean(tmp_path):
    """Nothing there is nothing wrong."""
    result = runner.invoke(app, ["check", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[1].split() == ["whole", "0", "0", "B"]


def test_files_that_are_not_ours_are_no_problem_and_stay(tmp_path):
    """A foreign file is counted and left alone, even by --fix."""
    (tmp_path / "notes.txt").write_text("mine")
    result = runner.invoke(app, ["check", str(tmp_path), "--fix", "--json"])
    assert (result.exit_code, json.loads(result.stdout)["foreign"]) == (0, 1)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_broken_file_is_found_and_fixed(tmp_path):
    """A file that only looks like a chunk is code 1, --fix removes it, and then the directory is clean."""
    chunk = tmp_path / ("0" * 32) / "ab" / f"{'ab' * 32}.qkv"
    chunk.parent.mkdir(parents=True)
    chunk.write_bytes(b"x" * 4096)
    result = runner.invoke(app, ["check", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith(f"{chunk}: ")
    assert chunk.exists()
    assert runner.invoke(app, ["check", str(tmp_path), "--fix"]).exit_code == 0
    assert not chunk.exists()
    assert runner.invoke(app, ["check", str(tmp_path)]).exit_code == 0


def test_problems_are_listed_and_code_1(report_as, tmp_path):
    """Something broken is code 1, and each problem is a line with its path as it is."""
    assert report_as(BROKEN) == []
    result = runner.invoke(app, ["check", str(tmp_path)])
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[-2:] == ["/kv/a: bad sum", "/kv/[b]: short"]
    assert lines[1].split() == ["whole", "3", "3.0", "MiB"]
    assert lines[2].split() == ["corrupt", "2", "8.0", "KiB"]


def test_more_problems_than_are_listed_are_counted(report_as, tmp_path):
    """The list may be cut; the number is not."""
    report_as(DiskReport(corrupt=5, problems=(("/kv/a", "bad sum"),)))
    assert runner.invoke(app, ["check", str(tmp_path)]).stdout.splitlines()[-1] == "and 4 more"


def test_what_was_fixed_is_clean(report_as, tmp_path):
    """With --fix everything broken is removed, and the code is 0 again."""
    calls = report_as(FIXED)
    assert runner.invoke(app, ["check", str(tmp_path), "--fix"]).exit_code == 0
    assert calls == [(str(tmp_path), True)]


def test_json_is_the_whole_report_and_nothing_else(report_as, tmp_path):
    """Programs get every number, without a bar or a table around it."""
    report_as(BROKEN)
    result = runner.invoke(app, ["check", str(tmp_path), "--json"])
    assert (result.exit_code, result.stderr) == (1, "")
    shown = json.loads(result.stdout)
    assert list(shown) == [*DiskReport.__struct_fields__, "is_clean"]
    assert (shown["corrupt"], shown["problems"][0], shown["is_clean"]) == (2, ["/kv/a", "bad sum"], False)


def test_a_directory_that_is_not_there_is_code_2(tmp_path):
    """A wrong path is the user's error: one line and code 2."""
    result = runner.invoke(app, ["check", str(tmp_path / "gone")])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"qkvault: {tmp_path / 'gone'} is not a directory\n"


def test_a_directory_that_cannot_be_read_is_code_2(monkeypatch, tmp_path):
    """An error of the file system ends in one line too."""

    def check_directory(path, *, fix=False, progress=None):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(disk_check, "check_directory", check_directory)
    result = runner.invoke(app, ["check", str(tmp_path)])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"qkvault: cannot check {tmp_path}: [Errno 13]")


def test_a_bar_shows_the_way_to_whoever_looks(monkeypatch, capsys):
    """On a terminal a bar on stderr follows the files; without one there is none, and nothing to call."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with command._progress(hidden=False) as progress:
        progress(1, 3)
        progress(3, 3)
    shown = capsys.readouterr()
    assert "3/3" in shown.err
    assert shown.out == ""
    with command._progress(hidden=True) as progress:
        assert progress is None
