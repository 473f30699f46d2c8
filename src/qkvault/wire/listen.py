"""Listening: a socket that clients can connect to, and the file it is found at."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
import time
from pathlib import Path
from typing import Final

from qkvault.address import Address
from qkvault.errors import ConfigError

_TURN_SECONDS: Final = 2.0  # that a server waits for others that start in the same folder
_TURN_PAUSE_SECONDS: Final = 0.01
_BACKLOG: Final = 1024  # a connect that does not fit fails at once
_PEER_GONE: Final = (  # a peer whose machine has vanished is noticed within half a minute
    (socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 25_000),  # ms; with output that it has not acknowledged no probes are sent
)  # fmt: skip


class Listener:
    """A listening socket. A Unix socket's file is made with mode 0600, and removed by ``close``."""

    def __init__(self, address: Address) -> None:
        """Listen. Raises ConfigError if something else answers, or lies, at the address."""
        self._file: tuple[int, int] | None = None
        if address.is_unix:
            self.socket, self._file = _listen_unix(address.path)
        else:
            self.socket = _listen_tcp(address)
        self.socket.setblocking(False)
        self.address = address if address.is_unix else Address(host=address.host, port=self.socket.getsockname()[1])

    def accept(self) -> socket.socket | None:
        """The next client, non-blocking; None if it may not connect: only this user may, and root. Raises OSError."""
        accepted, _ = self.socket.accept()
        accepted.setblocking(False)
        if not self.address.is_unix:
            tune(accepted)
        elif _peer_uid(accepted) not in (os.getuid(), 0):
            accepted.close()
            return None
        return accepted

    def withdraw(self) -> None:
        """Remove the file; to be called while the socket listens, when nobody can have replaced it. Idempotent."""
        with contextlib.suppress(OSError):
            if self._file is not None and _file_at(self.address.path) == self._file:  # not a successor's
                Path(self.address.path).unlink()
        self._file = None  # the next file may have the number of ours

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self.withdraw()
        self.socket.close()


def tune(connection: socket.socket) -> None:
    """Set what a TCP connection needs: no delay for small messages, and probes of a peer that is silent."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _PEER_GONE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _listen_tcp(address: Address) -> socket.socket:
    try:
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address.host, address.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        msg = f"cannot listen at {address}: {error}"
        raise ConfigError(msg) from error


def _listen_unix(path: str) -> tuple[socket.socket, tuple[int, int]]:
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
            time.sleep(_TURN_PAUSE_SECONDS)
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
            msg = f"another process answers at {path}"
            raise ConfigError(msg)
    Path(path).unlink()


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
