"""What the tests of tiers share: slots, desks, and gates that hold up a thread."""

from __future__ import annotations

import subprocess
import threading

import pytest

from qkvault.testing.tier_contract import Slots, TierDesk
from qkvault.tiers.disk import DiskTier

WAIT_SECONDS = 20.0


@pytest.fixture
def slots():
    slots = Slots()
    yield slots
    slots.pool.close()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "tier"


@pytest.fixture
def make_disk(root):
    """Makes disk tiers; they are closed after the test."""
    tiers = []

    def make(path=root, **settings):
        tier = DiskTier(path, 1 << 30, **{"probe_seconds": 0.01} | settings)
        tiers.append(tier)
        return TierDesk(tier)

    yield make
    for tier in tiers:
        tier.close()


@pytest.fixture
def disk(make_disk):
    return make_disk()


class Gate:
    """Holds up whoever passes while it is shut, and tells how many stand before it."""

    def __init__(self):
        self._changed = threading.Condition()
        self._is_open = False
        self._num_waiting = 0

    def pass_through(self):
        with self._changed:
            self._num_waiting += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._is_open, WAIT_SECONDS), "nobody opened the gate"
            self._num_waiting -= 1

    def wait_for(self, num_waiting=1):
        with self._changed:
            assert self._changed.wait_for(lambda: self._num_waiting >= num_waiting, WAIT_SECONDS), "nobody came"

    def open(self):
        with self._changed:
            self._is_open = True
            self._changed.notify_all()


@pytest.fixture
def gate():
    """A shut gate; opened after the test, lest a thread waits on."""
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB, which its test may fill and remount."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "qkvault-test", str(path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a file system can be mounted by root only: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)
