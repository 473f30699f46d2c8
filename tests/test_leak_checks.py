"""The leak checks of conftest.py see what they are for, and nothing else."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest


@pytest.fixture
def release():
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize(("name", "daemon"), [("worker", False), ("qkvault-store", True)])
def test_a_thread_left_running_is_a_leak(take_snapshot, release, name, daemon):
    before = take_snapshot()
    threading.Thread(target=release.wait, name=name, daemon=daemon).start()
    assert before.leaks_after(0.0) == [f"thread {name!r}"]


def test_a_daemon_thread_of_a_library_is_not_ours_to_stop(take_snapshot, release):
    before = take_snapshot()
    threading.Thread(target=release.wait, name="library", daemon=True).start()
    assert before.leaks_after(0.0) == []


def test_a_thread_gets_a_moment_to_end(take_snapshot, release):
    before = take_snapshot()
    threading.Thread(target=release.wait).start()
    threading.Timer(0.1, release.set).start()
    assert before.leaks_after(2.0) == []


def test_an_open_file_is_a_leak(take_snapshot, tmp_path):
    before = take_snapshot()
    path = tmp_path / "open"
    with path.open("w") as file:
        assert before.leaks_after(0.0) == [f"descriptor {file.fileno()} on {path}"]
    assert before.leaks_after(0.0) == []


def test_a_shared_segment_is_a_leak(take_snapshot):
    before = take_snapshot()
    segment = Path(f"/dev/shm/qkvault-leak-check-{os.getpid()}")
    segment.touch()
    try:
        assert before.leaks_after(0.0) == [f"shared memory {segment.name!r}"]
    finally:
        segment.unlink()


@pytest.mark.allow_leaks("shows that the mark switches the checks off")
def test_a_leak_with_a_reason_passes():
    os.environ["QKVAULT_LEFT_BEHIND"] = "1"
    os.pipe()


@pytest.mark.parametrize("attempt", range(2))
def test_settings_of_another_test_are_gone(attempt):
    assert not [name for name in os.environ if name.startswith("QKVAULT_")]
    os.environ["QKVAULT_POOL_BYTES"] = str(attempt)
