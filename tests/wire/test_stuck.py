"""Clients that are there and do nothing: who leaves a frame half sent, or replies untaken, is cut off in the end."""

from __future__ import annotations

import socket
import time
from contextlib import closing, suppress

import pytest

from qkvault.address import parse_address
from qkvault.testing.transport_contract import find, prompt, read, reserve, save
from qkvault.wire import codec, connection
from qkvault.wire import messages as m
from qkvault.wire import server as server_module
from qkvault.wire.listen import Listener, tune
from qkvault.wire.sockets import Stream

PATIENCE_SECONDS = 0.5


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(connection, "_PATIENCE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(server_module, "_LOOK_SECONDS", 0.02)


@pytest.mark.parametrize("count", [1, codec.HEAD.size - 1, codec.HEAD.size + 3])
def test_half_a_frame_is_waited_for_a_while(welcomed, is_cut_off, client, ask, count):
    """B394: half a head, or half a body; what its session held is free again, and others are answered meanwhile."""
    plain = welcomed()
    reserved = ask(plain, codec.encode(m.Reserve((prompt("xx")[0].new(),)), 2, 0))
    assert reserved.lease_id
    assert client.status().num_leases == 1
    plain.sendall(codec.encode(m.GetStatus(), 3, 0)[:count])
    assert save(client, "aa") == 1
    assert is_cut_off(plain)
    assert client.status().num_leases == 0
    assert read(client, find(client, "aa"), "aa") == 32


def test_half_of_the_data_is_waited_for_a_while(welcomed, is_cut_off, client, driver, ask):
    """B394: the slots of a commit that never ends are somebody else's then."""
    plain = welcomed()
    used_bytes = driver.pool.used_bytes
    chunk = prompt("xx")[0].new()
    reserved = ask(plain, codec.encode(m.Reserve((chunk,)), 2, 0))
    plain.sendall(codec.encode(m.Commit(reserved.lease_id), 3, 0, chunk.image_bytes) + bytes(5000))
    assert driver.pool.used_bytes > used_bytes
    assert is_cut_off(plain)
    client.check()
    assert driver.pool.used_bytes == used_bytes


def test_a_frame_that_drips_is_no_frame(welcomed, client, until):
    """B394: a byte now and then earns no patience worth speaking of."""
    plain = welcomed()
    with suppress(OSError):
        for byte in codec.encode(m.Match(0, b"r" * 48, bytes(4000)), 2, 0):
            plain.sendall(bytes([byte]))
            time.sleep(0.02)
    until(lambda: client.status().num_sessions == 1)


def test_replies_that_are_never_taken_are_waited_for_a_while(welcomed, client, until):
    """B394: a reader that has stopped holds no memory and no slots for ever; others are answered meanwhile."""
    plain = welcomed()
    plain.settimeout(0.2)
    frames = codec.encode(m.GetStatus(), 2, 0) * 10_000
    with suppress(TimeoutError, OSError):
        while True:
            plain.sendall(frames)
            client.check()
    until(lambda: client.status().num_sessions == 1)


def test_a_few_replies_that_are_never_taken_are_too_many(welcomed, client, until):
    """B394: also when nothing else is asked behind them."""
    plain = welcomed()
    plain.sendall(codec.encode(m.GetStatus(), 2, 0) * 3000)
    assert client.status().num_sessions == 2
    until(lambda: client.status().num_sessions == 1)


def test_who_moves_enough_is_never_cut_off(monkeypatch, welcomed, client):
    """B394: a slow reader, whose replies wait for much longer than anybody may rest."""
    monkeypatch.setattr(connection, "_SLOWEST_BYTES_PER_SECOND", 1 << 10)
    plain = welcomed()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.setblocking(False)
    frame = codec.encode(m.GetStatus(), 2, 0)
    count = 0
    with suppress(BlockingIOError):
        while count < 100_000 * len(frame):
            count += plain.send(frame * 1000)
    plain.settimeout(20.0)
    until = time.monotonic() + 4 * PATIENCE_SECONDS
    while time.monotonic() < until:
        assert plain.recv(4096)
        time.sleep(0.01)
    assert client.status().num_sessions == 2


def test_who_owes_nothing_may_rest(welcomed, client, ask):
    """B394: a session that is idle, or waits for nothing but its own next thought, stays."""
    plain = welcomed()
    reserved = reserve(client, "bb")
    time.sleep(3 * PATIENCE_SECONDS)
    assert isinstance(ask(plain, codec.encode(m.GetStatus(), 2, 0)), m.Status)
    assert client.commit(reserved.lease_id) == 1


def test_a_machine_that_vanishes_is_noticed_whatever_was_sent_to_it():
    """B395: probes tell of it, and where output waits to be acknowledged, which stops them, a limit on that wait."""
    with closing(Listener(parse_address("tcp://127.0.0.1:0"))) as listener:
        stream = Stream(listener.address, 20.0)
        accepted = None
        while accepted is None:
            with suppress(BlockingIOError):
                accepted = listener.accept()
        plain = socket.socket()
        tune(plain)
        for end in (stream._socket, accepted, plain):
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle, pause, count = (
                end.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert idle + pause * count <= 30
            assert 0 < end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000
        for end in (stream, accepted, plain):
            end.close()
