"""Engines in processes of their own, over a real model: restarts, kills, both doors, both layouts of processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

CACHES = (
    "A cache keeps what was expensive to compute, so that it need not be computed again. Its size is limited, and so "
    "it must choose what to forget. The oldest entry is often a good choice, but not always: some things are needed "
    "every day, others only once. Name three rules by which a cache can choose, and say when each of them is wrong. "
)
SEAS = (
    "The sea is older than the mountains. Rivers bring it sand and salt, and the wind brings it back as rain. Ships "
    "have crossed it for thousands of years, first along the coasts, then by the stars. Write one sentence on it. "
)


@pytest.fixture(scope="module")
def tokens(model_path: Path) -> list[list[int]]:
    """The questions, long enough to fill chunks and a part of one, as tokens of the model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    return [tokenizer(question * 4)["input_ids"] for question in (CACHES, SEAS)]


@pytest.fixture
def engine_process(model_path: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs an engine over the disk tier of this test in a process of its own; returns what it told."""
    program = Path(__file__).with_name("real_engine.py")

    def run(prompts: list[list[int]], *, mp: bool, end: str = "exit", **task: Any) -> dict[str, Any]:
        task = {
            "model": str(model_path),
            "disk": str(tmp_path / "disk"),
            "door": "by name",
            "rounds": [[prompt] for prompt in prompts],
            "max_tokens": 12,
            "end": end,
            **task,
        }
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(mp))}
        done = subprocess.run(
            [sys.executable, str(program), json.dumps(task)],
            capture_output=True, text=True, check=False, timeout=540, env=environment,
        )  # fmt: skip
        told = [line for line in done.stdout.splitlines() if line.startswith("TOLD ")]
        assert told, done.stderr[-5000:]
        assert done.returncode == (0 if end == "exit" else -signal.SIGKILL), done.stderr[-5000:]
        return {**json.loads(told[0].removeprefix("TOLD ")), "lines": (done.stdout + done.stderr).splitlines()}

    return run


def whole_blocks(count: int) -> int:
    return (count - 1) // 32 * 32


def test_what_was_stored_outlives_the_process_that_stored_it(engine_process, tokens):
    """B 126: after an exit, and after kill -9, another process says the same from disk, whatever the processes' layout.

    The first engine is one process and is found by module; the second is vLLM's default of three, is found by name, and
    is killed; the third has not read its directory to the end when it is asked.
    """
    first, second = tokens
    one = engine_process([first], mp=False, door="by module")
    assert (one["cached"], one["sources"]) == ([0], {})

    two = engine_process([first, second, second], mp=True, end="kill", num_files=2 * len(tokens))
    assert two["processes"] >= 2
    assert two["cached"] == [whole_blocks(len(first)), 0, whole_blocks(len(second))]
    assert two["sources"]["disk"] == whole_blocks(len(first))
    assert two["texts"][0] == one["texts"][0]
    assert two["texts"][1] == two["texts"][2]

    three = engine_process([second, first], mp=False, slow_scan=True)
    assert three["is_scanning"]
    # What a scan has not come to is found by name, and so in whole chunks only.
    assert three["cached"] == [(len(prompt) - 1) // 64 * 64 for prompt in (second, first)]
    assert three["sources"] == {"disk": sum(three["cached"])}
    assert three["texts"] == [two["texts"][1], one["texts"][0]]


def test_in_vllms_default_processes_hits_come_from_memory(engine_process, tokens):
    """B 127: a worker in another process maps the store's memory; the second of two equal prompts is not computed."""
    told = engine_process([tokens[0]] * 2, mp=True, door="by module", options={"enable_prefix_caching": False})
    assert told["cached"] == [0, whole_blocks(len(tokens[0]))]
    assert told["sources"] == {"host": told["cached"][1]}
    assert told["texts"][0] == told["texts"][1]


def test_numbers_and_lines_of_all_processes_are_vllms(engine_process, tiny_model):
    """B280, B283: counted in the engine's process and the worker's, read in this one; logged once, in vLLM's format."""
    prompt = list(range(3, 303))
    told = engine_process(
        [prompt] * 2, mp=True, model=tiny_model, options={"enable_prefix_caching": False},
        settings={"qkvault.log_level": "debug"},
    )  # fmt: skip
    assert told["processes"] >= 2
    assert told["cached"] == [0, 288]
    numbers = told["metrics"]
    assert numbers["found_tokens.ram"] == numbers["loaded_tokens"] == 288
    assert numbers["loaded_bytes"] == 288 * 2 * 2 * 2 * 32 * 4  # layers, K and V, heads, head size, float32
    assert numbers["request_tokens.lookup"] == 600
    assert numbers["requests_finished.retrieve"] == 1
    assert numbers["stored_tokens"] == 288
    assert numbers["stage_failures.put"] == numbers["failed_loads"] == numbers["rejected_updates"] == 0
    assert numbers["store_medium_capacity_bytes.ram"] == 64 << 20
    finished = [line for line in told["lines"] if "retrieve_finished" in line]
    assert len(finished) == 1
    assert " DEBUG " in finished[0]
    assert " tokens=288 " in finished[0]


def test_drafts_and_hits_give_the_same_tokens(engine_process, truth, tiny_model):
    """With n-gram drafts, whose rejected tokens leave KV behind, what is stored and loaded is still the truth."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    told = engine_process(
        [], mp=False, model=tiny_model, rounds=[truth["prompts"]] * 2, max_tokens=24, forgets=True,
        options={"speculative_config": drafts},
    )  # fmt: skip
    assert told["texts"] == truth["texts"] * 2
    assert sum(told["cached"][:40]) < 4000 < sum(told["cached"][40:])
