"""The server of a Unix socket: whatever one client does, the others are answered; who goes leaves nothing."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest

from qkvault.address import parse_address
from qkvault.errors import ConfigError, Unavailable
from qkvault.pool import Pool
from qkvault.testing.transport_contract import find, read, reserve, save
from qkvault.wire import codec, connection, listen
from qkvault.wire import messages as m
from qkvault.wire import server as server_module
from qkvault.wire.server import SocketServer

HELLO = codec.encode(m.Hello(m.PROTOCOL_VERSION, "raw"), 1, 0)


@contextlib.contextmanager
def all_descriptors_taken(*, but):
    """This process gets ``but`` descriptors more, and then none."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 64, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(but):
            os.close(taken.pop())
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class TestAddress:
    def test_only_its_owner_may_connect(self, server, path):
        """The socket file has mode 0600, whatever the umask."""
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def test_the_file_goes_with_the_server(self, server, path):
        """Closing twice is fine."""
        server.close()
        server.close()
        assert not path.exists()

    def test_a_stale_file_is_replaced(self, driver, address, path):
        """A socket that a killed server left behind is no obstacle."""
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as dead:
            dead.bind(str(path))
        assert path.exists()
        with closing(SocketServer(driver, driver.pool, address, epoch=1)):
            assert path.exists()

    def test_a_live_server_is_not_replaced(self, driver, server, address, client):
        """It goes on serving."""
        with pytest.raises(ConfigError, match="another process"):
            SocketServer(driver, driver.pool, address, epoch=1)
        client.check()

    def test_a_server_whose_queue_is_full_is_alive(self, driver, address, path):
        """It does not answer at once, which is no reason to take its place."""
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as busy:
            busy.bind(str(path))
            busy.listen(0)
            waiting = []
            for _ in range(3):
                waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                waiting[-1].setblocking(False)
                waiting[-1].connect_ex(str(path))
            with pytest.raises(ConfigError, match="another process"):
                SocketServer(driver, driver.pool, address, epoch=1)
            for plain in waiting:
                plain.close()

    @pytest.mark.parametrize("make", [lambda path: path.write_text("mine"), lambda path: path.mkdir()])
    def test_what_is_no_socket_is_left_alone(self, driver, address, path, make):
        """Nobody's file is removed."""
        make(path)
        with pytest.raises(ConfigError, match="not a socket"):
            SocketServer(driver, driver.pool, address, epoch=1)
        assert path.exists()

    def test_a_successors_file_is_left_alone(self, driver, server, address, path):
        """A server that closes late does not remove the file of the one that has taken its place."""
        path.unlink()
        with closing(SocketServer(driver, driver.pool, address, epoch=1)):
            server.close()
            assert path.exists()

    def test_a_server_that_starts_while_another_closes_keeps_its_file(self, address, path, monkeypatch):
        """B515: also where the file system gives it the number of the one before."""
        monkeypatch.setattr(listen, "_file_at", lambda _: (1, 1))
        followers = []

        class Slow(socket.socket):
            def close(self):
                super().close()
                if not followers:
                    followers.append(listen.Listener(parse_address(address)))

        first = listen.Listener(parse_address(address))
        first.socket = Slow(fileno=first.socket.detach())
        for _ in range(2):
            first.close()
            assert path.exists()
        followers[0].close()
        assert not path.exists()

    def test_of_several_that_start_at_a_time_one_serves(self, driver, address):
        """The others are refused; nobody's socket is lost."""
        servers, refused = [], []

        def start():
            try:
                servers.append(SocketServer(driver, driver.pool, address, epoch=1))
            except ConfigError as error:
                refused.append(error)

        threads = [threading.Thread(target=start) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(servers), len(refused)) == (1, 7)
        servers[0].close()

    def test_where_nothing_can_be_made_nothing_starts(self, driver, tmp_path):
        """A folder that does not exist, and a path that is too long."""
        for path in (tmp_path / "no" / "s", tmp_path / ("x" * 200)):
            with pytest.raises(ConfigError, match=r"cannot listen|at most 107"):
                SocketServer(driver, driver.pool, f"unix://{path}", epoch=1)

    def test_a_private_pool_cannot_be_served(self, driver, address, path):
        """There would be nothing to send."""
        with closing(Pool(4096, prefault=False)) as pool, pytest.raises(ConfigError, match="shared pool"):
            SocketServer(driver, pool, address, epoch=1)
        assert not path.exists()

    @pytest.mark.parametrize(
        "address", ["http://127.0.0.1:1", "/run/s", "unix://", "unix://s", "tcp://host", "tcp://h:99999"]
    )
    def test_other_addresses_are_refused(self, address):
        with pytest.raises(ConfigError, match="expected unix:///"):
            parse_address(address)


class TestFrames:
    def test_a_request_may_come_byte_by_byte(self, raw, ask, client):
        """Others are answered meanwhile."""
        slow = raw()
        for at in range(len(HELLO) - 1):
            slow.sendall(HELLO[at : at + 1])
            if at % 8 == 0:
                client.check()
        assert isinstance(ask(slow, HELLO[-1:]), m.Welcome)

    def test_requests_may_be_sent_ahead(self, raw):
        """They are answered in order, each with its number and the store's epoch."""
        plain = raw()
        plain.sendall(HELLO + b"".join(codec.encode(m.Poll(n), n, 0) for n in range(2, 50)))
        data = b""
        while data.count(b"Located") < 48:
            data += plain.recv(65536)
        sequences = []
        while data:
            head = codec.decode_head(data)
            sequences.append(head.sequence)
            assert head.epoch == 7
            data = data[codec.HEAD.size + head.body_bytes :]
        assert sequences == list(range(1, 50))

    def test_a_malformed_message_is_answered(self, raw, ask):
        """Its frame was whole, so the connection goes on."""
        plain = raw()
        for body in (b"", b"\xff" * 30, b"\x80", b"\x81\xa4type\xa4Nope"):
            reply = ask(plain, codec.HEAD.pack(len(body), 9, 0, 0) + body)
            assert (type(reply), reply.code) == (m.Failed, "protocol")
        assert isinstance(ask(plain, HELLO), m.Welcome)

    def test_a_frame_that_is_too_long_ends_the_connection(self, raw, is_cut_off, client):
        """Nobody waits for it, or keeps memory for it."""
        plain = raw()
        plain.sendall(codec.HEAD.pack(codec.MAX_BODY_BYTES + 1, 1, 0, 0))
        assert is_cut_off(plain)
        client.check()

    def test_another_protocol_is_refused(self, raw, ask):
        reply = ask(raw(), codec.encode(m.Hello(m.PROTOCOL_VERSION + 1, "newer"), 1, 0))
        assert (type(reply), reply.code) == (m.Failed, "protocol")

    def test_an_unfinished_frame_is_forgotten_with_its_client(self, raw, client, until):
        """Half a head, half a body, or nothing at all."""
        for part in (b"", HELLO[:7], HELLO[:-1]):
            plain = raw()
            plain.sendall(part)
            plain.close()
        until(lambda: client.status().num_sessions == 1)

    def test_who_does_not_read_is_not_read_from(self, monkeypatch, welcomed, client, server, until):
        """B252: replies that nobody takes do not fill memory; when they are taken, all the others come."""
        monkeypatch.setattr(connection, "_MAX_OUT_BYTES", 10_000)
        plain = welcomed()
        plain.setblocking(False)
        frame = codec.encode(m.GetStatus(), 1, 0)
        count, sent = 0, len(frame) * 1000
        with contextlib.suppress(BlockingIOError):
            while count < 1_000_000 and sent == len(frame) * 1000:  # what follows half a frame would be its end
                sent = plain.send(frame * 1000)
                count += sent
        client.check()
        held = lambda: max(each._owned_bytes for each in server._connections.values())  # noqa: E731  # asked twice
        until(lambda: held() > 10_000)
        client.check()
        assert held() < 20_000
        plain.settimeout(20.0)
        for _ in range(count // len(frame)):
            assert isinstance(receive_next(plain), m.Status)
        client.check()

    def test_a_slow_reader_gets_everything(self, welcomed):
        """What does not fit the socket's buffer waits for its reader."""
        plain = welcomed()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sender = threading.Thread(target=lambda: plain.sendall(codec.encode(m.GetStatus(), 1, 0) * 2000))
        sender.start()
        data = bytearray()
        while data.count(b"Status") < 2000:
            data += plain.recv(1 << 16)
        sender.join()

    def test_keys_that_are_none_are_answered(self, welcomed, ask, client):
        """DET-05: ten thousand random keys of any length; the connection lives on, and a valid request works."""
        rng = random.Random(5)
        assert save(client, "aa") == 1
        plain = welcomed()
        answers = {m.Located: 0, m.Done: 0, m.Failed: 0}
        for _ in range(5000):
            key, other = (rng.randbytes(rng.choice((48, 48, rng.randrange(120)))) for _ in range(2))
            checks = rng.randbytes(len(other) // 48 * 3)
            for message in (m.Lookup(key, other, checks), m.Forget(key, other)):
                answers[type(ask(plain, codec.encode(message, 1, 0)))] += 1
        assert min(answers.values()) > 1000, answers
        assert read(client, find(client, "aa"), "aa") == 32
        client.check()

    def test_random_frames_harm_nobody_else(self, welcomed, client):
        """Thousands of them: garbage, wrong lengths, spoilt messages; then a valid request works."""
        rng = random.Random(3)
        assert save(client, "aa") == 1
        good = [
            codec.encode(message, 1, 0)
            for message in (
                m.Lookup(b"r" * 48, b"k" * 144, b"1234" * 3, bytes(64)),
                m.Reserve(tuple(chunk for chunk in ())),
                m.Match(0, b"r" * 48, bytes(64)),
                m.Release((1, 2)),
                m.Commit(1, (b"k" * 48,)),
            )
        ]
        plain = welcomed()
        for _ in range(4000):
            kind = rng.randrange(4)
            frame = bytearray(rng.choice(good))
            if kind == 0:
                frame = bytearray(rng.randbytes(rng.randint(1, 60)))
            elif kind == 1:
                body = rng.randbytes(rng.randint(0, 60))
                frame = bytearray(codec.HEAD.pack(len(body), 1, 0, 0) + body)
            elif kind == 2:
                frame[rng.randrange(codec.HEAD.size, len(frame))] = rng.randrange(256)
            else:
                del frame[rng.randint(0, len(frame) - 1) :]
            try:
                plain.sendall(frame)
            except OSError:
                plain.close()
                plain = welcomed()
            if kind in (0, 3):  # what comes next would be taken for its rest
                plain.close()
                plain = welcomed()
        assert read(client, find(client, "aa"), "aa") == 32
        assert save(client, "bb") == 1
        client.check()


class TestClients:
    def test_a_stranger_is_not_served(self, monkeypatch, raw, is_cut_off, server):
        """Only processes of the same user, and root's, are."""
        monkeypatch.setattr(listen, "_peer_uid", lambda _: 12345678)
        plain = raw()
        with contextlib.suppress(OSError):  # it may be closed already
            plain.sendall(HELLO)
        assert is_cut_off(plain)

    def test_a_fault_of_ours_costs_one_connection(self, monkeypatch, driver, raw, is_cut_off, client):
        """The thread that answers everybody goes on."""
        original = driver.call
        monkeypatch.setattr(
            driver, "call", lambda session, request: 1 / 0 if session == 2 else original(session, request)
        )
        plain = raw()
        plain.sendall(HELLO)
        assert is_cut_off(plain)
        client.check()

    def test_a_client_that_cannot_be_accepted_does_not_stop_the_others(self, client, monkeypatch, raw, ask):
        """Out of descriptors, for example, is a state that passes."""

        def fail(_):
            monkeypatch.undo()
            raise OSError(24, "too many open files")

        monkeypatch.setattr(socket.socket, "accept", fail)
        assert isinstance(ask(raw(), HELLO), m.Welcome)
        client.check()

    def test_a_server_without_descriptors_answers_those_it_has(self, client, server, raw, ask, monkeypatch):
        """B511: who is turned away is not looked at again and again; who still waits then is taken."""
        looks, accept = [], server._listener.accept
        monkeypatch.setattr(server._listener, "accept", lambda: looks.append(time.monotonic()) or accept())
        with all_descriptors_taken(but=1):
            begun = time.monotonic()
            plain = raw()
            for _ in range(200):
                client.ping()
            while not looks:
                client.ping()
            assert len(looks) <= 1 + (time.monotonic() - begun) / server_module._SHORTAGE_SECONDS
        assert type(ask(plain, HELLO)) is m.Welcome

    def test_a_process_that_is_killed_leaves_nothing(self, client, driver, address, until):
        """B121: its write in the middle of a copy is aborted, its reads are released, and nobody sees a byte."""
        assert save(client, "aa") == 1
        assert driver.drain(20)
        used_bytes = driver.pool.used_bytes
        child = subprocess.Popen([sys.executable, "-c", VICTIM, address], stdout=subprocess.PIPE, text=True)
        with child, child.stdout:
            assert child.stdout.readline() == "copying\n"
            assert client.status().num_leases == 2
            assert find(client, "xxyy").lease_id == 0
            child.send_signal(signal.SIGKILL)
            until(lambda: client.status().num_sessions == 1)
        assert client.status().num_leases == 0
        assert driver.pool.used_bytes == used_bytes
        assert find(client, "xxyy").lease_id == 0
        assert save(client, "xxyy") == 2
        assert read(client, find(client, "xxyy"), "xxyy") == 64
        client.check()

    def test_closing_the_server_ends_all_sessions(self, server, driver, connect):
        """Their leases end with them."""
        reserve(connect(), "aa")
        find(connect(), "aa")
        server.close()
        driver.check()
        assert len(driver.manager.leases) == 0
        assert driver.pool.used_bytes == 0


class TestFaults:
    def test_a_connection_that_cannot_be_taken_does_not_end_the_server(self, server, client, connect, monkeypatch):
        """B482: the others are answered, and so is the next one."""
        accept, faults = server._listener.accept, [RuntimeError("one"), ValueError("two")]

        def accept_at_last():
            if faults:
                raise faults.pop()
            return accept()

        monkeypatch.setattr(server._listener, "accept", accept_at_last)
        assert save(connect(), "aa") == 1
        client.check()
        assert faults == []

    def test_a_client_that_cannot_be_dropped_does_not_end_the_server(self, server, connect, driver, raw):
        """B482: its session ends, and all others are ended when the server closes."""
        clients = [connect() for _ in range(3)]
        reserve(clients[0], "aa")
        next(iter(server._connections.values())).socket.close()  # epoll does not know it any more
        with pytest.raises(Unavailable):
            clients[0].check()
        clients[1].check()
        raw().sendall(HELLO)
        clients[2].check()
        server.close()
        assert len(driver._sessions) == 0
        assert driver.pool.used_bytes == 0


def receive_next(plain):
    data = b""
    while len(data) < codec.HEAD.size:
        data += plain.recv(codec.HEAD.size - len(data))
    size = codec.decode_head(data).body_bytes
    body = b""
    while len(body) < size:
        body += plain.recv(size - len(body))
    return codec.decode_reply(body)


VICTIM = """
import sys
from qkvault.client import StoreClient
from qkvault.testing.transport_contract import find, prompt
from qkvault.wire.sockets import SocketTransport

client = StoreClient(SocketTransport(sys.argv[1], "victim", timeout_seconds=20.0))
assert find(client, "aa").lease_id
chunks = prompt("xxyy")
reserved = client.reserve([chunk.new() for chunk in chunks])
chunks[0].write(client.pool.view(reserved.offsets[0], chunks[0].new().image_bytes))
view = client.pool.view(reserved.offsets[1], chunks[1].new().image_bytes)
print("copying", flush=True)
while True:
    view[4096:] = bytes(len(view) - 4096)
"""
