"""DropLog: chunks whose queries are not stored, told in the log: a warning a reason and minute, and what to do."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from qkvault.capture.rows import CaptureCounters, Hole, Reason
from qkvault.logs import get_logger

_log: Final = get_logger("capture")
_INTERVAL_SECONDS: Final = 60.0
_REPORT: Final = "a fault of QKVault or a layout of rows that it does not know: report vLLM's version and backend"
# Of all others some always occur: what a cache gave, and requests that end inside of a chunk.
_ADVICE: Final = {
    Reason.RING_FULL: "make q_ring_blocks larger, or capture fewer q_layers, or only requests that ask (q_requests)",
    Reason.LAYER_MISSING: "a layer was not seen, or a warning before this one says what failed: use --enforce-eager",
    Reason.ROW_MISSING: _REPORT,
    Reason.BAD_BLOCKS: _REPORT,
    Reason.NO_ROOM: "make query_bytes or ram_bytes of the store larger",
    Reason.NOT_STORED: "a warning before this one says what failed: see whether the store is there (qkvault status)",
}


class DropLog:
    """What is new of the counters. Owned by the model's thread."""

    def __init__(self, counters: CaptureCounters, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters = counters
        self._clock = clock
        self._told: Counter[Reason] = Counter()
        self._due: dict[Reason, float] = {}  # when a reason may be told again

    def tell(self, holes: Iterable[Hole] = (), *, is_end: bool = False) -> None:
        """A step is over, with these holes; at the end all that was not told yet is."""
        for hole in holes:
            _log.debug("query_hole", request=hole.request_id, chunk=hole.chunk, reason=hole.reason.value)
        now = self._clock()
        for reason, count in self._counters.dropped.items():
            num_new, advice = count - self._told[reason], _ADVICE.get(reason)
            if not num_new or not (advice is None or is_end or now >= self._due.get(reason, now)):
                continue
            self._told[reason], self._due[reason] = count, now + _INTERVAL_SECONDS
            if advice is None:
                _log.debug("query_chunks_dropped", reason=reason.value, chunks=num_new)
            else:
                _log.warning("query_chunks_dropped", reason=reason.value, chunks=num_new, todo=advice)
