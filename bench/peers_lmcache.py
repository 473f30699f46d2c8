"""LMCache's engine in a process of its own, driven by orders: the peer of the copy, lookup and disk benches.

    python -m bench.peers_lmcache '{"num_layers": 32, ...}'

Runs in the peer's environment, so it imports nothing of ours but the standard-library half of ``bench``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench import orders
from bench.peers_rig import PeerRig

PROMPTS = 1.25  # in its memory, as in our pool
SPARE_GIB = 0.1
DISK = "LocalDiskBackend"
DISK_SECONDS = 120.0


class Engine(PeerRig):
    """An engine over the pages."""

    def __init__(self, work: dict[str, Any]) -> None:
        super().__init__(work)
        self.engine: Any = None  # LMCacheEngine

    def start(self) -> None:
        """Build the engine, with its default hash: RAM only, or if ``work`` names a ``disk`` that only."""
        from lmcache.v1.cache_engine import LMCacheEngineBuilder
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata

        from bench.peers_copy import PageCopies

        work = self.work
        shape = work["num_layers"], 2, work["chunk_size"], work["num_heads"], work["head_size"]
        gib = self.num_bytes / 2**30
        disk = work.get("disk")
        settings = {
            "chunk_size": work["chunk_size"], "local_cpu": not disk, "max_local_cpu_size": gib * PROMPTS + SPARE_GIB,
        }  # fmt: skip
        if disk:
            Path(disk).mkdir()
            settings |= {"local_disk": disk, "max_local_disk_size": gib * 4 + 1}
            settings["extra_config"] = {"use_odirect": work["is_direct"]}
        config = LMCacheEngineConfig.from_dict(settings)
        metadata = LMCacheMetadata(
            model_name="bench", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=torch.bfloat16, kv_shape=shape, chunk_size=work["chunk_size"], role="worker",
        )  # fmt: skip
        connector = PageCopies(work["block_size"])
        self.engine = LMCacheEngineBuilder.get_or_create(
            "bench", config, metadata, connector, lambda tensor, _: tensor, lambda value, _: value
        )
        self.engine.post_init()

    def renew(self) -> None:
        """A prompt that nobody has seen, and an empty cache."""
        super().renew()
        self.engine.clear()
        for disk in self._disks():
            for key in list(disk.dict):
                disk.remove(key)

    def store_down(self) -> dict[str, float]:
        """Store the prompt, until all of it can be found on disk."""
        return orders.timed(self._store_down)

    def store(self) -> dict[str, float]:
        """Store the prompt."""
        return orders.timed(lambda: self.engine.store(self.tokens, kvcaches=self.tensors, blocks=self.source))

    def retrieve(self) -> dict[str, float]:
        """Load the prompt into its other blocks."""
        return orders.timed(self._retrieve)

    def lookup(self) -> dict[str, float]:
        """Ask for a prompt that is there."""
        return orders.timed(lambda: self.require(self.engine.lookup(self.tokens), len(self.tokens)))

    def lookup_unknown(self) -> dict[str, float]:
        """Ask for one that is not."""
        return orders.timed(lambda: self.require(self.engine.lookup(self.others), 0))

    def _store_down(self) -> None:
        self.engine.store(self.tokens, kvcaches=self.tensors, blocks=self.source)
        deadline = time.monotonic() + DISK_SECONDS
        while (found := self.engine.lookup(self.tokens, search_range=[DISK])) < len(self.tokens):
            if time.monotonic() > deadline:
                self.require(found, len(self.tokens))
            time.sleep(0.001)

    def _disks(self) -> list[Any]:  # LocalDiskBackend
        backends = self.engine.storage_manager.storage_backends
        return [backends[DISK]] if DISK in backends else []

    def _retrieve(self) -> None:
        there = self.engine.retrieve(self.tokens, kvcaches=self.tensors, blocks=self.target, req_id="bench")
        self.require(int(there.sum()), len(self.tokens))


def main() -> None:
    """Answer orders until stdin ends."""
    torch.set_num_threads(1)
    engine = Engine(json.loads(sys.argv[1]))
    does = ("renew", "store", "store_down", "retrieve", "lookup", "lookup_unknown", "verify")
    orders.serve({name: getattr(engine, name) for name in does}, engine.start)
    os._exit(0)  # its threads would keep the process


if __name__ == "__main__":
    main()
