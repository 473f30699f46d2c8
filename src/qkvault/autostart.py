"""Autostart: the first engine of a machine that finds no server starts one, for itself and for all that come later."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from qkvault.address import parse_address
from qkvault.config import Config
from qkvault.connecting import open_client
from qkvault.errors import ConfigError, DeadlineExceeded, QKVaultError, Unavailable
from qkvault.logs import get_logger

_START_SECONDS: Final = 60.0  # a pool of 60 GB is pre-faulted by then
_PAUSE_SECONDS: Final = 0.02
_MAX_LOG_BYTES: Final = 1 << 20  # a longer one is put aside at the next start
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 1.0, 60.0  # between two starts of a server that goes again and again
# The command, but that nothing is imported from the engine's current folder: Python 3.10 has no flag for that.
_MAIN: Final = "import sys; sys.path[:] = filter(None, sys.path); from qkvault.cli.app import main; main()"
_started: Final[set[int]] = set()  # processes of servers, as far as they are not known to have ended
# Settings of the engine's own process; all others are the server's.
_NOT_THE_SERVERS: Final = frozenset({"address", "autostart", "timeout_seconds", "instance_id", "token", "listen"})
_log = get_logger("autostart")


def ensure_server(config: Config) -> None:
    """See to it that a server answers at ``config.address``, a Unix socket: start one with these settings if not.

    Of several that call at a time one starts it, and all wait. It goes on when this process ends. Blocks until it
    answers, a minute at most. Raises ConfigError if it cannot be started, with the last thing it said, or if others
    have kept the turn to start it so long.
    """
    where = parse_address(config.address or "")
    if not where.is_unix:
        msg = f"autostart: {where} is not a Unix socket; start that server yourself, with qkvault serve"
        raise ConfigError(msg)
    deadline = time.monotonic() + _START_SECONDS
    while True:
        with _turn(where.path) as is_ours:
            if _answers(config):
                return
            if is_ours:
                _start(config, where.path, lambda: False, deadline)
                return
        if time.monotonic() > deadline:
            lock_path = _lock_path(where.path)
            msg = f"autostart: no server answers at {where}, and another process holds {lock_path}: fuser tells which"
            raise ConfigError(msg)
        time.sleep(_PAUSE_SECONDS)


class Reviver:
    """Starts a server that has gone again. For one thread, which may wait; after a failure it rests for longer."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._next_start = 0.0  # on the monotonic clock

    def __call__(self, is_over: Callable[[], bool]) -> None:
        """Start one if none answers and nobody else is starting one. Blocks until it answers or ``is_over()``.

        Says so, and raises nothing, if it cannot be started.
        """
        if time.monotonic() < self._next_start:
            return
        path = parse_address(self._config.address or "").path
        try:
            with _turn(path) as is_ours:
                if not is_ours:  # it is being started
                    return
                if not _answers(self._config):
                    _start(self._config, path, is_over, time.monotonic() + _START_SECONDS)
            self._pause_seconds = _FIRST_PAUSE_SECONDS
        except (ConfigError, OSError) as error:
            _log.warning("server_not_started", error=str(error))
            self._pause_seconds = min(2 * self._pause_seconds, _MAX_PAUSE_SECONDS)
        self._next_start = time.monotonic() + self._pause_seconds


@contextmanager
def _turn(path: str) -> Iterator[bool]:
    # One after the other: whether it is ours. The system ends the turn of a process that dies.
    lock_path = _lock_path(path)
    try:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        msg = f"autostart: {lock_path} cannot be made: {error}"
        raise ConfigError(msg) from error
    is_ours = False
    try:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = True
        yield is_ours
    finally:
        if is_ours:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough: a child forked meanwhile has it as well
        os.close(descriptor)


def _lock_path(path: str) -> str:
    return f"{path}.lock"


def _answers(config: Config) -> bool:
    try:
        open_client(config, "autostart").close()
    except DeadlineExceeded:  # it is slow; another would be refused
        return True
    except Unavailable:
        return False
    except QKVaultError:  # something is there that we cannot use: to start another would not help
        return True
    return True


def _start(config: Config, path: str, is_over: Callable[[], bool], deadline: float) -> None:
    # ``deadline`` is on the monotonic clock.
    for started in _started.copy():  # those that have ended stay in the system's table until somebody has asked
        _end_of(started)
    log_path = Path(f"{path}.log")
    command = [sys.executable, "-c", _MAIN, "serve", "--listen", str(config.address), *_settings(config)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QKVAULT_")}
    if config.token:
        environment["QKVAULT_TOKEN"] = config.token  # others can read a command line
    with suppress(FileNotFoundError):
        if log_path.stat().st_size > _MAX_LOG_BYTES:
            log_path.replace(f"{log_path}.old")
    with log_path.open("ab") as log:
        os.fchmod(log.fileno(), 0o600)
        start_bytes = log.tell()  # before it earlier servers speak
        # In a session of its own: signals to the engine are not the server's. Not a Popen: it outlives us.
        pid = os.posix_spawn(
            sys.executable,
            command,
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, log.fileno(), 1),
                (os.POSIX_SPAWN_DUP2, log.fileno(), 2),
            ],
            setsid=True,
        )
    _started.add(pid)
    _log.info("server_started", address=config.address, pid=pid, log=str(log_path))
    while not _answers(config) and not is_over():
        end = _end_of(pid)
        if end or time.monotonic() > deadline:
            if not end:  # else the number may be another process's by now
                os.kill(pid, signal.SIGKILL)
            said = f"({end or 'no answer in time'}): {_last_line(log_path, start_bytes)} (all of it in {log_path})"
            msg = f"autostart: the server did not start {said}"
            raise ConfigError(msg)
        time.sleep(_PAUSE_SECONDS)


def _end_of(started: int) -> str:
    # How a process of ours has ended, or nothing; once it is known, it is forgotten.
    try:
        number, status = os.waitpid(started, os.WNOHANG)
    except ChildProcessError:  # somebody else has asked
        _started.discard(started)
        return "it ended"
    if number == 0:
        return ""
    _started.discard(started)
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _settings(config: Config) -> Iterator[str]:
    defaults = Config()
    for name, value in msgspec.structs.asdict(config).items():
        if value != getattr(defaults, name) and name not in _NOT_THE_SERVERS:
            is_small = isinstance(value, float) and "e" in str(value)  # 5e-05 is no duration
            yield "--set"
            yield f"{name}={value:.30f}" if is_small else f"{name}={value}"


def _last_line(path: Path, start_bytes: int) -> str:
    lines = path.read_bytes()[start_bytes:].decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
