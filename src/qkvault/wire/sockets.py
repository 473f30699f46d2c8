"""The client's end: one blocking connection to a store in another process.

A client of a Unix socket maps the store's pool. One of TCP (``remote.py``) has slots of its own, and sends and receives
what is in them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import threading
import time
from typing import Final

from qkvault.address import Address, parse_address
from qkvault.errors import ConfigError, DeadlineExceeded, ProtocolError, Unavailable
from qkvault.pool import AttachedPool
from qkvault.wire import codec
from qkvault.wire import messages as m
from qkvault.wire.listen import tune
from qkvault.wire.transport import PoolView, Transport

_POLL_SECONDS: Final = 0.0005  # between two looks at a lease that has chunks pending
_BUFFER_BYTES: Final = 1 << 16  # replies that are longer get one of their own
_TIMEVAL: Final = struct.Struct("ll")
_SPIN_SECONDS: Final = 50e-6
_MIN_WAIT_SECONDS: Final = 1e-4  # the kernel takes 0 for ever


class Stream:
    """A connected socket on which every read and every write has an end."""

    def __init__(self, address: Address, timeout_seconds: float, tls: ssl.SSLContext | None = None) -> None:
        """Connect. Raises OSError."""
        self._is_tls = tls is not None
        self._wait_seconds = -1.0
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self.wants_descriptor = address.is_unix
        self.descriptors: list[int] = []  # received, and not owned by anybody yet
        if address.is_unix:
            plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        else:
            plain = socket.create_connection((address.host, address.port), timeout_seconds)
        try:
            plain.settimeout(timeout_seconds)
            if address.is_unix:
                plain.connect(address.path)
            else:
                tune(plain)
            self._socket = plain if tls is None else tls.wrap_socket(plain, server_hostname=address.host)
        except BaseException:
            plain.close()
            raise
        if tls is None:
            self._socket.settimeout(None)  # the kernel's own timeouts spare every call a poll
        self.limit(timeout_seconds)

    def limit(self, seconds: float) -> None:
        """Let every single read and write wait that long at most."""
        if seconds == self._wait_seconds:
            return
        self._wait_seconds, seconds = seconds, max(seconds, _MIN_WAIT_SECONDS)
        if self._is_tls:
            self._socket.settimeout(seconds)
            return
        value = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def send(self, data: bytes | memoryview) -> None:
        """Send all of it. Raises OSError, TimeoutError among them."""
        try:
            self._socket.sendall(data)
        except BlockingIOError as error:  # what a timeout of the kernel looks like
            raise TimeoutError from error

    def receive(self, deadline: float, *, exact: bool = False) -> tuple[codec.Head, memoryview]:
        """A head and the body, which is good until the next call. ``exact`` leaves what comes behind it where it is.

        Raises OSError, TimeoutError when ``deadline`` has passed, ProtocolError if something came behind it.
        """
        view = self._buffer
        first = view[: codec.HEAD.size] if exact else view
        got = self._read_soon(first) or self._read(first)
        while got < codec.HEAD.size:
            got += self._read(view[got : codec.HEAD.size] if exact else view[got:], deadline)
        head = codec.decode_head(view)
        end = codec.HEAD.size + head.body_bytes
        if end > len(view):
            longer = memoryview(bytearray(end))
            longer[:got] = view[:got]
            view = longer
        while got < end:
            got += self._read(view[got:end], deadline)
        if got > end or (head.data_bytes and not exact):
            msg = "more than was asked for"
            raise ProtocolError(msg)
        return head, view[codec.HEAD.size : end]

    def fill(self, view: memoryview) -> None:
        """Receive data into all of ``view``. Raises OSError, TimeoutError when nothing comes any more."""
        got = 0
        while got < len(view):
            got += self._read(view[got:])

    def shutdown(self) -> None:
        """Wake whoever waits in another thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, and what was received and never taken."""
        self._socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []

    def _read_soon(self, view: memoryview) -> int:
        # What comes within some microseconds, else 0. An answer is that fast where the store is on this machine, and a
        # core that goes to sleep meanwhile takes longer to wake than the store to answer.
        if self._is_tls or self.wants_descriptor:
            return 0
        until = time.perf_counter() + _SPIN_SECONDS
        while True:
            try:
                return _some(self._socket.recv_into(view, 0, socket.MSG_DONTWAIT))
            except BlockingIOError:
                if time.perf_counter() >= until:
                    return 0

    def _read(self, view: memoryview, deadline: float | None = None) -> int:
        if deadline is not None:  # something came before: what is left of the time is less than a whole wait
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                raise TimeoutError
            self.limit(left_seconds)
        try:
            if self.wants_descriptor:  # it comes with the first bytes
                self.wants_descriptor = False
                data, self.descriptors, _, _ = socket.recv_fds(self._socket, len(view), 1, socket.MSG_CMSG_CLOEXEC)
                view[: len(data)] = data
                return _some(len(data))
            return _some(self._socket.recv_into(view))
        except BlockingIOError as error:
            raise TimeoutError from error


class SocketTransport(Transport):
    """A session over a socket.

    Once a call has failed the session is of no more use; the store ends it, and gives its slots to others, when it is
    closed. Whoever owns it closes it as soon as nothing of his is still being copied.
    """

    def __init__(
        self,
        address: str,
        client: str,
        *,
        timeout_seconds: float = 1.0,
        token: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Connect and say hello. Raises Unavailable, and ProtocolError if the store speaks another protocol."""
        self.address = address
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._sequence = 0
        self._is_usable = True
        self.epoch = 0
        where = parse_address(address)
        try:
            self._stream = Stream(where, timeout_seconds, None if where.is_unix else tls)
        except OSError as error:
            raise self._lost(error) from error
        try:
            self.welcome = self._say_hello(m.Hello(m.PROTOCOL_VERSION, client, token))
            self.features = self.welcome.features
            self.pool: PoolView = self._open_pool(self.welcome)
        except BaseException:
            self._stream.close()
            raise

    def call(self, request: m.AnyRequest) -> m.AnyReply:  # contract inherited
        with self._lock:
            return self._exchange(request)[1]

    def wait_change(self, timeout_seconds: float) -> None:
        time.sleep(min(timeout_seconds, _POLL_SECONDS))

    def close(self) -> None:
        self._stream.shutdown()
        with self._lock:
            self._is_usable = False
            self._stream.close()
        self.pool.close()

    def _open_pool(self, welcome: m.Welcome) -> PoolView:
        if not self._stream.descriptors:
            msg = f"the store at {self.address} did not welcome us: it sent no pool"
            raise ProtocolError(msg)
        try:
            return AttachedPool(self._stream.descriptors.pop(), welcome.pool_bytes)
        except (OSError, ConfigError) as error:
            msg = f"the pool of the store at {self.address} cannot be mapped: {error}"
            raise Unavailable(msg) from error

    def _say_hello(self, hello: m.Hello) -> m.Welcome:
        _, welcome = self._exchange(hello)
        if not isinstance(welcome, m.Welcome):
            msg = f"the store at {self.address} did not welcome us: {welcome}"
            raise ProtocolError(msg)
        return welcome

    def _exchange(
        self, request: m.AnyRequest, *, data: tuple[memoryview, ...] = (), exact: bool = False
    ) -> tuple[codec.Head, m.AnyReply]:
        # One question, with its data, and its answer, holding the lock. ``exact``: the answer's data is still to come.
        if not self._is_usable:
            msg = f"the session with the store at {self.address} has ended"
            raise Unavailable(msg)
        self._sequence = (self._sequence + 1) % (1 << 32)
        frame = codec.encode(request, self._sequence, self.epoch, sum(map(len, data)))
        self._is_usable = False  # unless all goes well: a late answer would be taken for the next one's
        try:
            self._stream.limit(self._timeout_seconds)
            self._stream.send(frame)
            for view in data:
                self._stream.send(view)
            answer = self._receive(exact=exact)
        except OSError as error:
            raise self._lost(error) from error
        self._is_usable = True
        return answer

    def _receive(self, *, exact: bool) -> tuple[codec.Head, m.AnyReply]:
        head, body = self._stream.receive(time.monotonic() + self._timeout_seconds, exact=exact)
        if head.sequence != self._sequence:
            msg = f"reply {head.sequence} to request {self._sequence}"
            raise ProtocolError(msg)
        self.epoch = head.epoch
        return head, codec.decode_reply(body)

    def _lost(self, error: OSError) -> Unavailable:
        if isinstance(error, TimeoutError):
            return DeadlineExceeded(f"the store at {self.address} did not answer in {self._timeout_seconds:g} s")
        return Unavailable(f"no store answers at {self.address}: {error}")


def _some(count: int) -> int:
    if not count:
        msg = "it closed the connection"
        raise ConnectionResetError(msg)
    return count
