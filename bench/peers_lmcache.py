"""LMCache's engine in a process of its own, driven by orders: the peer of the copy and lookup benches.

    python -m bench.peers_lmcache '{"num_layers": 32, ...}'

Runs in the peer's environment, so it imports nothing of ours but the standard-library half of ``bench``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import torch

from bench import orders

PROMPTS = 1.25  # in its memory, as in our pool
SPARE_GIB = 0.1


class Engine:
    """An engine, pages, and one prompt at a time: the same rounds that ``rig.Rig`` goes through."""

    def __init__(self, work: dict[str, Any]) -> None:
        """``work`` is a geometry, ``num_tokens``, ``chunk_size``, ``is_random`` and ``seed``."""
        self.work = work
        self.engine: Any = None  # LMCacheEngine
        self._rng = np.random.default_rng(work["seed"])
        self._make_pages()
        self.tokens: list[int] = []
        self.others = self._rng.integers(0, 128_000, work["num_tokens"]).tolist()

    def start(self) -> None:
        """Build the engine: RAM only, its default hash."""
        from lmcache.v1.cache_engine import LMCacheEngineBuilder
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata

        from bench.peers_copy import PageCopies

        work = self.work
        shape = work["num_layers"], 2, work["chunk_size"], work["num_heads"], work["head_size"]
        gib = sum(page.nbytes for page in self.pages) / 2 / 2**30
        config = LMCacheEngineConfig.from_dict(
            {"chunk_size": work["chunk_size"], "local_cpu": True, "max_local_cpu_size": gib * PROMPTS + SPARE_GIB}
        )
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
        for page in self.pages:
            words = page.view(np.int64)
            np.add(words, 0x0101_0101_0101_0101, out=words)
            page[self.target] = 0
        self.tokens = self._rng.integers(0, 128_000, self.work["num_tokens"]).tolist()
        self.engine.clear()

    def store(self) -> dict[str, float]:
        """Store the prompt."""
        return orders.timed(lambda: self.engine.store(self.tokens, kvcaches=self.tensors, blocks=self.source))

    def retrieve(self) -> dict[str, float]:
        """Load the prompt into its other blocks."""
        return orders.timed(self._retrieve)

    def lookup(self) -> dict[str, float]:
        """Ask for a prompt that is there."""
        return orders.timed(lambda: self._require(self.engine.lookup(self.tokens), len(self.tokens)))

    def lookup_unknown(self) -> dict[str, float]:
        """Ask for one that is not."""
        return orders.timed(lambda: self._require(self.engine.lookup(self.others), 0))

    def verify(self) -> None:
        """Raise RuntimeError unless the bytes came back."""
        for number, page in enumerate(self.pages):
            if not np.array_equal(page[self.source], page[self.target]):
                msg = f"layer {number}: other bytes came back"
                raise RuntimeError(msg)

    def _retrieve(self) -> None:
        there = self.engine.retrieve(self.tokens, kvcaches=self.tensors, blocks=self.target, req_id="bench")
        self._require(int(there.sum()), len(self.tokens))

    def _make_pages(self) -> None:
        work = self.work
        count = work["num_tokens"] // work["block_size"]
        shape = 2 * count, work["num_heads"], 2, work["block_size"], work["head_size"]
        self.tensors = [torch.empty(shape, dtype=torch.bfloat16) for _ in range(work["num_layers"])]
        self.pages = [tensor.view(torch.int16).numpy().view(np.uint8).reshape(2 * count, -1) for tensor in self.tensors]
        for page in self.pages:
            words = page.view(np.int64)
            words[...] = self._rng.integers(0, 1 << 62, words.shape, dtype=np.int64)
        table = self._rng.permutation(2 * count) if work["is_random"] else np.arange(2 * count)
        self.source, self.target = table[:count], table[count:]

    @staticmethod
    def _require(found: int, wanted: int) -> None:
        if found != wanted:
            msg = f"found {found} instead of {wanted}"
            raise RuntimeError(msg)


def main() -> None:
    """Answer orders until stdin ends."""
    torch.set_num_threads(1)
    engine = Engine(json.loads(sys.argv[1]))
    does = ("renew", "store", "retrieve", "lookup", "lookup_unknown", "verify")
    orders.serve({name: getattr(engine, name) for name in does}, engine.start)
    os._exit(0)  # its threads would keep the process


if __name__ == "__main__":
    main()
