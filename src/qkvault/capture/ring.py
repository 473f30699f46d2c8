"""QRingBuffer: where queries wait until their chunk is whole. Paged like KV, so that the same copies move it.

Knows blocks, rows and tensors: no tokens, no requests, no store. What it takes is known before it is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from qkvault.errors import InvariantError
from qkvault.logs import RateLimited, get_logger

DEFAULT_BATCHED_TOKENS: Final = 8192
DEFAULT_DEPTH: Final = 2  # steps of the largest size that a ring holds
_NUM_TRASH_ROWS: Final = 1  # behind the last block of each layer
_log = RateLimited(get_logger("capture.ring"))
_Rows: TypeAlias = npt.NDArray[np.void]


def ring_blocks_for(
    block_size: int,
    max_batched_tokens: int | None = None,
    *,
    ring_blocks: int | None = None,
    ring_depth: int = DEFAULT_DEPTH,
) -> int:
    """How many blocks a ring has (row 79): ``ring_blocks`` if given, else ``ring_depth`` of the engine's largest steps.

    ``max_batched_tokens`` are those of such a step; 8192 if the engine does not say. Never less than one block.
    """
    if ring_blocks is not None:
        return max(1, ring_blocks)
    step_blocks = -(-(max_batched_tokens or DEFAULT_BATCHED_TOKENS) // block_size)
    return max(1, step_blocks * max(1, ring_depth))


def ring_bytes(num_layers: int, num_blocks: int, block_size: int, hidden_dim: int, dtype: torch.dtype) -> int:
    """Bytes that a ring of this geometry takes, all of them when it is built."""
    num_rows = num_layers * (num_blocks * block_size + _NUM_TRASH_ROWS)
    return num_rows * hidden_dim * int(dtype.itemsize)


class QRingBuffer:
    """Blocks of query rows, the same ones in every layer. Owned by the thread that runs the model.

    A *slot* is a row of a layer: ``block id * block_size + row in the block``.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        hidden_dim: int,
        dtype: torch.dtype,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        """``hidden_dim`` is all query heads of a rank. Raises ValueError unless all sizes are positive (row 65)."""
        if min(num_layers, num_blocks, block_size, hidden_dim) <= 0:
            msg = (
                f"num_layers {num_layers}, num_blocks {num_blocks}, block_size {block_size} and hidden_dim "
                f"{hidden_dim} must be positive"
            )
            raise ValueError(msg)
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.hidden_dim = hidden_dim
        self.dtype = dtype
        self.device = torch.device(device)
        num_rows = num_blocks * block_size
        # The last row of each layer is trash: slot -1, "no slot", is that row, so that nothing need be left out.
        memory = torch.empty((num_layers, num_rows + _NUM_TRASH_ROWS, hidden_dim), dtype=dtype, device=self.device)
        memory.zero_()  # takes it now, a third of a second for half a GiB: no step is to pay for that
        self.num_bytes = memory.numel() * memory.element_size()
        self._layers = list(memory.unbind())  # [rows and trash, hidden_dim] each
        self._arrays = [_rows_of(layer) for layer in self._layers] if self.device.type == "cpu" else []
        shape = (num_blocks, block_size, hidden_dim)
        self.tensors: dict[str, torch.Tensor] = {
            f"qkvault_q_layer_{at}": layer[:num_rows].view(shape) for at, layer in enumerate(self._layers)
        }
        self._free_blocks = list(range(num_blocks))  # the last one is taken first
        self._is_free = bytearray(b"\1" * num_blocks)

    def num_free_blocks(self) -> int:
        return len(self._free_blocks)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` free blocks, or None if there are fewer (row 70). Raises ValueError for a negative count."""
        if count < 0:
            msg = f"cannot allocate {count} blocks"
            raise ValueError(msg)
        if count > len(self._free_blocks):
            return None
        start = len(self._free_blocks) - count
        taken = self._free_blocks[start:]
        del self._free_blocks[start:]
        for block_id in taken:
            self._is_free[block_id] = 0
        return taken

    def free(self, block_ids: Sequence[int]) -> None:
        """Give blocks back. One that is free already, or does not exist, is left alone with a warning (row 71)."""
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks:
                _log.warning("ring_block_unknown", block=block_id, blocks=self.num_blocks)
            elif self._is_free[block_id]:
                _log.warning("ring_block_freed_twice", block=block_id)
            else:
                self._is_free[block_id] = 1
                self._free_blocks.append(block_id)

    def scatter(self, layer_index: int, query: torch.Tensor, ring_slots: torch.Tensor) -> None:
        """Write one row of a layer for each row of ``query`` (row 73).

        ``query`` is ``[rows, ...]`` with ``hidden_dim`` elements a row, of any dtype; ``ring_slots`` is int64
        ``[rows]`` on the ring's device, -1 for a row that is dropped (row 74), else below the number of slots. Nothing
        waits for a device. Raises ValueError, before anything is written, for another layer, width or number of rows.
        """
        if not 0 <= layer_index < self.num_layers:
            msg = f"no layer {layer_index} in a ring of {self.num_layers}"
            raise ValueError(msg)
        rows = query.flatten(1) if query.ndim > 1 else query[:, None]
        if rows.shape[1] != self.hidden_dim or ring_slots.shape != rows.shape[:1]:
            msg = (
                f"query {list(query.shape)} and slots {list(ring_slots.shape)} are not rows of {self.hidden_dim}: "
                "are query heads and head size those of the model?"
            )
            raise ValueError(msg)
        rows = rows.to(self.dtype)
        if self._arrays:
            # As whole rows, and not by torch: five times as fast, and no threads that spin on the model's cores.
            self._arrays[layer_index][ring_slots.numpy()] = _rows_of(rows)
        else:
            self._layers[layer_index].index_put_((ring_slots,), rows)  # -1 counts from the end

    def check(self) -> None:
        """Raise InvariantError unless every block is free once, or in use."""
        is_listed = bytearray(self.num_blocks)
        for block_id in self._free_blocks:
            is_listed[block_id] += 1
        if is_listed != self._is_free:
            msg = f"free blocks {sorted(self._free_blocks)} are not those that are marked"
            raise InvariantError(msg)


def _rows_of(rows: torch.Tensor) -> _Rows:
    """``[rows, hidden_dim]`` on the CPU as ``[rows]`` of raw bytes, sharing memory if the rows are contiguous."""
    rows = rows.detach()
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    array = rows.view(torch.uint8).numpy()
    whole: _Rows = array.view(np.dtype((np.void, array.shape[1])))[:, 0]
    return whole
