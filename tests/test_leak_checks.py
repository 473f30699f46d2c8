"""The leak checks of conftest.py see what they are for, and nothing else."""

from __future__ import annotations

import os
import threading

import pytest

from qkvault.pool import AttachedPool, Pool


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


def memory_leaks(before):
    """What is found of memory alone, without inodes: a mapping of Python's keeps a descriptor as well."""
    return [leak.rpartition(" ")[0] for leak in before.leaks_after(0.0) if leak.startswith("shared memory")]


def test_a_shared_pool_is_a_leak(take_snapshot):
    """Until its owner and whoever attached have unmapped it."""
    before = take_snapshot()
    pool = Pool(1 << 16, name="qkvault-leak", prefault=False)
    attached = AttachedPool(os.dup(pool.descriptor), pool.capacity_bytes)
    for close in (pool.close, attached.close):
        assert memory_leaks(before) == ["shared memory /memfd:qkvault-leak"]
        close()
    assert before.leaks_after(0.0) == []


def test_a_pool_that_somebody_still_looks_at_is_a_leak(take_snapshot):
    """Its memory stays mapped, whatever was closed."""
    before = take_snapshot()
    pool = Pool(1 << 16, name="qkvault-leak", prefault=False)
    view = pool.view(0, 16)
    pool.close()
    assert memory_leaks(before) == ["shared memory /memfd:qkvault-leak"]
    view.release()
    del pool
    assert before.leaks_after(0.0) == []


def test_a_pool_that_takes_the_place_of_another_is_a_leak(take_snapshot):
    """As many descriptors are open as before."""
    first = Pool(1 << 16, name="qkvault-leak", prefault=False)
    before = take_snapshot()
    first.close()
    second = Pool(1 << 16, name="qkvault-leak", prefault=False)
    assert memory_leaks(before) == ["shared memory /memfd:qkvault-leak"]
    second.close()
    assert before.leaks_after(0.0) == []


@pytest.mark.allow_leaks("shows that the mark switches the checks off")
def test_a_leak_with_a_reason_passes():
    os.environ["QKVAULT_LEFT_BEHIND"] = "1"
    os.pipe()


@pytest.mark.parametrize("attempt", range(2))
def test_settings_of_another_test_are_gone(attempt):
    assert not [name for name in os.environ if name.startswith("QKVAULT_")]
    os.environ["QKVAULT_POOL_BYTES"] = str(attempt)
