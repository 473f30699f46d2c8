"""Crowds of requests on stock vLLM: the tokens are those of vLLM without us. Each engine here is the only one alive."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.allow_leaks("vLLM keeps threads and sockets of its own")]


@pytest.fixture
def engine(real, truth, tiny_model):
    """An engine with few blocks and short steps, so that requests are preempted and prefilled in parts."""
    engine = real.RealEngine(tiny_model, {}, num_gpu_blocks_override=34, max_num_batched_tokens=96, max_model_len=1024)
    yield engine
    engine.close()


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


def test_the_tokens_are_those_of_vllm_without_us(engine, truth):
    """B 127: over a hundred requests that share prefixes, talk, are aborted, preempted and prefilled in parts."""
    from vllm import SamplingParams

    def sampling(max_tokens):
        return SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True)

    crowd = Crowd(engine, sampling, 3)
    wanted = list(zip(truth["prompts"], truth["texts"], strict=True))
    num_asked = 0
    for aborts in (0.0, 0.1, 0.1):
        num_asked += crowd.ask(list(wanted), aborts=aborts)
        engine.forget_own_prefixes()
    for turn in range(4):
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
