"""The process of ``qkvault serve``: starts a server, waits for a signal, and ends as whoever sent it expects."""

from __future__ import annotations

import os
import resource
import signal
from types import FrameType
from typing import Final, NoReturn

from qkvault.config import Loaded
from qkvault.logs import configure, get_logger
from qkvault.server.notify import notify
from qkvault.server.server import Server
from qkvault.units import approximate_size

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_UNFINISHED: Final = 3  # exit code: the disk lacks some of what was committed, or has some of what was cleared
_log = get_logger("server")


class _StoppedAtStart(BaseException):
    """A signal came before the server was ready."""


class _Signals:
    """The first signal asks to stop, the second one ends the process at once."""

    def __init__(self) -> None:
        self.is_starting = True
        self._num_received = 0
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        # The byte is written by the system's own handler: it wakes ``wait`` whichever thread the signal came to.
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, self._receive)

    def wait(self) -> None:
        """Block until the first signal."""
        while not self._num_received:
            os.read(self._read_end, 1)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._num_received += 1
        if self._num_received > 1:
            _end_at_once()
        if self.is_starting:
            raise _StoppedAtStart


def _end_at_once() -> NoReturn:
    os._exit(1)


def run(loaded: Loaded) -> int:
    """Serve until SIGTERM or SIGINT, then drain, flush to disk and return the exit code.

    For the main thread of a process that does nothing else. Raises ConfigError if it cannot start.
    """
    configure(loaded.config.log_level)
    signals = _Signals()
    _raise_descriptor_limit()
    try:
        server = Server(loaded)
        signals.is_starting = False
    except _StoppedAtStart:
        _log.info("server_stopped", at="start")
        return 0
    _tell_ready(server)
    signals.wait()
    notify("STOPPING=1")
    _log.info("server_stopping", pid=os.getpid())
    num_lost = server.close()
    _log.info("server_stopped", pid=os.getpid())
    return _UNFINISHED if num_lost else 0


def _tell_ready(server: Server) -> None:
    config = server.loaded.config
    fields = {"addresses": ",".join(server.addresses), "ram": approximate_size(server.driver.pool.capacity_bytes)}
    fields["pages"] = server.driver.pool.pages
    if config.disk_path is not None:
        fields |= {"disk": config.disk_path, "disk_size": approximate_size(config.disk_bytes)}
    if server.http_address:
        fields["http"] = server.http_address
    if config.insecure:
        _log.warning("insecure", why="whoever reaches the server may read and change the cache")
    _log.info("server_ready", **fields, chunk_size=config.chunk_size, pid=os.getpid())
    notify("READY=1")


def _raise_descriptor_limit() -> None:
    # Every client is a descriptor, and the usual soft limit of 1024 is for programs that use select.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
