"""What is stored, when, and that nothing is which was not computed from the true tokens."""

from __future__ import annotations

import pytest

from qkvault.types import Outcome

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


def ids_in(item):
    return [int.from_bytes(item.tokens[at : at + 4], "little") for at in range(0, len(item.tokens), 4)]


def assert_only_true_tokens(engine, toy, *, decode=True):
    """Every chunk that was offered to the store is a piece of a prompt and the text behind it, and is computed."""
    for plan in engine.plans:
        for op in [*plan.saves, *plan.finals]:
            request = engine.requests[op.request_id]
            true = request.prompt_token_ids + toy.text_of(request.prompt_token_ids, request.max_tokens)
            at = op.start_token
            for item in op.items:
                assert ids_in(item) == true[at : at + item.num_tokens]
                assert len(item.block_ids) * 16 == item.num_tokens
                at += item.num_tokens
            assert at < len(true)  # the last token that is sampled has no KV
            if not decode:
                assert at <= request.num_prompt_tokens


@ALL
def test_only_what_was_computed_from_true_tokens_is_stored(toy, toy_engine, prompts, options):
    """No key holds a placeholder, a draft that was rejected, or a token whose KV is not there yet."""
    engine = toy_engine(**options)
    for number in range(6):
        engine.add(f"r{number}", prompts(50 + 37 * number), max_tokens=90)
    engine.run()
    engine.assert_texts()
    engine.assert_clean()
    assert_only_true_tokens(engine, toy)


@ALL
def test_generated_tokens_are_stored_for_the_next_turn(toy, toy_engine, prompts, options):
    """B60: a turn's prompt and its answer, but for the last token, are there when the talk goes on."""
    engine = toy_engine(**options)
    prompt = prompts(100)
    engine.ask(prompt, max_tokens=150)
    talk = prompt + toy.text_of(prompt, 150)
    assert engine.num_cached(talk) == 240
    engine.ask(prompts(90), max_tokens=99, sampling={"stop_token_ids": list(range(3, 20))})
    engine.assert_clean()


@ALL
def test_without_save_decode_nothing_of_the_answers_is_stored(toy, toy_engine, prompts, options):
    """With the switch off, what is stored ends with the last whole block of the prompt."""
    engine = toy_engine(settings={"qkvault.save_decode": False}, **options)
    prompt = prompts(100)
    engine.ask(prompt, max_tokens=150)
    assert engine.num_cached(prompt + toy.text_of(prompt, 150)) == 96
    assert_only_true_tokens(engine, toy, decode=False)
    engine.assert_clean()


def test_without_partial_chunks_only_whole_ones_are_stored(toy, toy_engine, prompts):
    """B 14: with the switch off, a tail is not stored when the prompt ends, nor when the request does."""
    engine = toy_engine(settings={"qkvault.save_partial_chunks": False})
    prompt = prompts(100)
    engine.ask(prompt, max_tokens=50)
    assert engine.num_cached(prompt + toy.text_of(prompt, 50)) == 128
    assert {item.num_tokens for plan in engine.plans for op in plan.saves for item in op.items} == {64}
    engine.assert_clean()


def stop_behind(toy, prompt, num_tokens):
    """A token that the model says once, and not among the first ``num_tokens``."""
    text = toy.text_of(prompt, 100)
    return next(token for at, token in enumerate(text) if at > num_tokens and token not in text[:at])


@ALL
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_blocks_of_a_finished_request_are_taken_at_once_and_its_end_is_stored(
    toy, toy_engine, prompts, options, on_device
):
    """B566: of a request that stops unforeseen: the step that stores what is left also gives its blocks to others."""
    engine = toy_engine(num_blocks=16, on_device=on_device, **options)
    engine.scheduler.defer_block_free = False  # as where a connector only stores: blocks are free a step earlier
    execute, num_taken, talks = engine._execute, [], {}

    def watch(step):
        taken = {block for table in step.tables.values() for block in table}
        finals = step.output.kv_connector_metadata.finals
        num_taken.append(sum(not taken.isdisjoint(item.block_ids) for op in finals for item in op.items))
        execute(step)

    engine._execute = watch
    for number in range(8):
        talks[f"r{number}"] = prompt = prompts(90 + number)
        stops = {"stop_token_ids": [stop_behind(toy, prompt, 10 + number)]}
        engine.add(f"r{number}", prompt, max_tokens=100, sampling=stops)
    engine.run()
    assert sum(num_taken) >= 4
    for name, prompt in talks.items():
        talk = [*prompt, *engine.texts[name]]
        assert engine.num_cached(talk) == (len(talk) - 1) // 16 * 16
        engine.forget_own_prefixes()
        engine.ask([*talk, *prompts(20)], max_tokens=2)
    assert not engine.connector.requires_kv_delivery
    engine.assert_texts()
    engine.assert_clean()


@ALL
def test_when_the_answer_is_there_vllm_may_drop_its_cache_at_once(toy, toy_engine, prompts, options):
    """B566: no block is kept of a finished request. Its end is stored by the next step, whenever that comes."""
    engine = toy_engine(**options)
    prompt = prompts(100)
    engine.add("r", prompt, max_tokens=100, sampling={"stop_token_ids": [stop_behind(toy, prompt, 60)]})
    while "r" not in engine.endings:
        engine.step()
    while engine._running:
        engine.update()
    talk = [*prompt, *engine.texts["r"]]
    assert engine.num_cached(talk) < len(talk) // 16 * 16
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert engine.num_cached(talk) == (len(talk) - 1) // 16 * 16
    engine.assert_clean()


@ALL
def test_a_reset_forgets_what_the_next_step_was_to_store(toy, toy_engine, prompts, options):
    """B566, KEY-19: vLLM resets before it gives its pages up (sleep): they are not read any more."""
    engine = toy_engine(**options)
    prompt = prompts(100)
    engine.add("r", prompt, max_tokens=100, sampling={"stop_token_ids": [stop_behind(toy, prompt, 60)]})
    while "r" not in engine.endings:
        engine.step()
    while engine._running:
        engine.update()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.pages.fill_(-1)
    planned = len(engine.plans)
    engine.run()
    assert [op for plan in engine.plans[planned:] for op in plan.finals] == []
    assert engine.num_cached([*prompt, *engine.texts["r"]]) == 0
    engine.assert_clean()


def test_a_step_that_was_lost_costs_the_end_of_a_request(toy, toy_engine, prompts):
    """B566: its plan reached no worker. Nothing stays held for it, and what its pages hold later is not stored."""
    from vllm.v1.request import RequestStatus

    engine = toy_engine(num_blocks=24)
    prompt = prompts(100)
    engine.add("r", prompt, max_tokens=100, sampling={"stop_token_ids": [stop_behind(toy, prompt, 50)]})
    while "r" not in engine.endings:
        engine.step()
    lost = toy.Step(engine.scheduler).output.kv_connector_metadata
    assert [op.request_id for op in lost.finals] == ["r"]
    engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    for number in range(2):
        engine.add(f"next {number}", prompts(120), max_tokens=100)
    engine.run()
    talk = [*prompt, *engine.texts["r"]]
    assert 0 < engine.num_cached(talk) < (len(talk) - 1) // 16 * 16
    engine.assert_texts()
    engine.assert_clean()


def test_a_request_that_ends_as_foreseen_leaves_nothing(toy, toy_engine, prompts):
    """What a request computes up to its maximal length is stored in its last step, and nothing is left."""
    engine = toy_engine()
    prompt = prompts(100)
    engine.ask(prompt, max_tokens=77)
    assert [op for plan in engine.plans for op in plan.finals] == []
    assert engine.num_cached(prompt + toy.text_of(prompt, 77)) == 176
    engine.assert_clean()


@ALL
def test_nothing_more_is_stored_of_what_is_given_up(toy_engine, prompts, options):
    """An aborted request leaves nothing for the next step."""
    engine = toy_engine(**options)
    engine.add("r", prompts(100), max_tokens=200)
    while len(engine.texts["r"]) < 70:
        engine.step()
    engine.abort("r")
    engine.run()
    assert [op for plan in engine.plans for op in plan.finals] == []
    engine.assert_clean()


@ALL
def test_a_preempted_request_goes_on_with_what_it_had_stored(toy, toy_engine, prompts, options):
    """After preemption a request is looked up anew, with its generated tokens, and loses no chunk."""
    engine = toy_engine(**options)
    prompt = prompts(150)
    request = engine.add("preempted", prompt, max_tokens=120)
    while len(engine.texts["preempted"]) < 60:
        engine.step()
    while engine._running:
        engine.update()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    num_plans = len(engine.plans)
    engine.run()
    assert request.num_preemptions == 1
    loads = [op for plan in engine.plans[num_plans:] for op in plan.loads]
    assert [len(op.block_ids) * 16 for op in loads] == [192]
    assert engine.num_cached(prompt + toy.text_of(prompt, 120)) == 256
    engine.assert_texts()
    engine.assert_clean()


@ALL
def test_requests_that_preempt_one_another_leave_no_holes(toy, toy_engine, prompts, options):
    """With too few blocks for all, every finished request's tokens are found up to their last whole block."""
    engine = toy_engine(num_blocks=30, **options)
    asked = {f"r{number}": prompts(100) for number in range(5)}
    for name, prompt in asked.items():
        engine.add(name, prompt, max_tokens=120)
    engine.run()
    assert sum(request.num_preemptions for request in engine.requests.values()) > 0
    for prompt in asked.values():
        assert engine.num_cached(prompt + toy.text_of(prompt, 120)) >= 208
    engine.assert_texts()
    engine.assert_clean()


def test_a_save_that_failed_is_tried_again(toy, toy_engine, prompts, log_lines):
    """Chunks that could not be stored in their step are stored with a later one, so that no hole is left."""
    engine = toy_engine()
    prompt = prompts(90)
    engine.add("r", prompt, max_tokens=200)
    failures = []

    def fail(items):
        failures.append(items)
        raise RuntimeError

    engine.step()
    transfer = engine.worker._worker._session()
    whole = transfer.save
    transfer.save = fail
    while not failures:
        engine.step()
    transfer.save = whole
    engine.run()
    assert engine.num_cached(prompt + toy.text_of(prompt, 200)) == 288
    assert [line for line in log_lines if "save_failed" in line]
    engine.assert_texts()
    engine.assert_clean()


def test_what_found_no_room_is_tried_again_at_the_next_chunk(toy, toy_engine, prompts):
    """A full store is not asked in each step of a decode, but again when a chunk more is computed."""
    engine = toy_engine(settings={"qkvault.ram_bytes": 5 * 12 * 1024})
    first = prompts(300)
    engine.ask(first, max_tokens=1)
    client = engine.store.connect("test")
    from qkvault.keys import RequestIdentity
    from qkvault.prefix import Prefix

    lease_id = Prefix(engine.connector._spaces[0], RequestIdentity(), first, shared=False).find(client).lease_id
    prompt = prompts(60)
    engine.add("r", prompt, max_tokens=150)
    offers = 0
    while len(engine.texts["r"]) < 100:
        engine.step()
    offers = engine.status().counters[f"reserve.{Outcome.NO_ROOM.value}"]
    assert 0 < offers <= 4
    client.release(lease_id)
    client.close()
    engine.run()
    assert engine.num_cached(prompt + toy.text_of(prompt, 150)) == 208
    engine.assert_clean()


def test_a_request_that_has_fewer_blocks_than_tokens_stores_what_the_blocks_hold(toy, toy_engine, prompts):
    """Nothing is stored beyond the blocks that vLLM names, whatever the request's tokens say."""
    engine = toy_engine()
    request = engine.add("r", prompts(300), max_tokens=40)
    for _ in range(12):
        engine.step()
    side = engine.connector._scheduler
    tracked = side._tracked["r"]
    tracked.stored_tokens = tracked.saved_end = 0
    op = side._save(tracked, request.num_tokens, [7, 8, 9], with_tail=True)
    assert [item.num_tokens for item in op.items] == [48]
    engine.run()
    engine.assert_clean()


@pytest.mark.parametrize("status", ["FINISHED_STOPPED", "FINISHED_ABORTED"])
def test_the_end_of_a_request_that_was_never_seen_is_fine(toy_engine, prompts, toy, status):
    """vLLM may end a request that it never scheduled, without blocks, or twice."""
    from vllm.v1.request import RequestStatus

    engine = toy_engine()
    request = engine.add("r", prompts(30))
    engine.abort("r")
    request.status = RequestStatus[status]
    for _ in range(2):
        assert engine.connector.request_finished(request, []) == (False, None)
        assert engine.connector.request_finished_all_groups(request, ()) == (False, None)
        assert engine.connector.request_finished_all_groups(request, ([],)) == (False, None)
    engine.run()
    engine.assert_clean()


def test_hooks_may_come_twice_or_for_strangers(toy_engine, prompts):
    """Repeats, unknown requests and empty reports change nothing and raise nothing."""
    from vllm.v1.outputs import KVConnectorOutput

    from qkvault.integrations.vllm.ops import StepReport

    engine = toy_engine()
    prompt = prompts(200)
    engine.ask(prompt)
    engine.forget_own_prefixes()
    connector = engine.connector
    told = []

    def twice(plan):
        told.append(plan)
        for op in plan.loads:
            blocks = engine.scheduler.kv_cache_manager.get_blocks(op.request_id)
            connector.update_state_after_alloc(engine.requests[op.request_id], blocks, 0)

    engine.on_plan = twice
    request = engine.ask(prompt)
    connector.get_external_cache_hit_sources(request, 5)
    stranger = StepReport({99}, {"who": 0}, {"who": 0}, 7)
    connector.update_connector_output(KVConnectorOutput())
    connector.update_connector_output(KVConnectorOutput({"a"}, {"b"}, kv_connector_worker_meta=stranger))
    assert connector.get_external_cache_hit_sources(request, 5) == {}
    for worker in (engine.worker, engine.connector):
        assert worker.get_finished(set()) == (None, None)
        assert worker.get_block_ids_with_load_errors() == set()
        assert worker.build_connector_worker_meta() is None
    assert connector.take_events() == ()
    engine.assert_texts()
    engine.assert_clean()


def test_a_thousand_requests_log_a_handful_of_lines(toy_engine, prompts, log_lines):
    """At the default level the log does not grow with the requests, and no count of tokens is negative."""
    engine = toy_engine(max_num_seqs=64, num_blocks=300, max_num_batched_tokens=2048)
    stem = prompts(20)
    skip = {"extra_args": {"kv_transfer_params": {"qkvault.what": 1}}}
    for number in range(1000):
        engine.add(f"r{number}", stem + prompts(1), 1, sampling=skip if number % 2 else {})
    engine.run()
    assert len(log_lines) <= 3
    assert not [line for line in log_lines if "=-" in line]
    engine.assert_clean()
