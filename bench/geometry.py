"""Tensors as an engine has them: one a layer, pages of all heads, filled with bytes that change from round to round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bench.settings import Settings, Size
from qkvault.layout import ChunkLayout
from qkvault.types import CacheKind

CHUNK_TOKENS: Final = 256
NUM_TOKEN_IDS: Final = 128_000


class Geometry(NamedTuple):
    """A model's attention state in bfloat16, in blocks of ``block_size`` tokens."""

    name: str
    num_layers: int
    num_heads: int
    head_size: int
    block_size: int

    @property
    def token_bytes(self) -> int:
        """Of all layers, K and V."""
        return self.num_layers * self.num_heads * self.head_size * 2 * 2

    @property
    def layout(self) -> ChunkLayout:
        """As vLLM's CPU backend has it: layer, block, head, K or V, token, element."""
        return ChunkLayout(
            kind=CacheKind.KV,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            head_size=self.head_size,
            num_parts=2,
            dtype="bfloat16",
            block_size=self.block_size,
            chunk_size=CHUNK_TOKENS,
            order="LBHPND",
        )

    def num_tokens(self, num_bytes: int) -> int:
        """Tokens, in whole chunks, of about ``num_bytes``."""
        return max(1, num_bytes // self.token_bytes // CHUNK_TOKENS) * CHUNK_TOKENS


LLAMA: Final = Geometry("Llama-3.1-8B", 32, 8, 128, 16)
SMOLLM: Final = Geometry("SmolLM2-135M", 30, 3, 64, 32)
SMALL: Final = Geometry("a tiny model", 2, 1, 16, 16)


def geometries(settings: Settings) -> tuple[Geometry, ...]:
    """Those to measure."""
    return (SMALL,) if settings.size is Size.TINY else (LLAMA, SMOLLM)


class Pages:
    """Paged tensors of an engine, and two block tables of ``num_tokens``: where a prompt lies and where it shall go.

    ``is_random``: the blocks of a table lie anywhere, as after hours of serving; else one after the other.
    """

    def __init__(self, geometry: Geometry, num_tokens: int, *, is_random: bool, seed: int) -> None:
        """Take the memory and fill it."""
        self.geometry = geometry
        self.num_tokens = num_tokens
        rng = np.random.default_rng(seed)
        count = num_tokens // geometry.block_size
        shape = (2 * count, geometry.num_heads, 2, geometry.block_size, geometry.head_size)
        self.tensors = [torch.empty(shape, dtype=torch.bfloat16) for _ in range(geometry.num_layers)]
        # [blocks, bytes of a page] of each layer
        self.arrays = [
            tensor.view(torch.int16).numpy().view(np.uint8).reshape(2 * count, -1) for tensor in self.tensors
        ]
        for array in self.arrays:
            words = array.view(np.int64)
            words[...] = rng.integers(0, 1 << 62, words.shape, dtype=np.int64)
        table = rng.permutation(2 * count) if is_random else np.arange(2 * count)
        self.source, self.target = table[:count], table[count:]
        self.source_ids: list[int] = self.source.tolist()
        self.target_ids: list[int] = self.target.tolist()

    @property
    def num_bytes(self) -> int:
        """What a store or a retrieve of the prompt moves."""
        return self.num_tokens * self.geometry.token_bytes

    def renew(self) -> None:
        """New bytes at the source, none at the target."""
        for array in self.arrays:
            words = array.view(np.int64)
            np.add(words, 0x0101_0101_0101_0101, out=words)
            array[self.target] = 0

    def require_arrived(self) -> None:
        """Raise RuntimeError unless the target holds what the source does."""
        for number, array in enumerate(self.arrays):
            for start in range(0, len(self.source), 64):
                rows = slice(start, start + 64)
                if not np.array_equal(array[self.source[rows]], array[self.target[rows]]):
                    msg = f"layer {number}: the bytes that came back are not those that were stored"
                    raise RuntimeError(msg)


def token_ids(rng: np.random.Generator, count: int) -> list[int]:
    """A prompt that nobody has seen, as the list of Python's integers that engines keep."""
    ids: list[int] = rng.integers(0, NUM_TOKEN_IDS, count).tolist()
    return ids


Bytes = npt.NDArray[np.uint8]


def piece_copies(
    arrays: Sequence[Bytes], table: Sequence[int], memory: Bytes, *, to_memory: bool
) -> list[tuple[Bytes, Bytes]]:
    """(to, from) for each page that ``table`` names: the copies that moving a prompt cannot do without, made ready.

    ``arrays`` are ``[blocks, bytes of a page]``, one a layer.
    """
    pairs, start = [], 0
    for array in arrays:
        for block in table:
            page = array[block]
            place = memory[start : start + len(page)]
            pairs.append((place, page) if to_memory else (page, place))
            start += len(page)
    return pairs


def copy_all(pairs: list[tuple[Bytes, Bytes]]) -> None:
    """Do the copies."""
    copy = np.copyto
    for into, out_of in pairs:
        copy(into, out_of)
