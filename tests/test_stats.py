"""The numbers of an engine: exact after a known scenario, and never wrong in kind whatever they are given."""

from __future__ import annotations

import io
import logging
import sys
import threading
import timeit
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkvault import logs
from qkvault.stats import CHUNK_OUTCOMES, MEDIA, OPERATIONS, STAGES, OperationStats, StageStats, StatsMonitor
from qkvault.types import Medium, Outcome


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock():
    """A clock that stands still."""
    return Clock()


@pytest.fixture
def monitor(clock):
    """A monitor on that clock."""
    return StatsMonitor(clock=clock)


@pytest.fixture
def log_stream():
    """What is logged at the default level; the process is left as it was."""
    logger = logging.getLogger("qkvault")
    before = logger.handlers[:], logger.level, logger.propagate
    stream = io.StringIO()
    logs.configure("info", stream)
    yield stream
    logger.handlers[:], logger.level, logger.propagate = before


def numbers_of(stats) -> list[float]:
    """Every number of a snapshot."""
    found = []
    todo = list(msgspec.to_builtins(stats).values())
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            todo += value.values()
        else:
            found.append(value)
    return found


def test_everything_is_there_at_zero_from_the_start(monitor):
    """Every operation, stage, medium and outcome has its zeros before anything happens."""
    stats = monitor.snapshot()
    assert stats.operations == dict.fromkeys(OPERATIONS, OperationStats())
    assert stats.stages == dict.fromkeys(STAGES, StageStats())
    assert stats.found_tokens == dict.fromkeys(MEDIA, 0)
    assert stats.chunks == dict.fromkeys(CHUNK_OUTCOMES, 0)
    assert set(numbers_of(stats)) == {0}


def test_the_stages_are_those_of_the_data_path():
    """The stages are timed by the names the reference gave them, and the lookup (B 56)."""
    assert set(STAGES) == {"process_tokens", "from_gpu", "put", "get", "to_gpu", "lookup"}


def test_outcomes_are_those_of_the_store():
    """Every outcome that the store can give has a counter; a reserved chunk ends as stored or failed."""
    assert set(CHUNK_OUTCOMES) == {outcome.value for outcome in Outcome} - {"reserved"} | {"stored", "failed"}
    assert list(MEDIA) == [medium.value for medium in Medium]


def test_a_known_scenario_gives_exact_numbers(monitor, clock):
    """Asked, found, loaded and failed are separate numbers, each counted at its own step (B 56)."""
    lookup = monitor.on_lookup_request(2790)
    clock.advance(0.25)
    monitor.on_lookup_finished(lookup, {"ram": 2048, Medium.DISK: 512})
    retrieve = monitor.on_retrieve_request(2560)
    clock.advance(0.5)
    monitor.on_retrieve_finished(
        retrieve, num_tokens=2048, num_bytes=2048 * 1000, num_failed_tokens=256, num_voided_tokens=256
    )
    store = monitor.on_store_request(742)
    clock.advance(2)
    monitor.on_store_finished(
        store, num_tokens=512, num_bytes=512_000, chunks={"stored": 2, Outcome.PRESENT: 1, "no_room": 1}
    )
    stats = monitor.snapshot()
    assert stats.operations == {
        "lookup": OperationStats(requests=1, finished=1, seconds=0.25, tokens=2790),
        "retrieve": OperationStats(requests=1, finished=1, seconds=0.5, tokens=2560),
        "store": OperationStats(requests=1, finished=1, seconds=2, tokens=742),
    }
    assert stats.found_tokens == {"ram": 2048, "disk": 512, "remote": 0}
    assert (stats.loaded_tokens, stats.failed_tokens, stats.voided_tokens, stats.failed_loads) == (2048, 256, 256, 1)
    assert (stats.loaded_bytes, stats.stored_bytes, stats.stored_tokens) == (2_048_000, 512_000, 512)
    assert stats.chunks == dict.fromkeys(CHUNK_OUTCOMES, 0) | {"stored": 2, "present": 1, "no_room": 1}
    assert stats.rejected_updates == 0


def test_a_failed_load_is_never_a_hit(monitor):
    """What was found and could not be loaded counts as failed; the tokens loaded stay what they were."""
    request = monitor.on_retrieve_request(256)
    monitor.on_retrieve_finished(request, num_failed_tokens=256)
    stats = monitor.snapshot()
    assert (stats.loaded_tokens, stats.loaded_bytes, stats.failed_tokens, stats.failed_loads) == (0, 0, 256, 1)


def test_a_store_that_failed_is_not_a_store(monitor):
    """Chunks whose copy failed are counted apart, and add no tokens or bytes."""
    request = monitor.on_store_request(512)
    monitor.on_store_finished(request, chunks={"failed": 2})
    stats = monitor.snapshot()
    assert (stats.chunks["failed"], stats.chunks["stored"], stats.stored_tokens, stats.stored_bytes) == (2, 0, 0, 0)


def test_a_round_trip_counts_bytes_both_ways(monitor):
    """Bytes are counted going in and coming out: after one round trip they are equal, and above 0."""
    store = monitor.on_store_request(256)
    with monitor.stage("from_gpu", 4096, num_tokens=256):
        pass
    monitor.on_store_finished(store, num_tokens=256, num_bytes=4096, chunks={"stored": 1})
    retrieve = monitor.on_retrieve_request(256)
    with monitor.stage("to_gpu", 4096, num_tokens=256):
        pass
    monitor.on_retrieve_finished(retrieve, num_tokens=256, num_bytes=4096)
    stats = monitor.snapshot()
    assert stats.stored_bytes == stats.loaded_bytes == 4096
    assert stats.stages["from_gpu"].bytes == stats.stages["to_gpu"].bytes == 4096


def test_a_stage_knows_its_time_and_rate(monitor, clock):
    """Seconds, tokens, bytes and GB/s of each stage, and each stage for itself (B 56)."""
    for _ in range(2):
        with monitor.stage("from_gpu", 3_000_000_000, num_tokens=256):
            clock.advance(0.5)
    stats = monitor.snapshot()
    assert stats.stages["from_gpu"] == StageStats(calls=2, seconds=1.0, tokens=512, bytes=6_000_000_000)
    assert stats.stages["from_gpu"].gb_per_second == pytest.approx(6.0)
    assert stats.stages["put"] == StageStats()
    assert stats.stages["put"].gb_per_second == 0


def test_bytes_may_be_told_within_the_stage(monitor):
    """How much a stage moved is often known only when it has."""
    with monitor.stage("get") as stage:
        stage.num_bytes, stage.num_tokens = 100, 16
    assert (monitor.snapshot().stages["get"].bytes, monitor.snapshot().stages["get"].tokens) == (100, 16)


def test_a_stage_that_raises_counts_as_failed(monitor, clock):
    """The error passes through; its time is counted, its bytes are not."""

    def put():
        with monitor.stage("put", 4096, num_tokens=16):
            clock.advance(1)
            Path("/nowhere/at/all").stat()

    with pytest.raises(FileNotFoundError):
        put()
    assert monitor.snapshot().stages["put"] == StageStats(calls=1, failures=1, seconds=1.0)


def test_a_stage_timed_elsewhere_is_counted_alike(monitor):
    """A copy on a device is timed by events, not by a context."""
    monitor.on_stage("to_gpu", 0.5, num_bytes=100, num_tokens=16)
    monitor.on_stage("to_gpu", 0.5, num_bytes=100, num_tokens=16, failed=True)
    assert monitor.snapshot().stages["to_gpu"] == StageStats(calls=2, failures=1, seconds=1.0, tokens=16, bytes=100)


def test_requests_under_way_can_be_seen(monitor):
    """Begun and finished are counted apart."""
    monitor.on_store_request(16)
    request = monitor.on_store_request(16)
    monitor.on_store_finished(request)
    operation = monitor.snapshot().operations["store"]
    assert (operation.requests, operation.finished) == (2, 1)


def test_a_request_finishes_once(monitor):
    """Never more requests end than began."""
    request = monitor.on_store_request(16)
    for _ in range(3):
        monitor.on_store_finished(request, num_tokens=16)
    stats = monitor.snapshot()
    assert (stats.operations["store"].finished, stats.stored_tokens, stats.rejected_updates) == (1, 16, 2)


def test_a_snapshot_stays_as_it_was(monitor):
    """A snapshot is a value: it is frozen, and later updates do not reach it."""
    before = monitor.snapshot()
    monitor.on_stage("put", 1.0, num_bytes=1)
    monitor.on_lookup_finished(monitor.on_lookup_request(1), {"ram": 1})
    assert before == StatsMonitor().snapshot()
    with pytest.raises(AttributeError):
        before.loaded_tokens = 1


def test_looking_changes_nothing(monitor):
    """While nothing happens two snapshots are equal."""
    monitor.on_stage("put", 1.0, num_bytes=1)
    assert monitor.snapshot() == monitor.snapshot()


def test_two_monitors_share_nothing():
    """A monitor is its engine's own, not the process's (B 56)."""
    one, other = StatsMonitor(), StatsMonitor()
    one.on_store_request(256)
    assert other.snapshot() == StatsMonitor().snapshot()


NONSENSE = [-1, -0.5, float("nan"), float("inf"), -float("inf"), None, "many", [1], np.arange(3)]


@pytest.mark.parametrize("amount", NONSENSE, ids=repr)
def test_an_amount_that_makes_no_sense_changes_nothing(monitor, clock, amount):
    """Negative, infinite and foreign amounts never raise and never count, except as rejected."""
    before = monitor.snapshot()
    monitor.on_stage("put", 1.0, num_bytes=amount)
    monitor.on_stage("put", 1.0, num_tokens=amount)
    monitor.on_stage("put", amount, num_bytes=1)
    monitor.on_store_request(amount)
    assert monitor.snapshot() == msgspec.structs.replace(before, rejected_updates=4)


@pytest.mark.parametrize("amount", NONSENSE[:7], ids=repr)
def test_a_finish_that_makes_no_sense_changes_nothing(monitor, amount):
    """All numbers of one update count, or none."""
    requests = [monitor.on_lookup_request(1), monitor.on_store_request(1), monitor.on_retrieve_request(1)]
    before = monitor.snapshot()
    monitor.on_lookup_finished(requests[0], {"ram": 1, "disk": amount})
    monitor.on_store_finished(requests[1], num_tokens=1, num_bytes=amount)
    monitor.on_store_finished(requests[1], num_tokens=1, chunks={"stored": amount})
    monitor.on_retrieve_finished(requests[2], num_tokens=amount, num_bytes=1)
    assert monitor.snapshot() == msgspec.structs.replace(before, rejected_updates=4)


def test_an_unknown_name_changes_nothing(monitor):
    """A stage, medium or outcome that does not exist is rejected, not invented."""
    lookup, store = monitor.on_lookup_request(1), monitor.on_store_request(1)
    before = monitor.snapshot()
    monitor.on_stage("nowhere", 1.0)
    monitor.on_lookup_finished(lookup, {"tape": 1})
    monitor.on_store_finished(store, chunks={"reserved": 1})
    assert monitor.snapshot() == msgspec.structs.replace(before, rejected_updates=3)


def test_a_clock_that_goes_back_gives_no_negative_time(monitor, clock):
    """Time that runs backwards is rejected like any other nonsense."""
    request = monitor.on_store_request(16)
    with monitor.stage("put"):
        clock.advance(-5)
    monitor.on_store_finished(request, num_tokens=16)
    stats = monitor.snapshot()
    assert stats.rejected_updates == 2
    assert min(numbers_of(stats)) == 0


def test_numpys_numbers_become_plain_ones(monitor):
    """A snapshot holds Python's int and float only, whatever was counted."""
    monitor.on_stage("put", np.float64(0.5), num_bytes=np.int64(4096), num_tokens=np.int32(16))
    request = monitor.on_lookup_request(np.int64(16))
    monitor.on_lookup_finished(request, {"ram": np.int64(16)})
    stats = monitor.snapshot()
    assert stats.stages["put"] == StageStats(calls=1, seconds=0.5, tokens=16, bytes=4096)
    assert {type(number) for number in numbers_of(stats)} == {int, float}


amounts = st.one_of(st.integers(-100, 10**12), st.floats(), st.none())


@given(st.lists(st.tuples(st.sampled_from([*STAGES, "nowhere"]), amounts, amounts, amounts, st.booleans())))
def test_numbers_only_rise(updates):
    """Whatever the updates, nothing raises, no number falls, and every update counts or is rejected."""
    monitor = StatsMonitor()
    before = monitor.snapshot()
    for name, seconds, num_bytes, num_tokens, failed in updates:
        monitor.on_stage(name, seconds, num_bytes=num_bytes, num_tokens=num_tokens, failed=failed)
        after = monitor.snapshot()
        assert all(new >= old for new, old in zip(numbers_of(after), numbers_of(before), strict=True))
        before = after
    assert sum(stage.calls for stage in before.stages.values()) + before.rejected_updates == len(updates)


def test_threads_lose_no_update(monitor):
    """Updates from several threads all count."""

    def work():
        for _ in range(500):
            monitor.on_stage("put", 0.001, num_bytes=3)
            monitor.on_store_finished(monitor.on_store_request(2), num_tokens=2, chunks={"stored": 1})

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    stats = monitor.snapshot()
    assert (stats.stages["put"].calls, stats.stages["put"].bytes) == (2000, 6000)
    assert (stats.operations["store"].finished, stats.stored_tokens, stats.chunks["stored"]) == (2000, 4000, 2000)
    assert stats.rejected_updates == 0


def test_an_update_is_cheap():
    """An update costs about a microsecond, so that counting is never the reason to count less."""
    monitor = StatsMonitor()
    best_seconds = min(timeit.repeat(lambda: monitor.on_stage("put", 0.001, num_bytes=1), number=2000, repeat=7)) / 2000
    assert best_seconds < 10e-6  # ten times what it takes, for a busy machine


def test_a_finished_request_logs_its_rate(log_stream, monitor, clock):
    """GB/s of a store and of a retrieve are logged at DEBUG (B 56)."""
    logging.getLogger("qkvault").setLevel("DEBUG")
    store, retrieve = monitor.on_store_request(512), monitor.on_retrieve_request(512)
    clock.advance(0.5)
    monitor.on_store_finished(store, num_tokens=512, num_bytes=10**9, chunks={"stored": 2})
    monitor.on_retrieve_finished(retrieve, num_tokens=256, num_bytes=5 * 10**8)
    lines = log_stream.getvalue().splitlines()
    assert [line.partition("qkvault.stats ")[2] for line in lines] == [
        "store_finished asked=512 tokens=512 bytes=1000000000 seconds=0.5 gb_per_second=2",
        "retrieve_finished asked=512 tokens=256 bytes=500000000 seconds=0.5 gb_per_second=1",
    ]


def test_a_thousand_requests_are_silent_at_the_default_level(log_stream, monitor):
    """Requests write no line at INFO, so that traffic never floods a log."""
    for _ in range(1000):
        monitor.on_lookup_finished(monitor.on_lookup_request(256), {"ram": 256})
        monitor.on_store_finished(monitor.on_store_request(256), num_tokens=256)
        monitor.on_retrieve_finished(monitor.on_retrieve_request(256), num_tokens=0, num_failed_tokens=256)
    assert log_stream.getvalue() == ""


def test_no_line_has_a_negative_count(log_stream, monitor):
    """Amounts that make no sense are not logged either."""
    logging.getLogger("qkvault").setLevel("DEBUG")
    monitor.on_retrieve_finished(monitor.on_retrieve_request(16), num_tokens=-256)
    monitor.on_store_finished(monitor.on_store_request(-16), num_tokens=16)
    assert "=-" not in log_stream.getvalue()


def test_the_number_of_updates_tells_whether_there_is_news(monitor):
    """Whatever changes a snapshot raises it, refused updates too, and looking does not."""
    seen = [monitor.num_updates]
    store = monitor.on_store_request(4)
    seen.append(monitor.num_updates)
    monitor.on_store_finished(store, num_tokens=4)
    seen.append(monitor.num_updates)
    monitor.on_stage("put", 0.5)
    seen.append(monitor.num_updates)
    monitor.on_stage("nonsense", 0.5)
    seen.append(monitor.num_updates)
    assert seen == sorted(set(seen))
    monitor.snapshot()
    assert monitor.num_updates == seen[-1]
