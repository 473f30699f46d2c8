"""LMCache's names of chunks in a process of its own: the peer of the hash bench.

    python -m bench.peers_hashing '{"num_tokens": 131072, "chunk_size": 256, "seed": 1, ...}'

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

SCHEMES = ("builtin", "sha256_cbor")  # its default, Python's hash(); and SHA-256 of the ids as CBOR


class Databases:
    """A ``ChunkedTokenDatabase`` for each scheme, and one prompt as a list of ids."""

    def __init__(self, work: dict[str, Any]) -> None:
        self.work = work
        self.tokens = np.random.default_rng(work["seed"]).integers(0, 128_000, work["num_tokens"]).tolist()
        self._databases: dict[str, Any] = {}

    def start(self) -> None:
        """Make them as its engine does."""
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.token_database import ChunkedTokenDatabase

        work = self.work
        shape = work["num_layers"], 2, work["chunk_size"], work["num_heads"], work["head_size"]
        metadata = LMCacheMetadata(
            model_name="bench", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=torch.bfloat16, kv_shape=shape, chunk_size=work["chunk_size"], role="worker",
        )  # fmt: skip
        for scheme in SCHEMES:
            settings = {"chunk_size": work["chunk_size"], "pre_caching_hash_algorithm": scheme}
            self._databases[scheme] = ChunkedTokenDatabase(LMCacheEngineConfig.from_dict(settings), metadata)

    def keys(self, scheme: str) -> dict[str, float]:
        """All keys of the prompt."""
        return orders.timed(lambda: self._keys(self._databases[scheme]))

    def _keys(self, database: Any) -> None:  # ChunkedTokenDatabase
        keys = [key for _, _, key in database.process_tokens(self.tokens)]
        if len(keys) != -(-len(self.tokens) // self.work["chunk_size"]):
            msg = f"{len(keys)} keys of {len(self.tokens)} tokens"
            raise RuntimeError(msg)


def main() -> None:
    """Answer orders until stdin ends."""
    torch.set_num_threads(1)
    databases = Databases(json.loads(sys.argv[1]))
    orders.serve({"keys": databases.keys}, databases.start)
    os._exit(0)  # its threads would keep the process


if __name__ == "__main__":
    main()
