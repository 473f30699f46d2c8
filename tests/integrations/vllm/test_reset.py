"""A reset empties every tier, and what was computed before it does not come back."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.vllm

ALL = pytest.mark.parametrize(
    "options",
    [
        {"runner": 1},
        {"runner": 1, "asynchronous": True},
        {"runner": 2, "asynchronous": True, "is_late": True},
        {"runner": 1, "num_drafts": 3},
        {"runner": 2, "asynchronous": True, "is_late": True, "on_device": True},
    ],
    ids=["sync", "async", "runner 2, async", "drafts", "device"],
)


def num_chunks(engine):
    assert engine.store.driver.drain(10)
    return {tier.name: tier.num_chunks for tier in engine.status().media}


@ALL
def test_a_reset_empties_all_tiers(toy_engine, prompts, tmp_path, options):
    """KEY-19: after vLLM's reset with the connector nothing is found in RAM or on disk."""
    engine = toy_engine(settings={"qkvault.disk_path": str(tmp_path / "disk")}, **options)
    prompt = prompts(300)
    engine.ask(prompt)
    assert num_chunks(engine) == {"ram": 5, "disk": 5}
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert num_chunks(engine) == {"ram": 0, "disk": 0}
    engine.ask(prompt)
    assert not [op for plan in engine.plans for op in plan.loads]
    engine.assert_clean()


@ALL
def test_what_was_under_way_at_a_reset_does_not_appear_after_it(toy_engine, prompts, tmp_path, options):
    """KEY-19: requests that ran, waited or had just finished when the reset came leave nothing of that time."""
    for num_steps in range(1, 14):
        engine = toy_engine(settings={"qkvault.disk_path": str(tmp_path / f"disk{num_steps}")}, **options)
        engine.add("old", prompts(200), max_tokens=6, sampling={"stop_token_ids": [7]})
        engine.add("older", prompts(30), max_tokens=3)
        for _ in range(num_steps):
            engine.step()
        begun = [request for request in engine.requests.values() if request.num_computed_tokens]
        engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.run()
        assert [engine.num_cached(request.prompt_token_ids) for request in begun] == [0] * len(begun)
        if len(begun) >= len(engine.requests):
            assert num_chunks(engine) == {"ram": 0, "disk": 0}
        prompt = prompts(200)
        engine.ask(prompt)
        engine.forget_own_prefixes()
        engine.ask(prompt)
        assert sum(len(op.block_ids) for plan in engine.plans for op in plan.loads) == 12
        engine.assert_clean()
        engine.close()


@ALL
def test_what_vllm_keeps_of_its_own_at_a_reset_is_not_stored_again(toy_engine, prompts, options):
    """B525, KEY-19: it keeps all while a request runs. When it has been emptied, later hits in it are stored."""
    engine = toy_engine(**options)
    prompt = prompts(300)
    engine.ask(prompt)
    engine.add("runs", prompts(100), max_tokens=60)
    for _ in range(5):
        engine.step()
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    for name in ("again", "once more"):
        engine.add(name, [*prompt, *prompts(40)], max_tokens=2)
    engine.run()
    assert engine.num_cached(prompt) == 0
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.ask(prompt)
    assert engine.num_cached(prompt) == 288
    longer = [*prompt, *prompts(100)]
    engine.ask(longer)
    assert engine.num_cached(longer) == 400 // 16 * 16
    engine.assert_clean()


@ALL
def test_what_runs_at_a_reset_is_not_stored_by_those_who_follow_it(toy_engine, prompts, options):
    """B565, KEY-19: vLLM's own cache was empty then, and has it later: a talk that was shorter than a block."""
    engine = toy_engine(**options)
    prompt = prompts(10)
    engine.add("runs", prompt, max_tokens=200)
    for _ in range(3):
        engine.step()
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.add("new", other := prompts(40), max_tokens=2)
    engine.run()
    assert engine.num_cached(other) == 32
    talk = [*prompt, *engine.texts["runs"]]
    engine.ask([*talk, *prompts(20)])
    assert engine.num_cached(talk) == 0
    engine.forget_own_prefixes()
    engine.ask(talk)
    longer = [*talk, *prompts(100)]
    engine.ask(longer)
    assert engine.num_cached(longer) == 310 // 16 * 16
    engine.assert_clean()


def test_what_is_loaded_during_a_reset_is_not_stored_by_those_who_follow(toy_engine, prompts):
    """B565, KEY-19: it comes into vLLM's own cache, which was empty, when the load is over."""
    engine = toy_engine(asynchronous=True, on_device=True)
    prompt = prompts(300)
    engine.ask(prompt)
    engine.forget_own_prefixes()
    engine.add("loads", prompt)
    engine.step()
    assert engine.requests["loads"].status.name == "WAITING_FOR_REMOTE_KVS"
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.add("new", prompts(40), max_tokens=2)
    engine.run()
    engine.ask([*prompt, *prompts(40)])
    assert engine.num_cached(prompt) == 0
    engine.assert_clean()


@pytest.mark.parametrize("is_anew", [True, False])
def test_an_adapter_that_was_trained_on_is_not_given_the_old_ones_kv(toy_engine, prompts, tmp_path, is_anew):
    """B526: vLLM's own cache knows it by name and path; it is loaded in place, or under another number."""
    from vllm.lora.request import LoRARequest

    def train(weights):
        (tmp_path / "poet").mkdir(exist_ok=True)
        (tmp_path / "poet" / "adapter_model.safetensors").write_bytes(weights)

    engine, prompt = toy_engine(), prompts(300)

    def ask(name, number, **fields):
        engine.add(name, prompt, max_tokens=2, lora_request=LoRARequest("poet", number, f"{tmp_path}/poet", **fields))
        engine.run()
        return {item.key for plan in engine.plans for op in plan.saves if op.request_id == name for item in op.items}

    train(b"weights")
    assert len(ask("one", 1)) == 5
    train(b"other weights")
    again = {"number": 1, "load_inplace": True} if is_anew else {"number": 2}
    assert ask("two", **again) == set()
    engine.forget_own_prefixes()
    assert len(ask("three", **again)) >= 4
    engine.assert_clean()


def test_a_request_that_waits_for_a_disk_across_a_reset_is_computed(toy_engine, prompts, tmp_path):
    """A hit that was promised to nobody yet is gone with the reset."""
    engine = toy_engine(settings={"qkvault.disk_path": str(tmp_path / "disk")})
    prompt = prompts(200)
    engine.ask(prompt)
    engine.forget_own_prefixes()
    request = engine.add("waits", prompt)
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (192, True)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run()
    assert not [op for plan in engine.plans for op in plan.loads]
    engine.assert_texts()
    engine.assert_clean()


def test_a_reset_that_does_not_reach_the_store_says_so(toy_engine, prompts):
    """vLLM hears that the reset has failed; a worker's half, asked by mistake, does not know."""
    from qkvault.errors import Unavailable

    engine = toy_engine()
    assert engine.worker.reset_cache() is None

    def unreachable(**kwargs):
        raise Unavailable

    engine.connector._scheduler._client.clear = unreachable
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
