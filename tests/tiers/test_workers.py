"""The threads of a tier: order, parallelism, failures and ends; and the circuit breaker."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager

import pytest

from qkvault.tiers.base import JobKind, JobResult, Piece, TierJob
from qkvault.tiers.workers import ABSENT, UNAVAILABLE, Health, Workers

STORE, LOAD, DELETE = JobKind.STORE, JobKind.LOAD, JobKind.DELETE
WAIT_SECONDS = 20.0


def job(job_id, kind, *keys, delete_first=()):
    return TierJob(job_id, kind, tuple(Piece(key, memoryview(bytearray(8))) for key in keys), delete_first)


@contextmanager
def working(run, num_threads=1, on_result=lambda: None):
    workers = Workers("test", num_threads, run, on_result)
    try:
        yield workers
    finally:
        workers.close()


def settle(workers):
    assert workers.drain(WAIT_SECONDS)
    return {result.job_id: result for result in workers.poll()}


class Recorder:
    """A ``run`` that writes down what it was asked; what concerns the key ``hold`` waits at the gate."""

    def __init__(self, gate):
        self.gate = gate
        self.calls = []

    def __call__(self, kind, piece, job):
        if piece.key == b"hold":
            self.gate.pass_through()
        else:
            self.calls.append((kind, piece.key))

    def hold(self, workers):
        """Occupy a thread until the gate is opened."""
        workers.submit(job(0, LOAD, b"hold"))
        self.gate.wait_for()


@pytest.fixture
def recorder(gate):
    return Recorder(gate)


def test_loads_go_before_deletions_before_stores(recorder, gate):
    with working(recorder) as workers:
        recorder.hold(workers)
        for n, kind in enumerate([STORE, DELETE, LOAD, STORE, DELETE, LOAD], 1):
            workers.submit(job(n, kind, b"%d" % n, b"%d+" % n))
        gate.open()
        settle(workers)
    assert recorder.calls == [
        (LOAD, b"3"), (LOAD, b"3+"), (LOAD, b"6"), (LOAD, b"6+"),
        (DELETE, b"2"), (DELETE, b"2+"), (DELETE, b"5"), (DELETE, b"5+"),
        (STORE, b"1"), (STORE, b"1+"), (STORE, b"4"), (STORE, b"4+"),
    ]  # fmt: skip


def test_an_early_store_keeps_its_place_when_it_first_deletes(recorder, gate):
    with working(recorder) as workers:
        recorder.hold(workers)
        workers.submit(job(1, STORE, b"1", delete_first=(b"old",)))
        workers.submit(job(2, STORE, b"2"))
        gate.open()
        settle(workers)
    assert recorder.calls == [(DELETE, b"old"), (STORE, b"1"), (STORE, b"2")]


def test_the_pieces_of_a_job_run_at_the_same_time():
    barrier = threading.Barrier(4)

    def run(kind, piece, job):
        barrier.wait(WAIT_SECONDS)

    with working(run, num_threads=4) as workers:
        workers.submit(job(1, LOAD, b"a", b"b", b"c", b"d"))
        assert set(settle(workers)[1].done) == {b"a", b"b", b"c", b"d"}


def test_no_piece_begins_before_the_deletions_have_ended():
    calls, lock = [], threading.Lock()

    def run(kind, piece, job):
        with lock:
            calls.append(kind)
        return ABSENT if kind is DELETE else None

    with working(run, num_threads=4) as workers:
        for n in range(20):
            calls.clear()
            workers.submit(job(n, STORE, b"a", b"b", b"c", delete_first=(b"x", b"y")))
            assert len(settle(workers)[n].done) == 3
            assert calls == [DELETE] * 2 + [STORE] * 3


def test_nothing_is_stored_when_room_could_not_be_made():
    with working(lambda kind, piece, job: UNAVAILABLE if kind is DELETE else None) as workers:
        workers.submit(job(1, STORE, b"a", b"b", delete_first=(b"x", b"y")))
        assert settle(workers)[1] == JobResult(1, (), ((b"a", UNAVAILABLE), (b"b", UNAVAILABLE)))


def test_a_job_without_pieces_ends():
    with working(lambda kind, piece, job: None) as workers:
        workers.submit(job(1, LOAD))
        workers.submit(job(2, STORE, delete_first=(b"x",)))
        assert settle(workers) == {1: JobResult(1, ()), 2: JobResult(2, ())}


def test_an_exception_fails_its_piece_and_not_its_thread(caplog):
    def run(kind, piece, job):
        if piece.key.startswith(b"bad"):
            msg = "out of order"
            raise RuntimeError(msg)

    with working(run) as workers:
        workers.submit(job(1, LOAD, b"bad", b"good", b"bad too"))
        result = settle(workers)[1]
    assert result.done == (b"good",)
    assert result.failed == ((b"bad", UNAVAILABLE), (b"bad too", UNAVAILABLE))
    (record,) = caplog.records
    assert "out of order" in record.getMessage()
    assert "job=1" in record.getMessage()


def test_a_fault_of_whoever_is_told_costs_no_thread(caplog):
    with working(lambda kind, piece, job: None, on_result=lambda: 1 / 0) as workers:
        for n in range(3):
            workers.submit(job(n, LOAD, b"a"))
        assert len(settle(workers)) == 3
    assert len(caplog.records) == 1


def test_close_lets_running_pieces_end_and_fails_the_others(recorder, gate):
    with working(recorder) as workers:
        recorder.hold(workers)
        workers.submit(job(1, LOAD, b"a", b"b"))
        workers.submit(job(2, STORE, b"c", delete_first=(b"d",)))
        closing = threading.Thread(target=workers.close)
        closing.start()
        gate.open()
        closing.join(WAIT_SECONDS)
        results = {result.job_id: result for result in workers.poll()}
    assert results[0].done == (b"hold",)
    assert results[1].failed == ((b"a", UNAVAILABLE), (b"b", UNAVAILABLE))
    assert results[2].failed == ((b"c", UNAVAILABLE),)
    assert recorder.calls == []


def test_after_close_jobs_fail_at_once(recorder):
    with working(recorder) as workers:
        assert workers.close()
        workers.submit(job(1, STORE, b"a", delete_first=(b"b",)))
        workers.call(lambda: recorder.calls.append("called"))
        assert settle(workers)[1].failed == ((b"a", UNAVAILABLE),)
        assert recorder.calls == []


def test_close_does_not_wait_for_ever(recorder, gate, caplog):
    with working(recorder) as workers:
        recorder.hold(workers)
        assert not workers.close(timeout_seconds=0.01)
        assert "qkvault-test-0" in caplog.text
        assert not workers.drain(0.0)
        gate.open()
        assert workers.close()


def test_waiting_pieces_can_be_failed_but_not_deletions(recorder, gate):
    with working(recorder) as workers:
        recorder.hold(workers)
        workers.submit(job(1, STORE, b"a", delete_first=(b"x",)))
        workers.submit(job(2, STORE, b"b"))
        workers.submit(job(3, LOAD, b"c"))
        workers.submit(job(4, DELETE, b"d"))
        workers.fail_waiting(LOAD, STORE)
        assert {result.job_id: result.failed for result in workers.poll()} == {
            1: ((b"a", UNAVAILABLE),), 2: ((b"b", UNAVAILABLE),), 3: ((b"c", UNAVAILABLE),),
        }  # fmt: skip
        gate.open()
        assert set(settle(workers)) == {0, 4}
    assert recorder.calls == [(DELETE, b"x"), (DELETE, b"d")]


def test_a_call_goes_before_all_jobs(recorder, gate):
    with working(recorder) as workers:
        recorder.hold(workers)
        workers.submit(job(1, LOAD, b"a"))
        workers.call(lambda: recorder.calls.append("called"))
        gate.open()
        settle(workers)
    assert recorder.calls == ["called", (LOAD, b"a")]


def test_what_is_overdue_is_told_once(recorder, gate):
    deadlines = {LOAD: 0.0, STORE: 1e9, DELETE: 1e9, None: 1e9}
    with working(recorder, num_threads=2) as workers:
        assert workers.overdue(deadlines) == (set(), False)
        recorder.hold(workers)
        assert workers.overdue(deadlines) == ({LOAD}, False)
        assert workers.overdue(deadlines) == (set(), False)
        workers.submit(job(9, STORE, b"hold"))
        gate.wait_for(2)
        assert workers.overdue(deadlines | {STORE: 0.0}) == ({STORE}, True)
        assert workers.overdue(deadlines | {STORE: 0.0}) == (set(), True)
        gate.open()
        settle(workers)
        assert workers.overdue(deadlines) == (set(), False)


def test_an_idle_thread_holds_no_slot():
    buffer = bytearray(8)
    with working(lambda kind, piece, job: None) as workers:
        workers.submit(TierJob(1, LOAD, (Piece(b"a", memoryview(buffer)),)))
        settle(workers)
        done = threading.Event()
        workers.call(done.set)
        assert done.wait(WAIT_SECONDS)
        buffer.append(0)  # a BufferError while anybody looks at it


class TestHealth:
    @pytest.fixture(autouse=True)
    def _log(self, caplog):
        caplog.set_level(logging.INFO)

    def test_each_change_is_one_line(self, caplog):
        health = Health("disk", "writing", 100.0)
        assert health.is_up
        for _ in range(3):
            health.report("No space left on device")
        assert (health.is_up, health.problem) == (False, "No space left on device")
        health.recover()
        health.recover()
        assert health.is_up
        assert [record.getMessage() for record in caplog.records] == [
            'tier_unavailable tier=disk what=writing problem="No space left on device"',
            "tier_available tier=disk what=writing",
        ]

    def test_flapping_is_not_told_each_time(self, caplog):
        health = Health("disk", "writing", 100.0)
        for _ in range(10):
            health.report("no")
            health.recover()
        assert len(caplog.records) == 2

    def test_a_probe_is_due_once_in_a_while(self):
        health = Health("disk", "reading", 100.0)
        assert not health.claim_probe()
        health.report("no")
        assert not health.claim_probe()
        health.hasten()
        assert health.claim_probe()
        assert not health.claim_probe()
