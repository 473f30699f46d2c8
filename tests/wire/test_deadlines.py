"""Time over TCP: a call, and a fetch or a commit with its data, has one deadline, however little comes at a time."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest

from qkvault.address import parse_address
from qkvault.errors import DeadlineExceeded, Unavailable
from qkvault.image import ALIGNMENT_BYTES
from qkvault.types import KEY_BYTES, ChunkRef, Medium, NewChunk, Outcome
from qkvault.wire import codec, remote, resolve
from qkvault.wire import messages as m
from qkvault.wire.remote import RemoteTransport
from qkvault.wire.sockets import Stream

SOON_SECONDS = 0.3
LATE_SECONDS = 2.0  # after the deadline, on a machine that others use as well; each drip here would take longer
DRIP_SECONDS = 0.05
IMAGE_BYTES = 1 << 20
EPOCH = 7
REF = ChunkRef(b"k" * KEY_BYTES, 0, IMAGE_BYTES, 16, Medium.RAM)
CHUNK = NewChunk(b"k" * KEY_BYTES, b"p" * KEY_BYTES, b"s" * 3, 16, IMAGE_BYTES)


def exactly(plain, count):
    data = bytearray()
    while len(data) < count:
        data += plain.recv(min(1 << 16, count - len(data))) or pytest.fail("the connection ended")
    return data


def asked(plain):
    """The sequence number of the next request, whose body and data are taken."""
    head = codec.decode_head(exactly(plain, codec.HEAD.size))
    exactly(plain, head.body_bytes + head.data_bytes)
    return head.sequence


def drip(plain, data):
    for byte in data:
        plain.sendall(bytes([byte]))
        time.sleep(DRIP_SECONDS)


def welcome(plain):
    plain.sendall(codec.encode(m.Welcome(m.PROTOCOL_VERSION, 4 * IMAGE_BYTES), asked(plain), EPOCH))


@contextmanager
def within(seconds, error=DeadlineExceeded):
    """It raises, and no later than that."""
    started = time.monotonic()
    with pytest.raises(error) as raised:
        yield raised
    assert time.monotonic() - started < seconds + LATE_SECONDS


@pytest.fixture
def serve():
    """Runs a script, a function of the connection, for one client. Returns the address."""
    with ExitStack() as stack:

        def make(script):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def run():
                plain, _ = listener.accept()
                with plain, suppress(OSError):  # the client has gone
                    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    script(plain)

            thread = threading.Thread(target=run)
            thread.start()
            stack.callback(thread.join)
            return f"tcp://127.0.0.1:{listener.getsockname()[1]}"

        yield make


@pytest.fixture
def connect(serve):
    with ExitStack() as stack:

        def make(script, *, timeout_seconds=SOON_SECONDS):
            def welcoming(plain):
                welcome(plain)
                script(plain)

            transport = RemoteTransport(serve(welcoming), "test", timeout_seconds=timeout_seconds)
            return stack.enter_context(closing(transport))

        yield make


class _Endless:
    """A view that is never full: what comes next goes over what came before."""

    def __init__(self):
        self._view = memoryview(bytearray(1 << 16))

    def __len__(self):
        return 1 << 60

    def __getitem__(self, where):
        return self._view


def data_head(plain):
    plain.sendall(codec.encode(m.Data((IMAGE_BYTES,)), asked(plain), EPOCH, IMAGE_BYTES))


class TestFetchTime:
    def test_data_that_drips_ends_at_the_deadline(self, connect):
        """B390: something comes all the time, and the fetch ends nevertheless; its session is over."""

        def script(plain):
            data_head(plain)
            drip(plain, bytes(200))

        transport = connect(script, timeout_seconds=600.0)
        with within(SOON_SECONDS):
            transport.fetch([REF], SOON_SECONDS)
        with pytest.raises(Unavailable, match="has ended"):
            transport.call(m.Ping())

    def test_data_that_never_ends_ends_at_the_deadline(self, serve):
        """B390: nor does it help that there is something to read all the time."""

        def flood(plain):
            while True:
                plain.sendall(bytes(1 << 20))

        with closing(Stream(parse_address(serve(flood)), 20.0)) as stream:
            stream.begin(time.monotonic() + SOON_SECONDS)
            with within(SOON_SECONDS, TimeoutError):
                stream.fill(_Endless())

    def test_a_head_that_drips_leaves_the_data_no_time_of_its_own(self, connect):
        """B390: head, data and end share what the caller gave."""

        def script(plain):
            frame = codec.encode(m.Data((IMAGE_BYTES,)), asked(plain), EPOCH, IMAGE_BYTES)
            plain.sendall(frame[:-5])
            drip(plain, frame[-5:])
            drip(plain, bytes(200))

        with within(SOON_SECONDS):
            connect(script, timeout_seconds=600.0).fetch([REF], SOON_SECONDS)

    def test_an_end_that_drips_ends_at_the_deadline(self, connect):
        """B390: the frame behind the data too."""

        def script(plain):
            data_head(plain)
            plain.sendall(bytes(IMAGE_BYTES))
            drip(plain, codec.encode(m.Done(), 2, EPOCH) * 5)

        with within(SOON_SECONDS):
            connect(script, timeout_seconds=600.0).fetch([REF], SOON_SECONDS)

    def test_data_that_takes_longer_than_an_answer_may_come(self, connect):
        """B391: a fetch has the time that its caller gives, as long as something comes."""

        def script(plain):
            data_head(plain)
            for _ in range(8):
                time.sleep(SOON_SECONDS / 4)
                plain.sendall(bytes(IMAGE_BYTES // 8))
            plain.sendall(codec.encode(m.Done(), 2, EPOCH))

        transport = connect(script)
        transport.fetch([REF], 20.0)
        assert transport.is_usable

    def test_silence_in_the_middle_is_no_longer_than_that_of_a_call(self, connect):
        """B391: a store that dies behind a network is not waited for as long as a load may take."""

        def script(plain):
            data_head(plain)
            plain.sendall(bytes(1000))
            plain.recv(1)

        with within(SOON_SECONDS):
            connect(script).fetch([REF], 60.0)

    def test_without_a_word_the_time_fits_the_size(self, connect, monkeypatch):
        """B391: so much for an answer, and the rest by the bytes."""
        monkeypatch.setattr(remote, "_SLOWEST_BYTES_PER_SECOND", IMAGE_BYTES / 0.5)

        def script(plain):
            data_head(plain)
            drip(plain, bytes(200))

        started = time.monotonic()
        with within(SOON_SECONDS + 0.5):
            connect(script).fetch([REF])
        assert time.monotonic() - started > SOON_SECONDS + 0.4


class TestSendTime:
    @staticmethod
    def reserve(plain):
        plain.sendall(codec.encode(m.Reserved(1, (Outcome.RESERVED,), (0,)), asked(plain), EPOCH))

    def test_who_takes_data_slowly_gets_the_time_that_its_size_takes(self, connect, monkeypatch):
        """B391: a commit of megabytes takes longer than an answer, and no byte of it is lost."""
        monkeypatch.setattr(remote, "_SLOWEST_BYTES_PER_SECOND", IMAGE_BYTES / 20.0)

        def script(plain):
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            self.reserve(plain)
            head = codec.decode_head(exactly(plain, codec.HEAD.size))
            exactly(plain, head.body_bytes)
            for _ in range(8):
                exactly(plain, head.data_bytes // 8)
                time.sleep(SOON_SECONDS / 4)
            plain.sendall(codec.encode(m.Done(1), head.sequence, EPOCH))

        transport = connect(script)
        transport.call(m.Reserve((CHUNK,)))
        assert transport.call(m.Commit(1)) == m.Done(1)

    def test_who_takes_a_little_all_the_time_is_not_waited_for(self, connect):
        """B390: one deadline for a request, its data and its answer."""

        def script(plain):
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            until = time.monotonic() + 2 * LATE_SECONDS
            while plain.recv(4096) and time.monotonic() < until:
                time.sleep(DRIP_SECONDS)

        transport = connect(script)
        with within(SOON_SECONDS):
            transport.call(m.Match(0, b"", bytes(32 << 20)))

    def test_waiting_for_another_thread_counts(self, connect):
        """B390: a call's time is that from when it is made, and one that got no turn harms nobody."""
        go = threading.Event()

        def script(plain):
            number = asked(plain)
            go.wait(20)
            plain.sendall(codec.encode(m.Done(), number, EPOCH))

        transport = connect(script, timeout_seconds=20.0)
        thread = threading.Thread(target=transport.call, args=(m.Ping(),))
        thread.start()
        while not transport._lock.locked():
            time.sleep(0.001)
        with within(SOON_SECONDS) as raised:
            transport.call(m.Ping(), SOON_SECONDS)
        assert "in use" in str(raised.value)
        assert transport.is_usable, "nobody knows yet how the other's call ends"
        go.set()
        thread.join()
        assert transport.is_usable

    def test_a_turn_that_comes_late_leaves_what_is_left(self, connect):
        """B390: to wait for it and for the answer is one wait."""
        transport = connect(lambda plain: plain.recv(1 << 16) and plain.recv(1), timeout_seconds=20.0)
        threading.Timer(4.0, transport._lock.release).start()
        transport._lock.acquire()
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            transport.call(m.Ping(), 5.0)
        assert 4.0 < time.monotonic() - started < 5.0 + LATE_SECONDS


class TestConnectTime:
    def test_connect_and_hello_share_their_time(self, serve):
        """B390: a welcome that drips is none."""

        def script(plain):
            drip(plain, codec.encode(m.Welcome(m.PROTOCOL_VERSION, ALIGNMENT_BYTES), asked(plain), EPOCH) * 2)

        with within(SOON_SECONDS):
            RemoteTransport(serve(script), "test", timeout_seconds=SOON_SECONDS)

    def test_a_name_that_nobody_answers_for_is_a_bounded_wait(self, serve, monkeypatch):
        """B392: one lookup for all who ask meanwhile; what it finds late is used by who asks next."""
        go, asked_names, whole = threading.Event(), [], socket.getaddrinfo

        def slow(host, port, *args, **options):
            if options.get("flags"):
                raise socket.gaierror(socket.EAI_NONAME, "no address")
            asked_names.append(host)
            go.wait(20)
            return whole("127.0.0.1", port, *args, **options)

        address = serve(welcome).replace("127.0.0.1", "far.example")
        monkeypatch.setattr(socket, "getaddrinfo", slow)
        for _ in range(3):
            with within(SOON_SECONDS):
                RemoteTransport(address, "test", timeout_seconds=SOON_SECONDS)
        go.set()
        RemoteTransport(address, "test", timeout_seconds=20.0).close()
        assert asked_names == ["far.example"]
        assert resolve._lookups == {}

    def test_a_name_that_there_is_not_is_an_absent_store(self, monkeypatch):
        """B392: and is asked for again by the next call."""
        asked_names = []

        def fail(host, *_, **options):
            asked_names.append(bool(options.get("flags")))
            raise socket.gaierror(socket.EAI_NONAME, "no such name")

        monkeypatch.setattr(socket, "getaddrinfo", fail)
        for _ in range(2):
            with pytest.raises(Unavailable, match="no such name"):
                RemoteTransport("tcp://gone.example:1", "test")
        assert asked_names == [True, False] * 2

    def test_a_place_that_is_mute_leaves_time_for_the_next_one(self, serve, monkeypatch):
        """B392: of the addresses of a name each has its part of the time."""
        place = socket.getaddrinfo("127.0.0.1", int(serve(welcome).rsplit(":", 1)[1]), type=socket.SOCK_STREAM)
        with socket.socket() as mute:
            mute.bind(("127.0.0.1", 0))
            mute.listen(0)
            fillers = [socket.socket() for _ in range(4)]
            for filler in fillers:  # its queue is full: whoever connects now hears nothing
                filler.setblocking(False)
                filler.connect_ex(mute.getsockname())
            both = [(*place[0][:4], mute.getsockname()), *place]
            monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
            RemoteTransport("tcp://both.example:1", "test", timeout_seconds=4.0).close()
            for filler in fillers:
                filler.close()


def test_another_epoch_within_a_session_ends_it(connect):
    """B393: whatever answers now is not the store that held the session's leases."""

    def script(plain):
        plain.sendall(codec.encode(m.Done(), asked(plain), EPOCH))
        plain.sendall(codec.encode(m.Done(), asked(plain), EPOCH + 1))

    transport = connect(script, timeout_seconds=20.0)
    assert transport.call(m.Ping()) == m.Done()
    with pytest.raises(Unavailable, match="was restarted"):
        transport.call(m.Ping())
    assert not transport.is_usable
    with pytest.raises(Unavailable, match="has ended"):
        transport.call(m.Ping())
