"""A space to try things with, described as an engine's worker does. Knows no tensors."""

from __future__ import annotations

from qkvault.keys import KeySpace
from qkvault.layout import ChunkLayout
from qkvault.spaces import SpaceDescription
from qkvault.types import CacheKind


def described(
    model_name: str = "m",
    *,
    kind: CacheKind = CacheKind.KV,
    num_layers: int = 1,
    num_heads: int = 1,
    head_size: int = 8,
    dtype: str = "float32",
    block_size: int = 16,
    chunk_size: int = 32,
    order: str = "LBHNPD",
    world_size: int = 1,
    worker_id: int = 0,
) -> SpaceDescription:
    """What worker ``worker_id`` of ``world_size`` stores; ``num_heads`` are its own. Sizes in tokens and elements."""
    layout = ChunkLayout(
        kind=kind,
        num_layers=num_layers,
        num_heads=num_heads,
        head_size=head_size,
        num_parts=2 if kind is CacheKind.KV else 1,
        dtype=dtype,
        block_size=block_size,
        chunk_size=chunk_size,
        order=order,
    )
    space = KeySpace(
        model_name=model_name,
        model_fingerprint="f",
        world_size=world_size,
        worker_id=worker_id,
        dtype=dtype,
        kind=kind,
        chunk_size=chunk_size,
        tensors=layout.logical,
    )
    return SpaceDescription(space, layout)
