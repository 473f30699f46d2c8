"""Tiers that wrap a tier and make it slow or wrong. The tier inside knows nothing of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from qkvault.tiers.base import Found, JobKind, JobResult, Tier, TierCounters, TierJob

_WAIT_SECONDS: Final = 0.005  # between two looks while draining


class WrapperTier(Tier):
    """Does what ``inner`` does. Subclasses change a method or two; results pass through ``pass_on``."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name, self.medium, self.capacity_bytes = inner.name, inner.medium, inner.capacity_bytes
        self.jobs: dict[int, TierJob] = {}  # submitted and not returned
        self._held: list[JobResult] = []  # results of the inner tier that are not returned yet
        inner.notify(self.tell)

    def stored_bytes(self, image_bytes: int) -> int:
        return self.inner.stored_bytes(image_bytes)

    def submit(self, job: TierJob) -> None:
        self.jobs[job.job_id] = job
        self.inner.submit(job)

    def poll(self) -> list[JobResult]:
        self._held += self.inner.poll()
        held, self._held = self._held, []
        results = self.pass_on(held)
        for result in results:
            del self.jobs[result.job_id]
        return results

    def pass_on(self, results: list[JobResult]) -> list[JobResult]:
        """What ``poll`` returns of ``results``, which are new or were kept. What is appended to ``_held`` is kept."""
        return results

    def tell(self) -> None:
        """Call whoever has asked to be notified."""
        self.on_result()

    def scan(self) -> Iterator[Sequence[Found]]:
        return self.inner.scan()

    def contains(self, key: bytes) -> bool | None:
        return self.inner.contains(key)

    def find(self, keys: Sequence[bytes]) -> list[Found]:
        return self.inner.find(keys)

    def sample(self) -> list[Found]:
        return self.inner.sample()

    def purge(self) -> int:
        return self.inner.purge()

    @property
    def is_healthy(self) -> bool:
        return self.inner.is_healthy

    @property
    def can_store(self) -> bool:
        return self.is_healthy and self.inner.can_store

    @property
    def num_losses(self) -> int:
        return self.inner.num_losses

    @property
    def counters(self) -> TierCounters:
        return self.inner.counters

    def drain(self, timeout_seconds: float) -> bool:
        return self.inner.drain(timeout_seconds)

    def close(self) -> None:
        self.inner.close()


class LatencyTier(WrapperTier):
    """Returns each result ``seconds`` after the inner tier did, or later."""

    def __init__(self, inner: Tier, seconds: float) -> None:
        super().__init__(inner)
        self.seconds = seconds
        self._due: dict[int, float] = {}  # job -> monotonic time of its return
        self._timers: list[threading.Timer] = []

    def pass_on(self, results: list[JobResult]) -> list[JobResult]:
        now = self._stamp(results)
        self._held += [result for result in results if self._due[result.job_id] > now]
        due = [result for result in results if self._due[result.job_id] <= now]
        for result in due:
            del self._due[result.job_id]
        return due

    def drain(self, timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        if not self.inner.drain(timeout_seconds):
            return False
        self._held += self.inner.poll()
        now = self._stamp(self._held)
        last = max((self._due[result.job_id] for result in self._held), default=0.0)
        time.sleep(max(0.0, min(last, deadline) - now))
        return last <= deadline

    def close(self) -> None:
        super().close()
        for timer in self._timers:
            timer.cancel()
            timer.join()

    def _stamp(self, results: list[JobResult]) -> float:
        now = time.monotonic()
        for result in results:
            if result.job_id not in self._due:
                self._due[result.job_id] = now + self.seconds
                self._tell_later()
        return now

    def _tell_later(self) -> None:
        timer = threading.Timer(self.seconds, self.tell)
        timer.daemon = True
        self._timers = [t for t in self._timers if t.is_alive()] + [timer]
        timer.start()


class FaultyTier(WrapperTier):
    """Fails in the ways that tiers fail, when told to.

    - ``fail_every_load``: every n-th piece of a LOAD fails with ``fail_reason``, whatever the inner tier says
    - ``is_mute``: nothing is returned, until it is false again
    - ``has_vanished``: unhealthy; jobs fail at once, until it is false again
    """

    def __init__(self, inner: Tier, *, fail_every_load: int = 0, fail_reason: str = "unavailable") -> None:
        super().__init__(inner)
        self.fail_every_load = fail_every_load
        self.fail_reason = fail_reason
        self.is_mute = False
        self.has_vanished = False
        self._num_loads = 0

    def submit(self, job: TierJob) -> None:
        if not self.has_vanished:
            super().submit(job)
            return
        self.jobs[job.job_id] = job
        self._held.append(JobResult(job.job_id, (), tuple((piece.key, "unavailable") for piece in job.pieces)))
        self.on_result()

    def pass_on(self, results: list[JobResult]) -> list[JobResult]:
        if self.is_mute:
            self._held += results
            return []
        return [self._spoil(result) if self.jobs[result.job_id].kind is JobKind.LOAD else result for result in results]

    def contains(self, key: bytes) -> bool | None:
        return None if self.has_vanished else self.inner.contains(key)

    @property
    def is_healthy(self) -> bool:
        return not self.has_vanished and self.inner.is_healthy

    def drain(self, timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        while self.is_mute and self.jobs:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_WAIT_SECONDS)
        return self.inner.drain(max(0.0, deadline - time.monotonic()))

    def release(self) -> None:
        """Stop being mute, and tell that results are there."""
        self.is_mute = False
        self.on_result()

    def _spoil(self, result: JobResult) -> JobResult:
        done, failed = [], list(result.failed)
        for key in result.done:
            self._num_loads += 1
            if self.fail_every_load and self._num_loads % self.fail_every_load == 0:
                failed.append((key, self.fail_reason))
            else:
                done.append(key)
        return msgspec.structs.replace(result, done=tuple(done), failed=tuple(failed))
