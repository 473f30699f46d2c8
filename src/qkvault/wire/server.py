"""The server of one address: a thread that answers all of its clients.

A client on the same machine is sent the pool's file descriptor with the reply to its ``Hello``, maps it and copies by
itself: no bytes of chunks pass the socket, and no shared segment has a name that could be left behind.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import ssl
import threading
import time
import traceback
from typing import Final

from qkvault.address import parse_address
from qkvault.errors import ConfigError, ProtocolError
from qkvault.logs import RateLimited, get_logger
from qkvault.pool import Pool
from qkvault.wire.connection import BUFFER_BYTES, Connection, Door
from qkvault.wire.listen import Listener
from qkvault.wire.transport import Handler

_FAULT_PAUSE_SECONDS: Final = 0.01
_SHORTAGE_SECONDS: Final = 0.1  # without a look at the listener, when there was no descriptor for who waits there
_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_LOOK_SECONDS: Final = 1.0  # between two looks at who should have moved something
_HELLO_SECONDS: Final = 10.0  # a connection that has not said hello by then is closed
_MAX_STRANGERS: Final = 256  # connections that have not said hello; of more the oldest are closed
_log = get_logger("wire")
_limited = RateLimited(_log)


class SocketServer:
    """Answers every client of one address from one thread: messages are short, bytes go through the pool."""

    def __init__(
        self,
        handler: Handler,
        pool: Pool,
        address: str,
        *,
        epoch: int,
        token: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Listen and start. ``token`` is asked of clients of TCP; a Unix socket asks the kernel who they are.

        Without it clients of TCP may store and read, and give no orders: ``Clear``, ``Forget``, ``Switch``, ``Check``.
        Raises ConfigError if something else answers, or lies, at the address, or if the pool is private.
        """
        where = parse_address(address)
        descriptor = None
        if where.is_unix:
            token, tls = "", None
            try:
                descriptor = pool.descriptor
            except ValueError as error:
                msg = f"{error}: a store that others are to reach needs a shared pool"
                raise ConfigError(msg) from error
        takes_orders = where.is_unix or token != ""
        buffer = memoryview(bytearray(BUFFER_BYTES))
        self._door = Door(handler, epoch, descriptor, token, buffer, takes_orders=takes_orders, wake=self._wake)
        self._tls = tls
        self._listener = Listener(where)
        self.address = str(self._listener.address)  # with the port that the system chose
        self._is_closed = False
        self._epoll = select.epoll()
        self._epoll.register(self._listener.socket, select.EPOLLIN)
        self._waker, self._wakes = socket.socketpair()
        self._waker.setblocking(False)
        self._epoll.register(self._wakes, select.EPOLLIN)
        self._connections: dict[int, Connection] = {}  # by file descriptor
        self._strangers: dict[Connection, float] = {}  # have not said hello: until when they may
        self._returning: set[Connection] = set()  # to be served again without a word of their sockets
        self._unfinished: set[Connection] = set()  # those that have said it, and may not rest
        self._accepts_seconds: float | None = None  # when the listener is looked at again, if it is not
        self._looked_seconds = 0.0  # when their patience was last counted, on the monotonic clock
        self.thread = threading.Thread(target=self._run, name="qkvault-wire", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop answering, end every session, remove the socket file. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wake()
        self.thread.join()
        self._epoll.close()
        self._listener.close()
        for end in (self._waker, self._wakes):
            end.close()

    def _wake(self, _: object = None) -> None:
        with contextlib.suppress(OSError):  # so many wake it that it will anyway, or it has ended
            self._waker.send(b"x")

    def _run(self) -> None:
        while not self._is_closed:
            events = self._epoll.poll(self._rest_seconds())
            try:
                self._look(events)
            except Exception:  # thread top: what one client or one look costs is not the others'
                _limited.warning("wire_failed", error=traceback.format_exc(limit=-3))
                time.sleep(_FAULT_PAUSE_SECONDS)  # it may come again at once
        for connection in list(self._connections.values()):
            self._drop(connection)

    def _rest_seconds(self) -> float | None:
        # How long nothing is to be done unless something happens.
        rests = [each.returns_seconds or 0.0 for each in self._returning]
        if self._accepts_seconds is not None:
            rests.append(_SHORTAGE_SECONDS)
        if self._strangers or self._unfinished:
            rests.append(_LOOK_SECONDS)
        return min(rests, default=None)

    def _look(self, events: list[tuple[int, int]]) -> None:
        for descriptor, _ in events:
            if connection := self._connections.get(descriptor):
                self._serve(connection)
            elif descriptor == self._listener.socket.fileno():
                self._accept()
            elif descriptor == self._wakes.fileno():
                self._wakes.recv(BUFFER_BYTES)
        for connection in list(self._returning):
            self._serve(connection)
        if self._strangers:
            self._drop_strangers()
        if self._unfinished:
            self._drop_stuck()
        if self._accepts_seconds is not None and time.monotonic() >= self._accepts_seconds:
            self._accepts_seconds = None
            self._epoll.modify(self._listener.socket, select.EPOLLIN)

    def _accept(self) -> None:
        try:
            accepted = self._listener.accept()
            if accepted is None:
                return
            if self._tls is not None:
                accepted = self._tls.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
        except OSError as error:  # out of descriptors, or the client has gone again
            _limited.warning("accept_failed", error=str(error))
            if error.errno in _SHORTAGES:  # who waits is told again and again: the others are not to pay for it
                self._epoll.modify(self._listener.socket, 0)
                self._accepts_seconds = time.monotonic() + _SHORTAGE_SECONDS
            return
        connection = Connection(self._door, accepted)
        self._connections[connection.descriptor] = connection
        self._strangers[connection] = time.monotonic() + _HELLO_SECONDS
        self._epoll.register(connection.descriptor, connection.awaited)

    def _serve(self, connection: Connection) -> None:
        try:
            connection.serve()
            (self._unfinished.add if connection.is_unfinished else self._unfinished.discard)(connection)
            (self._returning.discard if connection.returns_seconds is None else self._returning.add)(connection)
            wanted = select.EPOLLOUT if connection.has_output else 0
            if not connection.is_full:
                wanted |= select.EPOLLIN
            wanted = wanted or select.EPOLLONESHOT  # that it has gone is told once, not without end
            if wanted != connection.awaited:
                connection.awaited = wanted
                self._epoll.modify(connection.descriptor, wanted)
        except OSError:  # it has gone
            self._drop(connection)
        except ProtocolError as error:
            _limited.warning("client_cut_off", session=connection.session_id, error=str(error))
            self._drop(connection)
        except Exception:  # thread top: one client's connection is not the others'
            _log.exception("client_cut_off", session=connection.session_id)
            self._drop(connection)

    def _drop_strangers(self) -> None:
        now = time.monotonic()
        for connection in [each for each in self._strangers if each.session_id is not None]:
            del self._strangers[connection]
        for connection, deadline in list(self._strangers.items()):  # the oldest first
            if now <= deadline and len(self._strangers) <= _MAX_STRANGERS:
                break
            self._drop(connection)

    def _drop_stuck(self) -> None:
        # Time in which we did not look ourselves, or others were served, is nobody's fault: it counts as one look's.
        now = time.monotonic()
        waited_seconds = min(now - self._looked_seconds, 2 * _LOOK_SECONDS)
        if waited_seconds < _LOOK_SECONDS:
            return
        self._looked_seconds = now
        for connection in list(self._unfinished):
            if connection.session_id is not None and not connection.has_patience(waited_seconds):
                _limited.warning("client_cut_off", session=connection.session_id, error="it moves nothing")
                self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        self._unfinished.discard(connection)
        self._returning.discard(connection)
        del self._connections[connection.descriptor]
        with contextlib.suppress(OSError):  # it is not known there any more
            self._epoll.unregister(connection.descriptor)
        try:
            connection.close()
        except Exception:  # thread top: whatever a session leaves behind, the other clients are answered
            _log.exception("session_not_ended", session=connection.session_id)
