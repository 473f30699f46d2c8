"""Log lines of ``event key=value ...`` over the standard library's logging, and a limiter for those that may repeat.

Importing this changes nothing in the process. A program that wants to see lines calls ``configure``, as the command
does, or sets up logging its own way: all our loggers are called ``qkvault.*``.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, TextIO

ROOT_NAME: Final = "qkvault"
_SPECIAL: Final = re.compile(r"[\s\"'=\\]")  # what cannot stand in a line without quotes


def get_logger(name: str) -> Logger:
    """The logger ``qkvault.<name>``; a full module name is taken as it is."""
    is_full = name == ROOT_NAME or name.startswith(f"{ROOT_NAME}.")
    return Logger(logging.getLogger(name if is_full else f"{ROOT_NAME}.{name}"))


def configure(level: str, stream: TextIO | None = None) -> logging.Handler:
    """Write our lines of ``level`` (debug, info, warning, error) and above to ``stream``, by default stderr.

    For programs, never for libraries: it sets the process's ``qkvault`` logger. Called again, it replaces what it set.
    Raises ValueError if the level is unknown.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    route(level, handler)
    return handler


def route(level: str, handler: logging.Handler) -> None:
    """As ``configure``, with a handler of the caller's. The root logger's get none of our lines from then on.

    Raises ValueError if the level is unknown.
    """
    logger = logging.getLogger(ROOT_NAME)
    logger.setLevel(level.upper())
    for previous in [previous for previous in logger.handlers if previous.name == ROOT_NAME]:
        logger.removeHandler(previous)
    handler.name = ROOT_NAME
    logger.addHandler(handler)
    logger.propagate = False


def format_line(event: str, fields: Mapping[str, object]) -> str:
    """``event key=value ...``, always one line: what could be mistaken is quoted, floats have six digits."""
    return " ".join([event, *(f"{key}={_format_value(value)}" for key, value in fields.items())])


def _format_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value.hex() if isinstance(value, bytes) else str(value)
    is_bare = text.isprintable() and text and not _SPECIAL.search(text)  # a terminal's escape codes do not print
    return text if is_bare else json.dumps(text)


class Logger:
    """Lines for one part of the system. A line below the level in force costs one comparison."""

    __slots__ = ("_target",)

    def __init__(self, target: logging.Logger) -> None:
        self._target = target

    def is_on(self, level: int) -> bool:
        """Whether lines of ``level`` (``logging.DEBUG``...) go anywhere: ask before preparing costly fields."""
        return self._target.isEnabledFor(level)

    def debug(self, event: str, /, **fields: object) -> None:  # seam: the fields of a line are the caller's
        """One decision."""
        self.log(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: object) -> None:  # seam: as debug
        """A change of state that an operator wants to know; never one line a chunk or request."""
        self.log(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: object) -> None:  # seam: as debug
        """Something costs performance or will go wrong; through RateLimited if it can repeat."""
        self.log(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: object) -> None:  # seam: as debug
        """Something that should work does not."""
        self.log(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: object) -> None:  # seam: as debug
        """An error with the traceback of the exception being handled."""
        self.log(logging.ERROR, event, fields, exc_info=True)

    def log(
        self, level: int, event: str, fields: Mapping[str, object], *, frames: int = 2, exc_info: bool = False
    ) -> None:
        """A line of any level. The record names the caller ``frames`` above this one."""
        if self._target.isEnabledFor(level):
            # "%s", since the event itself may hold a percent sign
            self._target.log(level, "%s", format_line(event, fields), exc_info=exc_info, stacklevel=frames + 1)


class RateLimited:
    """At most one line an interval for each event; the next one says how many were suppressed. Thread-safe.

    An event is a constant text: what varies belongs in the fields.
    """

    def __init__(
        self, logger: Logger, interval_seconds: float = 60.0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._last_seconds: dict[str, float] = {}  # event to when it was last logged
        self._suppressed: Counter[str] = Counter()  # lines since then

    def warning(self, event: str, /, **fields: object) -> None:  # seam: the fields of a line are the caller's
        """A warning, unless the event had one less than an interval ago."""
        self._log(logging.WARNING, event, fields)

    def info(self, event: str, /, **fields: object) -> None:  # seam: as warning
        """A line of level INFO, unless the event had one less than an interval ago."""
        self._log(logging.INFO, event, fields)

    def _log(self, level: int, event: str, fields: dict[str, object]) -> None:
        now = self._clock()
        with self._lock:
            last = self._last_seconds.get(event)
            if last is not None and now - last < self._interval_seconds:
                self._suppressed[event] += 1
                return
            self._last_seconds[event] = now
            count = self._suppressed.pop(event, 0)
        self._logger.log(level, event, fields | {"suppressed": count} if count else fields, frames=3)
