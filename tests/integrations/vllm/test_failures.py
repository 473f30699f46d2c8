"""Loads that fail, stores that are gone or mute: vLLM computes what is missing, and nothing else happens."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from qkvault.testing.transport_contract import until

pytestmark = pytest.mark.vllm

ALL = pytest.mark.parametrize(
    "options",
    [
        {"runner": 1},
        {"runner": 1, "asynchronous": True},
        {"runner": 2},
        {"runner": 2, "asynchronous": True, "is_late": True},
        {"runner": 1, "num_drafts": 3},
    ],
    ids=["runner 1", "runner 1, async", "runner 2", "runner 2, async", "drafts"],
)


class Damage:
    """Makes chunks of every load unreadable, and keeps what the worker then said of it."""

    def __init__(self, engine, *which: int) -> None:
        self.engine, self.which = engine, which
        self.reports = []  # (blocks that failed, requests that were told to be loaded)
        self.expected = set()
        engine.on_plan = self
        finished, failed = engine.worker.get_finished, engine.worker.get_block_ids_with_load_errors
        received = []

        def get_finished(ids):
            received.append(finished(ids))
            return received[-1]

        def get_failed():
            self.reports.append((failed(), received[-1][1] or set()))
            return self.reports[-1][0]

        engine.worker.get_finished = get_finished
        engine.worker.get_block_ids_with_load_errors = get_failed

    def __call__(self, plan) -> None:
        for op in plan.loads:
            which = [number for number in self.which if number < len(op.items_of(0))]
            if which:
                self.engine.damage(op, *which)
                good = sum(len(item.block_ids) for item in op.items_of(0)[: min(which)])
                self.expected.update(op.block_ids[good:])

    @property
    def failed(self) -> set[int]:
        return set().union(*(blocks for blocks, _ in self.reports))


@ALL
@pytest.mark.parametrize("which", [(0,), (2,), (1, 3), (4,)], ids=str)
def test_exactly_the_blocks_from_the_first_failure_on_are_reported(toy_engine, prompts, options, which):
    """B 28, B 29: what failed and all behind it is reported in the step that tells of the load, and computed again."""
    engine = toy_engine(**options)
    prompt = prompts(300)
    engine.ask(prompt)
    engine.forget_own_prefixes()
    damage = Damage(engine, *which)
    engine.ask(prompt)
    assert damage.failed == damage.expected
    assert [received for blocks, received in damage.reports if blocks] == [{"ask-1"}]
    assert len(engine.loads_of("ask-1")) == 1  # the same hit is not promised again
    engine.assert_clean()


@ALL
def test_what_was_computed_in_place_of_a_failed_load_is_stored(toy, toy_engine, prompts, options):
    """After a load has failed the chunks are offered to the store anew, from the first lost one on."""
    engine = toy_engine(**options)
    prompt = prompts(300)
    engine.ask(prompt)
    engine.forget_own_prefixes()

    def lose(plan):
        for op in plan.loads:
            engine.damage(op, 2)
            client = engine.store.connect("test")
            client.clear()
            client.close()

    engine.on_plan = lose
    num_plans = len(engine.plans)
    engine.ask(prompt)
    offered = [op for plan in engine.plans[num_plans:] for op in plan.saves]
    assert offered[0].start_token == 128
    assert sum(item.num_tokens for op in offered for item in op.items) >= 160
    engine.assert_clean()


@ALL
def test_nobody_runs_on_blocks_that_others_have_failed_to_load(toy_engine, prompts, options):
    """Requests that share blocks whose load failed, prefilled in small parts, say what they should."""
    engine = toy_engine(**{"max_num_batched_tokens": 40, **options})
    stem = prompts(250)
    engine.ask(stem)
    engine.forget_own_prefixes()
    Damage(engine, 1)
    for number in range(4):
        engine.add(f"r{number}", stem + prompts(10), max_tokens=20)
    engine.run()
    assert engine.violations == []
    engine.assert_texts()
    engine.assert_clean()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_no_failure_policy_ends_a_request(toy_engine, prompts, policy, log_lines):
    """A failed load never ends a request: vLLM's policy to fail is replaced, and the log says so."""
    engine = toy_engine(policy=policy)
    prompt = prompts(200)
    engine.ask(prompt)
    engine.forget_own_prefixes()
    Damage(engine, 0)
    engine.ask(prompt)
    assert engine.scheduler.recompute_kv_load_failures
    assert len([line for line in log_lines if "load_failure_policy" in line]) == (policy == "fail")
    engine.assert_clean()


def test_a_load_whose_promise_nobody_remembers_fails_and_is_computed(toy_engine, prompts):
    """Whatever happens between a promise and its allocation, vLLM hears that the blocks are not filled."""
    engine = toy_engine()
    prompt = prompts(200)
    engine.ask(prompt)
    engine.forget_own_prefixes()
    side = engine.connector._scheduler
    matched = side.matched

    def forgetful(request, num_local):
        answer = matched(request, num_local)
        tracked = side._tracked[request.request_id]
        side._release(tracked)
        return answer

    side.matched = forgetful
    request = engine.ask(prompt)
    assert request.num_preemptions == 0
    assert [(len(op.block_ids), op.items_of(0)) for op in engine.loads_of("ask-1")] == [(12, ())]
    engine.assert_clean()


@ALL
@pytest.mark.parametrize("reason", ["corrupt", "unavailable"])
def test_a_disk_that_fails_is_a_shorter_hit(toy_engine, prompts, tmp_path, options, reason):
    """B 129, B 133: chunks that a tier cannot deliver end the hit; the rest is computed and nobody waits for ever."""
    from qkvault.testing.wrappers import FaultyTier

    engine = toy_engine(settings={"qkvault.disk_path": str(tmp_path / "disk")}, **options)
    prompt = prompts(300)
    engine.ask(prompt)
    driver = engine.store.driver
    assert driver.drain(10)
    engine.wrap_disk(lambda disk: FaultyTier(disk, fail_every_load=4, fail_reason=reason))
    for _ in range(3):
        engine.move_to_disk()
        engine.forget_own_prefixes()
        engine.ask(prompt)
        assert driver.drain(10)
    assert engine.status().counters[f"failed.disk.{reason}"] > 0
    loaded = [len(op.block_ids) * 16 for plan in engine.plans for op in plan.loads]
    assert all(tokens == 288 or tokens % 64 == 0 for tokens in loaded)
    engine.assert_clean()


def test_a_file_that_is_spoiled_is_not_promised_again(toy_engine, prompts, tmp_path):
    """A chunk whose file does not hold what it should ends the hit before it, and is stored anew.

    The tail's file is as it was: it has a job of its own, which may still be under way when the engine stores again.
    """
    engine = toy_engine(settings={"qkvault.disk_path": str(tmp_path / "disk")})
    prompt = prompts(300)
    engine.ask(prompt)
    client = engine.store.connect("test")
    assert engine.store.driver.drain(10)
    files = list((tmp_path / "disk").rglob("*.qkv"))
    largest_bytes = max(file.stat().st_size for file in files)
    whole = [file for file in files if file.stat().st_size == largest_bytes]
    assert (len(files), len(whole)) == (5, 4)
    for file in whole:
        spoiled = bytearray(file.read_bytes())
        spoiled[len(spoiled) // 2] ^= 0xFF
        file.write_bytes(spoiled)
    for wanted in (0, 18):
        assert engine.store.driver.drain(10)
        client.clear(lower_tiers=False)
        engine.forget_own_prefixes()
        request = engine.ask(prompt)
        assert sum(len(op.block_ids) for op in engine.loads_of(request.request_id)) == wanted
        assert engine.store.driver.drain(10)
    client.close()
    engine.assert_clean()


@ALL
def test_a_store_that_is_closed_under_the_connector_costs_hits_only(toy_engine, prompts, log_lines, options):
    """With its store gone the engine goes on, says so once for each kind of trouble, and ends cleanly."""
    engine = toy_engine(**options)
    prompt = prompts(200)
    engine.ask(prompt)
    engine.forget_own_prefixes()
    engine.store.close()
    for _ in range(5):
        engine.ask(prompt)
        engine.forget_own_prefixes()
    engine.ask(prompts(100), max_tokens=100)
    assert 0 < len(log_lines) <= 6
    assert engine.violations == []
    assert engine.scheduler.requests == {}


class TestOverTheSocket:
    """The worker's half in a process of its own has a session over a Unix socket."""

    @pytest.fixture
    def remote_engine(self, toy_engine, monkeypatch):
        from qkvault import embedded

        monkeypatch.setattr(embedded, "find", lambda instance_id: None)
        return toy_engine

    @ALL
    def test_it_stores_and_loads(self, remote_engine, prompts, options):
        """Hits are the same when the halves share memory and a socket instead of a process."""
        engine = remote_engine(**options)
        prompt = prompts(300)
        engine.ask(prompt)
        engine.forget_own_prefixes()
        engine.ask(prompt)
        assert len(engine.loads_of("ask-1")[0].block_ids) == 18
        assert type(engine.worker._worker._transfer.client._transport).__name__ == "SocketTransport"
        engine.assert_clean()

    def test_a_store_that_is_mute_is_asked_once_in_a_while(self, remote_engine, prompts, monkeypatch, log_lines):
        """A socket where nobody answers costs the engine one timeout; others look whether it has come back."""
        from qkvault.errors import Unavailable

        engine = remote_engine()
        link = engine.worker._worker._link
        threads = []

        def mute():
            threads.append(threading.current_thread())
            raise Unavailable

        whole, link._connect = link._connect, mute
        prompt = prompts(200)
        for _ in range(4):
            engine.ask(prompt)
            engine.forget_own_prefixes()
        until(lambda: len(threads) > 3)
        assert threads.count(threading.current_thread()) == 1
        link._connect = whole
        until(lambda: link.is_up)
        engine.ask(prompt)
        engine.forget_own_prefixes()
        engine.ask(prompt)
        assert len(engine.loads_of(f"ask-{len(engine.requests) - 1}")[0].block_ids) == 12
        assert len([line for line in log_lines if "save_failed" in line]) == 1
        engine.assert_clean()

    def test_a_socket_where_nobody_answers_is_a_bounded_wait(self, remote_engine, prompts, monkeypatch, tmp_path):
        """A store that accepts and stays silent is given up after the transport's timeout."""
        from qkvault import embedded

        engine = remote_engine()
        path = tmp_path / "mute.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
            silent.bind(str(path))
            silent.listen(8)
            monkeypatch.setattr(embedded, "socket_address", lambda instance_id: f"unix://{path}")
            engine.ask(prompts(200))
        Path(path).unlink()
        assert engine.worker._worker._transfer is None
        engine.assert_clean()

    def test_a_session_that_breaks_is_opened_anew(self, remote_engine, prompts):
        """After its connection is cut the worker connects again, and what was not stored is stored then."""
        engine = remote_engine()
        worker = engine.worker._worker
        prompt = prompts(300)
        engine.add("r", prompt, max_tokens=100)
        engine.step()
        worker._transfer.client._transport._stream.shutdown()
        engine.step()
        until(lambda: worker._link.is_up)
        engine.run()
        engine.forget_own_prefixes()
        engine.ask(prompt)
        assert len(engine.loads_of("ask-1")[0].block_ids) == 18
        engine.assert_texts()
        engine.assert_clean()
