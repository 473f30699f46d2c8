"""Stock vLLM in this process, over a small random model: the tokens and the bytes are those of vLLM without us."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from qkvault.image import wipe_header

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.allow_leaks("vLLM keeps threads and sockets of its own")]

NUM_TALKS, NUM_TURNS = 4, 4


def prompt_of(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 512) for _ in range(count)]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Forty prompts: of some length each, or with a stem that others share to some point, inside a chunk as a rule."""
    rng = random.Random(7)
    stems = [prompt_of(rng, 330), prompt_of(rng, 150)]
    shared = [rng.choice(stems)[: rng.randrange(20, 330)] + prompt_of(rng, rng.randrange(1, 60)) for _ in range(24)]
    return shared + [
        prompt_of(rng, length) for length in [1, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 200, 256, 300, 500, 20]
    ]


@pytest.fixture(scope="module")
def truth(real, tiny_model, prompts) -> dict[str, Any]:
    """What vLLM says without us: after each prompt, and turn by turn in talks. Its engine has ended."""
    engine = real.RealEngine(tiny_model, enable_prefix_caching=False)
    rng = random.Random(8)
    found = {"texts": [engine.generate([prompt], 24)[0] for prompt in prompts], "talks": []}
    for _ in range(NUM_TALKS):
        talk, turns = [], []
        for _ in range(NUM_TURNS):
            talk = talk + prompt_of(rng, rng.randrange(20, 90))
            text = engine.generate([talk], 20)[0]
            turns.append((talk, text))
            talk = talk + text
        found["talks"].append(turns)
    engine.close()
    return found


@pytest.fixture(scope="module")
def engine(real, truth, tiny_model, tmp_path_factory) -> Iterator[Any]:
    """One engine with a disk tier and room for all, for the tests that look at one thing."""
    disk = tmp_path_factory.mktemp("store") / "disk"
    engine = real.RealEngine(tiny_model, {"qkvault.disk_path": str(disk)}, door="by module")
    yield engine
    engine.close()


@pytest.fixture
def fresh(engine) -> Iterator[Any]:
    """The engine with nothing cached anywhere."""
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    yield engine
    engine.assert_clean()


class Crowd:
    """Requests that arrive while others run, some of which are given up, on vLLM's own step loop."""

    def __init__(self, engine: Any, sampling: Any, seed: int) -> None:
        self.engine, self.sampling, self.rng = engine, sampling, random.Random(seed)
        self.core = engine.llm.llm_engine
        self.texts: dict[str, list[int]] = {}
        self.given_up: set[str] = set()
        self.count = 0

    def ask(self, wanted: list[tuple[list[int], list[int]]], *, aborts: float = 0.0) -> int:
        """Ask all of ``wanted`` (prompt, true text); each answer must be true, or the beginning of it if given up."""
        asked = {}
        while wanted or self.core.has_unfinished_requests():
            while wanted and self.rng.random() < 0.4:
                prompt, text = wanted.pop()
                name = f"{self.count}"
                self.count += 1
                asked[name] = text
                self.core.add_request(name, {"prompt_token_ids": prompt}, self.sampling(len(text)))
            for output in self.core.step():
                self.texts[output.request_id] = list(output.outputs[0].token_ids)
            running = [name for name in asked if len(self.texts.get(name, ())) < len(asked[name])]
            if running and self.rng.random() < aborts:
                name = self.rng.choice(running)
                self.core.abort_request([name])
                self.given_up.add(name)
        for name, text in asked.items():
            said = self.texts.get(name, [])
            assert said == (text[: len(said)] if name in self.given_up else text), name
        return len(asked)


def test_the_tokens_are_those_of_vllm_without_us(real, truth, prompts, tiny_model):
    """B 127: over a hundred requests that share prefixes, talk, are aborted, preempted and prefilled in parts."""
    from vllm import SamplingParams

    def sampling(max_tokens):
        return SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True)

    engine = real.RealEngine(tiny_model, {}, num_gpu_blocks_override=34, max_num_batched_tokens=96)
    crowd = Crowd(engine, sampling, 3)
    wanted = list(zip(prompts, truth["texts"], strict=True))
    num_asked = 0
    for aborts in (0.0, 0.1, 0.1):
        num_asked += crowd.ask(list(wanted), aborts=aborts)
        engine.forget_own_prefixes()
    for turn in range(NUM_TURNS):
        num_asked += crowd.ask([talk[turn] for talk in truth["talks"]])
        engine.forget_own_prefixes()
    assert num_asked > 100
    assert len(crowd.given_up) > 5
    assert engine.num_preempted > 0
    found = engine.connector.stats.snapshot().found_tokens["ram"]
    loaded = engine.worker.stats.snapshot()
    assert found == loaded.loaded_tokens > 5000
    assert loaded.failed_tokens == 0
    engine.assert_clean()
    engine.close()


def test_every_byte_that_comes_back_is_the_one_that_went(fresh, truth, prompts):
    """Pages of a prefix that was loaded equal, element by element, those that vLLM computed."""
    import torch

    worker, pages = fresh.worker, {}
    layers = fresh.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.kv_caches
    save, load = worker.wait_for_save, worker.start_load_kv
    compared = []

    def content(block_ids):
        return torch.stack([layer[list(block_ids)] for layer in layers]).clone()

    def wait_for_save():
        for op in worker._connector_metadata.saves:
            for item in op.items:
                pages[item.key] = content(item.block_ids)
        save()

    def start_load_kv(context, **kwargs):
        load(context, **kwargs)
        for op in worker._connector_metadata.loads:
            for item in op.items:
                first = item.start_token % 64 // 32
                was = pages[item.ref.key][:, first : first + len(item.block_ids)]
                compared.append(torch.equal(content(item.block_ids), was))

    worker.wait_for_save, worker.start_load_kv = wait_for_save, start_load_kv
    try:
        for _ in range(2):
            assert fresh.generate(prompts[30:39], 24) == truth["texts"][30:39]
            for layer in layers:
                layer.zero_()
            fresh.forget_own_prefixes()
    finally:
        worker.wait_for_save, worker.start_load_kv = save, load
    assert len(compared) > 10
    assert all(compared)


def test_an_empty_cache_changes_nothing(fresh, truth, prompts):
    """With no hit the tokens are those of vLLM, and no request was touched."""
    answers = []
    matched = fresh.connector.get_num_new_matched_tokens
    fresh.connector.get_num_new_matched_tokens = lambda *args: answers.append(matched(*args)) or answers[-1]
    assert fresh.generate([prompts[38]], 24) == [truth["texts"][38]]
    del fresh.connector.get_num_new_matched_tokens
    assert answers == [(0, False)]
    assert fresh.connector.requires_kv_delivery is False


def test_vllm_counts_hits_by_the_medium_they_come_from(fresh, truth, prompts):
    """vLLM's own metrics and outputs tell tokens from host memory and from disk apart."""
    prompt, text = prompts[38], truth["texts"][38]  # 500 tokens
    before = fresh.cached_by_source()

    def ask():
        output = fresh.outputs([prompt], 24)[0]
        assert list(output.outputs[0].token_ids) == text
        after = fresh.cached_by_source()
        return output.num_cached_tokens, {k: v - before.get(k, 0) for k, v in after.items() if v != before.get(k, 0)}

    assert ask() == (0, {})
    fresh.forget_own_prefixes()
    assert ask() == (480, {"host": 480})
    fresh.forget_own_prefixes()
    assert fresh.connector._store.driver.drain(10)
    client = fresh.connector._store.connect("test")
    client.clear(lower_tiers=False)
    client.close()
    assert ask() == (480, {"host": 480, "disk": 480})
    assert ask() == (480, {"host": 480, "disk": 480, "device": 480})


def test_a_talk_goes_on_from_what_was_said(fresh, truth):
    """Each turn finds the turns before it, answers included, up to the last whole block."""
    for talk, text in truth["talks"][0]:
        output = fresh.outputs([talk], 20)[0]
        assert list(output.outputs[0].token_ids) == text
        known = next((len(before) + 19 for before, _ in reversed(truth["talks"][0]) if len(before) < len(talk)), 0)
        assert output.num_cached_tokens == known // 32 * 32
        fresh.forget_own_prefixes()


@pytest.mark.parametrize("which", [0, 3, 7])
def test_a_load_that_fails_costs_a_recompute(fresh, truth, prompts, which):
    """B 128, B 129: with a chunk lost between promise and load, the text is the same, alone and shared by others."""
    stem, text = prompts[38], truth["texts"][38]
    assert fresh.generate([stem], 24) == [text]
    fresh.forget_own_prefixes()
    load = fresh.worker.start_load_kv

    def lose_one(context, **kwargs):
        for op in fresh.worker._connector_metadata.loads:
            ref = op.items[min(which, len(op.items) - 1)].ref
            wipe_header(fresh.connector._store.driver.pool.view(ref.offset, ref.image_bytes))
        load(context, **kwargs)

    fresh.worker.start_load_kv = lose_one
    try:
        assert fresh.generate([stem] * 4, 24) == [text] * 4
    finally:
        fresh.worker.start_load_kv = load
    assert fresh.worker.stats.snapshot().failed_loads > 0


def test_drafts_and_hits_give_the_same_tokens(real, truth, prompts, tiny_model):
    """With n-gram drafts, whose rejected tokens leave KV behind, what is stored and loaded is still the truth."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    engine = real.RealEngine(tiny_model, {}, speculative_config=drafts)
    for _ in range(2):
        assert engine.generate(prompts, 24) == truth["texts"]
        engine.forget_own_prefixes()
    assert engine.worker.stats.snapshot().loaded_tokens > 3000
    engine.assert_clean()
    engine.close()
