"""One accepted client: its bytes become requests, the store's answers become bytes. Never blocks."""

from __future__ import annotations

import hmac
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from qkvault.errors import ProtocolError
from qkvault.logs import RateLimited, get_logger
from qkvault.wire import codec
from qkvault.wire import messages as m
from qkvault.wire.transport import Early, Handler

BUFFER_BYTES: Final = 1 << 18
_PATIENCE_SECONDS: Final = 10.0  # with a client that has sent half a frame, or does not take what it is sent
_SLOWEST_BYTES_PER_SECOND: Final = 1 << 16  # what it has to move to keep our patience
_TURN_BYTES: Final = 8 << 20  # of one client's data that are taken or sent before the others have their turn
_PAUSE_SECONDS: Final = 0.02  # between two looks at a request that waits
_TURN_SECONDS: Final = 0.005  # in which its requests are answered; one is, however long it takes
_MAX_OUT_BYTES: Final = 4 << 20  # of replies that a client has yet to read: until it does, nothing is read from it
_MAX_HELLO_BYTES: Final = 1 << 16  # before it said who it is, nobody gets more memory
_ORDERS: Final = (m.Clear, m.Forget, m.Switch, m.Check)  # what changes the cache for others, or holds them up
_NO_ORDERS: Final = "no token is set, so nobody may do that over TCP: set `token` at both ends, or use a Unix socket"
_NOTHING: Final = memoryview(b"")
_WOULD_BLOCK: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_limited = RateLimited(get_logger("wire"))


class Door(NamedTuple):
    """What all connections of one server share."""

    handler: Handler
    epoch: int
    descriptor: int | None  # of the pool, for clients on this machine
    token: str  # that a client has to know; empty: none
    buffer: memoryview  # what a client has sent lies here while it is read
    takes_orders: bool = True  # else clients may store and read
    wake: Callable[[object], None] = lambda _: None  # has the server look whose wait is over; any thread


class Connection:
    """Owned by the server's thread."""

    def __init__(self, door: Door, connection: socket.socket) -> None:
        self.socket = connection
        self.descriptor = connection.fileno()
        self.awaited = select.EPOLLIN  # the events that its server waits for
        self.session_id: int | None = None  # until it has said hello
        self._door = door
        self._inbox = bytearray()
        self._outbox: deque[memoryview | Callable[[], bytes]] = deque()
        self._owned_bytes = 0  # of the outbox, besides slots
        self._sends_pool = False  # the descriptor goes with the next bytes
        self._is_ending = False  # closed when all is sent
        self._is_uploading = False  # slots wait to be sent
        self._turn_ends = 0.0  # on the monotonic clock
        self._patience_seconds = _PATIENCE_SECONDS
        self._pause: tuple[Early, Callable[[], None]] | None = None  # what its last request waits for, and its answer
        # After how long it is to be served again whatever its socket says: at once (its turn was over before its
        # requests were) or after a pause. None: its socket tells when.
        self.returns_seconds: float | None = None
        # Data that comes after a message: where it is to go, and who is answered then.
        self._filling: deque[memoryview] = deque()
        self._skip_bytes = 0
        self._filled: Callable[[], None] = lambda: None

    @property
    def has_output(self) -> bool:
        return bool(self._outbox)

    @property
    def is_full(self) -> bool:
        """Whether it waits, or has so much to read, that nothing is read from it meanwhile."""
        return self._is_uploading or self.returns_seconds is not None or self._owned_bytes > _MAX_OUT_BYTES

    @property
    def is_unfinished(self) -> bool:
        """Whether the client has to send or to take something before it may rest."""
        return bool(self._outbox or self._inbox or self._filling or self._skip_bytes)

    def has_patience(self, waited_seconds: float) -> bool:
        """Whether an unfinished client may go on after so much more time. What it moves earns it new patience."""
        self._patience_seconds -= waited_seconds
        return self._patience_seconds > 0

    def serve(self) -> None:
        """Take what has come, answer, and send what can be sent in one turn.

        Raises OSError when the client has gone, ProtocolError to cut it off.
        """
        self._turn_ends = time.monotonic() + _TURN_SECONDS
        if self.returns_seconds is not None:
            self._return()
        has_more = True
        while has_more:
            if not self.is_full:
                self._read()
            was_full = self.is_full
            self._write()
            # What lies here already wakes nobody: requests behind a full outbox, and what TLS has decrypted.
            has_more = not self.is_full and ((was_full and self._take(_NOTHING)) or self._has_decrypted())
        if self._patience_seconds < _PATIENCE_SECONDS and not self.is_unfinished:
            self._patience_seconds = _PATIENCE_SECONDS

    def _return(self) -> None:
        # Its turn was over, or a request waits: if not any more, that is answered and what lies behind it.
        if self._pause is not None:
            early, answer = self._pause
            if not early.answer.done() and time.monotonic() < early.until_seconds:
                return
            self._pause = None
            answer()
        self.returns_seconds = None
        self._take(_NOTHING)

    def _has_decrypted(self) -> bool:
        return isinstance(self.socket, ssl.SSLSocket) and self.socket.pending() > 0

    def _read(self) -> None:
        try:
            if self._filling or self._skip_bytes:
                self._take_data()
            else:
                self._take(self._door.buffer[: self._receive(self._door.buffer)])
        except _WOULD_BLOCK:
            pass

    def _write(self) -> None:
        outbox, left_bytes = self._outbox, _TURN_BYTES
        try:
            while outbox and left_bytes > 0:
                item = outbox[0]
                if not isinstance(item, memoryview):
                    item = outbox[0] = memoryview(item())
                    self._owned_bytes += len(item)
                if self._sends_pool and self._door.descriptor is not None:
                    sent = socket.send_fds(self.socket, [item], [self._door.descriptor])
                    self._sends_pool = False
                else:
                    sent = self.socket.send(item[:left_bytes])
                left_bytes -= sent
                self._moved(sent)
                if item.readonly:  # a frame of ours; slots are not
                    self._owned_bytes -= sent
                if sent < len(item):
                    outbox[0] = item[sent:]
                else:
                    outbox.popleft()
        except _WOULD_BLOCK:
            return
        if self._is_ending and not outbox:
            msg = "refused"
            raise ConnectionAbortedError(msg)

    def close(self) -> None:
        """Close the socket, and end the session."""
        self.socket.close()
        self._outbox.clear()  # no view of a slot outlives the session
        self._filling.clear()
        self._filled = lambda: None
        self._pause = None
        if self.session_id is not None:
            self._door.handler.close_session(self.session_id)

    def _receive(self, view: memoryview) -> int:
        count = self.socket.recv_into(view)
        if not count:
            msg = "it closed the connection"
            raise ConnectionResetError(msg)
        self._moved(count)
        return count

    def _moved(self, num_bytes: int) -> None:
        if self._patience_seconds < _PATIENCE_SECONDS:
            earned_seconds = num_bytes / _SLOWEST_BYTES_PER_SECOND
            self._patience_seconds = min(self._patience_seconds + earned_seconds, _PATIENCE_SECONDS)

    def _take(self, data: memoryview) -> bool:
        # Whether anything of it, or of what had come before, could be used.
        if self._inbox:
            self._inbox += data
            with memoryview(self._inbox) as view:
                used = self._use(view)
            del self._inbox[:used]
        else:  # nearly always: one whole request
            used = self._use(data)
            if used < len(data):
                self._inbox += data[used:]
        return used > 0

    def _use(self, view: memoryview) -> int:
        # Answers whole requests, and puts data where it belongs; returns how many bytes that were.
        at = 0
        while at < len(view) and not self.is_full:
            if self._is_ending:
                return len(view)
            expects_data = self._filling or self._skip_bytes
            used = self._use_data(view[at:]) if expects_data else self._use_frame(view[at:])
            if not used:
                break
            at += used
            if at < len(view) and self.returns_seconds is None and time.monotonic() >= self._turn_ends:
                self.returns_seconds = 0.0
        return at

    def _use_frame(self, view: memoryview) -> int:
        if len(view) < codec.HEAD.size:
            return 0
        head = codec.decode_head(view)
        if self.session_id is None and (head.body_bytes > _MAX_HELLO_BYTES or head.data_bytes):
            msg = "a long message before the hello"
            raise ProtocolError(msg)
        end = codec.HEAD.size + head.body_bytes
        if len(view) < end:
            return 0
        self._on_frame(head, view[codec.HEAD.size : end])
        return end

    def _on_frame(self, head: codec.Head, body: memoryview) -> None:
        try:
            request = codec.decode_request(body)
        except ProtocolError as error:  # its frame was whole: the next one can be read
            self._refuse(head, str(error))
            return
        if self.session_id is None:
            self._send(head.sequence, self._open(request))
        elif head.data_bytes:
            self._on_data(head, self.session_id, request)
        elif isinstance(request, m.Download):
            self._upload(head.sequence, self.session_id, request)
        else:
            self._answer(head.sequence, self.session_id, request)

    def _answer(self, sequence: int, session_id: int, request: m.AnyRequest) -> None:
        handler = self._door.handler
        if not self._door.takes_orders and isinstance(request, _ORDERS):
            self._send(sequence, m.Failed("unauthorized", _NO_ORDERS))
            return
        early = handler.prepare(request)
        if early is None:
            self._send(sequence, handler.call(session_id, request))
            return
        self._pause = early, lambda: self._send(sequence, handler.call(session_id, request))
        self.returns_seconds = _PAUSE_SECONDS
        early.answer.add_done_callback(self._door.wake)

    def _open(self, request: m.AnyRequest) -> m.AnyReply:
        handler = self._door.handler
        self._is_ending = True  # unless all is well
        if not isinstance(request, m.Hello):
            return m.Failed("unauthorized", "the first message has to be Hello")
        token = self._door.token
        if token and not hmac.compare_digest(request.token.encode(), token.encode()):
            _limited.warning("token_refused", peer=self.socket.getpeername()[0])
            return m.Failed("unauthorized", "the server asks for a token, and this is not it")
        self.session_id = handler.open_session(request.client)
        reply = handler.call(self.session_id, request)
        if isinstance(reply, m.Welcome):
            self._sends_pool, self._is_ending = self._door.descriptor is not None, False
        return reply

    def _on_data(self, head: codec.Head, session_id: int, request: m.AnyRequest) -> None:
        if not isinstance(request, m.Commit):
            self._refuse(head, f"{type(request).__name__} has no data")
            return
        handler = self._door.handler
        slots = handler.slots_of(session_id, request.lease_id, request.keys) or []  # none: the lease has run out
        if slots and sum(map(len, slots)) != head.data_bytes:
            self._refuse(head, f"{head.data_bytes} bytes of data for slots of {sum(map(len, slots))}")
        else:
            self._expect(head, slots, lambda: self._send(head.sequence, handler.call(session_id, request)))

    def _refuse(self, head: codec.Head, why: str) -> None:
        self._expect(head, [], lambda: self._send(head.sequence, m.Failed("protocol", why)))

    def _expect(self, head: codec.Head, slots: list[memoryview], then: Callable[[], None]) -> None:
        # What follows as data goes to slots, or nowhere.
        self._filling, self._filled = deque(slots), then
        self._skip_bytes = 0 if slots else head.data_bytes
        if not head.data_bytes:
            self._filling.clear()
            then()

    def _take_data(self) -> None:
        left_bytes = _TURN_BYTES
        while left_bytes > 0 and (self._filling or self._skip_bytes):
            count = self._receive(self._filling[0] if self._filling else self._door.buffer[: self._skip_bytes])
            left_bytes -= count
            self._count_data(count)

    def _count_data(self, count: int) -> None:
        # count bytes are where they belong.
        if self._filling:
            if count < len(self._filling[0]):
                self._filling[0] = self._filling[0][count:]
            else:
                self._filling.popleft()
        else:
            self._skip_bytes -= count
        if not self._filling and not self._skip_bytes:
            self._filled()

    def _use_data(self, view: memoryview) -> int:
        count = min(len(view), len(self._filling[0]) if self._filling else self._skip_bytes)
        if self._filling:
            self._filling[0][:count] = view[:count]
        self._count_data(count)
        return count

    def _upload(self, sequence: int, session_id: int, request: m.Download) -> None:
        # The images straight from the slots, under a lease of their own.
        handler = self._door.handler
        lease_id, slots = handler.open_download(session_id, request.keys)
        sizes = tuple(map(len, slots))
        self._send(sequence, m.Data(sizes), data_bytes=sum(sizes))
        self._outbox.extend(slot for slot in slots if len(slot))
        self._is_uploading = True

        def end() -> bytes:
            self._is_uploading = False
            return codec.encode(handler.close_download(session_id, lease_id), sequence, self._door.epoch)

        self._outbox.append(end)

    def _send(self, sequence: int, reply: m.AnyReply, *, data_bytes: int = 0) -> None:
        try:
            frame = codec.encode(reply, sequence, self._door.epoch, data_bytes)
        except ProtocolError as error:  # too long: not the fault of who asked
            frame = codec.encode(m.Failed("internal", str(error)), sequence, self._door.epoch)
        self._outbox.append(memoryview(frame))
        self._owned_bytes += len(frame)
