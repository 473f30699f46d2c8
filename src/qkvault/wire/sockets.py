"""Sockets: one client's blocking connection, and the thread that answers all of them.

A client of a Unix socket on the same machine is sent the pool's file descriptor with the reply to its ``Hello``, maps
it and copies by itself: no bytes of chunks pass the socket, and no shared segment has a name that could be left behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import selectors
import socket
import stat
import struct
import threading
import time
from pathlib import Path
from typing import Final

from qkvault.errors import ConfigError, DeadlineExceeded, ProtocolError, Unavailable
from qkvault.logs import RateLimited, get_logger
from qkvault.pool import AttachedPool, Pool
from qkvault.wire import codec
from qkvault.wire import messages as m
from qkvault.wire.transport import Handler, Transport

UNIX_SCHEME: Final = "unix://"
_POLL_SECONDS: Final = 0.0005  # between two looks at a lease that has chunks pending
_TURN_SECONDS: Final = 2.0  # that a server waits for others that start in the same folder
_ACCEPT_PAUSE_SECONDS: Final = 0.01
_BACKLOG: Final = 1024  # a connect that does not fit fails at once
_RECV_BYTES: Final = 1 << 18
_MAX_OUT_BYTES: Final = 256 << 20  # a client that does not read its replies is cut off here
_log = get_logger("wire")
_limited = RateLimited(_log)


def unix_path(address: str) -> str:
    """The path in ``unix:///path``. Raises ConfigError for another scheme or an empty path."""
    path = address.removeprefix(UNIX_SCHEME)
    if path == address or not path:
        msg = f"address {address!r} is not {UNIX_SCHEME}/path"
        raise ConfigError(msg)
    return path


class SocketTransport(Transport):
    """A session over a Unix socket.

    Once a call has failed the session is of no more use; the store ends it, and gives its slots to others, when it is
    closed. Whoever owns it closes it as soon as nothing of his is still being copied.
    """

    def __init__(self, address: str, client: str, *, timeout_seconds: float = 1.0) -> None:
        """Connect and say hello. Raises Unavailable, and ProtocolError if the store speaks another protocol."""
        self._address = address
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._sequence = 0
        self._is_usable = True
        self._descriptors: list[int] = []  # received and not owned by anybody yet
        self.epoch = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.pool: AttachedPool = self._open(client)
        except BaseException:
            self._socket.close()
            raise
        finally:
            for descriptor in self._descriptors:
                os.close(descriptor)

    def call(self, request: m.AnyRequest) -> m.AnyReply:  # contract inherited
        with self._lock:
            if not self._is_usable:
                msg = f"the session with the store at {self._address} has ended"
                raise Unavailable(msg)
            self._sequence = (self._sequence + 1) % (1 << 32)
            frame = codec.encode(request, self._sequence, self.epoch)
            self._is_usable = False  # unless all goes well: a late answer would be taken for the next one's
            try:
                reply = self._exchange(frame, has_pool=isinstance(request, m.Hello))
            except TimeoutError as error:
                msg = f"the store at {self._address} did not answer in {self._timeout_seconds:g} s"
                raise DeadlineExceeded(msg) from error
            except OSError as error:
                msg = f"no store answers at {self._address}: {error}"
                raise Unavailable(msg) from error
            self._is_usable = True
        return reply

    def wait_change(self, timeout_seconds: float) -> None:
        time.sleep(min(timeout_seconds, _POLL_SECONDS))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a call that is waiting in another thread
        with self._lock:
            self._is_usable = False
            self._socket.close()
        self.pool.close()

    def _open(self, client: str) -> AttachedPool:
        self._socket.settimeout(self._timeout_seconds)
        try:
            self._socket.connect(unix_path(self._address))
        except OSError as error:
            msg = f"no store answers at {self._address}: {error}"
            raise Unavailable(msg) from error
        welcome = self.call(m.Hello(m.PROTOCOL_VERSION, client))
        if not isinstance(welcome, m.Welcome) or not self._descriptors:
            msg = f"the store at {self._address} did not welcome us: {welcome}"
            raise ProtocolError(msg)
        try:
            return AttachedPool(self._descriptors.pop(), welcome.pool_bytes)
        except (OSError, ConfigError) as error:
            msg = f"the pool of the store at {self._address} cannot be mapped: {error}"
            raise Unavailable(msg) from error

    def _exchange(self, frame: bytes, *, has_pool: bool) -> m.AnyReply:
        deadline = time.monotonic() + self._timeout_seconds
        self._socket.settimeout(self._timeout_seconds)
        self._socket.sendall(frame)
        head = codec.decode_head(self._receive(codec.HEAD.size, deadline, has_pool=has_pool))
        body = self._receive(head.body_bytes, deadline)
        if head.sequence != self._sequence:
            msg = f"reply {head.sequence} to request {self._sequence}"
            raise ProtocolError(msg)
        self.epoch = head.epoch
        return codec.decode_reply(body)

    def _receive(self, num_bytes: int, deadline: float, *, has_pool: bool = False) -> bytearray:
        data = bytearray(num_bytes)
        view, got = memoryview(data), 0
        while got < num_bytes:
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:  # also when something came each time
                raise TimeoutError
            self._socket.settimeout(left_seconds)
            if has_pool:  # the descriptor comes with the first bytes
                first, self._descriptors, _, _ = socket.recv_fds(self._socket, num_bytes, 1, socket.MSG_CMSG_CLOEXEC)
                data[: len(first)], count, has_pool = first, len(first), False
            else:
                count = self._socket.recv_into(view[got:])
            if not count:
                msg = "it closed the connection"
                raise ConnectionResetError(msg)
            got += count
        return data


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

        Raises ConfigError if something else answers, or lies, at the address, or if the pool is private.
        """
        try:
            self._descriptor = pool.descriptor
        except ValueError as error:
            msg = f"{error}: a store that others are to reach needs a shared pool"
            raise ConfigError(msg) from error
        self._handler = handler
        self._epoch = epoch
        self._path = unix_path(address)
        self._listener, self._file = _listen(self._path)
        self._is_closed = False
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
        if self._is_closed:
            return
        self._is_closed = True
        self._waker.send(b"x")
        self._thread.join()
        self._selector.close()
        for end in (self._listener, self._waker, self._wakes):
            end.close()
        with contextlib.suppress(OSError):
            if _file_at(self._path) == self._file:  # not another's that has taken our place
                Path(self._path).unlink()

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
            _limited.warning("accept_failed", error=str(error))
            time.sleep(_ACCEPT_PAUSE_SECONDS)  # it would come again at once
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
        except OSError:  # it has gone
            self._drop(connection)
        except ProtocolError as error:
            _limited.warning("client_cut_off", session=connection.session_id, error=str(error))
            self._drop(connection)
        except Exception:  # thread top: one client's connection is not the others'
            _log.exception("client_cut_off", session=connection.session_id)
            self._drop(connection)

    def _answer(self, connection: _Connection) -> None:
        inbox = connection.inbox
        while len(inbox) >= codec.HEAD.size:
            head = codec.decode_head(inbox)
            end = codec.HEAD.size + head.body_bytes
            if len(inbox) < end:
                break
            reply = self._reply_to(connection, bytes(memoryview(inbox)[codec.HEAD.size : end]))
            connection.sends_pool |= isinstance(reply, m.Welcome)
            connection.outbox += codec.encode(reply, head.sequence, self._epoch)
            del inbox[:end]
            if len(connection.outbox) > _MAX_OUT_BYTES:
                msg = "the client does not read its replies"
                raise ProtocolError(msg)

    def _reply_to(self, connection: _Connection, body: bytes) -> m.AnyReply:
        try:
            request = codec.decode_request(body)
        except ProtocolError as error:  # its frame was whole: the next one can be read
            return m.Failed("protocol", str(error))
        return self._handler.call(connection.session_id, request)

    def _flush(self, connection: _Connection) -> None:
        outbox = connection.outbox
        try:
            while outbox:
                if connection.sends_pool:
                    sent = socket.send_fds(connection.socket, [bytes(outbox)], [self._descriptor])
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


def _listen(path: str) -> tuple[socket.socket, tuple[int, int]]:
    # The listener, and which file it is at.
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _take_turn(folder)
            _remove_stale(path)
            listener.bind(path)
            Path(path).chmod(0o600)  # before the first client can connect
            listener.listen(_BACKLOG)
        finally:
            os.close(folder)
        listener.setblocking(False)
        return listener, _file_at(path)
    except OSError as error:
        listener.close()
        msg = f"cannot listen at {path}: {error}"
        raise ConfigError(msg) from error
    except BaseException:
        listener.close()
        raise


def _take_turn(folder: int) -> None:
    # Of several that start at a time, one finds the place free. Ends with the descriptor.
    deadline = time.monotonic() + _TURN_SECONDS
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_ACCEPT_PAUSE_SECONDS)
        else:
            return


def _file_at(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino


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
        probe.setblocking(False)  # a live server's queue may be full
        if probe.connect_ex(path) != errno.ECONNREFUSED:
            msg = f"another store answers at {path}"
            raise ConfigError(msg)
    Path(path).unlink()


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
