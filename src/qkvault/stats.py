"""What one engine did, as plain numbers: requests, tokens and bytes by outcome, and the time and bytes of each stage.

A StatsMonitor belongs to the engine that made it: two engines in one process never mix their numbers. Updates cost
about a microsecond, may come from any thread, never raise, and never make a number smaller; one that makes no sense
(negative, not a number, an unknown name) changes nothing but ``rejected_updates``. Knows no Prometheus: ``metrics``
turns a snapshot into one.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Final, NamedTuple

import msgspec

from qkvault.logs import get_logger
from qkvault.types import Medium, Outcome

# "get" is waiting for what comes up from a tier, or is sent by a server.
STAGES: Final = ("lookup", "process_tokens", "from_gpu", "put", "get", "to_gpu")
OPERATIONS: Final = ("lookup", "store", "retrieve")
MEDIA: Final = tuple(medium.value for medium in Medium)
# What became of a chunk that was to be stored: "stored" and "failed" are the two ends of a reserved one.
CHUNK_OUTCOMES: Final = ("stored", "failed", *(o.value for o in Outcome if o is not Outcome.RESERVED))

# What a wrong name or amount can raise when it is looked at; RuntimeError: a tensor with several elements.
_NONSENSE: Final = (LookupError, TypeError, ValueError, AttributeError, RuntimeError)
_INF: Final = math.inf
_LOG: Final = get_logger(__name__)


class StageStats(msgspec.Struct, frozen=True):
    """Totals of one stage. A failed call counts with its time, and moves no tokens or bytes."""

    calls: int = 0
    failures: int = 0
    seconds: float = 0.0
    tokens: int = 0
    bytes: int = 0

    @property
    def gb_per_second(self) -> float:
        """Mean rate in 10**9 bytes a second; 0 before anything has moved."""
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


class OperationStats(msgspec.Struct, frozen=True):
    """Totals of one kind of request. ``requests - finished`` are under way."""

    requests: int = 0
    finished: int = 0
    seconds: float = 0.0  # of those that have finished
    tokens: int = 0  # asked for


class Stats(msgspec.Struct, frozen=True):
    """Everything a monitor counted since it was made. Every key of every mapping is there from the start."""

    operations: dict[str, OperationStats]  # by OPERATIONS
    stages: dict[str, StageStats]  # by STAGES
    found_tokens: dict[str, int]  # by medium; what lookups promised
    loaded_tokens: int  # what retrieves delivered
    failed_tokens: int  # found, and could not be loaded
    voided_tokens: int  # found behind tokens that could not be loaded, hence of no use
    failed_loads: int  # retrieves that delivered less than they were asked for
    loaded_bytes: int
    stored_tokens: int
    stored_bytes: int
    chunks: dict[str, int]  # by CHUNK_OUTCOMES
    rejected_updates: int  # a bug of the caller if not 0


_TOTALS: Final = tuple(field.name for field in msgspec.structs.fields(Stats) if field.type is int)


def _zeros(names: Iterable[str]) -> dict[str, float]:
    return dict.fromkeys(names, 0)


def _plain(numbers: Mapping[str, float]) -> dict[str, float]:
    """Python's own numbers, whatever kind was added (NumPy's, for example)."""
    return {name: float(number) if name == "seconds" else int(number) for name, number in numbers.items()}


class Request(NamedTuple):
    """A request under way: what ``on_*_request`` gives, to be handed to ``on_*_finished``."""

    operation: str
    num_tokens: int
    started_seconds: float


class Stage:
    """One call of a stage, as a context. ``num_tokens`` and ``num_bytes`` may still be set inside it."""

    __slots__ = ("_monitor", "_name", "_started_seconds", "num_bytes", "num_tokens")

    def __init__(self, monitor: StatsMonitor, name: str, num_bytes: int, num_tokens: int) -> None:
        self._monitor = monitor
        self._name = name
        self._started_seconds = 0.0
        self.num_bytes = num_bytes
        self.num_tokens = num_tokens

    def __enter__(self) -> Stage:  # noqa: PYI034  # Self is not in Python 3.10
        self._started_seconds = self._monitor.clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = self._monitor.clock() - self._started_seconds
        self._monitor.on_stage(
            self._name, seconds, num_bytes=self.num_bytes, num_tokens=self.num_tokens, failed=kind is not None
        )


class StatsMonitor:
    """Counts for one engine. ``clock`` gives seconds that only rise."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._lock = threading.Lock()  # guards all below
        self._num_updates = 0
        self._totals = _zeros(_TOTALS)
        self._found_tokens = _zeros(MEDIA)
        self._chunks = _zeros(CHUNK_OUTCOMES)
        self._stages = {name: _zeros(StageStats.__struct_fields__) for name in STAGES}
        self._operations = {name: _zeros(OperationStats.__struct_fields__) for name in OPERATIONS}

    @property
    def num_updates(self) -> int:
        """Rises with every update: while it stays the same, so does the snapshot."""
        return self._num_updates

    # -- stages --------------------------------------------------------------------------------------------------

    def stage(self, name: str, num_bytes: int = 0, *, num_tokens: int = 0) -> Stage:
        """Time one call of a stage: ``with monitor.stage("put", num_bytes): ...``."""
        return Stage(self, name, num_bytes, num_tokens)

    def on_stage(
        self, name: str, seconds: float, *, num_bytes: int = 0, num_tokens: int = 0, failed: bool = False
    ) -> None:
        """Count one call of a stage that was timed elsewhere (a copy on a device that was polled, not waited for)."""
        try:
            stage = self._stages[name]
            if 0 <= seconds < _INF and 0 <= num_bytes < _INF and 0 <= num_tokens < _INF:
                with self._lock:
                    self._num_updates += 1
                    stage["calls"] += 1
                    stage["seconds"] += seconds
                    if failed:
                        stage["failures"] += 1
                    else:
                        stage["tokens"] += num_tokens
                        stage["bytes"] += num_bytes
                return
        except _NONSENSE:
            pass
        self._reject()

    # -- requests ------------------------------------------------------------------------------------------------

    def on_lookup_request(self, num_tokens: int) -> Request:
        """Somebody asks how many of ``num_tokens`` are here."""
        return self._begin("lookup", num_tokens)

    def on_lookup_finished(self, request: Request, found_tokens: Mapping[str, int]) -> None:
        """Tokens found, by the medium (``Medium``) they were in. Found is not yet loaded."""
        self._finish(request, self._found_tokens, found_tokens, {})

    def on_store_request(self, num_tokens: int) -> Request:
        """Somebody wants ``num_tokens`` to be stored."""
        return self._begin("store", num_tokens)

    def on_store_finished(
        self, request: Request, *, num_tokens: int = 0, num_bytes: int = 0, chunks: Mapping[str, int] | None = None
    ) -> None:
        """Tokens and bytes that were stored, and what became of the chunks (``CHUNK_OUTCOMES``)."""
        totals = {"stored_tokens": num_tokens, "stored_bytes": num_bytes}
        is_counted = self._finish(request, self._chunks, chunks or {}, totals)
        if is_counted and _LOG.is_on(logging.DEBUG):
            self._log_rate(request, num_tokens, num_bytes)

    def on_retrieve_request(self, num_tokens: int) -> Request:
        """Somebody wants ``num_tokens`` to be loaded."""
        return self._begin("retrieve", num_tokens)

    def on_retrieve_finished(
        self,
        request: Request,
        *,
        num_tokens: int = 0,
        num_bytes: int = 0,
        num_failed_tokens: int = 0,
        num_voided_tokens: int = 0,
    ) -> None:
        """Tokens and bytes that were loaded; tokens that could not be, and good ones of no use behind those."""
        totals = {"loaded_tokens": num_tokens, "loaded_bytes": num_bytes}
        if num_failed_tokens or num_voided_tokens:
            totals |= {"failed_tokens": num_failed_tokens, "voided_tokens": num_voided_tokens, "failed_loads": 1}
        is_counted = self._finish(request, {}, {}, totals)
        if is_counted and _LOG.is_on(logging.DEBUG):
            self._log_rate(request, num_tokens, num_bytes)

    def snapshot(self) -> Stats:
        """All numbers, of one moment."""
        with self._lock:
            numbers = {
                "operations": {name: _plain(operation) for name, operation in self._operations.items()},
                "stages": {name: _plain(stage) for name, stage in self._stages.items()},
                "found_tokens": _plain(self._found_tokens),
                "chunks": _plain(self._chunks),
                **_plain(self._totals),
            }
        return msgspec.convert(numbers, Stats)

    # -- arithmetic ----------------------------------------------------------------------------------------------

    def _begin(self, name: str, num_tokens: int) -> Request:
        operation = self._operations[name]
        try:
            if 0 <= num_tokens < _INF:
                with self._lock:
                    self._num_updates += 1
                    operation["requests"] += 1
                    operation["tokens"] += num_tokens
                return Request(name, num_tokens, self.clock())
        except _NONSENSE:
            pass
        self._reject()
        return Request(name, 0, self.clock())

    def _finish(
        self, request: Request, table: dict[str, float], amounts: Mapping[str, int], totals: Mapping[str, int]
    ) -> bool:
        """End a request, add ``amounts`` to ``table`` and ``totals`` to the totals: all of it, or nothing and False."""
        operation: dict[str, float] = {}
        seconds = -1.0
        try:
            operation = self._operations[request.operation]
            seconds = self.clock() - request.started_seconds
            is_sane = 0 <= seconds < _INF and amounts.keys() <= table.keys()
            for amount in (*amounts.values(), *totals.values()):
                is_sane = is_sane and 0 <= amount < _INF
        except _NONSENSE:
            is_sane = False
        with self._lock:
            self._num_updates += 1
            if not is_sane or operation["finished"] >= operation["requests"]:
                self._totals["rejected_updates"] += 1
                return False
            operation["finished"] += 1
            operation["seconds"] += seconds
            for name, amount in amounts.items():
                table[name] += amount
            for name, amount in totals.items():
                self._totals[name] += amount
        return True

    def _reject(self) -> None:
        with self._lock:
            self._num_updates += 1
            self._totals["rejected_updates"] += 1

    def _log_rate(self, request: Request, num_tokens: int, num_bytes: int) -> None:
        seconds = self.clock() - request.started_seconds
        rate = num_bytes / seconds / 1e9 if seconds > 0 else 0.0
        fields = {"asked": request.num_tokens, "tokens": num_tokens, "bytes": num_bytes}
        _LOG.debug(f"{request.operation}_finished", **fields, seconds=seconds, gb_per_second=rate)
