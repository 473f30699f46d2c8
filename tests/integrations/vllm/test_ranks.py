"""Tensor parallel engines: each rank stores and loads its own heads, and a hit counts as far as all of them have it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def run(tiny_model, tmp_path):
    """Runs an engine of so many ranks over the disk tier of this test; returns what it told."""
    program = Path(__file__).with_name("real_engine.py")

    def run(prompts, ranks, **task):
        bind = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if ranks == 2 else {}
        task = {
            "model": tiny_model,
            "disk": str(tmp_path / "disk"),
            "door": "by name",
            "rounds": [[prompt] for prompt in prompts],
            "forgets": True,
            "max_tokens": 12,
            "end": "exit",
            "options": {"tensor_parallel_size": ranks},
            **task,
        }
        done = subprocess.run(
            [sys.executable, str(program), json.dumps(task)],
            capture_output=True, text=True, check=False, timeout=540,
            env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | bind,
        )  # fmt: skip
        told = [line for line in done.stdout.splitlines() if line.startswith("TOLD ")]
        assert told, done.stderr[-5000:]
        return json.loads(told[0].removeprefix("TOLD "))

    return run


def test_two_ranks_hit_from_ram_and_after_a_restart_from_disk(run, tmp_path):
    """B33, DET-03: the same text as when it was computed, every chunk once a rank; a hit ends where one rank's ends."""
    rng = random.Random(4)
    prompt, other = ([rng.randrange(3, 500) for _ in range(300)] for _ in range(2))
    one = run([prompt, prompt, other], 2)
    assert one["cached"] == [0, 288, 0]
    assert one["texts"][0] == one["texts"][1]
    spaces = list((tmp_path / "disk").glob("*/"))
    files = [sorted(path.name for path in space.rglob("*.qkv")) for space in spaces if space.is_dir()]
    assert len(files) == 2
    assert files[0] == files[1]

    # One rank has lost a chunk of one prompt, so that the hit is shorter; the other prompt's is whole.
    next(path for path in sorted(spaces[1].rglob("*.qkv"))).unlink()
    two = run([prompt, other], 2)
    assert two["texts"] == [one["texts"][0], one["texts"][2]]
    assert sorted(two["cached"])[1] == 288 > min(two["cached"])
