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


class Traffic:
    """Random requests that share much, and what a client does to them."""

    def __init__(self, toy, engine, seed: int, *, num_requests: int, failing: float = 0.0) -> None:
        self.toy, self.engine, self.random = toy, engine, random.Random(seed)
        self.left, self.failing = num_requests, failing
        self.num_failed = 0
        self.stems = [self.tokens(200) for _ in range(3)]
        engine.on_plan = self.damage

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(3, self.toy.VOCABULARY) for _ in range(count)]

    def prompt(self) -> list[int]:
        said = [
            r.prompt_token_ids + self.engine.texts[n]
            for n, r in self.engine.requests.items()
            if n in self.engine.endings
        ]
        if said and self.random.random() < 0.4:  # the next turn of a talk
            return self.random.choice(said)[:400] + self.tokens(self.random.randrange(1, 30))
        stem = self.random.choice(self.stems)
        return stem[: self.random.randrange(1, len(stem))] + self.tokens(self.random.randrange(1, 90))

    def add(self) -> None:
        self.left -= 1
        sampling = {"stop_token_ids": [5]} if self.random.random() < 0.5 else {}
        name = f"r{self.left}"
        self.engine.add(name, self.prompt(), self.random.randrange(1, 60), sampling=sampling)

    def damage(self, plan) -> None:
        for op in plan.loads:
            if op.items_of(0) and self.random.random() < self.failing:
                self.engine.damage(op, self.random.randrange(len(op.items_of(0))))
                self.num_failed += 1

    def run(self) -> None:
        engine, chance = self.engine, self.random.random
        for _ in range(4000):
            while self.left and chance() < 0.25:
                self.add()
            alive = [name for name in engine.requests if name not in engine.endings]
            if alive and chance() < 0.02:
                engine.abort(self.random.choice(alive))
            if not engine.scheduler.running and chance() < 0.2:
                engine.scheduler.reset_prefix_cache()
            engine.step()
            if not (self.left or engine.scheduler.has_requests() or engine._running):
                return
        pytest.fail("it does not come to an end")


def external_hits(engine) -> int:
    return sum(len(op.block_ids) for plan in engine.plans for op in plan.loads) * 16


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", LAYOUTS)
def test_every_text_is_the_true_one_in_any_traffic(toy, toy_engine, options, seed):
    """Requests that share prefixes, are aborted, preempted and prefilled in parts never see a wrong page."""
    engine = toy_engine(num_blocks=48, **options)
    traffic = Traffic(toy, engine, seed, num_requests=40)
    traffic.run()
    engine.assert_texts()
    engine.assert_clean()
    assert external_hits(engine) > 500
    assert sum(request.num_preemptions for request in engine.requests.values()) > 0


@pytest.mark.parametrize("options", LAYOUTS)
def test_no_load_that_fails_reaches_a_text(toy, toy_engine, options):
    """Loads that fail at random chunks, shared or not, cost a recompute and nothing else."""
    engine = toy_engine(num_blocks=48, **options)
    traffic = Traffic(toy, engine, 11, num_requests=40, failing=0.5)
    traffic.run()
    assert traffic.num_failed > 5
    engine.assert_texts()
    engine.assert_clean()


@pytest.mark.parametrize("options", LAYOUTS)
def test_a_store_that_is_always_full_costs_hits_only(toy, toy_engine, options):
    """Lookups, allocations and stores under constant eviction raise nothing and promise nothing that is gone."""
    engine = toy_engine(num_blocks=48, settings={"qkvault.ram_bytes": 9 * 12 * 1024}, **options)
    traffic = Traffic(toy, engine, 23, num_requests=60)
    traffic.run()
    counters = engine.status().counters
    assert counters["removed.ram.evicted"] > 20
    engine.assert_texts()
    engine.assert_clean()


@pytest.mark.parametrize("seed", range(16))
def test_no_setting_makes_a_text_wrong(toy, toy_engine, tmp_path, seed):
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
    traffic = Traffic(toy, engine, seed, num_requests=30, failing=rng.choice([0, 0.3]))
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
