"""A server that was killed and comes back with its disk, while no engine is alive."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from qkvault.testing.spaces import described
from qkvault.types import CacheKind

torch = pytest.importorskip("torch", reason="the SDK works on tensors")

TOKENS = list(range(1000, 1200))  # three chunks of 64 tokens, and 8 more
CLI = "from qkvault.cli.app import main; main()"
# Whoever reads it all takes an hour; single headers can be read.
SLOW_SCAN = (
    f"import time\nfrom qkvault.tiers import disk_listing\ndisk_listing.walk = lambda *_: time.sleep(3600)\n{CLI}"
)
# The files are scanned when there is a file called `go`; by key only one at a time is asked for.
GATED_SCAN = f"""
import os, sys, time
from qkvault.store import scan
from qkvault.tiers import disk_listing
walk, scan._MAX_EARLY = disk_listing.walk, 1

def walk_later(root, is_skipped):
    while not os.path.exists(os.path.join(root, "..", "go")):
        time.sleep(0.01)
    yield from walk(root, is_skipped)

disk_listing.walk = walk_later
{CLI}
"""


def spaces_of(kind):
    """What the workers of an engine would describe."""
    return [
        described("a/model", kind=kind, num_layers=2, num_heads=2, chunk_size=64, world_size=2, worker_id=rank)
        for rank in (0, 1)
    ]


@pytest.fixture
def restarted(start, tmp_path):
    """A server that had two kinds of one model on its disk when it was killed, and what those were."""
    from qkvault.sdk import connect

    flags = ("--disk", str(tmp_path / "disk"), "--disk-size", "64MiB", "--http", f"unix://{tmp_path}/h")
    first = start(*flags).wait_ready()
    parts = {kind: [torch.randn(2, 192, 4, 8) for _ in range(num)] for kind, num in (("kv", 2), ("query", 1))}
    for kind, tensors in parts.items():
        with connect(first.address, kind=CacheKind(kind), spaces=spaces_of(CacheKind(kind))) as context:
            assert context.store(tensors, TOKENS[:192]).written_tokens == 192
            deadline = time.monotonic() + 30
            while context._client.status().num_jobs:
                assert time.monotonic() < deadline
                time.sleep(0.005)
    assert first.stop(signal.SIGKILL) == -signal.SIGKILL
    return lambda code=CLI: (start(*flags, code=code).wait_ready(), parts)


def run(address, *arguments):
    """What a command says to ``--json``."""
    command = [sys.executable, "-c", CLI, *arguments, "--json", "--address", address]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout)


@pytest.mark.parametrize("code", [CLI, SLOW_SCAN], ids=["at once", "before the scan has ended"])
def test_the_sdk_reads_what_a_killed_server_had_on_disk(restarted, code):
    """B330, B292: by its address alone, all ranks, whether the files have been scanned or not."""
    from qkvault.sdk import kvcache, qcache

    server, parts = restarted(code)
    for kind, module in (("kv", kvcache), ("query", qcache)):
        with module.connect(server.address) as context:
            assert context.geometry.shape == (2, 4, 8)
            found = context.retrieve(TOKENS)
            assert found.num_tokens == 192
            assert all(torch.equal(one, other) for one, other in zip(found.parts, parts[kind], strict=True))


def test_commands_and_pages_know_the_models_of_the_disk(restarted, kit, tmp_path):
    """B330: status, lookup by name, and both over HTTP."""
    server, _ = restarted()
    models = run(server.address, "status")["models"]
    assert sorted((model["model_name"], model["kind"], model["worker_id"]) for model in models) == [
        ("a/model", kind, rank) for kind in ("kv", "query") for rank in (0, 1)
    ]
    found = run(server.address, "lookup", "--model", "a/model", *map(str, TOKENS))["spaces"]
    assert [(space["cached_tokens"], space["tokens"]) for space in found] == [(192, {"disk": 192})] * 4
    http = kit.Http(f"unix://{tmp_path}/h")
    assert http.ask("POST", "/lookup", {"tokens": TOKENS, "model_name": "a/model"})[1]["spaces"] == found
    assert http.ask("POST", "/lookup", {"tokens": TOKENS, "model_name": "another"})[1]["spaces"] == []
    assert http.ask("GET", "/status")[1]["models"] == models


def test_what_is_deleted_before_the_scan_has_come_to_it_stays_away(restarted, tmp_path):
    """B332: with the prompts that went on from it, and no other, in RAM and on disk."""
    from qkvault.sdk import kvcache

    server, _ = restarted(GATED_SCAN)
    with kvcache.connect(server.address) as context:
        context.delete(TOKENS, start=64)
        assert context._client.status().is_scanning
        (tmp_path / "go").touch()
        deadline = time.monotonic() + 30
        while (status := context._client.status()).is_scanning or status.num_jobs:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert context.lookup(TOKENS) == 64
        assert context.retrieve(TOKENS).num_tokens == 64
        folders = {space.space_id.hex() for space in context.geometry.spaces}
    files = [path for path in (tmp_path / "disk").rglob("*.qkv") if path.parent.parent.name in folders]
    assert len(files) == len(folders) == 2
    assert len(list((tmp_path / "disk").rglob("*.qkv"))) == 2 + 6
