"""DropLog: what is not stored is told, seldom enough, with what to do."""

from __future__ import annotations

import pytest

from qkvault.capture.drops import DropLog
from qkvault.capture.rows import CaptureCounters, Hole, Reason

QUIET = (Reason.NOT_COMPUTED, Reason.ENDED)  # of these there are always some


class Rig:
    def __init__(self, caplog) -> None:
        self.counters, self.now, self.caplog = CaptureCounters(), 0.0, caplog
        self.log = DropLog(self.counters, clock=lambda: self.now)

    def drop(self, reason, count=1, **options):
        """Lines of one step, by level."""
        self.counters.dropped[reason] += count
        self.caplog.clear()
        self.log.tell(**options)
        return [(record.levelname, record.getMessage()) for record in self.caplog.records]


@pytest.fixture
def rig(caplog):
    caplog.set_level("DEBUG", "qkvault.capture")
    return Rig(caplog)


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason not in QUIET])
def test_a_reason_is_told_once_a_minute_with_how_many(rig, reason):
    """B412: each of them, with what to do."""
    ((level, line),) = rig.drop(reason, 3)
    assert level == "WARNING"
    assert line.startswith(f"query_chunks_dropped reason={reason.value} chunks=3 todo=")
    rig.now = 59
    assert rig.drop(reason, 2) == rig.drop(reason, 0) == []
    rig.now = 60
    ((level, line),) = rig.drop(reason, 0)  # though nothing is dropped any more
    assert f"reason={reason.value} chunks=2 " in line
    assert rig.drop(reason, 7) == []
    ((level, line),) = rig.drop(reason, 0, is_end=True)
    assert f"reason={reason.value} chunks=7 " in line
    assert rig.drop(reason, 0, is_end=True) == []


def test_one_reason_does_not_hold_back_another(rig):
    """B412."""
    assert len(rig.drop(Reason.RING_FULL)) == len(rig.drop(Reason.NO_ROOM)) == 1


@pytest.mark.parametrize("reason", QUIET)
def test_what_always_occurs_is_told_at_the_level_of_debug(rig, reason):
    """B412: hits, and requests that end inside of a chunk, are no warning."""
    assert rig.drop(reason, 3) == [("DEBUG", f"query_chunks_dropped reason={reason.value} chunks=3")]


def test_each_hole_can_be_seen(rig):
    """B411."""
    lines = rig.drop(Reason.RING_FULL, 0, holes=[Hole("a", 4, Reason.RING_FULL)])
    assert lines == [("DEBUG", "query_hole request=a chunk=4 reason=ring_full")]
