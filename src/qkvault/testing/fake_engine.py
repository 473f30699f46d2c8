"""FakeEngine: paged tensors, block tables and a "model" whose every element is known, for tests of whatever moves KV.

The contents at a position depend on all tokens up to it, as attention state does, and differ in every layer, part, head
and element: bytes of another prompt, position, layer or model never pass for the right ones. Knows layouts and nothing
of the cache; contents are placed and read here without the code that tests are about.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from qkvault.layout import ChunkLayout

if TYPE_CHECKING:
    import torch

_MASK: Final = (1 << 64) - 1
_MIX: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # splitmix64
_STEP: Final = 0x9E3779B97F4A7C15
_BITS: Final = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}  # by bytes of an element
Elements: TypeAlias = npt.NDArray[np.integer]  # the bits of elements, as integers of their size


class FakeEngine:
    """An engine's KV memory on the CPU.

    ``tensors`` are what an engine would register: one a layer, each with the axes of ``layout.order`` but L, all views
    of one storage. Parts are read as ``[layers, tokens, heads, head_size]``. Memory starts as noise. Engines with equal
    ``seed``, which stands for the weights, compute the same.
    """

    def __init__(self, layout: ChunkLayout, num_blocks: int, *, seed: int = 0) -> None:
        import torch

        self.layout = layout
        self.num_blocks = num_blocks
        self._seed = seed
        self._random = random.Random(num_blocks)  # noqa: S311  # repeatable, not secret
        noise = np.frombuffer(self._random.randbytes(num_blocks * layout.block_bytes), np.uint8).copy()
        self.memory: Elements = noise.view(_BITS[layout.element_bytes]).reshape(layout.shape(num_blocks))
        elements = torch.from_numpy(self.memory).view(getattr(torch, layout.dtype))
        self.tensors: list[torch.Tensor] = list(elements.unbind(layout.order.index("L")))
        self._free = self._random.sample(range(num_blocks), num_blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks in no table."""
        return len(self._free)

    def allocate(self, num_tokens: int, table: Sequence[int] = ()) -> list[int]:
        """``table`` with as many more blocks, in no order, as ``num_tokens`` tokens take. Raises ValueError if none."""
        num_new = self.layout.num_blocks(num_tokens) - len(table)
        if num_new > len(self._free):
            msg = f"{num_new} blocks wanted, {len(self._free)} are free"
            raise ValueError(msg)
        taken = [self._free.pop() for _ in range(num_new)]
        return [*table, *taken]

    def free(self, table: Sequence[int]) -> None:
        """Give blocks back; they keep what is in them. Raises ValueError for one that is free."""
        if set(table) & set(self._free) or len(set(table)) != len(table):
            msg = f"freed twice: {sorted(table)}"
            raise ValueError(msg)
        self._free.extend(table)
        self._random.shuffle(self._free)

    def prefill(self, tokens: Sequence[int]) -> list[int]:
        """The block table of a new request whose tokens are all computed."""
        table = self.allocate(len(tokens))
        self.compute(tokens, table)
        return table

    def compute(self, tokens: Sequence[int], table: Sequence[int], start: int = 0, stop: int | None = None) -> None:
        """Fill the positions ``[start, stop)`` of ``table`` with what the model makes of ``tokens``."""
        stop = len(tokens) if stop is None else stop
        blocks, offsets = self._places(table, start, stop)
        for view, part in zip(self._part_views(), self.expected(tokens[:stop]), strict=True):
            view[:, blocks, offsets] = part[:, start:]

    def expected(self, tokens: Sequence[int]) -> list[Elements]:
        """What the model makes of ``tokens``: the parts, each ``[layers, tokens, heads, head_size]``."""
        layout, state = self.layout, self._seed & _MASK
        states = np.empty(len(tokens), np.uint64)
        for at, token in enumerate(tokens):
            state = ((state ^ (token + 1)) * _MIX[0] + _STEP) & _MASK
            state ^= state >> 29
            states[at] = state
        shape = (layout.num_parts, layout.num_layers, 1, layout.num_heads, layout.head_size)
        numbers = (np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(1)) * np.uint64(_STEP)
        mixed = states[None, None, :, None, None] ^ numbers.reshape(shape)
        mixed ^= mixed >> np.uint64(31)
        mixed *= np.uint64(_MIX[1])
        return list((mixed >> np.uint64(64 - 8 * layout.element_bytes)).astype(_BITS[layout.element_bytes]))

    def read(self, table: Sequence[int], num_tokens: int) -> list[Elements]:
        """The parts that lie in the first ``num_tokens`` positions of ``table``. Copies."""
        blocks, offsets = self._places(table, 0, num_tokens)
        return [view[:, blocks, offsets] for view in self._part_views()]

    def verify(self, tokens: Sequence[int], table: Sequence[int], start: int = 0, stop: int | None = None) -> None:
        """Raise AssertionError, telling the first wrong element, unless ``[start, stop)`` holds what it should."""
        stop = len(tokens) if stop is None else stop
        parts = zip(self.read(table, stop), self.expected(tokens[:stop]), strict=True)
        for number, (got, wanted) in enumerate(parts):
            wrong = np.argwhere(got[:, start:] != wanted[:, start:])
            if len(wrong):
                layer, token, head, element = (int(index) for index in wrong[0])
                where = f"part {number}, layer {layer}, token {start + token}, head {head}, element {element}"
                msg = f"{where}: the first of {len(wrong)} wrong elements in tokens {start} to {stop}"
                raise AssertionError(msg)

    def holds(self, tokens: Sequence[int], table: Sequence[int]) -> list[bool]:
        """For each token, whether all that the model makes of it is there."""
        parts = zip(self.read(table, len(tokens)), self.expected(tokens), strict=True)
        right = np.logical_and.reduce([(got == wanted).all(axis=(0, 2, 3)) for got, wanted in parts])
        return [bool(token) for token in right]

    def scribble(self, table: Sequence[int]) -> None:
        """Fill blocks with noise, as if they had been another request's."""
        blocks = self.memory.swapaxes(0, self.layout.order.index("B"))
        for block in table:
            noise = np.frombuffer(self._random.randbytes(self.layout.block_bytes), self.memory.dtype)
            blocks[block] = noise.reshape(blocks[block].shape)

    def snapshot(self) -> Elements:
        """A copy of each block: ``[blocks, elements of a block]``."""
        return np.array([block.ravel() for block in self.memory.swapaxes(0, self.layout.order.index("B"))])

    def _places(self, table: Sequence[int], start: int, stop: int) -> tuple[Elements, Elements]:
        """The block and the place in it of each position."""
        positions = np.arange(start, stop)
        blocks = np.asarray(table, np.int64)[positions // self.layout.block_size]
        return blocks, positions % self.layout.block_size

    def _part_views(self) -> list[Elements]:
        """The memory of each part as ``[layers, blocks, tokens of a block, heads, head_size]``."""
        order = self.layout.order.replace("P", "")
        axes = [order.index(axis) for axis in "LBNHD"]
        return [self._part(number).transpose(axes) for number in range(self.layout.num_parts)]

    def _part(self, number: int) -> Elements:
        """One part, its axes in the layout's order."""
        part: Elements = self.memory[(slice(None),) * self.layout.order.index("P") + (number,)]
        if self.layout.key_transposed and number == 0:  # the square of [N, D] lies as [D, N]
            square = part.reshape(*part.shape[:-2], self.layout.head_size, self.layout.block_size)
            part = np.swapaxes(square, -1, -2)
        return part
