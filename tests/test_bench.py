"""The benches run, at a size at which their numbers mean nothing, and write what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
pytest.importorskip("torch", reason="the benches copy tensors")


def command_of(folder: Path, *arguments: str) -> tuple[list[str], Path]:
    """A tiny run, and where it writes its document."""
    path = folder / "results.json"
    command = [sys.executable, "-m", "bench", *arguments, "--tiny", "--json", str(path), "--scratch", str(folder)]
    return command, path


def bench(folder: Path, *arguments: str) -> dict:
    """Run the command, and return the document that it wrote."""
    command, path = command_of(folder, *arguments)
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
    assert len(found["benches"]["socket"]) == 8
    assert {series["role"] for row in found["benches"]["socket"] for series in row["series"]} == {"ours", "limit"}


@pytest.mark.slow
def test_peers_of_hashing_and_disks_that_are_not_there_are_left_out(tmp_path):
    found = bench(tmp_path, "micro", "--only", "hash", "--only", "disk", "--peer-venv", str(tmp_path / "nothing"))
    assert {"hash: LMCache, in process"} <= {skipped["case"] for skipped in found["skipped"]}
    rows = [row for rows in found["benches"].values() for row in rows]
    assert rows
    assert {series["role"] for row in rows for series in row["series"]} == {"ours", "limit"}


@pytest.mark.slow
def test_a_server_is_held_against_a_store_in_process_in_the_same_run(micro):
    """B402: store and retrieve beside memcpy and the same in process, lookups and round trips, each with its target."""
    copies, others = micro["benches"]["socket"][:2], micro["benches"]["socket"][2:]
    for row in copies:
        assert {"memcpy, in one piece", "QKVault, in process"} <= {series["name"] for series in row["series"]}
        assert ("speed", 0.8, "QKVault, in process") in bounds_of(row)
    rows = {row["name"].rpartition("tokens, ")[2]: row for row in others}
    assert bounds_of(rows["keys kept"]) == [("seconds", 0.3e-3, "")]
    assert bounds_of(rows["keys kept, its lease given back"]) == []
    assert bounds_of(rows["list of ids"]) == [("seconds", 3e-3, "")]
    assert bounds_of(rows["round trip"]) == [("seconds", 50e-6, "")]
    for row in micro["benches"]["socket"]:
        for target in row["targets"]:
            is_least = target["measure"] == "speed"
            assert target["met"] == (
                target["reached"] >= target["bound"] if is_least else target["reached"] <= target["bound"]
            )


def bounds_of(row: dict) -> list[tuple]:
    return [(target["measure"], target["bound"], target["against"]) for target in row["targets"]]


@pytest.mark.slow
def test_many_clients_are_measured_and_nothing_is_lost(tmp_path):
    """B262: each call of two clients, and no call that failed."""
    command, path = command_of(tmp_path, "load")
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    told = {row["name"]: row for row in json.loads(path.read_text())["benches"]["load"]}
    rows = {name: row["series"][0] for name, row in told.items()}
    facts = rows["2 clients, lookup"]["facts"]
    assert (facts["failed"], facts["wrong"], facts["stale"]) == (0, 0, 0)
    assert [target["met"] for target in told["2 clients, lookup"]["targets"]] == [True] * 3
    assert facts["found"] > 0
    assert facts["p50 us"] <= facts["p99 us"] <= facts["p999 us"]
    calls = {"lookup", "reserve", "copy in", "commit", "copy out", "release", "status"}
    assert {name.removeprefix("2 clients, ") for name in rows} == calls


@pytest.mark.slow
def test_what_is_kept_of_a_load_does_not_grow_with_it(tmp_path):
    """A minute of 64 clients was 878 kB of samples."""
    sizes = []
    for seconds in ("0.5", "2"):
        found = bench(tmp_path, "load", "--seconds", seconds)["benches"]["load"]
        sizes.append(len(json.dumps(found, indent=1)))
        for row in found:
            quantiles = row["series"][0]["seconds"]["quantiles"]
            assert len(quantiles) == 21
            assert quantiles == sorted(quantiles)
    assert max(sizes) < 12_000
    assert max(sizes) < 1.2 * min(sizes)


@pytest.mark.slow
def test_a_call_that_fails_misses_the_target_of_the_load(tmp_path):
    """B403: the store's process is killed; the run goes on to its end, tells what failed, and its exit code is 1."""
    command, path = command_of(tmp_path, "load", "--seconds", "6")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        clients, deadline = [], time.monotonic() + 60
        while len(clients) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            children = psutil.Process(running.pid).children()
            clients = [child for child in children if "bench.load.client" in child.cmdline()]
        next(child for child in children if "serve" in child.cmdline()).kill()
        told, _ = running.communicate(timeout=120)
    assert running.returncode == 1, told
    assert "missed  2 clients, lookup: at most 0 failed" in told
    targets = json.loads(path.read_text())["benches"]["load"][0]["targets"]
    assert {target["against"]: target["met"] for target in targets} == {"failed": False, "wrong": True, "stale": True}


def test_wrong_and_stale_bytes_and_clients_that_are_gone_miss_targets():
    """B403."""
    code = (
        "from bench import cli\n"
        "from bench.load.client import CALLS\n"
        "from bench.load.mixed import rows_of\n"
        "from bench.samples import *\n"
        "from bench.settings import Size\n"
        "good = dict(failed=0, wrong=0, stale=0, found=3)\n"
        "def missed(*counts, clients=1):\n"
        "    rows = rows_of(clients, 1.0, [{'counts': each, 'took': dict.fromkeys(CALLS, {})} for each in counts])\n"
        "    found = [target.against for target in rows[0].targets if not rows[0].is_met(target)]\n"
        "    assert cli.is_missed({'load': rows}, Size.TINY) == bool(found)\n"
        "    return found\n"
        "assert missed(good) == []\n"
        "for name in ('failed', 'wrong', 'stale'):\n"
        "    assert missed(good | {name: 1}) == [name]\n"
        "assert missed(good, clients=2) == missed() == ['failed']\n"
        "slow = Series(name='s', role=Role.OURS, seconds=[2.0])\n"
        "row = Row(name='r', unit=Unit.CALLS, amount=1, series=[slow], targets=(Target(Measure.SECONDS, 1),))\n"
        "assert cli.is_missed({'lookup': [row]}, Size.QUICK)\n"
        "assert not cli.is_missed({'lookup': [row]}, Size.TINY)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_histogram_knows_quantiles_to_a_part_in_a_hundred():
    code = (
        "from bench.load.histogram import Histogram\n"
        "times = [10 ** (at / 1000 - 7) for at in range(7000)]\n"
        "parts = Histogram(), Histogram(), Histogram()\n"
        "for at, time in enumerate(times):\n"
        "    parts[at % 2].add(time)\n"
        "whole = Histogram()\n"
        "for part in parts:\n"
        "    whole.merge(Histogram.of_json(part.as_json()))\n"
        "times.sort()\n"
        "assert whole.count == len(times)\n"
        "assert (whole.quantile(0), whole.quantile(1)) == (times[0], times[-1])\n"
        "for at in range(1, 100):\n"
        "    exact = times[int(at / 100 * len(times))]\n"
        "    assert abs(whole.quantile(at / 100) / exact - 1) < 0.013, at\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


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


def test_what_fails_with_peers_is_measured_without_them(tmp_path):
    """A peer that fails in the middle of a bench takes its own rows with it, and is told."""
    from bench import peers  # stands on torch

    skipped, told = [], peers.Skip("it found nothing")

    class Told:
        def skip(self, case, reason):
            skipped.append((case, reason))

    def run(settings):
        if settings.peer_venv is not None:
            raise told
        return ["ours"]

    def never(_):
        raise told

    settings = peers.Settings(peer_venv=tmp_path)
    assert peers.with_peers_or_without(settings, Told(), "disk", run) == ["ours"]
    assert skipped == [("disk", "it found nothing")]
    assert peers.with_peers_or_without(peers.Settings(), Told(), "disk", never) == []
    assert len(skipped) == 2
