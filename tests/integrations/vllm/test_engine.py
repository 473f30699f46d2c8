"""Stock vLLM in this process, over a small random model: the tokens and the bytes are those of vLLM without us."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from qkvault.image import wipe_header

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.allow_leaks("vLLM keeps threads and sockets of its own")]


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


def test_every_byte_that_comes_back_is_the_one_that_went(fresh, truth):
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
            for item in op.items_of(0):
                first = item.start_token % 64 // 32
                was = pages[item.ref.key][:, first : first + len(item.block_ids)]
                compared.append(torch.equal(content(item.block_ids), was))

    worker.wait_for_save, worker.start_load_kv = wait_for_save, start_load_kv
    try:
        for _ in range(2):
            assert fresh.generate(truth["prompts"][30:39], 24) == truth["texts"][30:39]
            for layer in layers:
                layer.zero_()
            fresh.forget_own_prefixes()
    finally:
        worker.wait_for_save, worker.start_load_kv = save, load
    assert len(compared) > 10
    assert all(compared)


def test_an_empty_cache_changes_nothing(fresh, truth):
    """With no hit the tokens are those of vLLM, and no request was touched."""
    answers = []
    matched = fresh.connector.get_num_new_matched_tokens
    fresh.connector.get_num_new_matched_tokens = lambda *args: answers.append(matched(*args)) or answers[-1]
    assert fresh.generate([truth["prompts"][38]], 24) == [truth["texts"][38]]
    del fresh.connector.get_num_new_matched_tokens
    assert answers == [(0, False)]
    assert fresh.connector.requires_kv_delivery is False


def test_vllm_counts_hits_by_the_medium_they_come_from(fresh, truth):
    """vLLM's own metrics and outputs tell tokens from host memory and from disk apart."""
    prompt, text = truth["prompts"][38], truth["texts"][38]  # 500 tokens
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


def test_when_an_answer_is_there_the_caches_may_be_dropped(fresh, truth):
    """B566: also one that stopped unforeseen, and as vLLM does before it sleeps. Its end is stored by the next step."""
    prompt, text = truth["prompts"][38], truth["texts"][38]  # 500 tokens
    stop = next(at for at in range(13, 24) if text[at] not in text[:at])
    talk = [*prompt, *text[: stop + 1]]

    def ask():
        output = fresh.outputs([prompt], 24, stop_token_ids=[text[stop]])[0]
        assert (list(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (talk[500:], "stop")

    ask()
    fresh.forget_own_prefixes()
    assert fresh.generate([other := truth["prompts"][5]], 1) == [truth["texts"][5][:1]]
    fresh.forget_own_prefixes()
    assert fresh.outputs([[*talk, *other]], 1)[0].num_cached_tokens == 512
    assert fresh.llm.reset_prefix_cache(reset_connector=True)
    ask()
    fresh.llm.llm_engine.engine_core.engine_core._reset_caches()
    assert fresh.outputs([talk], 1)[0].num_cached_tokens == 0


@pytest.mark.parametrize("which", [0, 3, 7])
def test_a_load_that_fails_costs_a_recompute(fresh, truth, which):
    """B 128, B 129: with a chunk lost between promise and load, the text is the same, alone and shared by others."""
    stem, text = truth["prompts"][38], truth["texts"][38]
    assert fresh.generate([stem], 24) == [text]
    fresh.forget_own_prefixes()
    load = fresh.worker.start_load_kv

    def lose_one(context, **kwargs):
        for op in fresh.worker._connector_metadata.loads:
            ref = op.items_of(0)[min(which, len(op.items_of(0)) - 1)].ref
            wipe_header(fresh.connector._store.driver.pool.view(ref.offset, ref.image_bytes))
        load(context, **kwargs)

    fresh.worker.start_load_kv = lose_one
    try:
        assert fresh.generate([stem] * 4, 24) == [text] * 4
    finally:
        fresh.worker.start_load_kv = load
    assert fresh.worker.stats.snapshot().failed_loads > 0
