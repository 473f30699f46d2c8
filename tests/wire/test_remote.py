"""A client that cannot map the pool: what it sends and receives, and what a server does with data that lies."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, closing

import msgspec
import pytest

from qkvault.client import StoreClient
from qkvault.errors import ProtocolError, Refused, Unwelcome
from qkvault.image import key_in
from qkvault.testing import FakeClock
from qkvault.testing.store_model import ROOT, keys_of
from qkvault.testing.transport_contract import CHUNK_SIZE, WAIT_SECONDS, find, make_driver, prompt, read, reserve, save
from qkvault.types import KEY_BYTES, ChunkRef, Outcome
from qkvault.wire import codec, connection, remote
from qkvault.wire import messages as m
from qkvault.wire import server as server_module
from qkvault.wire.remote import RemoteTransport
from qkvault.wire.server import SocketServer

LEASE_SECONDS = 10.0
TOKEN = "sesame"
HELLO = codec.encode(m.Hello(m.PROTOCOL_VERSION, "raw", TOKEN), 1, 0)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def driver(clock):
    with closing(make_driver(lease_seconds=LEASE_SECONDS, clock=clock)) as driver:
        yield driver
        driver.check()


@pytest.fixture
def server(driver):
    with closing(SocketServer(driver, driver.pool, "tcp://127.0.0.1:0", epoch=7, token=TOKEN)) as server:
        yield server


@pytest.fixture
def connect(server):
    with ExitStack() as stack:
        yield lambda: stack.enter_context(
            closing(StoreClient(RemoteTransport(server.address, "test", timeout_seconds=WAIT_SECONDS, token=TOKEN)))
        )


@pytest.fixture
def client(connect):
    return connect()


@pytest.fixture
def raw(server):
    """Makes plain sockets to the server."""
    host, port = server.address.removeprefix("tcp://").rsplit(":", 1)
    with ExitStack() as stack:
        yield lambda: stack.enter_context(closing(socket.create_connection((host, int(port)), WAIT_SECONDS)))


@pytest.fixture
def welcomed(raw):
    def make():
        plain = raw()
        plain.sendall(HELLO)
        assert isinstance(receive(plain)[1], m.Welcome)
        return plain

    return make


def image_of(client, offset):
    return client.pool.view(offset, prompt("aa")[0].new().image_bytes)


def in_use(driver):
    return driver.pool.used_bytes


class TestSending:
    def test_only_what_is_named_is_sent(self, client, driver):
        """B241: the bytes of chunks that a commit does not name never leave the client."""
        reserved = reserve(client, "aabbcc")
        keys = [chunk.key for chunk in prompt("aabbcc")]
        assert client.commit(reserved.lease_id, keys[1:2]) == 1
        here = [bytes(driver.pool.view(offset, 8192)) != bytes(8192) for offset in reserved.offsets]
        assert here == [False, True, False]

    def test_what_runs_out_while_it_is_sent_is_never_read(self, welcomed, client, driver, clock, until):
        """B240: half of the data has come when the lease ends; the slots stay out of use until all of it has."""
        plain = welcomed()
        chunk = prompt("aa")[0]
        plain.sendall(codec.encode(m.Reserve((chunk.new(),)), 2, 0))
        reserved = receive(plain)[1]
        image = memoryview(bytearray(chunk.new().image_bytes))
        chunk.write(image)
        plain.sendall(codec.encode(m.Commit(reserved.lease_id), 3, 0, len(image)))
        plain.sendall(image[:4500])
        until(lambda: key_in(driver.pool.view(reserved.offsets[0], 4096)) == chunk.key)
        clock.advance(LEASE_SECONDS + 1)
        until(lambda: client.status().num_leases == 0)
        assert in_use(driver) == 8192
        client.check()
        plain.sendall(image[4500:])
        assert receive(plain)[1] == m.Done(0)
        assert in_use(driver) == 0
        assert key_in(driver.pool.view(reserved.offsets[0], 4096)) == bytes(KEY_BYTES)
        assert find(client, "aa").lease_id == 0

    def test_who_goes_while_it_sends_leaves_nothing(self, welcomed, client, driver, until):
        """B121: half a chunk is none, and its slot is free again."""
        plain = welcomed()
        chunk = prompt("aa")[0]
        plain.sendall(codec.encode(m.Reserve((chunk.new(),)), 2, 0))
        reserved = receive(plain)[1]
        plain.sendall(codec.encode(m.Commit(reserved.lease_id), 3, 0, chunk.new().image_bytes) + bytes(5000))
        plain.close()
        until(lambda: client.status().num_sessions == 1)
        assert in_use(driver) == 0
        assert find(client, "aa").lease_id == 0

    @pytest.mark.parametrize("change", [-1, 1, 4096, 1 << 20])
    def test_data_of_another_size_is_refused(self, welcomed, client, driver, change):
        """B249: it goes nowhere, the connection goes on, and what was reserved is published by nothing."""
        plain = welcomed()
        chunk = prompt("aa")[0]
        plain.sendall(codec.encode(m.Reserve((chunk.new(),)), 2, 0))
        reserved = receive(plain)[1]
        size = chunk.new().image_bytes + change
        plain.sendall(codec.encode(m.Commit(reserved.lease_id), 3, 0, size) + b"x" * size)
        assert receive(plain)[1].code == "protocol"
        plain.sendall(codec.encode(m.Abort(reserved.lease_id), 4, 0))
        assert receive(plain)[1] == m.Done()
        assert bytes(driver.pool.view(reserved.offsets[0], 8192)) == bytes(8192)
        client.check()

    def test_data_for_a_read_lease_changes_nothing(self, welcomed, client):
        """B249: only what is reserved may be written."""
        save(client, "aa")
        plain = welcomed()
        chunk = prompt("aa")[0]
        plain.sendall(codec.encode(m.Lookup(ROOT, chunk.key, chunk.check), 2, 0))
        located = receive(plain)[1]
        assert located.lease_id
        size = chunk.new().image_bytes
        plain.sendall(codec.encode(m.Commit(located.lease_id), 3, 0, size) + b"x" * size)
        assert receive(plain)[1] == m.Done(0)
        assert read(client, find(client, "aa"), "aa") == CHUNK_SIZE

    def test_data_behind_other_messages_goes_nowhere(self, welcomed, client):
        """B249: of whichever kind; what follows it is read as the next message."""
        plain = welcomed()
        for number, request in enumerate((m.Poll(1), m.Download(b"k" * 48), m.Check(), m.Hello(1, "again", TOKEN)), 2):
            frame = codec.encode(request, number, 0, 100) + bytes(100)
            plain.sendall(frame + codec.encode(m.GetStatus(), 99, 0))
            assert receive(plain)[1].code == "protocol"
            head, status = receive(plain)
            assert (head.sequence, type(status)) == (99, m.Status)
        client.check()

    def test_many_small_frames_with_data_in_one_piece_are_answered(self, welcomed, client):
        """As many as a buffer holds: each has its answer, and the connection goes on."""
        plain = welcomed()
        body = b"\xc0"
        piece = codec.HEAD.pack(len(body), 5, 0, 1) + body + b"x"
        count = connection.BUFFER_BYTES // len(piece)
        sender = threading.Thread(target=lambda: plain.sendall(piece * count + codec.encode(m.Poll(0), 6, 0)))
        sender.start()
        for _ in range(count):
            assert receive(plain)[1].code == "protocol"
        assert receive(plain)[0].sequence == 6
        sender.join()
        client.check()


class TestFetching:
    def test_more_is_fetched_than_is_kept(self, monkeypatch, connect):
        """B250: all of one fetch is there when it ends; what was used before is given back, and can be had again."""
        monkeypatch.setattr(remote, "_GRANULE_BYTES", 8192)
        monkeypatch.setattr(remote, "_KEPT_BYTES", 3 * 8192)
        one, other = connect(), connect()
        words = ["aabbccddeeff", "gghhiijjkkll"]
        for word in words:
            save(one, word)
        for word in words * 2:
            located = find(other, word)
            assert read(other, located, word) == 6 * CHUNK_SIZE
            assert all(key_in(image_of(other, ref.offset)) == ref.key for ref in located.ready)
            other.release(located.lease_id)
        find(other, "aa")
        first = next(iter(find(other, words[0]).ready))
        other.fetch([first])
        assert other._transport.pool.used_bytes <= 4 * 8192

    def test_what_is_reserved_and_not_sent_is_kept(self, monkeypatch, connect):
        """B250: however much is fetched in between."""
        monkeypatch.setattr(remote, "_GRANULE_BYTES", 8192)
        monkeypatch.setattr(remote, "_KEPT_BYTES", 0)
        one, other = connect(), connect()
        save(one, "aabbcc")
        reserved = reserve(other, "xxyy")
        assert read(other, find(other, "aabbcc"), "aabbcc") == 96
        assert read(other, find(other, "aabbcc"), "aabbcc") == 96
        assert other.commit(reserved.lease_id) == 2
        assert read(one, find(one, "xxyy"), "xxyy") == 64

    def test_a_slot_keeps_its_memory_whoever_had_it_before(self, monkeypatch):
        """B498: what lay there before was larger, and began elsewhere."""
        monkeypatch.setattr(remote, "_GRANULE_BYTES", 4096)
        monkeypatch.setattr(remote, "_KEPT_BYTES", 0)
        with closing(remote.MirrorPool(1 << 20)) as pool:
            pool.take(0, 1 << 16)[:] = b"x" * (1 << 16)
            slot = (5 << 12, 3 << 12)
            pool.take(*slot)[:] = b"y" * slot[1]
            pool.trim([slot])
            assert pool.view(*slot) == b"y" * slot[1]
            assert pool.used_bytes == slot[1]
            assert bytes(pool.view(0, 5 << 12)) == bytes(5 << 12)

    def test_what_is_fetched_to_a_slot_that_is_ours_by_now_goes_nowhere(self, connect):
        """B499: a chunk whose lease ran out, whether or not it is elsewhere: what is being written stays as it is."""
        one, other = connect(), connect()
        save(one, "aa")
        (chunk,), reserved = prompt("xx"), reserve(other, "xx")
        for key in (prompt("aa")[0].key, prompt("zz")[0].key):
            other.fetch([ChunkRef(key, reserved.offsets[0], chunk.new().image_bytes, CHUNK_SIZE)])
        assert other.commit(reserved.lease_id) == 1
        assert read(one, find(one, "xx"), "xx") == CHUNK_SIZE

    def test_more_is_fetched_than_one_message_may_ask_for(self, monkeypatch, connect):
        """In several."""
        monkeypatch.setattr(m, "MAX_CHUNKS", 2)
        one, other = connect(), connect()
        save(one, "aabbccddee")
        assert read(other, find(other, "aabbccddee"), "aabbccddee") == 160

    def test_what_ran_out_while_it_was_sent_has_no_header(self, driver, connect, monkeypatch):
        """B251: other bytes may have been sent: nothing of it may be used."""
        one, other = connect(), connect()
        save(one, "aabb")
        located = find(other, "aabb")
        monkeypatch.setattr(
            driver, "close_download", lambda session, lease: driver.call(session, m.Release((lease,))) and LOST
        )
        other.fetch(list(located.ready))
        assert [key_in(image_of(other, ref.offset)) for ref in located.ready] == [bytes(KEY_BYTES)] * 2
        other.check()

    def test_a_download_is_under_a_lease(self, driver, clock, welcomed, client, until):
        """B251: what is being sent stays where it is; if the lease runs out meanwhile, the end says so."""
        save(client, "aa")
        handler_lease, slots = driver.open_download(1, prompt("aa")[0].key)
        assert len(slots) == 1
        assert driver.call(1, m.Clear(lower_tiers=False)) == m.Done(0)
        assert driver.close_download(1, handler_lease) == m.Done()
        handler_lease, _ = driver.open_download(1, prompt("aa")[0].key)
        clock.advance(LEASE_SECONDS + 1)
        until(lambda: client.status().num_leases == 0)
        assert driver.close_download(1, handler_lease).code == "expired"

    def test_a_download_waits_for_the_end_of_another(self, welcomed, client, until):
        """B252: what waits for somebody who does not read takes no memory; he gets all of it in the end."""
        word = "".join(letter * 2 for letter in "abcdefghijklmnopqrstuvwxyz")
        assert save(client, word) == 26
        plain = welcomed()
        ask = [codec.encode(m.Download(keys_of(prompt(word)) * 200), number, 0) for number in range(2, 5)]
        plain.sendall(b"".join(ask) + codec.encode(m.Poll(0), 5, 0))
        until(lambda: client.status().num_leases > 0)
        for _ in range(20):
            assert client.status().num_leases == 1
        for number in range(2, 5):
            head, data = receive(plain)
            assert sum(data.image_bytes) == head.data_bytes
            skip(plain, head.data_bytes)
            assert (receive(plain)[1], head.sequence) == (m.Done(), number)
        assert receive(plain)[0].sequence == 5

    def test_a_download_that_is_read_fast_does_not_keep_others_waiting(self, monkeypatch, driver, client):
        """B252: after some megabytes the others have their turn, also when the socket would take more."""
        monkeypatch.setattr(connection, "_TURN_BYTES", 20_000)
        word = "aabbccddee"
        save(client, word)
        taker = Taker()
        made = connection.Connection(connection.Door(driver, 7, None, "", memoryview(bytearray(1 << 16))), taker)
        taker.incoming = HELLO + codec.encode(m.Download(keys_of(prompt(word)) * 3), 2, 0)
        sent = []
        while taker.incoming or made.has_output:
            before = len(taker.taken)
            made.serve()
            sent.append(len(taker.taken) - before)
        assert max(sent) == 20_000
        assert len(taker.taken) > 15 * 6144
        made.close()

    def test_many_requests_in_one_piece_do_not_keep_others_waiting(self, monkeypatch, driver):
        """B492: five thousand questions after the state kept everybody waiting for half a second of a core."""
        monkeypatch.setattr(connection, "_TURN_SECONDS", 0.0)
        taker = Taker()
        made = connection.Connection(connection.Door(driver, 7, None, "", memoryview(bytearray(1 << 16))), taker)
        asked = [codec.encode(m.Ping(), number, 0) for number in range(2, 50)]
        taker.incoming = HELLO + b"".join(asked) + asked[0][:10]
        answered = []
        while made.returns_seconds is not None or not answered:
            before = taker.num_sent
            made.serve()
            answered.append(taker.num_sent - before)
        assert max(answered) == 1
        assert sum(answered) == 1 + len(asked)
        assert not made.is_full
        made.close()

    def test_a_client_that_only_fetches_is_heard(self, connect, clock):
        """Its last sign of life is that."""
        one, other = connect(), connect()
        save(one, "aa")
        located = find(other, "aa")
        other.register(m.Instance("other", "worker", "model"))
        clock.advance(5)
        other.fetch(list(located.ready))
        assert [told.seconds_since_heard for told in one.status().instances] == [0]

    @pytest.mark.parametrize("sizes", [(1,), (8192, 8192), ()])
    def test_other_chunks_than_were_asked_for_end_the_session(self, monkeypatch, driver, connect, sizes):
        """A server that answers nonsense: nothing of what comes can be trusted."""
        one, other = connect(), connect()
        save(one, "aa")
        located = find(other, "aa")
        views = [memoryview(bytearray(size)) for size in sizes]
        monkeypatch.setattr(driver, "open_download", lambda session, keys: (0, views))
        with pytest.raises(ProtocolError, match="other chunks"):
            other.fetch(list(located.ready))


class TestTokens:
    @pytest.mark.parametrize("token", ["", "other", "sesam", "sesame ", "\u00e9"])
    def test_a_wrong_token_is_refused(self, server, token):
        """B253: whatever it is, nothing but the refusal is told."""
        wanted = "another token" if token else "a token"
        with pytest.raises(Unwelcome, match=f"{server.address} wants {wanted}: set `token`"):
            RemoteTransport(server.address, "test", timeout_seconds=WAIT_SECONDS, token=token)

    def test_nothing_is_answered_before_a_hello(self, raw, is_cut_off, client):
        """B253: any other first message ends the connection."""
        save(client, "aa")
        chunk = prompt("aa")[0]
        for request in (m.Lookup(ROOT, chunk.key, chunk.check), m.GetStatus(), m.Clear(), m.Download(chunk.key)):
            plain = raw()
            plain.sendall(codec.encode(request, 1, 0))
            assert receive(plain)[1].code == "unauthorized"
            assert is_cut_off(plain)
        assert read(client, find(client, "aa"), "aa") == CHUNK_SIZE
        assert client.status().num_sessions == 1

    @pytest.mark.parametrize("order", [m.Clear(), m.Forget(ROOT, b""), m.Switch(frozen=True), m.Check()])
    def test_without_a_token_nobody_may_give_orders(self, driver, order):
        """B484: what changes the cache for others is refused over TCP; storing and reading goes on."""
        with closing(SocketServer(driver, driver.pool, "tcp://127.0.0.1:0", epoch=7)) as server:
            transport = RemoteTransport(server.address, "test", timeout_seconds=WAIT_SECONDS)
            with closing(StoreClient(transport)) as client:
                assert save(client, "aab") == 2
                reply = transport.call(order)
                assert (type(reply), reply.code) == (m.Failed, "unauthorized")
                assert "set `token`" in reply.message
                with pytest.raises(Refused, match="set `token`"):
                    client.clear()
                assert read(client, find(client, "aab"), "aab") == 48
                assert (client.status().is_frozen, client.status().media[0].num_chunks) == (False, 2)
                assert client.is_usable

    def test_strangers_are_only_so_many(self, monkeypatch, raw, is_cut_off, connect):
        """B254: of more connections that say nothing the oldest are closed; whoever says hello is served."""
        monkeypatch.setattr(server_module, "_MAX_STRANGERS", 10)
        monkeypatch.setattr(server_module, "_HELLO_SECONDS", 600.0)
        client = connect()
        silent = [raw() for _ in range(30)]
        assert all(is_cut_off(plain) for plain in silent[:18])
        connect().check()
        client.check()

    def test_strangers_have_so_much_time(self, monkeypatch, raw, is_cut_off, client):
        """B254: who has not said hello by then is closed, also while it drips."""
        monkeypatch.setattr(server_module, "_HELLO_SECONDS", 0.2)
        plain = raw()
        plain.sendall(HELLO[:-1])
        assert is_cut_off(plain)
        client.check()


class TestAnswers:
    def test_an_answer_that_is_too_long_is_a_failure(self, monkeypatch, connect):
        """It costs its request, not the connection of whoever asked."""
        client = connect()
        monkeypatch.setattr(codec, "MAX_BODY_BYTES", 200)
        reply = client._transport.call(m.GetStatus())
        assert (type(reply), reply.code) == (m.Failed, "internal")
        assert client.ping() is False

    @pytest.mark.parametrize(
        "request_",
        [
            m.Register(m.Instance("x" * 2000, "worker", "model")),
            m.Register(m.Instance("x", "worker", "model", spaces=(bytes(1 << 13),))),
            m.Several((m.Poll(1),) * 1025),
            m.Match(0, ROOT, bytes((1 << 20) + 4)),
            m.Release(tuple(range(70_000))),
            m.Download(bytes((m.MAX_CHUNKS + 1) * 48)),
            m.Reserve((prompt("aa")[0].new(),) * (m.MAX_CHUNKS + 1)),
        ],
        ids=lambda request: type(request).__name__,
    )
    def test_what_would_keep_the_others_waiting_is_refused(self, client, request_):
        """B255: a field has a limit, and the session goes on."""
        reply = client._transport.call(request_)
        assert (type(reply), reply.code) == (m.Failed, "protocol")
        client.check()

    def test_a_malformed_chunk_is_not_repeated_in_full(self, client):
        """The refusal of a chunk with a key of megabytes is a line."""
        bad = prompt("aa")[0]._replace(key=b"k" * 10_000_000).new()
        reply = client._transport.call(m.Reserve((bad,)))
        assert reply.code == "protocol"
        assert len(reply.message) < 500

    def test_a_chunk_larger_than_the_pool_evicts_nobody(self, client):
        """Nor does the store look for whom it could evict."""
        save(client, "aa")
        huge = msgspec.structs.replace(prompt("bb")[0].new(), image_bytes=1 << 50)
        assert client.reserve([huge]).outcomes == (Outcome.NO_ROOM,)
        assert read(client, find(client, "aa"), "aa") == CHUNK_SIZE


class Taker:
    """A socket that takes whatever it is sent."""

    def __init__(self):
        self.incoming, self.taken, self.num_sent = b"", bytearray(), 0

    def recv_into(self, view):
        count = min(len(view), len(self.incoming))
        if not count:
            raise BlockingIOError
        view[:count], self.incoming = self.incoming[:count], self.incoming[count:]
        return count

    def send(self, data):
        self.taken += data
        self.num_sent += 1
        return len(data)

    def fileno(self):
        return -1

    def close(self):
        pass


LOST = m.Failed("expired", "the lease ran out")


def receive(plain):
    """One reply, with its head, and not a byte more."""
    head = codec.decode_head(exactly(plain, codec.HEAD.size))
    return head, codec.decode_reply(exactly(plain, head.body_bytes))


def exactly(plain, count):
    data = b""
    while len(data) < count:
        data += plain.recv(count - len(data)) or pytest.fail("the connection ended")
    return data


def skip(plain, count):
    while count:
        count -= len(plain.recv(min(count, 1 << 20)) or pytest.fail("the connection ended"))
