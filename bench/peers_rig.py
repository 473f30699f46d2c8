"""Pages and prompts of a peer in a process of its own: the same that ``rig.Rig`` has, but for what is ours.

Runs in the peer's environment, so it imports nothing of ours.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class PeerRig:
    """Pages, and one prompt at a time: the same rounds that ``rig.Rig`` goes through."""

    def __init__(self, work: dict[str, Any]) -> None:
        """``work`` is a geometry, ``num_tokens``, ``chunk_size``, ``is_random`` and ``seed``."""
        self.work = work
        self._rng = np.random.default_rng(work["seed"])
        self._make_pages()
        self.tokens: list[int] = []
        self.others = self._rng.integers(0, 128_000, work["num_tokens"]).tolist()

    @property
    def num_bytes(self) -> int:
        """Of the prompt."""
        return sum(page.nbytes for page in self.pages) // 2

    def renew(self) -> None:
        """A prompt that nobody has seen."""
        for page in self.pages:
            words = page.view(np.int64)
            np.add(words, 0x0101_0101_0101_0101, out=words)
            page[self.target] = 0
        self.tokens = self._rng.integers(0, 128_000, self.work["num_tokens"]).tolist()

    def verify(self) -> None:
        """Raise RuntimeError unless the bytes came back."""
        for number, page in enumerate(self.pages):
            if not np.array_equal(page[self.source], page[self.target]):
                msg = f"layer {number}: other bytes came back"
                raise RuntimeError(msg)

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
    def require(found: int, wanted: int) -> None:
        """Raise RuntimeError unless all of it was found."""
        if found != wanted:
            msg = f"found {found} instead of {wanted}"
            raise RuntimeError(msg)
