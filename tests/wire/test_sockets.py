"""A client of a Unix socket: every call has an end, and a session that failed once is never used again."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest

from qkvault.client import StoreClient
from qkvault.errors import DeadlineExceeded, ProtocolError, Unavailable
from qkvault.testing.transport_contract import find, prompt, save
from qkvault.types import ChunkRefs
from qkvault.wire import codec
from qkvault.wire import messages as m
from qkvault.wire.sockets import SocketTransport

SOON = 0.1  # seconds, of a client that is not to wait long
EXIT_SECONDS = 10.0  # of an interpreter; 2 on a machine of one's own


def answer(connection, reply, *, sequence=2):
    connection.recv(65536)
    connection.sendall(codec.encode(reply, sequence, 7))


def drip(connection):
    """Send a reply so slowly that it never ends, though something comes all the time."""
    connection.recv(65536)
    for byte in codec.encode(m.Done(), 2, 7):
        connection.sendall(bytes([byte]))
        time.sleep(SOON / 4)


class TestCalls:
    def test_a_mute_server_is_waited_for_no_longer_than_told(self, fake_server, address):
        """B133: the call ends with DeadlineExceeded, and so does the hello."""
        fake_server()
        with (
            closing(SocketTransport(address, "test", timeout_seconds=SOON)) as transport,
            pytest.raises(DeadlineExceeded, match="did not answer"),
        ):
            transport.call(m.Check())

    def test_signals_do_not_prolong_a_wait(self, fake_server, address):
        """B522: such as a profiler's, which come more often than a call may take."""
        num_left = itertools.count(39, -1)
        before = signal.signal(signal.SIGALRM, lambda *_: next(num_left) or signal.setitimer(signal.ITIMER_REAL, 0))
        fake_server()
        try:
            with closing(SocketTransport(address, "test", timeout_seconds=0.4)) as transport:
                signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
                started = time.monotonic()
                with pytest.raises(DeadlineExceeded):
                    transport.call(m.Check())
                assert time.monotonic() - started < 3.0
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def test_a_server_that_does_not_welcome_is_waited_for_no_longer_than_told(self, fake_server, address):
        """Connecting is a call like others."""
        fake_server(welcome="none")
        with pytest.raises(DeadlineExceeded):
            SocketTransport(address, "test", timeout_seconds=SOON)

    def test_a_slow_drip_is_no_answer(self, fake_server, address):
        """B133: the deadline is that of the whole call, not of each byte."""
        fake_server(drip)
        with (
            closing(SocketTransport(address, "test", timeout_seconds=SOON)) as transport,
            pytest.raises(DeadlineExceeded),
        ):
            transport.call(m.Check())

    def test_every_method_of_a_client_has_an_end(self, path, fake_server, address):
        """B133: against a server that is mute each raises within its deadline, and nothing blocks afterwards."""
        calls = [
            lambda client: find(client, "aa"),
            lambda client: client.poll(1),
            lambda client: client.release(1),
            lambda client: client.reserve([prompt("aa")[0].new()]),
            lambda client: client.commit(1),
            lambda client: client.abort(1),
            lambda client: client.clear(),
            lambda client: client.switch(frozen=True),
            lambda client: client.status(),
            lambda client: client.check(),
            lambda client: client.wait(m.Located(1, ChunkRefs(), 1), 20.0, time.monotonic),
        ]
        for call in calls:
            server = fake_server()
            with closing(StoreClient(SocketTransport(address, "test", timeout_seconds=0.02))) as client:
                with pytest.raises(DeadlineExceeded):
                    call(client)
                with pytest.raises(Unavailable, match="has ended"):
                    call(client)
            server.close()
            path.unlink()

    def test_a_session_that_missed_an_answer_is_over(self, fake_server, address):
        """The late answer is not taken for that of the next call."""
        go = threading.Event()

        def script(connection):
            go.wait(20)
            answer(connection, m.Done(99))

        fake_server(script)
        with closing(SocketTransport(address, "test", timeout_seconds=SOON)) as transport:
            with pytest.raises(DeadlineExceeded):
                transport.call(m.Check())
            go.set()
            with pytest.raises(Unavailable, match="has ended"):
                transport.call(m.Check())

    def test_a_session_that_failed_keeps_its_slots_until_it_is_closed(self, client, driver, address, until):
        """A copy may still be under way: the store gives its slots to others when the owner says that it is over."""
        transport = SocketTransport(address, "test", timeout_seconds=0.2)
        reserved = StoreClient(transport).reserve([prompt("xx")[0].new()])
        with driver._lock, pytest.raises(DeadlineExceeded):
            transport.call(m.Check())
        view = transport.pool.view(reserved.offsets[0], 4096)
        assert client.status().num_leases == 1
        view[:] = bytes(4096)
        view.release()
        transport.close()
        until(lambda: client.status().num_leases == 0)

    @pytest.mark.parametrize(
        "script",
        [
            lambda connection: answer(connection, m.Done(), sequence=3),
            lambda connection: connection.sendall(b"\xff" * 64),
            lambda connection: connection.sendall(codec.HEAD.pack(3, 2, 7, 0) + b"\xff\xff\xff"),
            lambda connection: connection.sendall(codec.HEAD.pack(codec.MAX_BODY_BYTES + 1, 2, 7, 0)),
        ],
    )
    def test_an_answer_that_makes_no_sense_ends_the_session(self, fake_server, address, script):
        """It cannot be known what the next bytes would belong to."""
        fake_server(script)
        with closing(SocketTransport(address, "test", timeout_seconds=20.0)) as transport:
            with pytest.raises(ProtocolError):
                transport.call(m.Check())
            with pytest.raises(Unavailable):
                transport.call(m.Check())

    @pytest.mark.parametrize("part", [b"", codec.HEAD.pack(10, 2, 7, 0)[:5], codec.HEAD.pack(10, 2, 7, 0) + b"12345"])
    def test_a_server_that_dies_in_the_middle_is_unavailable(self, fake_server, address, part):
        """Before its answer, within the head, within the body."""

        def script(connection):
            connection.recv(65536)
            connection.sendall(part)
            connection.shutdown(socket.SHUT_RDWR)

        fake_server(script)
        with (
            closing(SocketTransport(address, "test", timeout_seconds=20.0)) as transport,
            pytest.raises(Unavailable, match="no store answers"),
        ):
            transport.call(m.Check())

    def test_another_answer_than_was_asked_for_is_a_protocol_error(self, fake_server, address):
        """A server of another kind."""
        fake_server(lambda connection: answer(connection, m.Done()))
        with (
            closing(StoreClient(SocketTransport(address, "test", timeout_seconds=20.0))) as client,
            pytest.raises(ProtocolError, match="was answered with"),
        ):
            client.status()

    def test_a_message_that_is_too_long_is_not_sent(self, client):
        """The session goes on."""
        with pytest.raises(ProtocolError, match="at most"):
            client._transport.call(m.Match(0, b"", bytes(codec.MAX_BODY_BYTES)))
        assert save(client, "aa") == 1


class TestConnecting:
    def test_where_nobody_listens_nobody_answers(self, address, tmp_path):
        """No file, a dead socket's file, a folder."""
        with pytest.raises(Unavailable, match="no store answers"):
            SocketTransport(address, "test")
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as dead:
            dead.bind(str(tmp_path / "dead"))
        for path in (tmp_path / "dead", tmp_path):
            with pytest.raises(Unavailable, match="no store answers"):
                SocketTransport(f"unix://{path}", "test")

    def test_another_protocol_is_told_from_an_absent_store(self, fake_server, address):
        """To try again would not help."""
        fake_server(welcome=m.Failed("protocol", "this store speaks protocol 9"), has_pool=False)
        with pytest.raises(ProtocolError, match="speaks protocol 9"):
            SocketTransport(address, "test", timeout_seconds=20.0)

    def test_who_answers_as_no_store_does_is_told_from_one(self, fake_server, address):
        """B556: such as a web server, with the address, and nothing of frames alone."""
        fake_server(lambda plain: plain.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), welcome="none")
        with pytest.raises(ProtocolError, match=f"no QKVault store speaks at {address}"):
            SocketTransport(address, "test", timeout_seconds=20.0)

    def test_a_welcome_without_a_pool_is_none(self, fake_server, address):
        fake_server(has_pool=False)
        with pytest.raises(ProtocolError, match="did not welcome"):
            SocketTransport(address, "test", timeout_seconds=20.0)

    def test_a_pool_that_is_smaller_than_it_says_is_not_used(self, fake_server, address):
        """Reading past its end would end the process."""
        fake_server(welcome=m.Welcome(m.PROTOCOL_VERSION, 1 << 40))
        with pytest.raises(Unavailable, match="cannot be mapped"):
            SocketTransport(address, "test", timeout_seconds=20.0)

    def test_a_python_that_cannot_watch_a_process_connects_as_well(self, server, address, monkeypatch):
        """Some are built without; what is lost is that the memory of a killed store is given back."""
        monkeypatch.delattr(os, "pidfd_open")
        with closing(SocketTransport(address, "test", timeout_seconds=20.0)) as transport:
            assert transport.call(m.Check()) == m.Done()

    def test_a_reply_tells_which_life_of_the_store_it_is_from(self, server, address):
        """A client that connects again sees whether it is the same."""
        with closing(SocketTransport(address, "test", timeout_seconds=20.0)) as transport:
            assert transport.epoch == 7


class TestClosing:
    def test_closing_does_not_wait_for_a_call(self, fake_server, address):
        """B133: a call that another thread waits in ends at once."""
        fake_server()
        transport = SocketTransport(address, "test", timeout_seconds=600.0)
        errors = []

        def call():
            try:
                transport.call(m.Check())
            except Unavailable as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        while not transport._lock.locked():
            time.sleep(0.001)
        transport.close()
        transport.close()
        thread.join()
        assert len(errors) == 1

    def test_a_process_ends_although_its_server_does_not_answer(self, fake_server, address):
        """B133: neither close nor the interpreter's exit waits for anything that was not sent."""
        fake_server()
        with subprocess.Popen([sys.executable, "-c", STUBBORN, address], stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout.readline() == b"connected\n"
                assert process.wait(EXIT_SECONDS) == 0
                assert process.stdout.read() == b"closed\n"
            finally:
                process.kill()

    def test_what_was_mapped_is_unmapped(self, connect):
        """Unless somebody still looks at it; then with him."""
        client = connect()
        reserved = client.reserve([prompt("aa")[0].new()])
        view = client.pool.view(reserved.offsets[0], 16)
        client.close()
        view[:] = bytes(16)
        other = connect()
        pool = other.pool
        other.close()
        with pytest.raises(ValueError, match="released"):
            pool.view(0, 16)


STUBBORN = """
import sys, threading
from qkvault.errors import Unavailable
from qkvault.wire import messages as m
from qkvault.wire.sockets import SocketTransport

transport = SocketTransport(sys.argv[1], "test", timeout_seconds=600.0)
print("connected", flush=True)

def call():
    try:
        transport.call(m.Match(0, b"", bytes(1 << 25)))
    except Unavailable:
        pass

thread = threading.Thread(target=call)
thread.start()
thread.join(0.1)
transport.close()
print("closed", flush=True)
"""
