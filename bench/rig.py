"""One of our engines over pages of its own, and the rounds it is put through."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from bench import machine
from bench.geometry import CHUNK_TOKENS, Geometry, Pages, token_ids
from bench.samples import Skip
from qkvault import embedded
from qkvault.client import StoreClient
from qkvault.config import Config
from qkvault.embedded import EmbeddedStore
from qkvault.engine import CacheEngine, EngineMetadata

_HEADER_BYTES = 4096  # of a chunk's image, at least
_NAP_SECONDS = 0.002  # between two looks at what is on its way
_OTHERS_BYTES = 1 << 30  # memory that is left to others


class Rig:
    """An engine, its pages, and one prompt at a time. What it does is checked, not believed."""

    def __init__(self, config: Config, client: StoreClient, pages: Pages, seed: int) -> None:
        """The engine is the rig's from now on, and ends with it."""
        self.pages = pages
        self.client = client
        metadata = EngineMetadata(model_name="bench", model_fingerprint="bench", layout=pages.geometry.layout)
        self.engine = CacheEngine(config, metadata, pages.tensors, client)
        self.tokens: list[int] = []
        self._rng = np.random.default_rng(seed)

    def renew(self) -> None:
        """A prompt that nobody has seen."""
        self.pages.renew()
        self.tokens = token_ids(self._rng, self.pages.num_tokens)

    def store(self) -> None:
        """Store the prompt, all of it."""
        result = self.engine.store(self.tokens, block_ids=self.pages.source_ids)
        if result.stored_tokens != self.pages.num_tokens:
            msg = f"{result.stored_tokens} of {self.pages.num_tokens} tokens were stored"
            raise RuntimeError(msg)

    def retrieve(self) -> None:
        """Load the prompt into its other blocks, all of it."""
        there = self.engine.retrieve(self.tokens, block_ids=self.pages.target_ids)
        if not bool(there.all()):
            msg = f"{int(there.sum())} of {self.pages.num_tokens} tokens came back"
            raise RuntimeError(msg)

    def bring_up(self) -> None:
        """Have the prompt brought into RAM, all of it, and into no blocks."""
        self.engine.async_lookup_and_prefetch("bench", self.tokens)
        is_over = False
        while not is_over:
            self.client.wait_change(_NAP_SECONDS)
            num_tokens, is_over = self.engine.prefetched("bench")
        self.engine.lookup_unpin("bench")
        if num_tokens != self.pages.num_tokens:
            msg = f"{num_tokens} of {self.pages.num_tokens} tokens came up"
            raise RuntimeError(msg)


def pool_bytes(geometry: Geometry, num_tokens: int, *, prompts: float) -> int:
    """A pool for that many prompts."""
    image_bytes = _HEADER_BYTES + CHUNK_TOKENS * geometry.token_bytes
    return int(num_tokens // CHUNK_TOKENS * prompts + 1) * image_bytes


def require_memory(num_bytes: int) -> None:
    """Raise Skip unless that much can be had."""
    available = machine.available_bytes() - _OTHERS_BYTES
    if num_bytes > available:
        msg = f"needs {num_bytes / 1e9:.1f} GB of memory, {max(0, available) / 1e9:.1f} are free"
        raise Skip(msg)


@contextlib.contextmanager
def own_store(ram_bytes: int, disk_path: Path | None = None, disk_bytes: int = 0) -> Iterator[EmbeddedStore]:
    """A store in this process."""
    config = Config(ram_bytes=ram_bytes, instance_id="bench")
    if disk_path is not None:
        config = msgspec.structs.replace(config, disk_path=str(disk_path), disk_bytes=disk_bytes, disk_keep=False)
    store = embedded.acquire(config)
    try:
        yield store
    finally:
        embedded.release(store)
