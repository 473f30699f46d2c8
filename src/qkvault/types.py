"""The vocabulary: small frozen values that cross every seam. Imports nothing of ours.

A *chunk* is named by a :data:`ChunkKey`: 16 bytes of space (everything that is constant for one engine:
model, rank, dtype, layout, kind) followed by the 32-byte chained chunk hash (tokens and everything of the request).
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NewType

import msgspec

SpaceId = NewType("SpaceId", bytes)  # 16 bytes
ChunkKey = NewType("ChunkKey", bytes)  # 48 bytes: SpaceId, then the chunk hash

SPACE_BYTES: Final = 16
HASH_BYTES: Final = 32
KEY_BYTES: Final = SPACE_BYTES + HASH_BYTES
TOKEN_BYTES: Final = 4  # a token id is an unsigned 32-bit little-endian integer wherever it is bytes
SKETCH_BYTES: Final = 4  # bytes of a sketch for each grain
GRAIN_TOKENS: Final = 16  # granularity of a chunk's sketch, hence the finest block a hit can end at


class CacheKind(str, Enum):
    """What kind of tensor a chunk holds; part of every key."""

    KV = "kv"
    QUERY = "query"

    def server_model_name(self, model_name: str) -> str:
        """The display form of a model name for this kind: ``model`` or ``model##query`` (row 106)."""
        return model_name if self is CacheKind.KV else f"{model_name}##{self.value}"


class Medium(str, Enum):
    """Where bytes are. The order is nearest first."""

    RAM = "ram"
    DISK = "disk"
    REMOTE = "remote"


class ChunkState(str, Enum):
    """Where an entry is in its life. READY is the only state in which its bytes in RAM may be read."""

    ABSENT = "absent"  # not in RAM (it may be in a lower tier)
    WRITING = "writing"  # reserved by a client
    LOADING = "loading"  # being promoted from a lower tier
    READY = "ready"


class ChunkRef(msgspec.Struct, frozen=True, array_like=True):
    """A chunk whose bytes a lease gives access to.

    ``offset`` and ``image_bytes`` locate the chunk image (header, then payload) in the pool.
    """

    key: bytes
    offset: int
    image_bytes: int
    num_tokens: int
    medium: Medium = Medium.RAM  # where it came from at lookup


class NewChunk(msgspec.Struct, frozen=True, array_like=True):
    """A chunk somebody wants to store.

    ``sketch`` is ``image.sketch_of`` of its tokens: 4 bytes for every started grain of 16 tokens.
    """

    key: bytes
    parent: bytes  # key of the chunk before it; of the chain's root for the first chunk
    sketch: bytes
    num_tokens: int
    image_bytes: int


class Outcome(str, Enum):
    """What became of one chunk that a client wanted to store."""

    RESERVED = "reserved"  # a slot was given
    PRESENT = "present"  # somebody has stored it, or is doing so
    NO_ROOM = "no_room"  # the pool is full and nothing can be evicted
    FROZEN = "frozen"  # stores are switched off
    COLLISION = "collision"  # the key exists with other tokens
    BUSY = "busy"  # an older version is to go, but is still being read
