"""Log lines: one line each, what varies as key=value, few when something repeats, and none until a program asks."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import threading

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qkvault import logs
from qkvault.logs import RateLimited, format_line, get_logger


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _restore():
    """Leave the process's logging as it was."""
    logger = logging.getLogger("qkvault")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.fixture
def stream():
    """What is logged at DEBUG and above, without the time."""
    stream = io.StringIO()
    logs.configure("debug", stream).setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    return stream


def test_a_line_is_an_event_and_its_fields(stream):
    """Level, logger, event, then key=value in the order given."""
    get_logger("store").info("chunk_stored", tokens=256, seconds=0.1234567, key=b"\x01\xff", medium="ram", parent=None)
    assert (
        stream.getvalue()
        == "INFO qkvault.store chunk_stored tokens=256 seconds=0.123457 key=01ff medium=ram parent=None\n"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("two words", '"two words"'),
        ("", '""'),
        ("a=b", '"a=b"'),
        ("two\nlines", '"two\\nlines"'),
        ('a "quote"', '"a \\"quote\\""'),
        ("100%", "100%"),
        ("/mnt/kv", "/mnt/kv"),
        (OSError(28, "No space left"), '"[Errno 28] No space left"'),
        (1.0, "1"),
        (1e-9, "1e-09"),
        (True, "True"),
    ],
)
def test_what_could_be_mistaken_is_quoted(value, text):
    """A value with spaces, quotes or line ends stays one value."""
    assert format_line("event", {"key": value}) == f"event key={text}"


@given(st.dictionaries(st.sampled_from("abc"), st.text()))
@example({"a": "x' y=\\", "b": "\u2028\x85\x1b[31m", "c": ""})
def test_a_line_is_one_line_and_can_be_taken_apart(fields):
    """No value breaks a line, colours a terminal, or passes for another field: every value can be read back."""
    line = format_line("event", fields)
    assert line.isprintable()
    found = re.findall(r' ([abc])=("(?:[^"\\]|\\.)*"|[^\s"=]+)', line)
    assert {key: json.loads(text) if text.startswith('"') else text for key, text in found} == fields
    assert line == "event" + "".join(f" {key}={text}" for key, text in found)


def test_percent_signs_are_text(stream):
    """An event is never a format."""
    get_logger("x").warning("50%s done", done="%d")
    assert stream.getvalue() == "WARNING qkvault.x 50%s done done=%d\n"


def test_fields_may_have_any_name(stream):
    """`event` and `self` are names like others."""
    get_logger("x").debug("note", event=1, self=2, level=3)
    assert stream.getvalue() == "DEBUG qkvault.x note event=1 self=2 level=3\n"


@pytest.mark.parametrize(
    ("name", "full"), [("tiers", "qkvault.tiers"), ("qkvault.stats", "qkvault.stats"), ("qkvault", "qkvault")]
)
def test_all_loggers_are_ours(name, full, stream):
    """Every logger hangs below `qkvault`, so that one switch reaches all."""
    get_logger(name).warning("here")
    assert stream.getvalue() == f"WARNING {full} here\n"


def test_an_exception_comes_with_its_traceback(stream):
    """What was raised can be found."""
    try:
        _ = {}["missing"]
    except KeyError:
        get_logger("x").exception("lost", key=1)
    assert stream.getvalue().startswith("ERROR qkvault.x lost key=1\nTraceback")
    assert "KeyError: 'missing'" in stream.getvalue()


@pytest.mark.parametrize("limited", [False, True])
def test_the_record_names_the_caller(caplog, limited):
    """A line says where it was written, not where the logger is."""
    logger = get_logger("x")
    with caplog.at_level("INFO", "qkvault"):
        (RateLimited(logger) if limited else logger).info("here")
    assert caplog.records[0].funcName == "test_the_record_names_the_caller"


def test_lines_below_the_level_cost_no_formatting(stream):
    """A field of a line that nobody sees is not even turned into text."""
    logging.getLogger("qkvault").setLevel("INFO")

    class Costly:
        def __str__(self) -> str:
            raise AssertionError

    logger = get_logger("x")
    logger.debug("chunk", costly=Costly())
    assert not logger.is_on(logging.DEBUG)
    assert logger.is_on(logging.INFO)
    assert stream.getvalue() == ""


def test_importing_changes_nothing_in_the_process():
    """No handler, no level: only a program that asks for lines configures logging."""
    code = (
        "import logging, qkvault.logs as logs\n"
        "logger = logging.getLogger('qkvault')\n"
        "logs.get_logger('x').info('unseen')\n"
        "print(logger.handlers, logger.level, logger.propagate, logging.getLogger().handlers)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("[] 0 True []", "")


def test_warnings_are_seen_without_any_configuration():
    """Who configures nothing still sees what goes wrong."""
    code = "import qkvault.logs as logs; logs.get_logger('x').warning('disk_full', free=0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "disk_full free=0\n"


def test_configuring_again_replaces(stream):
    """Two calls do not write each line twice."""
    other = io.StringIO()
    logs.configure("warning", other)
    get_logger("x").info("unseen")
    get_logger("x").warning("seen")
    assert stream.getvalue() == ""
    assert other.getvalue().count("seen") == 1
    assert " WARNING qkvault.x seen" in other.getvalue()


def test_configuring_leaves_the_programs_other_handlers(stream):
    """A handler that is not ours stays."""
    foreign = logging.NullHandler()
    logging.getLogger("qkvault").addHandler(foreign)
    logs.configure("info", io.StringIO())
    assert foreign in logging.getLogger("qkvault").handlers


def test_an_unknown_level_is_refused():
    """A misspelt level is an error, not silence."""
    with pytest.raises(ValueError, match="LOUD"):
        logs.configure("loud")


def test_what_repeats_is_one_line_an_interval_and_a_count(stream):
    """Of a thousand equal warnings one is written; the next, an interval later, says how many were not."""
    clock = Clock()
    limited = RateLimited(get_logger("tiers"), interval_seconds=60, clock=clock)
    for number in range(1000):
        limited.warning("disk_full", attempt=number)
    clock.now = 59.9
    limited.warning("disk_full", attempt=1000)
    clock.now = 60.0
    limited.warning("disk_full", attempt=1001)
    clock.now = 200.0
    limited.warning("disk_full", attempt=1002)
    assert stream.getvalue().splitlines() == [
        "WARNING qkvault.tiers disk_full attempt=0",
        "WARNING qkvault.tiers disk_full attempt=1001 suppressed=1000",
        "WARNING qkvault.tiers disk_full attempt=1002",
    ]


def test_events_are_limited_each_for_itself(stream):
    """A flood of one event hides no other."""
    limited = RateLimited(get_logger("tiers"), clock=Clock())
    for _ in range(3):
        limited.warning("disk_full")
        limited.info("server_lost")
    assert stream.getvalue().splitlines() == ["WARNING qkvault.tiers disk_full", "INFO qkvault.tiers server_lost"]


def test_threads_share_one_limit(stream):
    """However many threads warn, one line is written and every other is counted."""
    clock = Clock()
    limited = RateLimited(get_logger("tiers"), clock=clock)

    def warn():
        for _ in range(200):
            limited.warning("disk_full")

    threads = [threading.Thread(target=warn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    clock.now += 60
    limited.warning("disk_full")
    assert stream.getvalue().splitlines() == [
        "WARNING qkvault.tiers disk_full",
        "WARNING qkvault.tiers disk_full suppressed=799",
    ]
