"""The benches run, at a size at which their numbers mean nothing, and write what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytest.importorskip("torch", reason="the benches copy tensors")


def bench(folder: Path, *arguments: str) -> dict:
    """Run the command, and return the document that it wrote."""
    path = folder / "results.json"
    command = [sys.executable, "-m", "bench", *arguments, "--tiny", "--json", str(path), "--scratch", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert path.exists(), done.stdout + done.stderr
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def micro(tmp_path_factory):
    return bench(tmp_path_factory.mktemp("bench"), "micro")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "needed"), [("hash", 1), ("lookup", 1), ("copy", 4), ("socket", 4), ("disk", 0), ("index", 1)]
)
def test_a_micro_bench_holds_ours_against_a_limit(micro, name, needed):
    if name not in micro["benches"]:
        assert name == "disk", micro["skipped"]  # the file system of the test may have no O_DIRECT
        return
    compared = 0
    for row in micro["benches"][name]:
        roles = {series["role"] for series in row["series"]}
        compared += {"ours", "limit"} <= roles
        for series in row["series"]:
            seconds = series["seconds"]
            assert seconds["min"] <= seconds["median"] <= seconds["max"]
            assert seconds["min"] > 0
            assert len(seconds["samples"]) >= 2
            assert ("our_part_of_its_speed" in series) == (series["role"] != "ours")
    assert compared >= needed


@pytest.mark.slow
def test_a_result_says_where_and_how_it_was_measured(micro):
    assert micro["machine"]["cpu"]
    assert micro["machine"]["cores"] == os.cpu_count()
    assert {"python", "numpy", "torch"} <= micro["versions"].keys()
    assert micro["command"].startswith("python -m bench micro")
    assert micro["settings"]["size"] == "tiny"
    assert micro["date"].endswith("+00:00")


@pytest.mark.slow
def test_a_peer_that_is_not_there_is_told_and_left_out(tmp_path):
    found = bench(tmp_path, "micro", "--only", "socket", "--peer-venv", str(tmp_path / "nothing"))
    assert {skipped["case"].partition(": ")[2] for skipped in found["skipped"]} == {
        "LMCache, server",
        "LMCache, server, shm",
        "LMCache, server, shm, malloc tuned",
    }
    assert len(found["benches"]["socket"]) == 6
    assert {series["role"] for row in found["benches"]["socket"] for series in row["series"]} == {"ours", "limit"}


@pytest.mark.slow
def test_peers_of_hashing_and_disks_that_are_not_there_are_left_out(tmp_path):
    found = bench(tmp_path, "micro", "--only", "hash", "--only", "disk", "--peer-venv", str(tmp_path / "nothing"))
    assert {"hash: LMCache, in process"} <= {skipped["case"] for skipped in found["skipped"]}
    rows = [row for rows in found["benches"].values() for row in rows]
    assert rows
    assert {series["role"] for row in rows for series in row["series"]} == {"ours", "limit"}


@pytest.mark.slow
def test_many_clients_are_measured_and_nothing_is_lost(tmp_path):
    """B262: each call of two clients, and no call that failed."""
    rows = {row["name"]: row["series"][0] for row in bench(tmp_path, "load")["benches"]["load"]}
    facts = rows["2 clients, lookup"]["facts"]
    assert (facts["failed"], facts["wrong"]) == (0, 0)
    assert facts["found"] > 0
    assert facts["p50 us"] <= facts["p99 us"] <= facts["p999 us"]
    calls = {"lookup", "reserve", "copy in", "commit", "copy out", "release", "status"}
    assert {name.removeprefix("2 clients, ") for name in rows} == calls


@pytest.mark.slow
@pytest.mark.vllm
def test_the_time_to_the_first_token_is_measured(tmp_path, model_path):
    """B59."""
    found = bench(tmp_path, "e2e", "--only", "ttft", "--engine", "inproc", "--case", "ram", "--model", str(model_path))
    assert not found["skipped"], found["skipped"]
    cold, hit = found["benches"]["ttft"]
    assert [series["role"] for series in cold["series"]] == ["ours", "limit"]
    assert hit["series"][0]["facts"]["found"] == 192  # of 200: whole blocks of 32, and one token is left to compute
    assert hit["series"][0]["facts"]["same 16 tokens"] is True


@pytest.mark.slow
@pytest.mark.vllm
def test_the_cost_of_capture_is_measured_and_nothing_is_dropped(tmp_path, model_path):
    """B384: capture of a cold prompt beside the same engine without it, and every chunk of it stored."""
    arguments = ["--only", "capture", "--engine", "inproc", "--model", str(model_path), "--dtype", "float32"]
    found = bench(tmp_path, "e2e", *arguments)
    assert not found["skipped"], found["skipped"]
    off, on, some = found["benches"]["capture"]
    for row in (off, on, some):
        assert [series["role"] for series in row["series"]] == ["ours", "limit"]
        assert row["targets"][0]["reached"] > 0
    assert on["series"][1]["name"] == some["series"][1]["name"] == off["series"][0]["name"]
    for row, num_layers in ((on, 30), (some, 8)):
        facts = row["series"][0]["facts"]
        assert (facts["chunks stored"], facts["chunks dropped"], facts["faults"]) == (1, 0, 0)
        num_bytes = num_layers * 9 * 64 * 4  # of a token: layers, query heads, their size, float32
        assert facts["MB a prompt"] == pytest.approx(192 * num_bytes / 1e6, abs=0.06)  # it is told in tenths
        assert facts["same tokens"] is True


def test_a_ratio_is_taken_round_by_round():
    code = (
        "from bench.samples import *\n"
        "fast = Series(name='f', role=Role.LIMIT, seconds=[1, 2, 3])\n"
        "slow = Series(name='s', role=Role.OURS, seconds=[2, 4, 12])\n"
        "assert ratio(slow, fast, is_speed=True) == (0.5, 0.25, 0.5)\n"
        "assert ratio(slow, fast, is_speed=False) == (2, 2, 4)\n"
        "row = Row(name='r', unit=Unit.CALLS, amount=1, series=[slow, fast])\n"
        "assert row.is_met(Target(Measure.SPEED, 0.5, 'f'))\n"
        "assert not row.is_met(Target(Measure.TIME, 1.9, 'f'))\n"
        "assert row.is_met(Target(Measure.TIME, 1.9, 'absent')) is None\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_list_names_every_bench():
    command = [sys.executable, "-m", "bench", "list"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in told.splitlines()] == [
        "hash",
        "lookup",
        "copy",
        "socket",
        "index",
        "disk",
        "load",
        "ttft",
        "capture",
    ]
