"""What the threads of a tier need: the threads, their queue and results, and whether a direction works at all.

A tier says how one piece of a job is done; everything about threads is here, and so are all locks of the tiers. Knows
nothing of files, networks or chunk images.
"""

from __future__ import annotations

import heapq
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from qkvault.logs import RateLimited, get_logger
from qkvault.tiers.base import JobKind, JobResult, Piece, TierJob

ABSENT: Final = "absent"
CORRUPT: Final = "corrupt"
REFUSED: Final = "refused"
UNAVAILABLE: Final = "unavailable"

LOG_SECONDS: Final = 60.0  # the same trouble is not logged again within this time
CLOSE_SECONDS: Final = 5.0  # how long close waits for I/O that hangs

_PRIORITY: Final = {JobKind.LOAD: 1, JobKind.DELETE: 2, JobKind.STORE: 3}  # least first; calls are 0

_log = get_logger("tiers")


@dataclass(slots=True)
class _Progress:
    """A job under way. Guarded by the lock of its workers."""

    job: TierJob
    sequence: int
    num_left: int
    is_ended: bool = False
    done: list[bytes] = field(default_factory=list)
    failed: list[tuple[bytes, str]] = field(default_factory=list)


@dataclass(slots=True)
class _Task:
    """What a thread does in one go: a piece of a job, the deletions before a STORE, or a call."""

    kind: JobKind | None
    progress: _Progress | None = None
    piece: Piece | None = None  # None: the deletions that go before a STORE
    call: Callable[[], None] | None = None
    started: float = 0.0  # monotonic; 0 while it waits
    is_reported: bool = False  # ``overdue`` has told of it


class Workers:
    """A bounded number of daemon threads that do the jobs of one tier.

    Loads go before deletions, deletions before stores; each is first in, first out. The pieces of a job are spread over
    the threads. Jobs that share a key are not ordered: whoever needs an order waits for the first to end.
    """

    def __init__(
        self,
        name: str,
        num_threads: int,
        run: Callable[[JobKind, Piece, TierJob], str | None],
        on_result: Callable[[], None],
    ) -> None:
        """Start threads called ``qkvault-<name>-<n>``.

        ``run(kind, piece, job)`` does one piece of a job on one of them and returns None, or the reason why not; what a
        STORE deletes first comes as DELETE. What it raises is logged and counts as ``unavailable``. ``on_result()`` is
        called, without a lock, after a job has ended.
        """
        self._name = name
        self._run = run
        self._on_result = on_result
        self._lock = threading.Lock()  # guards all that follows, but for the deque
        self._has_work = threading.Condition(self._lock)
        self._is_idle = threading.Condition(self._lock)
        self._queue: list[tuple[int, int, int, _Task]] = []  # priority, sequence of the job, tie-breaker, task
        self._running: dict[int, _Task] = {}  # number of the thread -> what it does
        self._num_jobs = 0  # submitted and not ended
        self._sequence = 0
        self._is_closing = False
        self._log = RateLimited(_log, LOG_SECONDS)
        self._results: deque[JobResult] = deque()
        self._threads = [
            threading.Thread(target=self._work, args=(n,), name=f"qkvault-{name}-{n}", daemon=True)
            for n in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: TierJob) -> None:
        """Queue ``job``. Does not block. After ``close`` the job fails at once."""
        with self._lock:
            progress = self._begin(job)
            if self._is_closing:
                ended = self._fail(progress, UNAVAILABLE)
            elif job.delete_first:
                self._push(_Task(JobKind.DELETE, progress))
                ended = False
            else:
                ended = self._push_pieces(progress)
        self._announce(ended=ended)

    def fail(self, job: TierJob, reason: str) -> None:
        """End ``job`` without beginning it; all its pieces fail with ``reason``."""
        with self._lock:
            ended = self._fail(self._begin(job), reason)
        self._announce(ended=ended)

    def fail_waiting(self, *kinds: JobKind) -> None:
        """Fail the pieces of these kinds that no thread has begun. What a STORE deletes first goes all the same."""
        with self._lock:
            ended = self._fail_waiting(kinds)
        self._announce(ended=ended)

    def call(self, function: Callable[[], None]) -> None:
        """Have ``function()`` called by the next thread that is free, before all jobs. Dropped after ``close``."""
        with self._lock:
            if not self._is_closing:
                self._push(_Task(None, call=function))

    def poll(self) -> list[JobResult]:
        """Results of the jobs that ended since the last call. Does not block."""
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def overdue(self, deadlines: dict[JobKind | None, float]) -> tuple[set[JobKind | None], bool]:
        """Kinds of which a piece has now been running for longer than its deadline, in seconds; each piece told once.

        None stands for calls. The second value says whether every thread hangs so, and nothing else can be begun.
        """
        now = time.monotonic()
        with self._lock:
            late = [task for task in self._running.values() if now - task.started > deadlines[task.kind]]
            new = {task.kind for task in late if not task.is_reported}
            for task in late:
                task.is_reported = True
            return new, len(late) == len(self._threads)

    def drain(self, timeout_seconds: float) -> bool:
        """Block until every submitted job has ended, or the time is up. True if all have."""
        with self._lock:
            return self._is_idle.wait_for(lambda: self._num_jobs == 0, timeout_seconds)

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> bool:
        """Let running pieces end, fail the others, and join the threads. Idempotent.

        Blocks, but not for ever: False if a thread hangs in a call; it is then left behind, with the job it works on.
        """
        with self._lock:
            self._is_closing = True
            ended = self._fail_waiting(tuple(JobKind))
            self._queue.clear()
            self._has_work.notify_all()
        self._announce(ended=ended)
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hanging = [thread.name for thread in self._threads if thread.is_alive()]
        if hanging:
            _log.warning("closed_while_hanging", tier=self._name, threads=",".join(hanging))
        return not hanging

    def _work(self, number: int) -> None:
        while (task := self._take(number)) is not None:
            reason: str | None = UNAVAILABLE
            try:
                reason = self._do(task)
            except Exception:  # thread top: the piece counts as unavailable, the thread lives on
                self._log_unexpected(task)
            self._announce(ended=self._end(number, task, reason))
            del task  # an idle thread must not keep a slot's memory mapped

    def _take(self, number: int) -> _Task | None:
        with self._lock:
            self._has_work.wait_for(lambda: self._queue or self._is_closing)
            if not self._queue:
                return None
            task = heapq.heappop(self._queue)[-1]
            task.started = time.monotonic()
            self._running[number] = task
            return task

    def _do(self, task: _Task) -> str | None:
        if task.call is not None:
            task.call()
        elif task.progress is not None:
            job = task.progress.job
            if task.piece is not None:
                return self._run(job.kind, task.piece, job)
            return self._delete_first(job)
        return None

    def _delete_first(self, job: TierJob) -> str | None:
        # All of it, also after one has failed: the store counts each as gone. Returns the first reason why not.
        first = None
        for key in job.delete_first:
            reason = self._run(JobKind.DELETE, Piece(key, memoryview(b"")), job)
            first = first or (reason if reason != ABSENT else None)
        return first

    def _end(self, number: int, task: _Task, reason: str | None) -> bool:
        with self._lock:
            del self._running[number]
            progress = task.progress
            if progress is None or progress.is_ended:
                return False
            if task.piece is not None:
                return self._end_piece(progress, task.piece, reason)
            if reason is not None or self._is_closing:
                return self._fail(progress, reason or UNAVAILABLE)
            return self._push_pieces(progress)

    # The methods below are called with the lock held. Those that return a bool tell whether a job has ended.

    def _begin(self, job: TierJob) -> _Progress:
        self._num_jobs += 1
        self._sequence += 1
        return _Progress(job, self._sequence, len(job.pieces))

    def _push(self, task: _Task) -> None:
        priority = 0 if task.kind is None else _PRIORITY[task.kind]
        self._sequence += 1
        order = task.progress.sequence if task.progress is not None else self._sequence
        heapq.heappush(self._queue, (priority, order, self._sequence, task))
        self._has_work.notify()

    def _push_pieces(self, progress: _Progress) -> bool:
        for piece in progress.job.pieces:
            self._push(_Task(progress.job.kind, progress, piece))
        return self._end_job(progress)

    def _fail(self, progress: _Progress, reason: str) -> bool:
        progress.failed += [(piece.key, reason) for piece in progress.job.pieces]
        progress.num_left = 0
        return self._end_job(progress)

    def _fail_waiting(self, kinds: tuple[JobKind, ...]) -> bool:
        ended = False
        kept = []
        for item in self._queue:
            task = item[-1]
            if task.progress is None or task.progress.job.kind not in kinds:
                kept.append(item)
            elif task.piece is None:
                kept.append(item)
                ended |= not task.progress.is_ended and self._fail(task.progress, UNAVAILABLE)
            else:
                ended |= self._end_piece(task.progress, task.piece, UNAVAILABLE)
        heapq.heapify(kept)
        self._queue = kept
        return ended

    def _end_piece(self, progress: _Progress, piece: Piece, reason: str | None) -> bool:
        if reason is None:
            progress.done.append(piece.key)
        else:
            progress.failed.append((piece.key, reason))
        progress.num_left -= 1
        return self._end_job(progress)

    def _end_job(self, progress: _Progress) -> bool:
        if progress.num_left:
            return False
        self._results.append(JobResult(progress.job.job_id, tuple(progress.done), tuple(progress.failed)))
        progress.is_ended = True
        self._num_jobs -= 1
        if not self._num_jobs:
            self._is_idle.notify_all()
        return True

    # The methods below are called without it.

    def _announce(self, *, ended: bool) -> None:
        if not ended:
            return
        try:
            self._on_result()
        except Exception:  # thread top: a caller's fault must not cost us a thread
            self._log_unexpected(None)

    def _log_unexpected(self, task: _Task | None) -> None:
        job_id = task.progress.job.job_id if task is not None and task.progress is not None else None
        self._log.warning("worker_failed", tier=self._name, job=job_id, error=traceback.format_exc(limit=-3))


class Health:
    """Whether one direction of a tier works: a circuit breaker that logs a line when it opens and one when it closes.

    While it is down, the tier fails that direction's work at once and probes now and then. Any thread may call.
    """

    def __init__(self, tier: str, what: str, probe_seconds: float) -> None:
        """Start up. ``tier`` and ``what`` appear in the log; ``probe_seconds`` lie between two probes."""
        self._fields = {"tier": tier, "what": what}
        self._probe_seconds = probe_seconds
        self._lock = threading.Lock()  # guards all that follows
        self._problem: str | None = None
        self._next_probe = 0.0  # monotonic
        self._last_log = -LOG_SECONDS  # monotonic; flapping is not told each time
        self._is_logged = False  # this time of being down is

    @property
    def problem(self) -> str | None:
        """Why it is down, for people; None while it is up."""
        return self._problem

    @property
    def is_up(self) -> bool:
        """Whether work may be tried."""
        return self._problem is None

    def report(self, problem: str) -> None:
        """It does not work, or still does not, because of ``problem``."""
        now = time.monotonic()
        with self._lock:
            self._problem = problem
            self._next_probe = now + self._probe_seconds
            is_line = not self._is_logged and now - self._last_log >= LOG_SECONDS
            if is_line:
                self._is_logged, self._last_log = True, now
        if is_line:
            _log.warning("tier_unavailable", **self._fields, problem=problem)

    def recover(self) -> None:
        with self._lock:
            is_line, self._is_logged, self._problem = self._is_logged, False, None
        if is_line:
            _log.info("tier_available", **self._fields)

    def hasten(self) -> None:
        """Something has changed for the better: let the next probe be due now."""
        with self._lock:
            self._next_probe = 0.0

    def claim_probe(self) -> bool:
        """Whether it is down and a probe is due; the one who is told so makes it."""
        with self._lock:
            now = time.monotonic()
            if self._problem is None or now < self._next_probe:
                return False
            self._next_probe = now + self._probe_seconds
            return True
