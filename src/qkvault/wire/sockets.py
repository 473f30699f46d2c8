"""The client's end: one blocking connection to a store in another process.

A client of a Unix socket maps the store's pool. One of TCP (``remote.py``) has slots of its own, and sends and receives
what is in them.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import ssl
import struct
import threading
import time
from typing import Final

from qkvault.address import Address, parse_address
from qkvault.errors import ConfigError, DeadlineExceeded, ProtocolError, Unavailable, Unwelcome
from qkvault.pool import AttachedPool
from qkvault.wire import codec
from qkvault.wire import messages as m
from qkvault.wire.listen import tune
from qkvault.wire.resolve import resolve
from qkvault.wire.transport import PoolView, Transport

_POLL_SECONDS: Final = 0.0005  # between two looks at a lease that has chunks pending
_BUFFER_BYTES: Final = 1 << 16  # replies that are longer get one of their own
_SPIN_SECONDS: Final = 100e-6
_EXIT_SECONDS: Final = 0.02  # a process that is killed ends that soon after its sockets
_MIN_WAIT_SECONDS: Final = 1e-4  # the kernel takes 0 for ever
_HUNG_UP: Final = (ssl.SSLError, ConnectionResetError, BrokenPipeError)


class Stream:
    """A connected socket. All that is done on it after ``begin`` has one deadline, and no silence outlasts a call.

    Deadlines are on the monotonic clock. Owned by one thread at a time, but for ``shutdown``.
    """

    def __init__(self, address: Address, timeout_seconds: float, tls: ssl.SSLContext | None = None) -> None:
        """Connect. This and all until ``begin`` has ``timeout_seconds``; later silence has as much. Raises OSError."""
        self._is_tls = tls is not None
        self._timeout_seconds = timeout_seconds
        self.begin(time.monotonic() + timeout_seconds)
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self.wants_descriptor = address.is_unix
        self.descriptors: list[int] = []  # received, and not owned by anybody yet
        plain = self._connect_unix(address.path) if address.is_unix else self._connect_tcp(address)
        try:
            plain.settimeout(self._left_seconds())
            self._socket = plain if tls is None else tls.wrap_socket(plain, server_hostname=address.host)
        except BaseException:
            plain.close()
            raise
        self._process = _process_behind(plain) if address.is_unix else None
        if tls is None:
            self._socket.settimeout(None)  # we ask without blocking, and sleep in ``_await``

    def begin(self, deadline: float) -> None:
        """What follows has to be done by ``deadline``, all of it."""
        self._deadline, self._silence_seconds = deadline, self._timeout_seconds

    def bear_silence(self) -> None:
        """Until the next ``begin`` only the deadline counts: while what was sent is on its way no answer can come."""
        self._silence_seconds = math.inf

    def send(self, data: bytes | memoryview) -> None:
        """Send all of it. Raises OSError, TimeoutError among them."""
        sent = self._send_some(data)
        while sent < len(data):
            sent += self._send_some(memoryview(data)[sent:])

    def receive(self, *, exact: bool = False) -> tuple[codec.Head, memoryview]:
        """A head and the body, which is good until the next call. ``exact`` leaves what comes behind it where it is.

        Raises OSError, TimeoutError among them, and ProtocolError if something came behind it.
        """
        view = self._buffer
        first = view[: codec.HEAD.size] if exact else view
        got = self._read_soon(first) or self._read(first)
        while got < codec.HEAD.size:
            got += self._read(view[got : codec.HEAD.size] if exact else view[got:])
        head = codec.decode_head(view)
        end = codec.HEAD.size + head.body_bytes
        if end > len(view):
            longer = memoryview(bytearray(end))
            longer[:got] = view[:got]
            view = longer
        while got < end:
            got += self._read(view[got:end])
        if got > end or (head.data_bytes and not exact):
            msg = "more than was asked for"
            raise ProtocolError(msg)
        return head, view[codec.HEAD.size : end]

    def fill(self, view: memoryview) -> None:
        """Receive data into all of ``view``. Raises OSError, TimeoutError among them."""
        got = 0
        while got < len(view):
            got += self._read(view[got:])

    def shutdown(self) -> None:
        """Wake whoever waits in another thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def is_orphaned(self) -> bool:
        """Whether the process at the other end has ended, as far as can be known: it is on this machine."""
        if self._process is None:
            return False
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return [event for _, event in poll.poll(_EXIT_SECONDS * 1000)] == [select.POLLIN]

    def close(self) -> None:
        """Close the socket, and what was received and never taken."""
        self._socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []
        if self._process is not None:
            os.close(self._process)
            self._process = None

    def _connect_unix(self, path: str) -> socket.socket:
        plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            plain.settimeout(self._left_seconds())
            plain.connect(path)
        except BaseException:
            plain.close()
            raise
        return plain

    def _connect_tcp(self, address: Address) -> socket.socket:
        places = resolve(address.host, address.port, self._deadline)
        problem: OSError | None = None
        for number, place in enumerate(places):
            plain = socket.socket(place.family, socket.SOCK_STREAM)
            try:
                plain.settimeout(
                    self._left_seconds() / (len(places) - number)
                )  # one that is mute leaves time for others
                plain.connect(place.address)
                tune(plain)
            except OSError as error:
                plain.close()
                problem = error
            else:
                return plain
        raise problem or OSError(f"{address.host} has no address")

    def _left_seconds(self) -> float:
        # How long the next step may wait. Raises TimeoutError if it may not.
        left_seconds = min(self._deadline - time.monotonic(), self._silence_seconds)
        if left_seconds <= 0:
            raise TimeoutError
        return max(left_seconds, _MIN_WAIT_SECONDS)

    def _await(self, event: int) -> None:
        # Signals prolong no poll; they would a timeout of the socket itself.
        poll = select.poll()
        poll.register(self._socket, event)
        if not poll.poll(math.ceil(self._left_seconds() * 1000)):
            raise TimeoutError

    def _send_some(self, data: bytes | memoryview) -> int:
        if self._is_tls:  # in pieces: one call has one wait, however long what it is given
            self._socket.settimeout(self._left_seconds())
            return self._socket.send(data[:_BUFFER_BYTES])
        while True:
            try:
                return self._socket.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._await(select.POLLOUT)

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

    def _read(self, view: memoryview) -> int:
        if self._is_tls:
            self._socket.settimeout(self._left_seconds())
            return _some(self._socket.recv_into(view))
        if self.wants_descriptor:  # it comes with the first bytes
            self._await(select.POLLIN)
            self.wants_descriptor = False
            data, self.descriptors, _, _ = socket.recv_fds(self._socket, len(view), 1, socket.MSG_CMSG_CLOEXEC)
            view[: len(data)] = data
            return _some(len(data))
        self._left_seconds()  # also where there is always something to read
        while True:
            try:
                return _some(self._socket.recv_into(view, 0, socket.MSG_DONTWAIT))
            except BlockingIOError:
                self._await(select.POLLIN)


class SocketTransport(Transport):
    """A session over a socket. A call's time counts from when it is made: for its turn, the sending and the answer.

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
        """Connect and say hello, in ``timeout_seconds`` altogether; each call has as much.

        Raises Unavailable, Unwelcome among it, and ProtocolError if what is there speaks another protocol.
        """
        self.address = address
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._sequence = 0
        self._is_usable = True
        self.epoch = None  # it has not said so yet
        self._pool_of_store: AttachedPool | None = None  # if it is mapped here
        self._allowed_seconds = timeout_seconds  # for what is under way
        where = parse_address(address)
        self._is_tls = None if where.is_unix else tls is not None
        try:
            self._stream = Stream(where, timeout_seconds, tls if self._is_tls else None)
        except OSError as error:
            raise self._lost(error) from error
        try:
            self.welcome = self._say_hello(m.Hello(m.PROTOCOL_VERSION, client, token))
            self.features = self.welcome.features
            self.pool: PoolView = self._open_pool(self.welcome)
        except BaseException:
            self._stream.close()
            raise

    @property
    def is_usable(self) -> bool:
        if not self._lock.acquire(blocking=False):  # a call is under way: how it ends is not known yet
            return True
        try:
            return self._is_usable
        finally:
            self._lock.release()

    def call(self, request: m.AnyRequest, timeout_seconds: float | None = None) -> m.AnyReply:  # contract inherited
        self._take_turn(self._timeout_seconds if timeout_seconds is None else timeout_seconds)
        try:
            return self._answer(request)
        finally:
            self._lock.release()

    def wait_change(self, timeout_seconds: float) -> None:
        time.sleep(min(timeout_seconds, _POLL_SECONDS))

    def close(self) -> None:
        self._stream.shutdown()
        with self._lock:
            self._is_usable = False
            self._stream.close()
        self.pool.close()

    def bury(self) -> None:  # contract inherited
        with self._lock:  # nobody closes what is looked at
            pool = self._pool_of_store
            if pool is None or self._is_usable or not self._stream.is_orphaned():
                return
            self._pool_of_store = None
        pool.empty()

    def _take_turn(self, seconds: float) -> None:
        # The lock, and so much time for what is done meanwhile; waiting for the lock is part of it.
        deadline = time.monotonic() + seconds
        if not self._lock.acquire(blocking=False) and not self._lock.acquire(timeout=max(0.0, seconds)):
            msg = f"the session with the store at {self.address} was in use for {seconds:g} s"
            raise DeadlineExceeded(msg)
        self._allow(seconds, deadline)

    def _allow(self, seconds: float, deadline: float | None = None) -> None:
        # Holding the lock: what follows has so much time, from now on or until ``deadline``.
        self._allowed_seconds = seconds
        self._stream.begin(time.monotonic() + seconds if deadline is None else deadline)

    def _answer(self, request: m.AnyRequest) -> m.AnyReply:
        return self._exchange(request)[1]

    def _open_pool(self, welcome: m.Welcome) -> PoolView:
        if not self._stream.descriptors:
            msg = f"the store at {self.address} did not welcome us: it sent no pool"
            raise ProtocolError(msg)
        try:
            self._pool_of_store = AttachedPool(self._stream.descriptors.pop(), welcome.pool_bytes)
        except (OSError, ConfigError) as error:
            msg = f"the pool of the store at {self.address} cannot be mapped: {error}"
            raise Unavailable(msg) from error
        return self._pool_of_store

    def _say_hello(self, hello: m.Hello) -> m.Welcome:
        try:
            head, welcome = self._exchange(hello)
        except ProtocolError as error:
            msg = f"no QKVault store speaks at {self.address}: {error}"
            raise ProtocolError(msg) from error
        self.epoch = head.epoch
        if isinstance(welcome, m.Failed) and welcome.code == "unauthorized":
            another = "another" if hello.token else "a"
            msg = f"the server at {self.address} wants {another} token: set `token` to the server's"
            raise Unwelcome(msg)
        if not isinstance(welcome, m.Welcome):
            msg = f"the store at {self.address} did not welcome us: {getattr(welcome, 'message', welcome)}"
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
        frame = codec.encode(request, self._sequence, self.epoch or 0, sum(map(len, data)))
        self._is_usable = False  # unless all goes well: a late answer would be taken for the next one's
        try:
            self._stream.send(frame)
            for view in data:
                self._stream.send(view)
            if data:
                self._stream.bear_silence()
            answer = self._receive(exact=exact)
        except OSError as error:
            raise self._lost(error) from error
        self._is_usable = True
        return answer

    def _receive(self, *, exact: bool) -> tuple[codec.Head, m.AnyReply]:
        head, body = self._stream.receive(exact=exact)
        if head.sequence != self._sequence:
            msg = f"reply {head.sequence} to request {self._sequence}"
            raise ProtocolError(msg)
        if self.epoch not in (None, head.epoch):
            msg = f"the store at {self.address} was restarted: what it held for this session is gone"
            raise Unavailable(msg)
        return head, codec.decode_reply(body)

    def _lost(self, error: OSError) -> Unavailable:
        if isinstance(error, TimeoutError):
            limit = f"{self._allowed_seconds:g} s (timeout_seconds)"
            return DeadlineExceeded(f"the store at {self.address} did not answer in {limit}")
        if isinstance(error, ssl.SSLCertVerificationError):
            advice = "set tls_ca_path to its certificate, and ask at an address that this names"
            return Unwelcome(f"not the certificate of {self.address}: {error.verify_message}; {advice}")
        if self._is_tls is not None and self.epoch is None and isinstance(error, _HUNG_UP):
            advice = (
                "speaks no TLS, unset tls_ca_path" if self._is_tls else "wants TLS, set tls_ca_path to its certificate"
            )
            return Unwelcome(f"what listens at {self.address} hung up before a welcome: {error}; if it {advice}")
        return Unavailable(f"no store answers at {self.address}: {error}")


def _process_behind(plain: socket.socket) -> int | None:
    # A descriptor of the process that listens, lest its number be given to another one.
    try:
        pid, _, _ = struct.unpack("3i", plain.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # an older kernel or Python; a process of which this container knows nothing
        return None


def _some(count: int) -> int:
    if not count:
        msg = "it closed the connection"
        raise ConnectionResetError(msg)
    return count
