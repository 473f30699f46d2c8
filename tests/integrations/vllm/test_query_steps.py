"""Queries under both of vLLM's model runners: every one that is stored is its token's, and none is missing unsaid."""

from __future__ import annotations

import random
from copy import copy
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.vllm

LAYOUTS = [
    pytest.param({"runner": 1}, id="runner 1"),
    pytest.param({"runner": 2}, id="runner 2"),
    pytest.param({"runner": 1, "asynchronous": True}, id="runner 1, async"),
    pytest.param({"runner": 2, "asynchronous": True, "is_late": True}, id="runner 2, async"),
    pytest.param({"runner": 1, "num_drafts": 3}, id="drafts"),
    pytest.param({"runner": 1, "on_device": True}, id="device"),
    pytest.param(
        {"runner": 2, "asynchronous": True, "is_late": True, "on_device": True, "kernel_ratio": 2}, id="device, async"
    ),
]
ON = {"qkvault.transfer_intermediate_tensors": True, "qkvault.q_ring_blocks": 128}
CHUNK = 64


@pytest.fixture
def query_engine(toy_engine, toy_queries):
    """Starts toy engines of two layers whose queries are captured."""

    def start(*, settings=None, on_device=False, **options):
        engine = toy_engine(
            settings=ON | {"qkvault.ram_bytes": "16MiB", "qkvault.query_bytes": "12MiB"} | (settings or {}),
            on_device=on_device, num_layers=2, layers=toy_queries.Layers, **options,
        )  # fmt: skip
        if on_device:
            toy_queries.LateStream(toy_queries.capture_of(engine).adapter.paged)
        holes, stepped = toy_queries.Holes(engine), engine.step

        def step():
            stepped()
            toy_queries.capture_of(engine).adapter.check()

        engine.step, engine.holes = step, holes
        return engine

    return start


@pytest.fixture
def verify(toy, toy_queries):
    """Checks all that an engine has stored, and returns the keys of it. Nothing is held any more."""

    def check(engine, layers=(0, 1)):
        toy_queries.assert_ring_is_free(engine)
        engine.assert_texts()
        engine.assert_clean()
        return toy_queries.assert_stored_is_right(engine, toy.digests, layers)

    return check


@pytest.fixture
def account(verify, toy_queries):
    """``verify``, and of every request that came to its end each whole chunk is stored, or was said to be a hole."""

    def check(engine, layers=(0, 1)):
        keys, capture = verify(engine, layers), toy_queries.capture_of(engine)
        for name, ending in engine.endings.items():
            request = engine.requests[name]
            tokens = list(request.all_token_ids)[: request.num_tokens - 1]  # the last one is not computed
            prefix = toy_queries.Prefix(capture.adapter.space, engine.identity, tokens, shared=False)
            items = prefix.save_items(0, len(tokens) // CHUNK * CHUNK, range(len(tokens)), 16)
            lost = {number for number, item in enumerate(items) if item.key not in keys}
            assert ending == "aborted" or lost <= set(engine.holes.of(name)), name
        return keys

    return check


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("options", LAYOUTS)
def test_every_query_is_its_tokens_in_any_traffic(query_engine, new_traffic, account, options, seed):
    """B85-B89, B91, B350: requests that share prefixes, end early, are aborted, preempted and prefilled in odd parts,
    with drafts that are rejected: what is stored is right, and what is missing was told as a hole.
    """
    engine = query_engine(num_blocks=40, max_num_batched_tokens=random.Random(seed).choice([37, 59, 96]), **options)
    new_traffic(engine, seed, num_requests=40).run()
    assert len(account(engine)) > 20
    assert sum(request.num_preemptions for request in engine.requests.values()) > 0
    assert engine.holes.reasons == {"not_computed"}


@pytest.mark.parametrize("options", LAYOUTS)
def test_a_request_whose_load_fails_is_captured_from_where_it_is_computed_anew(
    query_engine, new_traffic, account, options
):
    """B85, B351: loads that fail at random chunks rewind requests; what was captured of them before is void."""
    engine = query_engine(num_blocks=48, **options)
    traffic = new_traffic(engine, 11, num_requests=40, failing=0.5)
    traffic.run()
    assert traffic.num_failed > 3
    account(engine)


@pytest.mark.parametrize("options", LAYOUTS)
@pytest.mark.parametrize("num_ring_blocks", [1, 5, 9])
def test_a_ring_that_is_too_small_loses_chunks_and_says_so(
    query_engine, new_traffic, account, options, num_ring_blocks
):
    """B117, B352: less than one chunk, one, or two: the rest is dropped whole and counted, what is stored is right."""
    settings = {"qkvault.q.ring_blocks": num_ring_blocks}
    engine = query_engine(num_blocks=48, settings=settings, **options)
    new_traffic(engine, 5, num_requests=25).run()
    keys = account(engine)
    assert "ring_full" in engine.holes.reasons
    assert bool(keys) == (num_ring_blocks > 1)


@pytest.mark.parametrize("options", LAYOUTS)
def test_a_store_that_is_always_full_costs_chunks_only(query_engine, new_traffic, verify, options):
    """B311, B353: what is found is right, every ring block comes back, and both kinds are there at the end."""
    engine = query_engine(
        num_blocks=48, settings={"qkvault.ram_bytes": 200 << 10, "qkvault.query_bytes": 100 << 10}, **options
    )
    new_traffic(engine, 23, num_requests=40).run()
    status = engine.status()
    assert status.counters["removed.ram.evicted"] > 20
    assert 0 < status.media[0].query_used_bytes < status.media[0].used_bytes
    verify(engine)


@pytest.mark.parametrize("seed", range(8))
def test_no_setting_makes_a_query_wrong(query_engine, new_traffic, verify, tmp_path, seed):
    """B350: whatever is set, with resets in between, with a disk or without: queries and texts are true."""
    rng = random.Random(seed)
    settings = {
        "qkvault.save_decode": rng.random() < 0.7,
        "qkvault.save_partial_chunks": rng.random() < 0.7,
        "qkvault.hot_cache": rng.random() < 0.7,
        "qkvault.q_ring_blocks": rng.choice([10, 40, 128]),
    }
    if rng.random() < 0.5:
        settings["qkvault.disk_path"] = str(tmp_path / "disk")
    options = {
        "enable_prefix_caching": rng.random() < 0.8,
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "max_num_batched_tokens": rng.choice([16, 71, 500]),
        **rng.choice(LAYOUTS).values[0],
    }
    engine = query_engine(num_blocks=rng.choice([36, 48, 80]), settings=settings, **options)
    stepped = engine.step

    def step():
        stepped()
        if rng.random() < 0.01:
            engine.scheduler.reset_prefix_cache(reset_connector=True)

    engine.step = step
    new_traffic(engine, seed, num_requests=30, failing=rng.choice([0, 0.3])).run()
    verify(engine)


@pytest.mark.parametrize("options", LAYOUTS)
def test_requests_that_end_while_others_are_prefilled_do_not_write_over_them(query_engine, account, prompts, options):
    """B82, B350: the last row of a request whose tail is not stored is in no block that another has got meanwhile."""
    engine = query_engine(num_blocks=160, max_num_batched_tokens=100, **options)
    for number in range(12):
        engine.add(f"short {number}", prompts(64 + number), max_tokens=3 + number % 3)
        engine.add(f"long {number}", prompts(400), max_tokens=2)
        for _ in range(6):
            engine.step()
    engine.run()
    assert len(account(engine)) > 80


@pytest.mark.parametrize("size", [17, 37, 96])
def test_a_prompt_in_odd_parts_is_captured_whole(query_engine, account, prompts, size):
    """B85, B117: a cold prompt and what is decoded, however it is cut: every chunk, and the tail in whole blocks."""
    engine = query_engine(max_num_batched_tokens=size)
    engine.ask(prompts(300), max_tokens=101)
    keys = account(engine)
    assert len(keys) == 7  # 400 tokens are computed, of which 16 are a tail
    assert engine.holes.found == {}


@pytest.mark.parametrize("options", LAYOUTS)
def test_what_a_reset_finds_is_not_stored_after_it(toy, query_engine, prompts, verify, options):
    """B354: of requests that run, wait or have just ended when everything is to be forgotten no query appears later."""
    for num_steps in range(1, 12):
        engine = query_engine(**options)
        engine.add("old", prompts(210), max_tokens=6)
        stopped, ended = prompts(79), prompts(78)
        engine.add("stops", stopped, max_tokens=6, sampling={"stop_token_ids": [toy.text_of(stopped, 2)[1]]})
        engine.add("ends", ended, max_tokens=3)  # a tail of one block is stored when it has ended
        for _ in range(num_steps):
            engine.step()
        begun = {name for name, request in engine.requests.items() if request.num_computed_tokens}
        engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.run()
        keys = verify(engine)
        if begun == set(engine.requests):
            assert keys == set()
        engine.ask(prompts(210), max_tokens=1)
        assert len(verify(engine)) >= 4
        engine.close()


def test_a_reset_while_only_queries_are_stored_leaves_none(query_engine, prompts, verify):
    """B354: of a prompt whose K and V are in the store already, in a step that is under way."""
    engine = query_engine(runner=2, asynchronous=True, is_late=True, settings={"qkvault.min_hit_tokens": 1000})
    prompt = prompts(130)
    engine.add("old", prompt, max_tokens=1, sampling={"extra_args": {"kv_transfer_params": {"qkvault.queries": False}}})
    engine.run()
    engine.forget_own_prefixes()
    engine.add("older", prompt, max_tokens=1)
    engine.step()
    assert engine.plans[-1].query_steps
    assert not engine.plans[-1].saves
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run()
    assert verify(engine) == set()


class TestUnplanned:
    """One request that cannot be told of, or a step that vLLM describes in another way."""

    def test_the_others_are_told(self, query_engine, prompts, toy, toy_queries, log_lines):
        """B414: of a request that is a fault nothing is stored; those beside it, and those that ended, lose nothing."""
        engine = query_engine(max_num_batched_tokens=500)
        steps = engine.connector._scheduler._queries
        is_captured = steps._is_captured

        def fault_at_bad(tracked):
            return is_captured(tracked) if tracked.request.request_id != "bad" else tracked.nothing

        steps._is_captured = fault_at_bad
        engine.add("ends", prompts(78), max_tokens=3)  # its tail is told when it has ended
        engine.add("bad", prompts(130), max_tokens=8)
        engine.add("good", prompts(130), max_tokens=8)
        engine.run()
        keys = toy_queries.assert_stored_is_right(engine, toy.digests, (0, 1))
        assert len(keys) == 4
        assert not keys & set(toy_queries.names_of(engine, engine.requests["bad"].prompt_token_ids, bytes(130)))
        toy_queries.assert_ring_is_free(engine)
        engine.assert_clean()

    @pytest.mark.parametrize("num_bad", [1, 3])
    def test_what_has_ended_is_told_with_the_next_step(self, query_engine, prompts, toy, toy_queries, num_bad):
        """B414: a description that cannot be read costs its step, and not the end of a request, nor its blocks."""
        engine = query_engine()
        steps = engine.connector._scheduler._queries
        prompt = prompts(79)
        engine.add("ends", prompt, max_tokens=6, sampling={"stop_token_ids": [toy.text_of(prompt, 2)[1]]})
        engine.add("goes on", prompts(130), max_tokens=40)
        for _ in range(9):
            if not steps._ended:
                engine.step()
        assert [step.request_id for step in steps._ended] == ["ends"]

        plan = steps.plan

        def of_another_vllm(output, tracked):
            cached = copy(output.scheduled_cached_reqs)
            cached.num_computed_tokens = [*cached.num_computed_tokens, 1]
            return plan(SimpleNamespace(**{**vars(output), "scheduled_cached_reqs": cached}), tracked)

        steps.plan = of_another_vllm
        for _ in range(num_bad):
            engine.step()
        del steps.plan
        engine.run()
        keys = toy_queries.assert_stored_is_right(engine, toy.digests, (0, 1))
        tokens = list(engine.requests["ends"].all_token_ids)
        assert len(keys & set(toy_queries.names_of(engine, tokens, toy.digests(tokens)))) == 2
        toy_queries.assert_ring_is_free(engine)
        engine.assert_clean()


class TestPassed:
    """An engine that passes queries by itself, as a patched vLLM does."""

    @pytest.mark.parametrize("name", ["q", "query"])
    @pytest.mark.parametrize("options", LAYOUTS)
    def test_they_are_taken_instead_of_the_taps(self, query_engine, new_traffic, account, options, name):
        """B81: under either name, in any traffic; the tap is closed, and vLLM has its own methods back."""
        engine = query_engine(num_blocks=48, **options)
        engine.layers.passes = name
        new_traffic(engine, 3, num_requests=25).run()
        assert len(account(engine)) > 10
        assert engine.worker._queries._tap is None
        assert all("forward" not in vars(module.impl) for module in engine.layers.modules.values())

    @pytest.mark.parametrize("num_steps", range(1, 6))
    def test_nothing_is_lost_or_taken_twice_in_the_step_in_which_it_begins(
        self, query_engine, account, prompts, toy_queries, num_steps
    ):
        """B81: whenever an engine begins to pass them, also at its first step."""
        engine = query_engine(max_num_batched_tokens=37)
        rows, save = [], toy_queries.capture_of(engine).save_q_layer

        def counted(layer_name, query, slot_mapping):
            rows.append(layer_name)
            save(layer_name, query, slot_mapping)

        toy_queries.capture_of(engine).save_q_layer = counted
        engine.add("a", prompts(300), max_tokens=40)
        for number in range(400):
            if number == num_steps:
                engine.layers.passes = "q"
            engine.step()
        assert rows.count("layer") == rows.count("layer.1") == sum(bool(plan.query_steps) for plan in engine.plans)
        keys = account(engine)
        assert len(keys) == 6
        assert engine.holes.found == {}

    def test_other_tensors_are_none_of_ours(self, query_engine, account, prompts, toy_queries):
        """B81: under another name, or not by name at all, nothing is taken, and the tap goes on."""
        engine = query_engine()
        engine.layers.passes = "k"
        engine.ask(prompts(210), max_tokens=1)
        engine.worker.save_kv_layer("layer", engine.pages, None, intermediate_tensors=None, other=1)
        assert len(account(engine)) == 4
        assert engine.worker._queries._tap is not None
