"""Our lines among vLLM's: once each, in its format, at the level that our setting says."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.vllm

OURS = ["a_debug", "a_info", "a_warning", "a_error"]
LEVELS = pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])


@pytest.fixture
def restored():
    """Puts the process's logging back as it was."""
    loggers = [logging.getLogger(name) for name in (None, "vllm", "qkvault")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    factory = logging.getLogRecordFactory()
    for logger in loggers:
        logger.handlers = []
    yield
    logging.setLogRecordFactory(factory)
    for logger, state in zip(loggers, before, strict=True):
        logger.handlers, logger.level, logger.propagate = state
        logger.setLevel(state[1])  # forgets what was cached of the level


@pytest.fixture
def vllm_logs(restored, capsys):
    """Configures vLLM's logging at a level, or not at all."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging

    def configure(level="INFO", **options):
        vllms = logging.getLogger("vllm")
        for logger in (vllms, logging.getLogger()):
            logger.handlers = [handler for handler in logger.handlers if isinstance(handler, Ours)]  # and not pytest's
        vllms.setLevel(logging.NOTSET)
        vllms.propagate = True
        if level is not None:
            configure_logging(LoggingConfig(log_level=level, **options))

    return configure


@pytest.fixture
def said(capsys):
    """What is written when our four lines are logged, under these settings, and one of vLLM's."""

    def run(**settings):
        from qkvault import config
        from qkvault.integrations.vllm.logs import follow_vllm
        from qkvault.logs import get_logger

        others = [logging.getLogger(name) for name in (None, "vllm", "urllib3")]
        before = [(logger.level, logger.propagate, logger.handlers[:]) for logger in others]
        if settings.pop("is_followed", True):
            for _ in range(2):
                follow_vllm(config.load(env={}, vllm={f"qkvault.{name}": value for name, value in settings.items()}))
        assert [(logger.level, logger.propagate, logger.handlers) for logger in others] == before
        for event in OURS:
            getattr(get_logger("vllm.worker"), event.removeprefix("a_"))(event, number=1)
        logging.getLogger("vllm.x").info("from vllm")
        logging.getLogger("urllib3").info("from others")
        written = capsys.readouterr()
        return [line for line in (written.out + written.err).splitlines() if "a_" in line or "from" in line]

    return run


def events(lines):
    return [word for line in lines for word in line.split() if word.startswith("a_")]


@LEVELS
@pytest.mark.parametrize("vllms", ["INFO", "ERROR"])
def test_the_setting_decides_what_is_said(vllm_logs, said, level, vllms):
    """B283: each line once, however often it is configured, and whatever level vLLM has for itself."""
    vllm_logs(vllms)
    lines = said(log_level=level)
    assert events(lines) == OURS[OURS.index(f"a_{level}") :]
    assert [line for line in lines if "from" in line] == [line for line in lines if "from vllm" in line]
    assert any("from vllm" in line for line in lines) == (vllms == "INFO")


@pytest.mark.parametrize(("vllms", "first"), [("DEBUG", "a_info"), ("INFO", "a_info"), ("ERROR", "a_error")])
def test_without_the_setting_vllms_level_counts_too(vllm_logs, said, vllms, first):
    """B283: who has silenced vLLM does not hear us either."""
    vllm_logs(vllms)
    assert events(said())[0] == first


def test_the_lines_look_like_vllms(vllm_logs, said):
    """B283: the process, the level, the time, the file and then our event."""
    vllm_logs()
    ours, _, _, vllms = said()
    assert ours.split()[:3] == vllms.split()[:3]
    assert f"pid={os.getpid()}) INFO" in ours
    assert "[test_logs.py:" in ours
    assert ours.endswith("] a_info number=1")
    assert vllms.endswith("] from vllm")


def test_vllm_may_configure_its_logging_afterwards(vllm_logs, said):
    """B283: an engine does so when it starts."""
    vllm_logs()
    said(log_level="debug")
    vllm_logs("WARNING")
    assert events(said(is_followed=False)) == OURS
    vllm_logs()
    said()
    vllm_logs("WARNING")
    assert events(said(is_followed=False)) == ["a_warning", "a_error"]


class Ours(logging.StreamHandler):
    """A handler as a program may add one."""


def to_stdout(name, text, level="NOTSET"):
    handler = Ours(sys.stdout)
    handler.setLevel(level)
    handler.setFormatter(logging.Formatter(text))
    logging.getLogger(name).addHandler(handler)


def test_the_roots_handlers_do_not_say_it_again(vllm_logs, said):
    """B283: a program that logs everything by its root logger sees our lines once, as it does vLLM's."""
    to_stdout(None, "root: %(message)s")
    vllm_logs()
    lines = said(log_level="debug")
    assert events(lines) == OURS
    assert not any(line.startswith("root: a_") for line in lines)


def test_a_vllm_that_leaves_logging_alone_is_followed_in_that(vllm_logs, said):
    """B283: with ``VLLM_CONFIGURE_LOGGING=0`` our lines go to the program's own handlers, as vLLM's do."""
    vllm_logs(None)
    to_stdout(None, "%(name)s: %(message)s")
    lines = said(log_level="debug")
    assert [line for line in lines if "a_" in line] == [f"qkvault.vllm.worker: {event} number=1" for event in OURS]


def test_where_nobody_has_a_handler_warnings_are_seen(vllm_logs, said, monkeypatch):
    """B283: as Python has it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    monkeypatch.setattr(logging, "lastResort", handler)
    vllm_logs(None)
    assert events(said()) == ["a_warning", "a_error"]


def test_a_handler_of_the_program_is_left_alone(vllm_logs, said):
    """B284: who has configured our logger has done it."""
    vllm_logs()
    to_stdout("qkvault", "mine: %(message)s")
    logging.getLogger("qkvault").setLevel("WARNING")
    logging.getLogger("qkvault").propagate = False
    assert said()[:2] == ["mine: a_warning number=1", "mine: a_error number=1"]
    assert events(said(log_level="error")) == ["a_error"]


def test_a_file_of_errors_stays_one(vllm_logs, said):
    """B284: only vLLM's own handler is given more than it wants."""
    vllm_logs()
    to_stdout("vllm", "file: %(message)s", "ERROR")
    lines = said(log_level="debug")
    assert [line for line in lines if line.startswith("file")] == ["file: a_error number=1"]
    assert len(events(lines)) == 5


def test_the_connector_configures_its_process(toy_engine, restored):
    """B283: both of its sides do, in whatever process they are."""
    toy_engine(settings={"qkvault.log_level": "debug"})
    logger = logging.getLogger("qkvault")
    assert logger.level == logging.DEBUG
    assert len(logger.handlers) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("level", "wanted"), [("debug", ["a_debug", "a_info"]), ("error", [])])
def test_in_a_process_of_its_own(level, wanted):
    """B283: a process that has imported vLLM, and nothing of ours but the connector's package."""
    code = f"""
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
configure_logging(LoggingConfig(log_level="INFO"))
from qkvault import config
from qkvault.integrations.vllm.logs import follow_vllm
from qkvault.logs import get_logger
follow_vllm(config.load(vllm={{"qkvault.log_level": "{level}"}}))
get_logger("vllm").debug("a_debug")
get_logger("vllm").info("a_info")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert events((done.stdout + done.stderr).splitlines()) == wanted
