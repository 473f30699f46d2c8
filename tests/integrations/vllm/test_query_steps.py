"""Queries under both of vLLM's model runners: every one that is stored is its token's, and none is missing unsaid."""

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
ON = {"qkvault.transfer_intermediate_tensors": True, "qkvault.q_ring_blocks": 128}
CHUNK = 64


@pytest.fixture
def query_engine(toy_engine, toy_queries):
    """Starts toy engines of two layers whose queries are captured."""

    def start(*, settings=None, on_device=False, **options):
        engine = toy_engine(
            settings=ON | {"qkvault.ram_bytes": "16MiB"} | (settings or {}),
            on_device=on_device, num_layers=2, layers=toy_queries.Layers, **options,
        )  # fmt: skip
        if on_device:
            toy_queries.LateStream(toy_queries.capture_of(engine).adapter.paged)
        holes, stepped = toy_queries.Holes(engine), engine.step

        def step():
            stepped()
            holes.look()
            toy_queries.capture_of(engine).adapter.check()

        engine.step, engine.holes = step, holes
        return engine

    return start


@pytest.fixture
def verify(toy, toy_queries):
    """Checks all that an engine has stored, and returns the keys of it. Nothing is held any more."""

    def check(engine, layers=(0, 1)):
        engine.holes.look()
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
