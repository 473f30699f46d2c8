"""Tensor parallel engines: each rank stores and loads its own heads, and a hit counts as far as all of them have it.

Data parallel ones: each rank is an engine of its own, and what one has computed the others hit.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

BIND = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def run(tiny_model, tmp_path):
    """Runs an engine of so many ranks over the disk tier of this test; returns what it told."""
    program = Path(__file__).with_name("real_engine.py")

    def run(prompts, ranks, **task):
        bind = BIND if ranks == 2 else {}
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


@pytest.fixture
def address(tmp_path):
    return f"unix://{tmp_path}/s"


@pytest.fixture
def ask(engine_process, tiny_model, address):
    """Starts an engine of two ranks on the server of this test; returns what asks it."""
    with ExitStack() as stack:

        def start(program, **options):
            engine = engine_process(tiny_model, {"qkvault.address": address}, program, BIND, **options)
            stack.callback(engine.close)
            assert engine.told() == "ready"
            return engine.ask

        yield start


@pytest.fixture
def serve(server_process, address, tmp_path):
    """Starts the server of this test, with one disk whenever it does."""
    with ExitStack() as stack:

        def start():
            server = server_process(address, tmp_path / "disk")
            stack.callback(lambda: server.process.poll() is None and server.end())
            return server

        yield start


def files_of(disk):
    """Names of the chunks of each space."""
    return [sorted(path.name for path in space.rglob("*.qkv")) for space in disk.glob("*/") if space.is_dir()]


def assert_nothing_is_held(server):
    deadline = time.monotonic() + 10
    while server.status().num_leases:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_two_ranks_of_one_engine_share_a_server(ask, serve, tmp_path):
    """B33, B396, B400: hits come from its memory, and after a restart from its disk, and end where one rank's ends."""
    rng = random.Random(4)
    prompt, other = ([rng.randrange(3, 500) for _ in range(300)] for _ in range(2))
    server = serve()
    ask = ask("engine_child.py", tensor_parallel_size=2)
    first, second = ask(prompt), ask(prompt, forgets=True)
    assert (first["cached"], second["cached"]) == ([0], [288])
    assert first["texts"] == second["texts"]
    third = ask(other)
    assert third["cached"] == [0]
    roles = sorted(each.instance.role for each in server.status().instances)
    assert roles == ["scheduler", "worker", "worker"]
    assert server.end() == 0

    one, two = files_of(tmp_path / "disk")
    assert one == two
    assert len(one) == 10  # of each prompt four whole chunks, and one of a block
    next(path for path in sorted((tmp_path / "disk").rglob("*.qkv"))).unlink()
    server = serve()
    deadline = time.monotonic() + 30  # a sign of life each five seconds finds it
    while len(server.status().instances) < 3:  # nobody asks the engine for anything meanwhile
        assert time.monotonic() < deadline
        time.sleep(0.05)
    again = [ask(each, forgets=True) for each in (prompt, other)]
    assert [each["texts"] for each in again] == [first["texts"], third["texts"]]
    assert sorted(each["cached"][0] for each in again)[1] == 288 > min(each["cached"][0] for each in again)
    assert_nothing_is_held(server)
    assert server.end() == 0


def test_what_one_data_parallel_rank_has_computed_the_other_hits(ask, serve, tmp_path):
    """B401: with the same tokens, whichever rank was first; a rank's chunks are nobody's but the model's."""
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 500) for _ in range(300)] for _ in range(2)]
    server = serve()
    ask = ask("data_parallel_child.py", data_parallel_size=2)
    for first, prompt in enumerate(prompts):
        cold, hit = ask(prompt, rank=first), ask(prompt, rank=1 - first)
        assert (cold["cached"], hit["cached"]) == ([0], [288])
        assert cold["texts"] == hit["texts"]
    roles = sorted(each.instance.role for each in server.status().instances)
    assert roles == ["scheduler", "scheduler", "worker", "worker"]
    assert_nothing_is_held(server)
    assert server.end() == 0
    assert [len(names) for names in files_of(tmp_path / "disk")] == [10]
