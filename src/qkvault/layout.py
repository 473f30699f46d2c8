"""ChunkLayout: the geometry of a chunk's payload, and which bytes of it are which element of K and V.

A payload holds an engine's pages as they are, so that storing and loading are plain copies. ``order`` names the axes of
the payload in memory order, slowest first:

    L layer   B block of the chunk   N token in the block   H head   P part (K, then V)   D element of a head

vLLM 0.32 knows ``LBHNPD`` (head-major pages, K|V fused; the default), ``LBNHPD`` (token-major), ``LHBNPD``, ``BLHNPD``,
``BLNHPD`` and ``BHLNPD``; older and other engines keep K and V apart: ``LPBNHD``, ``LPBHND``, ``LBPNHD``, ``LBPHND``,
``LBHPND``. The axes before B span *planes*: independent runs of equal pages, one array ``[blocks, page_bytes]`` each.
The axes after B are one *page*, always contiguous.

An MLA latent is one head and one part. So are K and V of unequal width: one part as wide as both. Layers that differ in
head size, number of heads or dtype do not fit one ChunkLayout: such a model is several groups of layers, each with its
own layout, space and chunks.
"""

from __future__ import annotations

import hashlib
import math
from typing import Final

import msgspec

from qkvault.errors import LayoutMismatch
from qkvault.types import CacheKind

AXES: Final = frozenset("LBHNPD")
ELEMENT_BYTES: Final = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip


class ChunkLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How a payload of whole blocks is laid out. Immutable, comparable, and the same on every machine."""

    kind: CacheKind
    num_layers: int
    num_heads: int  # KV heads of this rank; query heads for kind QUERY
    head_size: int
    num_parts: int  # 2 = K and V, 1 = a latent or a query
    dtype: str  # a name in ELEMENT_BYTES
    block_size: int  # tokens a page
    chunk_size: int  # tokens a whole chunk
    order: str
    key_transposed: bool = False  # inside K's [N, D] square the elements lie as [D, N] (vLLM's CPU kernels)
    opaque: bool = False  # an engine packs pages in a way we cannot see into: copy, never view or convert

    def __post_init__(self) -> None:
        """Refuse impossible geometries. Raises ValueError."""
        if frozenset(self.order) != AXES or len(self.order) != len(AXES):
            msg = f"order {self.order!r} must name each of the axes L B H N P D once"
            raise ValueError(msg)
        if self.dtype not in ELEMENT_BYTES:
            msg = f"unknown dtype {self.dtype!r}: one of {', '.join(sorted(ELEMENT_BYTES))}"
            raise ValueError(msg)
        sizes = (self.num_layers, self.num_heads, self.head_size, self.num_parts, self.block_size, self.chunk_size)
        if min(sizes) <= 0:
            msg = f"layers, heads, head size, parts, block size and chunk size must be positive: {sizes}"
            raise ValueError(msg)
        if self.chunk_size % self.block_size:
            msg = f"chunk size {self.chunk_size} is not a multiple of the block size {self.block_size}"
            raise ValueError(msg)
        if self.key_transposed and not self.order.endswith("ND"):
            msg = f"a transposed K needs pages that end in ND, not {self.order}"
            raise ValueError(msg)

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def num_planes(self) -> int:
        """How many independent arrays of pages there are: the product of the axes before B."""
        return math.prod(self._size(axis) for axis in self.order[: self.order.index("B")])

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: one block's share of one plane."""
        return math.prod(self._size(a) for a in self.order[self.order.index("B") + 1 :]) * self.element_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all planes."""
        return self.num_planes * self.page_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return self.block_bytes // self.block_size

    @property
    def fingerprint(self) -> str:
        """16 hex digits that differ for every physical layout."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:16]

    @property
    def logical(self) -> str:
        """What the tensors are, however they are laid out: part of every key, equal for engines that can share."""
        return f"{self.num_layers}x{self.num_heads}x{self.head_size}x{self.num_parts}"

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens take. The last one may be part filled."""
        return -(-num_tokens // self.block_size)

    def payload_bytes(self, num_tokens: int) -> int:
        """Bytes of a payload that holds ``num_tokens`` tokens, in whole blocks."""
        return self.num_blocks(num_tokens) * self.block_bytes

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        """Sizes of the axes of a payload of ``num_blocks`` blocks, in memory order."""
        return tuple(num_blocks if axis == "B" else self._size(axis) for axis in self.order)

    def has_same_pages(self, other: ChunkLayout) -> bool:
        """Whether a payload of ``other`` is, byte for byte, one of this layout: all but the chunk size agrees."""
        fields = (field for field in self.__struct_fields__ if field != "chunk_size")
        return self == other or all(getattr(self, field) == getattr(other, field) for field in fields)

    def require_viewable(self) -> None:
        """Raise LayoutMismatch if the elements of these pages cannot be told apart."""
        if self.opaque:
            msg = f"pages of layout {self.fingerprint} are packed by the engine; they can be copied, not viewed"
            raise LayoutMismatch(msg)

    def require_same_tensors(self, other: ChunkLayout) -> None:
        """Raise LayoutMismatch unless ``other`` holds the same logical tensors (it may order them otherwise)."""
        if (self.kind, self.dtype, self.logical) != (other.kind, other.dtype, other.logical):
            msg = (
                f"{self.kind.value} {self.dtype} {self.logical} is not {other.kind.value} {other.dtype} {other.logical}"
            )
            raise LayoutMismatch(msg)

    def _size(self, axis: str) -> int:
        return {
            "L": self.num_layers, "H": self.num_heads, "N": self.block_size, "P": self.num_parts, "D": self.head_size,
        }[axis]  # fmt: skip
