"""What is looked up, when, and what a query may change: nothing."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.vllm

RUNNERS = pytest.mark.parametrize(
    "options",
    [
        {"runner": 1},
        {"runner": 1, "asynchronous": True},
        {"runner": 2},
        {"runner": 2, "asynchronous": True, "is_late": True},
    ],
    ids=["runner 1", "runner 1, async", "runner 2", "runner 2, async"],
)
SKIP = {"extra_args": {"kv_transfer_params": {"qkvault.skip": True}}}  # vLLM's own cache only


def external(engine, request):
    """How many tokens of the request were loaded."""
    return sum(len(op.block_ids) for op in engine.loads_of(request.request_id)) * 16


@RUNNERS
def test_a_prompt_that_is_cached_is_loaded_up_to_its_last_whole_block(toy_engine, prompts, options):
    """B 31: all but the last blocks' rest of a prompt comes from the store, in both runners and both schedulings."""
    engine = toy_engine(**options)
    prompt = prompts(300)
    assert external(engine, engine.ask(prompt)) == 0
    engine.forget_own_prefixes()
    assert external(engine, engine.ask(prompt)) == 288
    engine.assert_clean()


@pytest.mark.parametrize("length", [15, 16, 17, 63, 64, 65, 128, 129])
def test_one_token_is_always_left_to_compute(toy_engine, prompts, length):
    """A prompt whose every block is cached is loaded but for the block of its last token."""
    engine = toy_engine()
    prompt = prompts(length)
    engine.ask(prompt)
    engine.forget_own_prefixes()
    assert external(engine, engine.ask(prompt)) == (length - 1) // 16 * 16
    engine.assert_clean()


def test_what_vllm_has_itself_is_neither_loaded_nor_written(toy_engine, prompts):
    """For every length that vLLM has and every length that is stored, exactly the blocks between are written."""
    engine = toy_engine()
    for num_stored in range(10):
        for num_local in range(0, 10, 3):
            prompt = prompts(10 * 16 + 1)
            if num_stored:
                engine.ask(prompt[: num_stored * 16 + 1], max_tokens=1)
            engine.forget_own_prefixes()
            if num_local:
                engine.ask(prompt[: num_local * 16 + 1], max_tokens=1, sampling=SKIP)
            request = engine.ask(prompt, max_tokens=1)
            ops = engine.loads_of(request.request_id)
            assert external(engine, request) == max(0, num_stored - num_local) * 16
            if ops:
                assert ops[0].start_token == num_local * 16
    engine.assert_clean()


def test_five_queries_change_nothing(toy_engine, prompts):
    """A hit that is asked for again and again is the same, and what is stored then begins where it should."""
    engine = toy_engine()
    prompt = prompts(200)
    engine.ask(prompt)
    engine.forget_own_prefixes()
    longer = prompt + prompts(200)
    request = engine.add("longer", longer)
    answers = [engine.connector.get_num_new_matched_tokens(request, 0) for _ in range(5)]
    assert answers == [(192, True)] * 5
    assert engine.status().num_leases == 1
    engine.run()
    engine.forget_own_prefixes()
    assert external(engine, engine.ask(longer)) == 384
    engine.assert_clean()


def test_a_query_that_is_never_followed_holds_nothing_when_the_request_ends(toy_engine, prompts):
    """Requests that are looked up and then aborted before they get blocks leave no lease."""
    engine = toy_engine()
    prompt = prompts(200)
    engine.ask(prompt)
    engine.forget_own_prefixes()
    for number in range(100):
        request = engine.add(f"r{number}", prompt)
        engine.connector.get_num_new_matched_tokens(request, 0)
    assert engine.status().num_leases == 100
    engine.abort(*[f"r{number}" for number in range(100)])
    engine.run()
    engine.assert_clean()


def test_a_lease_that_ran_out_while_its_request_waited_is_taken_anew(toy_engine, prompts):
    """A request that waited longer than a lease lives is looked up again and loads what is there then."""
    engine = toy_engine()
    prompt = prompts(200)
    engine.ask(prompt)
    engine.forget_own_prefixes()
    request = engine.add("waiting", prompt)
    engine.connector.get_num_new_matched_tokens(request, 0)
    with engine.store.driver._lock:
        engine.store.driver.manager.expire(1e12)
    assert engine.status().num_leases == 0
    engine.run()
    assert external(engine, request) == 192
    engine.assert_clean()


def test_a_hit_below_the_least_that_is_used_is_neither_loaded_nor_stored_again(toy_engine, prompts):
    """A short hit counts as none, and nothing of it is offered to the store a second time."""
    engine = toy_engine(settings={"qkvault.min_hit_tokens": 100})
    short, long = prompts(70), prompts(150)
    engine.ask(short, max_tokens=1)
    engine.ask(long, max_tokens=1)
    engine.forget_own_prefixes()
    before = engine.status().counters
    assert external(engine, engine.ask(short, max_tokens=1)) == 0
    after = engine.status().counters
    assert [after[f"reserve.{kind}"] - before[f"reserve.{kind}"] for kind in ("reserved", "present")] == [0, 0]
    engine.forget_own_prefixes()
    waiting = engine.add("waiting", short)
    assert engine.connector.get_num_new_matched_tokens(waiting, 0) == (0, False)
    assert engine.status().num_leases == 0
    assert external(engine, engine.ask(long, max_tokens=1)) == 144
    engine.assert_clean()


def test_requests_that_share_a_prefix_wait_for_the_one_that_loads_it(toy_engine, prompts):
    """Of requests with one cached prefix one loads it, and the others have it from vLLM's own cache afterwards."""
    engine = toy_engine()
    stem = prompts(200)
    engine.ask(stem)
    engine.forget_own_prefixes()
    for number in range(4):
        engine.add(f"r{number}", stem + prompts(20))
    engine.run()
    assert [external(engine, engine.requests[f"r{number}"]) for number in range(4)] == [192, 0, 0, 0]
    engine.assert_texts()
    engine.assert_clean()


def test_without_vllms_own_cache_each_request_loads_for_itself(toy_engine, prompts):
    """Where blocks are not shared, nobody waits for another request's load."""
    engine = toy_engine(enable_prefix_caching=False)
    stem = prompts(200)
    engine.ask(stem)
    for number in range(3):
        engine.add(f"r{number}", stem + prompts(20))
    engine.step()
    assert len(engine.plans[-1].loads) == 3
    engine.run()
    engine.assert_texts()
    engine.assert_clean()


def test_what_vllm_has_is_not_fetched_from_a_lower_tier(toy_engine, prompts, tmp_path):
    """Chunks before the end of vLLM's own hit are not looked up: no disk is read and nobody waits for them."""
    engine = toy_engine(settings={"qkvault.disk_path": str(tmp_path / "disk")})
    prompt = prompts(260)
    engine.ask(prompt, max_tokens=1)
    engine.move_to_disk()
    request = engine.ask(prompt, max_tokens=1)
    assert external(engine, request) == 0
    assert engine.status().counters["chunks_promoted"] == 0
    engine.assert_clean()


@RUNNERS
def test_chunks_in_a_lower_tier_are_waited_for(toy_engine, prompts, tmp_path, options):
    """A hit on disk is a full hit, told by its medium, when its chunks have come up; other requests run meanwhile."""
    engine = toy_engine(settings={"qkvault.disk_path": str(tmp_path / "disk")}, **options)
    prompt = prompts(300)
    engine.ask(prompt)
    engine.move_to_disk()
    engine.forget_own_prefixes()
    engine.add("other", prompts(20), max_tokens=60)
    request = engine.ask(prompt)
    assert external(engine, request) == 288
    assert engine.connector.stats.snapshot().found_tokens == {"ram": 0, "disk": 288, "remote": 0}
    engine.assert_texts()
    engine.assert_clean()


def test_a_tier_that_does_not_answer_is_waited_for_until_the_deadline(toy_engine, prompts, tmp_path):
    """Chunks that do not come in time are a miss: what is there by then is used, and the rest is computed."""
    from qkvault.testing.wrappers import FaultyTier

    engine = toy_engine(settings={"qkvault.disk_path": str(tmp_path / "disk")})
    prompt = prompts(300)
    engine.ask(prompt)
    engine.move_to_disk()
    engine.forget_own_prefixes()
    now = [0.0]
    engine.connector._scheduler._clock = lambda: now[0]
    tier = engine.wrap_disk(FaultyTier)
    tier.is_mute = True
    request = engine.add("patient", prompt)
    for _ in range(5):
        engine.step()
    assert not request.num_computed_tokens
    now[0] = 10.0
    engine.run()
    assert external(engine, request) == 0
    tier.release()
    assert engine.store.driver.drain(10)
    engine.assert_texts()
    engine.assert_clean()


def test_each_wait_has_a_deadline_of_its_own(toy_engine, prompts, tmp_path):
    """A request that waited long once is as patient as ever when it is looked up again after a preemption."""
    from qkvault.testing.wrappers import FaultyTier

    engine = toy_engine(settings={"qkvault.disk_path": str(tmp_path / "disk")})
    prompt = prompts(300)
    engine.ask(prompt)
    now = [0.0]
    engine.connector._scheduler._clock = lambda: now[0]
    engine.move_to_disk()
    tier = engine.wrap_disk(FaultyTier)
    engine.forget_own_prefixes()
    tier.is_mute = True
    engine.add("r", prompt, max_tokens=30)
    engine.step()
    now[0] = 10.0
    while not engine.texts["r"]:
        engine.step()
    tier.release()
    engine.move_to_disk()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert sum(len(op.block_ids) for op in engine.loads_of("r")) == 18
    engine.assert_texts()
    engine.assert_clean()


@pytest.mark.parametrize("options", [{}, {"asynchronous": True}], ids=["sync", "async"])
def test_an_abort_after_any_step_holds_nothing(toy_engine, prompts, tmp_path, options):
    """Whenever a request that waits for a disk, loads, prefills or decodes is aborted, all it held is free."""
    from qkvault.testing.wrappers import LatencyTier

    engine = toy_engine(settings={"qkvault.disk_path": str(tmp_path / "disk")}, **options)
    driver = engine.store.driver
    engine.wrap_disk(lambda disk: LatencyTier(disk, 0.02))
    prompt = prompts(300)
    engine.ask(prompt)
    for num_steps in range(16):
        engine.move_to_disk()
        engine.forget_own_prefixes()
        engine.add(f"r{num_steps}", prompt + prompts(100), max_tokens=4)
        for _ in range(num_steps):
            engine.step()
        engine.abort(f"r{num_steps}")
        engine.run()
        assert driver.drain(10)
        engine.assert_clean()


def test_a_request_that_is_not_to_read_prefixes_is_not_looked_up(toy_engine, prompts):
    """A request that must compute its whole prompt, for its log probabilities, is stored and never loaded."""
    engine = toy_engine()
    prompt = prompts(200)
    engine.ask(prompt)
    engine.forget_own_prefixes()
    before = engine.status().counters["lookups"]
    request = engine.ask(prompt, sampling={"skip_reading_prefix_cache": True})
    assert external(engine, request) == 0
    assert engine.status().counters["lookups"] == before
    engine.assert_clean()


def test_roles_are_kept(toy_engine, prompts, tmp_path):
    """A producer only stores, a consumer only loads."""
    settings = {"qkvault.disk_path": str(tmp_path / "disk")}
    prompt = prompts(200)
    producer = toy_engine(settings=settings, kv_role="kv_producer")
    producer.ask(prompt)
    producer.forget_own_prefixes()
    assert external(producer, producer.ask(prompt)) == 0
    producer.assert_clean()
    producer.close()
    consumer = toy_engine(settings=settings, kv_role="kv_consumer")
    assert external(consumer, consumer.ask(prompt)) == 192
    other = prompts(200)
    consumer.ask(other)
    consumer.forget_own_prefixes()
    assert external(consumer, consumer.ask(other)) == 0
    consumer.assert_clean()


def test_every_number_is_counted_at_its_own_step(toy_engine, prompts):
    """B 56: asked, found, loaded, failed and stored are what a scripted scenario says, however often it is asked."""
    engine = toy_engine()
    prompt = prompts(200)
    engine.ask(prompt, max_tokens=1)
    engine.forget_own_prefixes()
    request = engine.add("again", prompt, 1)
    for _ in range(3):
        engine.connector.get_num_new_matched_tokens(request, 0)
    engine.on_plan = lambda plan: [engine.damage(op, 2) for op in plan.loads]
    engine.run()
    asked, did = engine.connector.stats.snapshot(), engine.worker.stats.snapshot()
    assert (asked.operations["lookup"].finished, asked.operations["lookup"].tokens) == (2, 400)
    assert asked.found_tokens == {"ram": 192, "disk": 0, "remote": 0}
    assert (did.loaded_tokens, did.failed_tokens + did.voided_tokens, did.failed_loads) == (128, 64, 1)
    assert did.stored_tokens == 192
    assert asked.rejected_updates == did.rejected_updates == 0
    engine.assert_clean()


def test_what_vllm_has_itself_counts_as_used_and_is_not_offered_again(toy_engine, prompts):
    """A prompt that is served by vLLM's own cache stays in the store while others leave, without being sent to it."""
    engine = toy_engine(num_blocks=200, settings={"qkvault.ram_bytes": 12 * 12 * 1024})
    stem = prompts(256)
    engine.ask(stem, max_tokens=1)
    for _ in range(12):
        num_plans = len(engine.plans)
        engine.ask(stem + prompts(20), max_tokens=1)
        starts = [op.start_token for plan in engine.plans[num_plans:] for op in plan.saves]
        assert starts == [256]
        engine.ask(prompts(130), max_tokens=1)
    assert engine.status().counters["removed.ram.evicted"] > 20
    assert engine.num_cached(stem) == 256
    engine.assert_clean()


def test_a_prompt_that_leaves_another_inside_a_chunk_is_loaded_up_to_the_fork(toy_engine, prompts):
    """B 119: the whole blocks that two prompts share are loaded, wherever in a chunk they part."""
    engine = toy_engine()
    stem = prompts(320)
    engine.ask(stem)
    for fork in (17, 63, 64, 65, 100, 250, 319):
        engine.forget_own_prefixes()
        request = engine.ask(stem[:fork] + [96] * 40, max_tokens=1)
        assert external(engine, request) == fork // 16 * 16
    engine.assert_clean()
