"""Our log lines among vLLM's own: the same handlers and format, the level of our setting ``log_level``.

Sets the logger ``qkvault`` and nothing else, neither the root logger nor vLLM's.
"""

from __future__ import annotations

import logging
from typing import Final

from qkvault.config import DEFAULT, Loaded
from qkvault.logs import ROOT_NAME, route

_NAME: Final = "vllm"  # of vLLM's logger, and of the handler that it gives it


def follow_vllm(loaded: Loaded) -> None:
    """Write our lines where vLLM writes its own, from now on. Idempotent.

    Who has given our logger a handler keeps it: then only a level that was asked for is set.
    """
    logger = logging.getLogger(ROOT_NAME)
    is_asked = loaded.sources["log_level"] != DEFAULT
    if all(handler.name == ROOT_NAME for handler in logger.handlers):
        route(loaded.config.log_level, _ToVllm(is_asked=is_asked))
    elif is_asked:
        logger.setLevel(loaded.config.log_level.upper())


class _ToVllm(logging.Handler):
    """Hands records to the handlers that vLLM's logger has at that moment: vLLM may configure them anew."""

    def __init__(self, *, is_asked: bool) -> None:
        """With ``is_asked`` our level counts and not vLLM's own; without, what vLLM would not say we do not."""
        super().__init__()
        self._is_asked = is_asked

    def emit(self, record: logging.LogRecord) -> None:
        logger: logging.Logger | None = logging.getLogger(_NAME)
        if logger is None or not (self._is_asked or logger.isEnabledFor(record.levelno)):
            return
        is_said = False
        while logger is not None:
            for handler in logger.handlers:
                is_said = True
                # vLLM's own handler has vLLM's level; others are files and the like, with a purpose of their own.
                if record.levelno >= handler.level or (self._is_asked and handler.name == _NAME):
                    handler.handle(record)
            logger = logger.parent if logger.propagate else None
        if not is_said and logging.lastResort is not None and record.levelno >= logging.lastResort.level:
            logging.lastResort.handle(record)
