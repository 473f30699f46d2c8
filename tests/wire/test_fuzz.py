"""Whatever is sent to a server, the others are answered, the store is whole, and nothing is left behind.

A random fuzzer over plain sockets, some seconds long. Of TLS it keeps the rules, and sends its nonsense inside, or it
sends nonsense instead of a handshake. QKV_FUZZ_SECONDS=600 makes it longer, QKV_FUZZ_SEED repeats the
order in which it does things.
"""

from __future__ import annotations

import gc
import os
import random
import socket
import ssl
import struct
import sys
import threading
import time
from contextlib import ExitStack, closing, suppress
from types import SimpleNamespace

import psutil
import pytest

from qkvault.client import StoreClient
from qkvault.image import key_in
from qkvault.testing import DictTier
from qkvault.testing.store_model import ROOT, checks_of, keys_of
from qkvault.testing.transport_contract import WAIT_SECONDS, find, make_driver, prompt, save
from qkvault.types import CacheKind, NewChunk
from qkvault.wire import codec
from qkvault.wire import messages as m
from qkvault.wire.remote import RemoteTransport
from qkvault.wire.server import SocketServer
from qkvault.wire.sockets import SocketTransport

SECONDS = float(os.environ.get("QKV_FUZZ_SECONDS", "2"))
SEED = int(os.environ.get("QKV_FUZZ_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
SOON_SECONDS = 0.25  # in which 99 of 100 answers to the others come, on a machine that others use as well;
BOUND_SECONDS = 3.0  # and each one in this. A client gives up after one second, if nobody says otherwise
GROWTH_BYTES = 192 << 20  # of this process, the pool and both ends of all sockets included
TOKEN = "sesame"
WORDS = ["aabb", "aabbc", "xxyy", "zz"]
NUMBERS = [0, 1, -1, 2, 3, 255, 2**31, 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1]
HELLO = m.Hello(m.PROTOCOL_VERSION, "fuzz", TOKEN)
KINDS = [CacheKind.KV, CacheKind.KV, CacheKind.QUERY]  # said of any chunk, right or wrong


class Fuzzer:
    """Sockets to one server, and everything that is done to it through them."""

    def __init__(self, dial, seed, *, is_unix, tls=None):
        self.rng = random.Random(seed)
        self.dial = dial  # makes a plain socket
        self.is_unix = is_unix
        self.tls = tls  # the client's context, where the server speaks TLS
        self.open = []  # connections that stay
        self.dripping = []  # (connection, what is still to be sent)
        self.frames_made = []
        self.wrong = []

    def close(self):
        for plain in [*self.open, *(plain for plain, _ in self.dripping)]:
            plain.close()
        self.open, self.dripping = [], []

    # What is sent

    def number(self):
        return self.rng.choice([*NUMBERS, self.rng.randrange(20)])

    def key(self):
        rng = self.rng
        chunks = prompt(rng.choice(WORDS))
        return rng.choice([ROOT, rng.choice(chunks).key, rng.choice(chunks).key, rng.randbytes(rng.choice([0, 7, 48]))])

    def chunk(self):
        new = self.rng.choice(prompt(self.rng.choice([*WORDS, "nn", "oopp"]))).new()
        if self.rng.random() < 0.6:
            return new
        fields = [self.key(), self.key(), new.sketch, self.number(), self.number()]
        kept = [new.key, new.parent, new.sketch, new.num_tokens, new.image_bytes]
        return NewChunk(*(self.rng.choice(pair) for pair in zip(kept, fields, strict=True)))

    def message(self):
        rng, key, number = self.rng, self.key, self.number
        chunks = prompt(rng.choice(WORDS))
        whole = [chunk for chunk in chunks if chunk.num_tokens == 32]
        media = rng.choice([None, (), ("ram",), ("disk", "nowhere"), ("x" * 2000,)])
        lookup = m.Lookup(ROOT, keys_of(whole) * rng.randrange(4), checks_of(whole) * rng.randrange(4), b"", media)
        some = [lookup, m.Poll(number()), m.Match(0, key(), chunks[0].tokens)]
        instance = m.Instance("fuzz", "worker", "m" * rng.choice([1, 5000]), spaces=(bytes(1 << 12),) * 8)
        kinds = [
            lambda: lookup,
            lambda: m.Lookup(key(), rng.randbytes(rng.randrange(200)), rng.randbytes(rng.randrange(20)), key(), media),
            lambda: m.Match(number(), key(), rng.choice(chunks).tokens + rng.randbytes(rng.randrange(9)), media),
            lambda: m.Match(0, key(), rng.randbytes(rng.choice([0, 64, 100, 1 << 16])), media),
            lambda: m.Poll(number()),
            lambda: m.Several(tuple(rng.choice(some) for _ in range(rng.choice([0, 3, 500, 2000])))),
            lambda: m.Release(tuple(number() for _ in range(rng.choice([0, 3, 1000])))),
            lambda: m.Reserve(tuple(self.chunk() for _ in range(rng.choice([0, 1, 2, 5, 100]))), rng.choice(KINDS)),
            lambda: m.Commit(number(), rng.choice([None, (), (key(), key())])),
            lambda: m.Abort(number()),
            lambda: m.Download(b"".join(key() for _ in range(rng.choice([0, 1, 3, 3000])))),
            lambda: m.Register(instance),
            lambda: m.Inspect(key(), keys_of(whole), checks_of(whole), rng.choice(chunks).tokens, media),
            lambda: m.Forget(key(), b"".join(key() for _ in range(rng.choice([0, 1, 300]))), chunks[-1].tokens),
            lambda: m.Clear(spaces=(rng.randbytes(rng.choice([0, 16, 48])),)),
            lambda: rng.choice([m.Ping(), m.GetStatus(), m.Check(), m.Clear(lower_tiers=False)]),
            lambda: rng.choice([HELLO, m.Hello(number(), "x", "y"), m.Switch(hot_cache=True)]),
        ]
        return rng.choice(kinds)()

    def frame(self):
        """A new one, or one that was sent before: to make one takes longer than to answer it."""
        if len(self.frames_made) < 50 or self.rng.random() < 0.1:
            self.frames_made.append(self.new_frame())
            del self.frames_made[:-300]
        return self.rng.choice(self.frames_made)

    def new_frame(self):
        """A message, as it should be or spoilt."""
        rng = self.rng
        try:
            body = codec.encode(self.message(), 0, 0)[codec.HEAD.size :]
        except OverflowError:  # a number that msgpack cannot hold
            body = b""
        if rng.random() < 0.4:
            body = self.spoilt(body)
        data = rng.randbytes(rng.choice([0, 0, 0, 1, 100, 8192]))
        return codec.HEAD.pack(len(body), rng.randrange(1 << 32), rng.randrange(1 << 64), len(data)) + body + data

    def spoilt(self, body):
        rng, spoilt = self.rng, bytearray(body)
        for _ in range(rng.choice([1, 1, 2, 10])):
            at = rng.randrange(len(spoilt) + 1)
            what = rng.randrange(5)
            if what == 0 and at < len(spoilt):
                spoilt[at] = rng.randrange(256)
            elif what == 1:
                del spoilt[at:]
            elif what == 2:  # what msgpack's longest headers announce
                head = bytes([rng.choice([0xC6, 0xC9, 0xDB, 0xDD, 0xDF])])
                spoilt[at:at] = head + rng.choice([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\xff\xff\xff"])
            elif what == 3:
                spoilt[at:at] = rng.choice([b"\x91", b"\x81\xa1x", b"\xdc\xff\xff"]) * rng.choice([1, 1000, 50_000])
            else:
                spoilt[at:at] = spoilt[: rng.randrange(40)]
        return bytes(spoilt)

    def handshake(self):
        """The first message of TLS."""
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        with suppress(ssl.SSLWantReadError):
            self.tls.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1").do_handshake()
        return outgoing.read()

    def no_handshake(self):
        """What comes instead of it: a part, one that is spoilt, a record that never comes, frames in the clear."""
        rng, hello = self.rng, bytearray(self.handshake())
        for _ in range(rng.choice([0, 1, 5])):
            hello[rng.randrange(len(hello))] = rng.randrange(256)
        clear = codec.encode(HELLO, 1, 0) + self.frame()
        record = bytes([rng.choice([20, 21, 22, 23, 0]), 3, rng.choice([1, 3, 4])]) + rng.choice(
            [b"\xff\xff", b"\x40\x00"]
        )
        return rng.choice(
            [hello, hello[: rng.randrange(len(hello))], hello * 3, clear, record, record + clear, b"GET / \r\n"]
        )

    # What is done

    def connect(self):
        plain = self.dial()
        if self.tls is None:
            return plain
        try:
            return self.tls.wrap_socket(plain, server_hostname="127.0.0.1")
        except BaseException:
            plain.close()
            raise

    def welcomed(self):
        plain = self.connect()
        try:
            plain.sendall(codec.encode(HELLO, 1, 0))
        except OSError:
            plain.close()
            raise
        return plain

    def garbage(self):
        with closing(self.rng.choice([self.connect, self.welcomed])()) as plain:
            plain.sendall(self.rng.randbytes(self.rng.choice([1, 23, 24, 100, 100_000])))

    def without_handshake(self):
        """In the clear to a server that speaks TLS: said at once or byte by byte, and left at once, reset, or kept."""
        if self.tls is None:
            return
        plain, said = self.dial(), self.no_handshake()
        how = self.rng.randrange(4)
        if how == 0:
            self.dripping.append((plain, said))
            return
        self.keep(plain).sendall(said)
        if how == 1:
            self.reset(plain)
        elif how == 2:
            self.open.remove(plain)
            with closing(plain):  # an alert, or nothing
                plain.shutdown(socket.SHUT_WR)
                plain.recv(1 << 16)

    def frames(self):
        """Some, with nobody reading."""
        with closing(self.welcomed()) as plain:
            plain.sendall(b"".join(self.frame() for _ in range(self.rng.choice([1, 5, 50]))))

    def answered(self):
        """Whole frames, however spoilt their bodies, have one answer each, in order."""
        with closing(self.welcomed()) as plain:
            answer(plain)
            for number in range(2, 12):
                frame = bytearray(self.frame())
                body_bytes, _, epoch, data_bytes = codec.HEAD.unpack_from(frame)
                codec.HEAD.pack_into(frame, 0, body_bytes, number, epoch, data_bytes)
                plain.sendall(frame)
                head, reply = answer(plain)
                if isinstance(reply, m.Data):
                    exactly(plain, head.data_bytes)
                    head, reply = answer(plain)
                if head.sequence != number or (isinstance(reply, m.Failed) and reply.code in ("internal", "invariant")):
                    self.wrong.append((head, reply))

    def truncated(self):
        with closing(self.welcomed()) as plain:
            frame = self.frame()
            plain.sendall(frame[: self.rng.randrange(len(frame))])
            if self.rng.random() < 0.5:
                self.reset(plain)

    def huge(self):
        """Lengths of gigabytes, and more."""
        plain = self.keep(self.rng.choice([self.connect, self.welcomed])())
        numbers = [0, 1, 100, 1 << 16, codec.MAX_BODY_BYTES, codec.MAX_BODY_BYTES + 1, 2**32 - 1]
        head = codec.HEAD.pack(self.rng.choice(numbers), 2, 0, self.rng.choice([0, 1, 2**40, 2**64 - 1]))
        plain.sendall(head + self.rng.randbytes(self.rng.choice([0, 10, 1 << 20])))

    def lying(self):
        """Reserve, then send other data than was announced, or than there is room for."""
        rng = self.rng
        with ExitStack() as stack:
            plain = stack.enter_context(closing(self.welcomed()))
            answer(plain)
            chunks = tuple(chunk.new() for chunk in prompt(rng.choice(["nn", "oopp", "qqrrss"])))
            plain.sendall(codec.encode(m.Reserve(chunks), 2, 0))
            _, reserved = answer(plain)
            if not isinstance(reserved, m.Reserved):
                return
            given = [new.image_bytes for new, at in zip(chunks, reserved.offsets, strict=True) if at >= 0]
            size = sum(given) + rng.choice([-1, 0, 0, 0, 1])
            commit = codec.encode(m.Commit(reserved.lease_id), 3, 0, max(0, size))
            plain.sendall(commit + rng.randbytes(max(0, size - rng.choice([0, 0, 1, 5000]))))
            if rng.random() < 0.5:
                plain.sendall(self.frame())
            elif rng.random() < 0.5:
                stack.pop_all()
                self.keep(plain)

    def ahead(self):
        """Many requests in one piece."""
        plain = self.keep(self.welcomed())
        plain.setblocking(False)
        with suppress(BlockingIOError, ssl.SSLWantWriteError):
            plain.send(b"".join(self.frame() for _ in range(300)))

    def unread(self):
        """Downloads and states that nobody takes."""
        plain = self.keep(self.welcomed())
        plain.setblocking(False)
        keys = keys_of(prompt("aabb")) * 1000
        piece = codec.encode(self.rng.choice([m.Download(keys), m.GetStatus(), m.Lookup(ROOT, keys, b"")]), 2, 0)
        with suppress(BlockingIOError, ssl.SSLWantWriteError):
            for _ in range(20):
                plain.send(piece * max(1, 100_000 // len(piece)))

    def half_closed(self):
        with closing(self.welcomed()) as plain:
            plain.sendall(self.frame())
            plain.shutdown(socket.SHUT_WR)
            with suppress(OSError):
                while plain.recv(1 << 16):
                    pass

    def silent(self):
        """Connections that never say hello."""
        for _ in range(self.rng.choice([1, 20])):
            self.keep(self.rng.choice([self.dial, self.connect])())

    def drip(self):
        plain = self.connect()
        self.dripping.append((plain, codec.encode(HELLO, 1, 0) + self.frame()))

    def wrong_token(self):
        with closing(self.connect()) as plain:
            token = self.rng.choice(["", "sesam", TOKEN + "x", "x" * 1000])
            plain.sendall(codec.encode(m.Hello(m.PROTOCOL_VERSION, "x", token), 1, 0))
            _, reply = answer(plain)
            if not self.is_unix and not isinstance(reply, m.Failed):
                self.wrong.append(reply)

    def descriptors(self):
        """Some that the server did not ask for."""
        if self.is_unix:
            with closing(self.connect()) as plain:
                socket.send_fds(plain, [codec.encode(HELLO, 1, 0)], [0, 1, 2])

    def reset(self, plain):
        """When it is closed, as if its machine had been switched off and on."""
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def keep(self, plain):
        self.open.append(plain)
        while len(self.open) > 60:
            self.open.pop(self.rng.randrange(len(self.open) - 1)).close()
        return plain

    def step(self):
        actions = [
            self.garbage, self.frames, self.frames, self.answered, self.answered, self.truncated, self.huge, self.lying,
            self.lying, self.ahead, self.unread, self.half_closed, self.silent, self.drip, self.wrong_token,
            self.descriptors, self.without_handshake,
        ]  # fmt: skip
        with suppress(OSError, EOFError):  # to be cut off is fine
            self.rng.choice(actions)()
        for number, (plain, rest) in enumerate(self.dripping):
            with suppress(OSError):
                plain.send(rest[:1])
            self.dripping[number] = plain, rest[1:]
        for plain, _ in [drop for drop in self.dripping if not drop[1]] + self.dripping[:-20]:
            plain.close()
        self.dripping = [drop for drop in self.dripping[-20:] if drop[1]]


def exactly(plain, count):
    data = bytearray()
    while len(data) < count:
        part = plain.recv(min(count - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def answer(plain):
    head = codec.decode_head(exactly(plain, codec.HEAD.size))
    return head, codec.decode_reply(exactly(plain, head.body_bytes))


def other_bytes(client, located, word):
    """Chunks that a lease shows with other bytes than theirs. One whose lease ran out meanwhile has no header."""
    client.fetch(list(located.ready))
    found = []
    for ref, chunk in zip(located.ready, prompt(word), strict=False):
        image = client.pool.view(ref.offset, ref.image_bytes)
        is_here = key_in(image) == chunk.key == ref.key
        is_whole = chunk.is_in(image)
        if is_here and key_in(image) == chunk.key and not is_whole:
            found.append(ref)
    return found


class Timed:
    """A transport that notes how long each answer took, in seconds."""

    def __init__(self, transport):
        self._transport = transport
        self.seconds = []

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def call(self, *args):
        return self._time(self._transport.call, *args)

    def fetch(self, *args):
        return self._time(self._transport.fetch, *args)

    def _time(self, ask, *args):
        start = time.monotonic()
        try:
            return ask(*args)
        finally:
            self.seconds.append(time.monotonic() - start)


def watch(client, is_over, wrong):
    """Somebody else's client: what it asks is answered right."""
    while not is_over.wait(0.01):
        try:
            save(client, "aabbc")
            located = find(client, "aabbc")
            wrong += other_bytes(client, located, "aabbc")
            client.release(located.lease_id)
            client.check()
        except Exception as error:  # thread top: told by the test's own thread
            wrong.append(error)
            return


@pytest.fixture(params=["unix", "tcp", "tls"])
def served(request, tmp_path):
    """A store of a few words, a timed client of it, and how to dial its server."""
    is_unix = request.param == "unix"
    ends = request.getfixturevalue("tls") if request.param == "tls" else SimpleNamespace(server=None, client=None)
    address = f"unix://{tmp_path}/s" if is_unix else "tcp://127.0.0.1:0"
    make = SocketTransport if is_unix else RemoteTransport
    with ExitStack() as stack:
        driver = stack.enter_context(closing(make_driver(DictTier(), lease_seconds=1.0, pool_bytes=24 * 8192)))
        server = SocketServer(driver, driver.pool, address, epoch=7, token=TOKEN, tls=ends.server)
        stack.enter_context(closing(server))
        transport = Timed(make(server.address, "watch", timeout_seconds=WAIT_SECONDS, token=TOKEN, tls=ends.client))
        client = stack.enter_context(closing(StoreClient(transport)))
        for word in WORDS:
            save(client, word)
        transport.seconds.clear()

        def dial():
            if is_unix:
                plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                plain.connect(str(tmp_path / "s"))
            else:
                host, port = server.address.removeprefix("tcp://").rsplit(":", 1)
                plain = socket.create_connection((host, int(port)))
            plain.settimeout(WAIT_SECONDS)
            return plain

        yield SimpleNamespace(client=client, seconds=transport.seconds, dial=dial, is_unix=is_unix, tls=ends.client)


@pytest.mark.timeout(SECONDS + 120)
def test_whatever_one_sends_the_others_are_answered(served, caplog, until):
    """B256, B490: random bytes, spoilt, huge and slow frames, data that lies, crowds that say nothing, no handshake."""
    client, process = served.client, psutil.Process()
    with closing(Fuzzer(served.dial, SEED, is_unix=served.is_unix, tls=served.tls)) as fuzzer:
        num_threads, num_descriptors = threading.active_count(), process.num_fds()
        is_over, wrong = threading.Event(), fuzzer.wrong
        watcher = threading.Thread(target=watch, args=(client, is_over, wrong))
        watcher.start()
        deadline, rounds, grown_bytes = time.monotonic() + SECONDS, 0, 0
        before_bytes = process.memory_info().rss
        try:
            while time.monotonic() < deadline and not wrong:
                fuzzer.step()
                rounds += 1
                if rounds % 50 == 0:
                    grown_bytes = max(grown_bytes, process.memory_info().rss - before_bytes)
        finally:
            is_over.set()
            watcher.join()
    answers = sorted(served.seconds)
    soon, slowest = answers[len(answers) * 99 // 100], answers[-1]
    times = f"{len(answers)} answers, 99 % in {soon:.3f} s, slowest {slowest:.2f} s"
    said = f"seed {SEED}, {rounds} rounds, {times}, grown by {grown_bytes >> 20} MB"
    sys.stdout.write(said + "\n")
    assert wrong == [], said
    assert soon < SOON_SECONDS, said
    assert slowest < BOUND_SECONDS, said
    assert grown_bytes < GROWTH_BYTES, said
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [], said
    until(lambda: client.status().num_sessions == 1)
    until(lambda: client.status().num_leases == 0)
    client.check()
    gc.collect()
    # Who never had a session may be seen to have gone last.
    until(lambda: (threading.active_count(), process.num_fds()) == (num_threads, num_descriptors))
