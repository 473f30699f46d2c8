"""A server that can store nothing: engines go on, and the log stays short."""

from __future__ import annotations

import errno
import logging
import os
import threading

import pytest

from qkvault.logs import RateLimited
from qkvault.store import driver as driver_module
from qkvault.testing import FakeClock
from qkvault.testing.transport_contract import find, prompt, read, save, until

CHUNK_BYTES = 8192  # of the slots of a chunk of these tests


@pytest.fixture
def full_disk(monkeypatch):
    """Writing to any disk fails, in our threads."""
    write = os.pwritev

    def refuse(*args):
        if threading.current_thread().name.startswith("qkvault-"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*args)

    monkeypatch.setattr(os, "pwritev", refuse)


@pytest.fixture
def clock(monkeypatch):
    """The time by which lines of the store are held back."""
    clock = FakeClock()
    monkeypatch.setattr(driver_module, "_limited", RateLimited(driver_module._log, clock=clock))
    return clock


@pytest.mark.usefixtures("full_disk")
def test_a_server_that_refuses_all_writes_says_so_once_a_minute(make_server, connect, tmp_path, clock, caplog):
    """B485: the disk is full, and all of RAM is being read: a line an interval with how many were held back."""
    caplog.set_level(logging.INFO, "qkvault")
    server = make_server(ram_bytes=4 * CHUNK_BYTES, disk_path=str(tmp_path / "disk"), disk_bytes="64MiB")
    client, other = connect(server.addresses[0]), connect(server.addresses[0])
    words = ["aa", "bb", "cc", "dd"]
    assert [save(client, word) for word in words] == [1] * 4
    held = [find(client, word) for word in words]
    until(lambda: client.status().counters["failed.disk.unavailable"] >= 1)

    def refused():
        return [message for message in caplog.messages if message.startswith("no_room")]

    num_refused = 0
    for num_wanted, suppressed in ((50, ""), (20, " suppressed=49"), (1, " suppressed=19")):
        for _ in range(num_wanted):
            assert other.reserve([chunk.new() for chunk in prompt("xxyy")]).lease_id == 0
        num_refused += 2 * num_wanted
        assert client.status().counters["reserve.no_room"] == num_refused
        assert refused()[-1] == f'no_room chunks=2 why="nothing that is idle can leave"{suppressed}'
        clock.advance(61.0)
    assert len(refused()) == 3
    troubles = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([line for line in troubles if line.startswith("tier_unavailable")]) == 1
    assert len(troubles) == 4
    for located, word in zip(held, words, strict=True):
        assert read(client, located, word) == 32
