"""Everything at once, at random: shared prefixes, turns, aborts, preemption, prefill in parts, eviction, failures."""

from __future__ import annotations

import random

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


def external_hits(engine) -> int:
    return sum(len(op.block_ids) for plan in engine.plans for op in plan.loads) * 16


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", LAYOUTS)
def test_every_text_is_the_true_one_in_any_traffic(toy_engine, new_traffic, options, seed):
    """Requests that share prefixes, are aborted, preempted and prefilled in parts never see a wrong page."""
    engine = toy_engine(num_blocks=48, **options)
    traffic = new_traffic(engine, seed, num_requests=40)
    traffic.run()
    engine.assert_texts()
    engine.assert_clean()
    assert external_hits(engine) > 500
    assert sum(request.num_preemptions for request in engine.requests.values()) > 0


@pytest.mark.parametrize("options", LAYOUTS)
def test_no_load_that_fails_reaches_a_text(toy_engine, new_traffic, options):
    """Loads that fail at random chunks, shared or not, cost a recompute and nothing else."""
    engine = toy_engine(num_blocks=48, **options)
    traffic = new_traffic(engine, 11, num_requests=40, failing=0.5)
    traffic.run()
    assert traffic.num_failed > 5
    engine.assert_texts()
    engine.assert_clean()


@pytest.mark.parametrize("options", LAYOUTS)
def test_a_store_that_is_always_full_costs_hits_only(toy_engine, new_traffic, options):
    """Lookups, allocations and stores under constant eviction raise nothing and promise nothing that is gone."""
    engine = toy_engine(num_blocks=48, settings={"qkvault.ram_bytes": 9 * 12 * 1024}, **options)
    traffic = new_traffic(engine, 23, num_requests=60)
    traffic.run()
    counters = engine.status().counters
    assert counters["removed.ram.evicted"] > 20
    engine.assert_texts()
    engine.assert_clean()


@pytest.mark.parametrize("seed", range(16))
def test_no_setting_makes_a_text_wrong(toy_engine, new_traffic, tmp_path, seed):
    """Whatever is set, with a disk or without, with resets in between, texts are true and nothing is left behind."""
    rng = random.Random(seed)
    choices = {
        "qkvault.disk_path": [None, str(tmp_path / "disk")],
        "qkvault.ram_bytes": ["4MiB", 9 * 12 * 1024, 30 * 12 * 1024],
        "qkvault.save_decode": [True, True, False],
        "qkvault.save_partial_chunks": [True, True, False],
        "qkvault.min_hit_tokens": [0, 0, 100],
        "qkvault.hot_cache": [True, True, False],
    }
    settings = {name: rng.choice(values) for name, values in choices.items()}
    options = {
        "enable_prefix_caching": rng.random() < 0.8,
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "max_num_batched_tokens": rng.choice([16, 96, 500]),
    }
    options |= rng.choice(LAYOUTS).values[0]
    settings = {name: value for name, value in settings.items() if value is not None}
    engine = toy_engine(num_blocks=rng.choice([36, 48, 80]), settings=settings, **options)
    traffic = new_traffic(engine, seed, num_requests=30, failing=rng.choice([0, 0.3]))
    stepped = engine.step

    def step():
        stepped()
        if rng.random() < 0.01:
            engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.store.driver.check()

    engine.step = step
    traffic.run()
    engine.assert_texts()
    engine.assert_clean()
