"""Logical views: the K and V tensors in a payload, whatever the order of its bytes; and converting between orders.

A part (K, V, a latent, a query) is ``[layers, tokens, heads, head_size]``, of the layout's dtype, on the CPU. numpy
copies, in the caller's thread: torch would spread a copy over threads that spin on cores which others use. This module
knows payloads only: no engine, no device, no keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from qkvault.layout import ELEMENT_BYTES, ChunkLayout

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in ELEMENT_BYTES}
# Elements are moved as integers of their size: numpy knows neither bfloat16 nor float8.
_BITS: Final = {
    1: (np.uint8, torch.uint8), 2: (np.int16, torch.int16), 4: (np.int32, torch.int32), 8: (np.int64, torch.int64),
}  # fmt: skip
_Array: TypeAlias = npt.NDArray[np.integer]


def logical_views(payload: memoryview, layout: ChunkLayout, num_tokens: int) -> list[torch.Tensor]:
    """The parts of a payload of ``num_tokens`` tokens in all, each ``[layers, tokens, heads, head_size]``.

    A part shares memory with ``payload`` where its tokens lie at one distance: always with one block, else in orders
    whose N comes right after B (``LBNHPD``, ``LHBNPD``, ``LPBNHD``; with one head and one part, more). Otherwise it is
    a copy, and so is every part of a read-only payload.

    Raises LayoutMismatch if the layout is opaque, ValueError if the payload is too short or ``num_tokens`` below 1.
    """
    views = _block_views(payload, layout, num_tokens)
    arrays = [view.reshape(len(view), -1, *view.shape[3:])[:, :num_tokens] for view in views]
    owned = [array if array.flags.writeable else array.copy() for array in arrays]
    return [torch.from_numpy(array).view(TORCH_DTYPES[layout.dtype]) for array in owned]


def write_logical(payload: memoryview, layout: ChunkLayout, parts: Sequence[torch.Tensor]) -> None:
    """Fill ``payload`` with ``parts``: ``num_parts`` tensors ``[layers, tokens, heads, head_size]``, with any strides.

    Tokens that are missing in the last block become zeros. Bytes of ``payload`` beyond its blocks are left alone.

    Raises LayoutMismatch if the layout is opaque; ValueError if a part has another shape or dtype or is not on the CPU,
    or the payload is too short or read-only. Nothing is written then.
    """
    arrays = _arrays_of(parts, layout)
    num_tokens = arrays[0].shape[1]
    whole, rest = divmod(num_tokens, layout.block_size)
    for array, view in zip(arrays, _block_views(payload, layout, num_tokens), strict=True):
        in_whole, in_rest = np.split(array, [whole * layout.block_size], axis=1)
        view[:, :whole] = in_whole.reshape(len(array), whole, *view.shape[2:])  # cutting an axis never copies
        if rest:
            view[:, whole, :rest] = in_rest
            view[:, whole, rest:] = 0


def convert(
    payload: memoryview,
    layout: ChunkLayout,
    *,
    stored_blocks: int,
    start: int,
    out: memoryview,
    out_layout: ChunkLayout,
) -> None:
    """Fill ``out``, whole blocks of ``out_layout``, with the tokens from ``start`` on of ``payload``, in one copy.

    ``start`` is a multiple of the block size of ``out_layout``. Raises LayoutMismatch if the layouts do not hold the
    same tensors or one of them is opaque, ValueError if the payload ends before ``out`` does. Nothing is written then.
    """
    layout.require_same_tensors(out_layout)
    stop = start + len(out) // out_layout.block_bytes * out_layout.block_size
    if stop > stored_blocks * layout.block_size:
        msg = f"tokens {start} to {stop} of a payload of {stored_blocks} blocks of {layout.block_size}"
        raise ValueError(msg)
    sources = _block_views(payload, layout, stored_blocks * layout.block_size)
    targets = _block_views(out, out_layout, stop - start)
    # The longest pieces that both kinds of blocks consist of. Every `period` pieces they are cut alike again.
    piece = math.gcd(layout.block_size, out_layout.block_size)
    have, want = layout.block_size // piece, out_layout.block_size // piece  # pieces a block
    period = have * want  # they have no common divisor
    for source, target in zip(sources, targets, strict=True):
        for at in range(min(period, (stop - start) // piece)):
            to = target[:, at // want :: have, at % want * piece :][:, :, :piece]
            come = start // piece + at
            pieces = source[:, come // have :: want, come % have * piece :][:, : to.shape[1], :piece]
            np.copyto(to, pieces)


def _arrays_of(parts: Sequence[torch.Tensor], layout: ChunkLayout) -> list[_Array]:
    """The parts as integers, sharing their memory. Raises ValueError unless they are what ``layout`` holds."""
    num_tokens = parts[0].shape[1] if parts and parts[0].ndim > 1 else 0
    shape = (layout.num_layers, num_tokens, layout.num_heads, layout.head_size)
    dtype = TORCH_DTYPES[layout.dtype]
    if len(parts) != layout.num_parts or any(tuple(part.shape) != shape or part.dtype != dtype for part in parts):
        got = [(tuple(part.shape), str(part.dtype)) for part in parts]
        msg = (
            f"{layout.num_parts} parts of {dtype} [layers, tokens, heads, head_size] = {list(shape)} wanted, got {got}"
        )
        raise ValueError(msg)
    if any(part.device.type != "cpu" for part in parts):
        msg = "parts must be on the CPU"
        raise ValueError(msg)
    _, bits = _BITS[layout.element_bytes]
    return [part.detach().view(bits).numpy() for part in parts]


def _block_views(payload: memoryview, layout: ChunkLayout, num_tokens: int) -> list[_Array]:
    """Each part as ``[layers, blocks, tokens of a block, heads, head_size]``, sharing memory with the payload."""
    layout.require_viewable()
    num_bytes = layout.payload_bytes(num_tokens)
    if num_tokens <= 0 or len(payload) < num_bytes:
        msg = f"{num_tokens} tokens take {num_bytes} bytes, the payload has {len(payload)}"
        raise ValueError(msg)
    bits, _ = _BITS[layout.element_bytes]
    elements = np.frombuffer(payload, bits, num_bytes // layout.element_bytes)
    pages = elements.reshape(layout.shape(layout.num_blocks(num_tokens)))
    order = layout.order.replace("P", "")
    views = []
    for part in range(layout.num_parts):
        view = pages[(slice(None),) * layout.order.index("P") + (part,)]
        if layout.key_transposed and part == 0:
            view = view.reshape(*view.shape[:-2], layout.head_size, layout.block_size).swapaxes(-1, -2)
        views.append(view.transpose([order.index(axis) for axis in "LBNHD"]))
    return views
