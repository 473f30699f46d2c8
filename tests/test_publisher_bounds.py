"""What listens to a store's events and does not read: what it takes of the process that publishes, and of others."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import pytest

from qkvault import publisher as publishing
from qkvault.config import Config
from qkvault.embedded import EmbeddedStore
from qkvault.events import StoreEvent
from qkvault.image import PLAIN
from qkvault.testing.spaces import described
from qkvault.testing.transport_contract import until
from qkvault.types import HASH_BYTES, Medium

zmq = pytest.importorskip("zmq", reason="pyzmq is of the extra `server`")

CHUNK, MIB, WAIT_MS = 256, 1 << 20, 20_000
DESCRIBED = described(dtype="float16", chunk_size=CHUNK)
TOKENS = struct.pack(f"<{CHUNK}I", *range(100_000, 100_000 + CHUNK))


class Publishing:
    """A store that has as much to tell as a test wants, its publisher, and clients of both sockets."""

    def __init__(self, monkeypatch, folder, **kwargs):
        self.num_takes = 0  # in which it has news
        self.is_told = False  # all that was taken
        self.store = EmbeddedStore(Config(ram_bytes=MIB, prefault=False))
        monkeypatch.setattr(self.store.driver, "take_events", self.take)
        self.publisher = publishing.Publisher(
            self.store.driver, f"ipc://{folder}/news", f"ipc://{folder}/past", **kwargs
        )
        self.context = zmq.Context()
        self.sockets = []

    def close(self):
        self.context.destroy(linger=0)
        self.publisher.close()
        self.store.close()

    def take(self, limit, *, start_over=False):
        if not self.num_takes:
            self.is_told = True
            return []
        self.num_takes -= 1
        return [
            StoreEvent(
                stored=True,
                medium=Medium.RAM,
                key=DESCRIBED.space.space_id + os.urandom(HASH_BYTES),
                parent=bytes(len(DESCRIBED.space.space_id) + HASH_BYTES),
                num_tokens=CHUNK,
                tier="ram",
                tokens=TOKENS,
                space=DESCRIBED.encode(),
                flags=PLAIN,
            )
            for _ in range(limit)
        ]

    def tell(self, num_takes):
        self.num_takes = num_takes
        until(lambda: not self.num_takes)
        self.is_told = False
        until(lambda: self.is_told)

    @property
    def oldest(self):
        return int.from_bytes(self.publisher._sent[0].sequence, "big")

    def fill(self):
        """Until the past is as long as it may be."""
        self.tell(10)
        while self.oldest == self.publisher._first:
            self.tell(10)

    def socket(self, kind, **options):
        socket = self.context.socket(kind)
        self.sockets.append(socket)  # closed with the context
        for name, value in options.items():
            setattr(socket, name, value)
        is_news = kind == zmq.SUB
        socket.connect(self.publisher.endpoint if is_news else self.publisher.replay_endpoint)
        if is_news:
            socket.subscribe(b"")
            assert socket.poll(WAIT_MS), "it was not told of the silence"
        return socket

    def deaf(self, kind=zmq.DEALER):
        """That takes next to nothing unless it is read."""
        return self.socket(kind, rcvhwm=1)

    def stuck(self, num_replays=1):
        """The replays that are under way, once none of them goes on."""
        until(lambda: len(self.publisher._replays) == num_replays)
        replays = list(self.publisher._replays.values())
        before = []
        while before != (now := [replay.next for replay in replays]):
            before = now
            time.sleep(4 * publishing._TICK_SECONDS)
        return replays


def ask(socket, start=0):
    socket.send_multipart([b"", start.to_bytes(8, "big")])


def numbers_to_the_end(socket):
    """The sequence numbers of a replay."""
    numbers = []
    while True:
        assert socket.poll(WAIT_MS), f"no end after {len(numbers)}"
        numbers.append(int.from_bytes(socket.recv_multipart()[2], "big", signed=True))
        if numbers[-1] == -1:
            return numbers[:-1]


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.fixture
def publishing_of(monkeypatch, tmp_path):
    """A function that publishes; closed at the end."""
    monkeypatch.setattr(publishing, "_QUIET_SECONDS", 0.2)
    opened = []

    def publish(**kwargs):
        opened.append(Publishing(monkeypatch, tmp_path, **kwargs))
        return opened[-1]

    yield publish
    for each in opened:
        each.close()


def test_replays_that_nobody_read_took_the_buffer_again_each_time(publishing_of):
    """B530: and others are answered meanwhile."""
    this = publishing_of(buffer_bytes=16 * MIB)
    this.fill()
    deaf, other = this.deaf(), this.socket(zmq.DEALER)
    before = resident_bytes()
    for _ in range(25):
        ask(deaf)
        ask(other, 2**64 - 1)
        assert numbers_to_the_end(other) == []
    assert resident_bytes() - before < 32 * MIB


def test_a_subscriber_that_did_not_read_took_a_thousand_batches_of_any_size(publishing_of):
    """B530: as many as the buffer has room for; those that stop at a time share them."""
    this = publishing_of(buffer_bytes=8 * MIB)
    this.fill()
    deaf = [this.deaf(zmq.SUB) for _ in range(3)]
    before = resident_bytes()
    this.tell(300)
    assert resident_bytes() - before < 32 * MIB
    assert all(socket.poll(WAIT_MS) for socket in deaf)


def test_a_batch_is_bounded_in_bytes(publishing_of):
    """B530: whatever the events weigh."""
    this = publishing_of()
    this.tell(3)
    until(lambda: len(this.publisher._sent) > 10)
    assert max(len(sent.payload) for sent in this.publisher._sent) <= publishing._BATCH_BYTES


def test_a_slow_client_gets_all_that_it_asked_for_in_order(publishing_of):
    """B531: once for each of two requests; what was told since it asked comes on the stream."""
    this = publishing_of()
    this.tell(40)
    slow, news = this.deaf(), this.socket(zmq.SUB)
    ask(slow)
    (replay,) = this.stuck()
    asked_for = list(range(this.publisher._first, replay.end))
    ask(slow, asked_for[-3])
    until(lambda: replay.wanted)
    this.tell(10)
    while int.from_bytes(news.recv_multipart()[1], "big") < replay.end:
        assert news.poll(WAIT_MS)
    assert numbers_to_the_end(slow) == asked_for
    again = numbers_to_the_end(slow)
    assert again[:3] == asked_for[-3:]
    assert again == list(range(again[0], again[-1] + 1))
    until(lambda: not this.publisher._replays)
    assert not slow.poll(200)


def test_a_client_that_does_not_read_costs_no_time(publishing_of):
    """B531: news come at their pace, and nothing spins."""
    this = publishing_of(buffer_bytes=16 * MIB)
    this.fill()
    deaf, news = [this.deaf() for _ in range(5)], this.socket(zmq.SUB)
    for socket in deaf:
        ask(socket)
    this.stuck(len(deaf))
    clock = time.pthread_getcpuclockid(this.publisher.thread.ident)
    start_seconds, used_seconds = time.monotonic(), time.clock_gettime(clock)
    for _ in range(5):  # batches that come of silence, each a fifth of a second after the last
        assert news.poll(WAIT_MS)
        news.recv_multipart()
    passed_seconds = time.monotonic() - start_seconds
    assert time.clock_gettime(clock) - used_seconds < 0.1 * max(1.0, passed_seconds)
    assert passed_seconds < 5.0
    assert len(this.publisher._replays) == len(deaf)


def test_a_replay_ends_with_its_client(publishing_of):
    """B531: whoever has gone is forgotten."""
    this = publishing_of(buffer_bytes=16 * MIB)
    this.fill()
    deaf = this.deaf()
    ask(deaf)
    this.stuck()
    deaf.close(linger=0)
    until(lambda: not this.publisher._replays)


def test_what_goes_before_a_slow_client_has_it_is_told_anew(publishing_of):
    """B531: it sees a gap, and its end; one that never reads makes nobody listen to all once more."""
    this = publishing_of(buffer_bytes=16 * MIB)
    this.fill()
    slow, start = this.deaf(), this.oldest
    ask(slow, start)
    (replay,) = this.stuck()
    this.tell(60)
    assert replay.next < this.oldest
    assert this.publisher._restarted_seconds == float("-inf")
    numbers = numbers_to_the_end(slow)
    assert numbers == sorted(set(numbers))
    assert len(numbers) < replay.end - start
    until(lambda: this.publisher._restarted_seconds > 0)


def test_a_request_that_is_too_large_is_cut_off(publishing_of):
    """B530: without others noticing."""
    this = publishing_of()
    large, other = this.socket(zmq.DEALER), this.socket(zmq.DEALER)
    monitor = large.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    large.send(bytes(MIB))
    assert monitor.poll(WAIT_MS)
    large.disable_monitor()
    monitor.close()
    ask(other, 2**64 - 1)
    assert numbers_to_the_end(other) == []
