"""Publisher: a store's events on a ZeroMQ socket, as vLLM publishes its own, and the last of them once more on request.

One thread owns the sockets and asks the store twenty times a second. The store does not know of it, and never waits.
ZeroMQ counts messages, so what may wait is bounded by how many, and by what each may weigh.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import zmq
from msgspec.structs import replace

from qkvault.address import UNIX_SCHEME, parse_address
from qkvault.errors import ConfigError
from qkvault.events import AllBlocksCleared, EventBatch, StoreEvent, Translator, WireEvent
from qkvault.image import PLAIN
from qkvault.logs import RateLimited, get_logger
from qkvault.store.driver import StoreDriver
from qkvault.tiers.base import Found
from qkvault.types import Medium
from qkvault.wire.listen import Listener

MODEL: Final = "{model}"  # in a topic: stands for the model's name
_TICK_SECONDS: Final = 0.05
_QUIET_SECONDS: Final = 5.0  # then an empty batch shows who has missed something that he has
_RESTART_SECONDS: Final = 10.0  # at least, between two times that all is told anew because somebody asked for too much
_CLOSE_SECONDS: Final = 10.0
_LINGER_MS: Final = 200
_BATCH_EVENTS: Final = 256
_BATCH_BYTES: Final = 1 << 16  # at most, of several events
_EVENT_BYTES: Final = 200  # at most, without its tokens
_TOKEN_BYTES: Final = 5  # at most
_MIN_QUEUED: Final = 8  # batches, however small the buffer
_REPLAY_SECONDS: Final = 0.002  # that replays go on for, before the store is looked at again
_PAUSE_SECONDS: Final = 0.001  # until a client that reads is sent more; doubled while none does
_MAX_REQUESTS: Final = 8  # taken before the store is looked at again
_MAX_FRAME_BYTES: Final = 1 << 18  # who sends more is cut off
_SEQUENCE_BYTES: Final = 8
_END: Final = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)
_log = get_logger("events")
_limited = RateLimited(_log)


class _Sent(NamedTuple):
    topic: bytes
    sequence: bytes
    payload: bytes


class _Replay(msgspec.Struct):
    next: int = 1  # sequence number; end + 1: all was sent
    end: int = 0  # the first that was not there when it began
    wanted: int | None = None  # from where once more, after that


class Publisher:
    """Publishes what a store tells, until it is closed. Close it before the store.

    It keeps ``buffer_bytes`` to be asked for again. As much may wait for each subscriber that does not read (there once
    for all that stopped at a time), and a sixteenth for each client of a replay; or eight batches, if they weigh more.
    """

    def __init__(
        self,
        driver: StoreDriver,
        endpoint: str,
        replay_endpoint: str = "",
        topic: str = "",
        *,
        buffer_steps: int = 10_000,
        buffer_bytes: int = 64 << 20,
    ) -> None:
        """Bind and start. ``buffer_*`` bound what can be asked for again. Raises ConfigError if that cannot be."""
        self._driver = driver
        self._topic = topic
        self._buffer_steps = buffer_steps
        self._buffer_bytes = buffer_bytes
        self._translator = Translator()
        self._encoder = msgspec.msgpack.Encoder()
        self._topics: list[bytes] = []  # that something was sent on
        self._first = _first_sequence()
        self._sequence = self._first  # of the next batch
        self._sent: deque[_Sent] = deque()
        self._sent_bytes = 0
        self._replays: dict[tuple[bytes, ...], _Replay] = {}  # under way, by who asked; whose turn it is comes first
        self._pause_seconds = _TICK_SECONDS  # until replays go on
        self._due_seconds = self._last_seconds = time.monotonic()  # when to ask the store; when something was sent
        self._restarted_seconds = float("-inf")
        self._is_restart_due = False
        self._closing = threading.Event()
        self._files: list[Listener] = []  # of ipc:// endpoints
        self._context = zmq.Context()
        try:
            self._out = self._bind(zmq.PUB, endpoint, buffer_bytes)
            self._replay = self._bind(zmq.ROUTER, replay_endpoint, buffer_bytes // 16) if replay_endpoint else None
        except BaseException:
            self._unbind(0)
            raise
        self.endpoint = _bound(self._out)  # with the port that the system chose
        self.replay_endpoint = _bound(self._replay) if self._replay is not None else ""
        # All fields are the thread's from here on.
        self.thread = threading.Thread(target=self._run, name="qkvault-events", daemon=True)
        self.thread.start()
        _log.info("events_published", endpoint=self.endpoint, replay_endpoint=self.replay_endpoint, topic=topic)

    def close(self) -> None:
        """Say that all is gone, and stop. Idempotent."""
        self._closing.set()
        self.thread.join(_CLOSE_SECONDS)  # a tier that hangs may hold it

    def _bind(self, kind: int, endpoint: str, queue_bytes: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(max(_MIN_QUEUED, queue_bytes // _BATCH_BYTES))
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        socket.linger = _LINGER_MS
        if kind == zmq.ROUTER:
            socket.router_mandatory = True  # says whether a client's queue is full, or he has gone
        if "[" in endpoint:
            socket.ipv6 = True
        try:
            scheme, _, path = endpoint.partition("://")
            if scheme == "ipc" and not path.startswith("@"):  # where ZeroMQ would replace any file
                listener = Listener(parse_address(f"{UNIX_SCHEME}{path}"))
                self._files.append(listener)
                socket.setsockopt(zmq.USE_FD, listener.socket.detach())
            socket.bind(endpoint)
        except (ConfigError, zmq.ZMQError) as error:
            msg = f"events cannot be published at {endpoint!r}: {error}"
            raise ConfigError(msg) from error
        return socket

    def _run(self) -> None:
        if MODEL not in self._topic:
            self._send(self._topic.encode(), [])
        while not self._closing.is_set():
            try:
                self._step()
            except Exception as error:  # thread top: what was taken and not sent is told anew
                _limited.warning("events_failed", error=f"{type(error).__name__}: {error}")
                self._is_restart_due = True
                self._closing.wait(1.0)
        for topic in self._topics:
            self._send(topic, [AllBlocksCleared()])
        self._unbind(_LINGER_MS)

    def _unbind(self, linger_ms: int) -> None:
        for file in self._files:
            file.withdraw()
        self._context.destroy(linger=linger_ms)

    def _step(self) -> None:
        if time.monotonic() >= self._due_seconds:
            is_more = self._publish()
            self._due_seconds = time.monotonic() + (0.0 if is_more else _TICK_SECONDS)
        wait_seconds = max(0.0, self._due_seconds - time.monotonic())
        if self._replay is None:
            self._closing.wait(wait_seconds)
            return
        is_read = self._go_on(self._replay)
        self._pause_seconds = _PAUSE_SECONDS if is_read else min(2 * self._pause_seconds, _TICK_SECONDS)
        timeout_ms = math.ceil(1000 * min(wait_seconds, self._pause_seconds))
        for _ in range(_MAX_REQUESTS):
            if not self._replay.poll(timeout_ms):
                break
            self._take_request(self._replay.recv_multipart())
            timeout_ms = 0

    def _publish(self) -> bool:
        """Send what the store has to tell, a batch at most. Whether there is more to be told at once."""
        now = time.monotonic()
        is_restart = self._is_restart_due and now - self._restarted_seconds >= _RESTART_SECONDS
        if is_restart:
            self._is_restart_due, self._restarted_seconds = False, now
        events = self._driver.take_events(_BATCH_EVENTS, start_over=is_restart)
        cold = [event.key for event in events if event.stored and not event.space and event.medium is not Medium.RAM]
        headers = self._read_headers(cold) if cold else {}
        batches: dict[bytes, list[WireEvent]] = {}
        for model, event in self._translator.translate(_described(event, headers) for event in events):
            if isinstance(event, AllBlocksCleared):
                _limited.info("events_start_over")
                topics = self._topics
            else:
                topics = [self._topic.replace(MODEL, model).encode()]
            for topic in topics:
                batches.setdefault(topic, []).append(event)
        most_tokens = max((event.num_tokens for event in events), default=0)
        step = max(1, _BATCH_BYTES // (_EVENT_BYTES + _TOKEN_BYTES * most_tokens))
        for topic, batch in batches.items():
            for start in range(0, len(batch), step):
                self._send(topic, batch[start : start + step])
        if now - self._last_seconds >= _QUIET_SECONDS:
            for topic in self._topics:
                self._send(topic, [])
        return len(events) == _BATCH_EVENTS and not cold  # files are read at leisure

    def _read_headers(self, keys: Sequence[bytes]) -> dict[bytes, Found]:
        return {found.key: found for tier in self._driver.tiers for found in tier.find(keys)}

    def _send(self, topic: bytes, events: list[WireEvent]) -> None:
        if topic not in self._topics:
            self._topics.append(topic)
            events = [AllBlocksCleared(), *events]  # whatever an earlier run has told
        payload = self._encoder.encode(EventBatch(time.time(), tuple(events)))
        sent = _Sent(topic, self._sequence.to_bytes(_SEQUENCE_BYTES, "big"), payload)
        self._sequence += 1
        self._out.send_multipart(sent)  # never waits: who is too slow misses it
        self._last_seconds = time.monotonic()
        self._sent.append(sent)
        self._sent_bytes += len(payload)
        while len(self._sent) > self._buffer_steps or (self._sent_bytes > self._buffer_bytes and len(self._sent) > 1):
            self._sent_bytes -= len(self._sent.popleft().payload)

    def _take_request(self, request: list[bytes]) -> None:
        """A client wants what was sent since the sequence number that he names, then the end. One replay at a time."""
        *client, start = request
        if not 1 <= len(client) <= 2 or any(client[1:]) or len(start) != _SEQUENCE_BYTES:  # noqa: PLR2004  # an empty frame
            _limited.warning("replay_malformed", num_frames=len(request))
            return
        first = min(max(int.from_bytes(start, "big"), self._first), self._sequence)
        replay = self._replays.setdefault(tuple(client), _Replay())
        replay.wanted = first if replay.wanted is None else min(first, replay.wanted)

    def _go_on(self, socket: zmq.Socket[bytes]) -> bool:
        """Send each client more of his replay, in turns, as far as there is room in his queue. Whether any had room."""
        has_sent = False
        until_seconds = time.monotonic() + _REPLAY_SECONDS
        for client in list(self._replays):
            replay = self._replays.pop(client)
            try:
                while time.monotonic() < until_seconds and self._send_again(socket, client, replay):
                    has_sent = True
            except zmq.ZMQError as error:
                if error.errno == zmq.EHOSTUNREACH:
                    continue  # he has gone
                if error.errno != zmq.EAGAIN:
                    raise
            if replay.next <= replay.end or replay.wanted is not None:
                self._replays[client] = replay
            if time.monotonic() >= until_seconds:
                break
        return has_sent

    def _send_again(self, socket: zmq.Socket[bytes], client: tuple[bytes, ...], replay: _Replay) -> bool:
        """Send the next message of a replay. False: there is none. Raises ZMQError, with nothing sent or changed."""
        if replay.next > replay.end:
            if replay.wanted is None:
                return False
            replay.next, replay.end, replay.wanted = replay.wanted, self._sequence, None
        oldest = self._sequence - len(self._sent)
        number = max(replay.next, min(oldest, replay.end))
        frames = self._sent[number - oldest] if number < replay.end else (b"", _END, b"")
        socket.send_multipart([*client, *frames], zmq.NOBLOCK)
        self._is_restart_due |= number > replay.next  # what he needs is gone: tell all anew, to everybody
        replay.next = number + 1
        return True


def _first_sequence() -> int:
    """Beyond all of an earlier run: a router that knows that one sees that it has missed something."""
    return time.time_ns() // 1000


def _bound(socket: zmq.Socket[bytes]) -> str:
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))


def _described(event: StoreEvent, headers: dict[bytes, Found]) -> StoreEvent:
    found = headers.get(event.key)
    if found is None or not event.stored or event.space:
        return event
    tokens = found.tokens if found.flags & PLAIN and found.num_tokens == event.num_tokens else b""
    return replace(event, tokens=tokens, space=found.space, flags=found.flags)
