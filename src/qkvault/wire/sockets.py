"""Sockets: one client's blocking connection, and the thread that answers all of them.

A client of a Unix socket on the same machine is sent the pool's file descriptor with the reply to its ``Hello``, maps
it and copies by itself: no bytes of chunks pass the socket, and no shared segment has a name that could be left behind.
"""

from __future__ import annotations

import os
import selectors
import socket
import stat
import struct
import threading
from pathlib import Path
from typing import Final

from qkvault.errors import ConfigError, DeadlineExceeded, ProtocolError, Unavailable
from qkvault.logs import get_logger
from qkvault.pool import AttachedPool, Pool
from qkvault.wire import codec
from qkvault.wire import messages as m
from qkvault.wire.transport import Handler, Transport

UNIX_SCHEME: Final = "unix://"
_POLL_SECONDS: Final = 0.0005  # between two looks at a lease that has chunks pending
_RECV_BYTES: Final = 1 << 18
_MAX_OUT_BYTES: Final = 256 << 20  # a client that does not read its replies is cut off here
_log = get_logger("wire")


def unix_path(address: str) -> str:
    """The path in ``unix:///path``. Raises ConfigError for another scheme or an empty path."""
    path = address.removeprefix(UNIX_SCHEME)
    if path == address or not path:
        msg = f"address {address!r} is not {UNIX_SCHEME}/path"
        raise ConfigError(msg)
    return path


class SocketTransport(Transport):
    """A session over a Unix socket."""

    def __init__(self, address: str, client: str, *, timeout_seconds: float = 1.0) -> None:
        """Connect and say hello. Raises Unavailable."""
        self._lock = threading.Lock()
        self._sequence = 0
        self.epoch = 0
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_seconds)
        try:
            self._socket.connect(unix_path(address))
            welcome, descriptors = self._exchange(m.Hello(m.PROTOCOL_VERSION, client), max_descriptors=1)
        except OSError as error:
            self.close()
            msg = f"no store answers at {address}: {error}"
            raise Unavailable(msg) from error
        if not isinstance(welcome, m.Welcome) or not descriptors:
            self.close()
            msg = f"the store at {address} did not welcome us: {welcome}"
            raise Unavailable(msg)
        self.pool: AttachedPool = AttachedPool(descriptors[0], welcome.pool_bytes)

    def call(self, request: m.AnyRequest) -> m.AnyReply:  # contract inherited
        try:
            return self._exchange(request)[0]
        except TimeoutError as error:
            self.close()  # the late answer would be taken for the next one's
            msg = "the store did not answer in time"
            raise DeadlineExceeded(msg) from error
        except OSError as error:
            self.close()
            msg = f"the store is gone: {error}"
            raise Unavailable(msg) from error

    def wait_change(self, timeout_seconds: float) -> None:
        threading.Event().wait(min(timeout_seconds, _POLL_SECONDS))

    def close(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def _exchange(self, request: m.AnyRequest, *, max_descriptors: int = 0) -> tuple[m.AnyReply, list[int]]:
        with self._lock:
            if self._socket is None:
                msg = "the session is closed"
                raise Unavailable(msg)
            self._sequence = (self._sequence + 1) % (1 << 32)
            self._socket.sendall(codec.encode(request, self._sequence, self.epoch))
            head_bytes, descriptors = self._receive(codec.HEAD.size, max_descriptors)
            head = codec.decode_head(head_bytes)
            body, _ = self._receive(head.body_bytes, 0)
            if head.sequence != self._sequence:
                msg = f"reply {head.sequence} to request {self._sequence}"
                raise ProtocolError(msg)
            self.epoch = head.epoch
        return codec.decode_reply(body), descriptors

    def _receive(self, num_bytes: int, max_descriptors: int) -> tuple[bytearray, list[int]]:
        connection = self._socket
        if connection is None:
            raise ConnectionResetError
        data, got = bytearray(num_bytes), 0
        descriptors: list[int] = []
        if max_descriptors:
            first, descriptors, _, _ = socket.recv_fds(connection, num_bytes, max_descriptors)
            data[: len(first)] = first
            got = len(first)
            if not got:
                raise ConnectionResetError
        view = memoryview(data)
        while got < num_bytes:
            count = connection.recv_into(view[got:])
            if not count:
                raise ConnectionResetError
            got += count
        return data, descriptors


class _Connection:
    """One accepted client. Owned by the server's thread."""

    def __init__(self, connection: socket.socket, session_id: int) -> None:
        self.socket = connection
        self.session_id = session_id
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.sends_pool = False  # the descriptor goes with the next bytes


class SocketServer:
    """Answers every client of one Unix socket from one thread: messages are short, bytes go through the pool."""

    def __init__(self, handler: Handler, pool: Pool, address: str, *, epoch: int) -> None:
        """Listen and start. The socket file is made with mode 0600 and removed by ``close``.

        Raises ConfigError if something else answers, or lies, at the address.
        """
        self._handler = handler
        self._pool = pool
        self._epoch = epoch
        self._path = unix_path(address)
        self._listener = _listen(self._path)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._waker, wakes = socket.socketpair()
        self._wakes = wakes
        self._selector.register(wakes, selectors.EVENT_READ)
        self._connections: dict[socket.socket, _Connection] = {}
        self._thread = threading.Thread(target=self._run, name="qkvault-wire", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering, end every session, remove the socket file. Idempotent."""
        if not self._thread.is_alive():
            return
        self._waker.send(b"x")
        self._thread.join()
        self._selector.close()
        for end in (self._listener, self._waker, self._wakes):
            end.close()
        Path(self._path).unlink(missing_ok=True)

    def _run(self) -> None:
        while True:
            for key, events in self._selector.select():
                if key.fileobj is self._wakes:
                    for connection in list(self._connections.values()):
                        self._drop(connection)
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._serve(key.data, events)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:  # out of descriptors, or the client has gone again
            _log.warning("accept_failed", error=str(error))
            return
        if _peer_uid(accepted) not in (os.getuid(), 0):
            accepted.close()
            return
        accepted.setblocking(False)
        connection = _Connection(accepted, self._handler.open_session("unix"))
        self._connections[accepted] = connection
        self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _serve(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                data = connection.socket.recv(_RECV_BYTES)
                if not data:
                    self._drop(connection)
                    return
                connection.inbox += data
                self._answer(connection)
            self._flush(connection)
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                _log.warning("client_cut_off", session=connection.session_id, error=str(error))
            self._drop(connection)

    def _answer(self, connection: _Connection) -> None:
        inbox = connection.inbox
        while len(inbox) >= codec.HEAD.size:
            head = codec.decode_head(inbox)
            end = codec.HEAD.size + head.body_bytes
            if len(inbox) < end:
                break
            request = codec.decode_request(memoryview(inbox)[codec.HEAD.size : end])
            reply = self._handler.call(connection.session_id, request)
            connection.sends_pool |= isinstance(reply, m.Welcome)
            connection.outbox += codec.encode(reply, head.sequence, self._epoch)
            del inbox[:end]
            if len(connection.outbox) > _MAX_OUT_BYTES:
                msg = "the client does not read its replies"
                raise ProtocolError(msg)

    def _flush(self, connection: _Connection) -> None:
        outbox = connection.outbox
        try:
            while outbox:
                if connection.sends_pool:
                    sent = socket.send_fds(connection.socket, [bytes(outbox)], [self._pool.descriptor])
                    connection.sends_pool = False
                else:
                    sent = connection.socket.send(outbox)
                del outbox[:sent]
        except BlockingIOError:
            pass
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if outbox else 0)
        if self._selector.get_key(connection.socket).events != wanted:
            self._selector.modify(connection.socket, wanted, connection)

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        del self._connections[connection.socket]
        connection.socket.close()
        self._handler.close_session(connection.session_id)


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        mask = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(mask)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        msg = f"cannot listen at {path}: {error}"
        raise ConfigError(msg) from error
    return listener


def _remove_stale(path: str) -> None:
    # A socket file outlives a killed server; it may go if nobody answers there.
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        msg = f"{path} exists and is not a socket"
        raise ConfigError(msg)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(path) == 0:
            msg = f"another store answers at {path}"
            raise ConfigError(msg)
    Path(path).unlink()


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
