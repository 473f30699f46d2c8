"""Publisher: a store's events on a ZeroMQ socket, as vLLM publishes its own, and the last of them once more on request.

One thread owns the sockets and asks the store twenty times a second. The store does not know of it, and never waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple

import msgspec
import zmq
from msgspec.structs import replace

from qkvault.errors import ConfigError
from qkvault.events import AllBlocksCleared, EventBatch, StoreEvent, Translator, WireEvent
from qkvault.image import PLAIN
from qkvault.logs import RateLimited, get_logger
from qkvault.store.driver import StoreDriver
from qkvault.tiers.base import Found
from qkvault.types import Medium

MODEL: Final = "{model}"  # in a topic: stands for the model's name
_TICK_SECONDS: Final = 0.05
_QUIET_SECONDS: Final = 5.0  # then an empty batch shows who has missed something that he has
_RESTART_SECONDS: Final = 10.0  # at least, between two times that all is told anew because somebody asked for too much
_CLOSE_SECONDS: Final = 10.0
_LINGER_MS: Final = 200
_BATCH_EVENTS: Final = 256
_MAX_QUEUED: Final = 1_000  # batches for one subscriber; one that is slower misses some, and sees that he does
_MAX_REQUESTS: Final = 8  # answered before the store is looked at again
_SEQUENCE_BYTES: Final = 8
_END: Final = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)
_log = get_logger("events")
_limited = RateLimited(_log)


class _Sent(NamedTuple):
    topic: bytes
    sequence: bytes
    payload: bytes


class Publisher:
    """Publishes what a store tells, until it is closed. Close it before the store."""

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
        self._last_seconds = time.monotonic()  # when something was sent
        self._restarted_seconds = float("-inf")
        self._is_restart_due = False
        self._closing = threading.Event()
        self._context = zmq.Context()
        try:
            self._out = self._bind(zmq.PUB, endpoint, _MAX_QUEUED)
            self._replay = self._bind(zmq.ROUTER, replay_endpoint, buffer_steps + 2) if replay_endpoint else None
        except BaseException:
            self._context.destroy(linger=0)
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

    def _bind(self, kind: int, endpoint: str, max_queued: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(max_queued)
        socket.linger = _LINGER_MS
        if "[" in endpoint:
            socket.ipv6 = True
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
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
        self._context.destroy(linger=_LINGER_MS)

    def _step(self) -> None:
        is_more = self._publish()
        if self._replay is None:
            self._closing.wait(0.0 if is_more else _TICK_SECONDS)
            return
        timeout_ms = 0 if is_more else int(_TICK_SECONDS * 1000)
        for _ in range(_MAX_REQUESTS):
            if not self._replay.poll(timeout_ms):
                break
            self._answer(self._replay, self._replay.recv_multipart())
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
        for topic, batch in batches.items():
            self._send(topic, batch)
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

    def _answer(self, replay: zmq.Socket[bytes], request: list[bytes]) -> None:
        """Send a client what was sent since the sequence number that he names, then the end."""
        *envelope, start = request
        if not 1 <= len(envelope) <= 2 or len(start) != _SEQUENCE_BYTES:  # noqa: PLR2004  # who asks, and an empty frame
            _limited.warning("replay_malformed", num_frames=len(request))
            return
        oldest = self._sequence - len(self._sent)
        first = min(max(int.from_bytes(start, "big"), self._first), self._sequence)
        if first < oldest:
            self._is_restart_due = True  # what he needs is gone: tell all anew, to everybody
        for sent in islice(self._sent, max(0, first - oldest), None):
            replay.send_multipart([*envelope, *sent])
        replay.send_multipart([*envelope, b"", _END, b""])


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
