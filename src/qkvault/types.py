"""The vocabulary: small frozen values that cross every seam. Imports nothing of ours.

A *chunk* is named by a :data:`ChunkKey`: 16 bytes of space (everything that is constant for one engine:
model, rank, dtype, layout, kind) followed by the 32-byte chained chunk hash (tokens and everything of the request).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import groupby, islice
from typing import Annotated, Final, NewType

import msgspec
from msgspec import Meta

SpaceId = NewType("SpaceId", bytes)  # 16 bytes
ChunkKey = NewType("ChunkKey", bytes)  # 48 bytes: SpaceId, then the chunk hash

SPACE_BYTES: Final = 16
HASH_BYTES: Final = 32
KEY_BYTES: Final = SPACE_BYTES + HASH_BYTES
TOKEN_BYTES: Final = 4  # a token id is an unsigned 32-bit little-endian integer wherever it is bytes
SKETCH_BYTES: Final = 3  # bytes of a sketch for each grain: of a whole chunk 48, which a bytes object holds in 96
OFFSET_BYTES: Final = 8  # bytes of an offset into the pool where many are packed
MAX_CHUNK_TOKENS: Final = 1 << 18  # of one chunk
GRAIN_TOKENS: Final = 16  # granularity of a chunk's sketch, hence the finest block a hit can end at
TRANSFER_QUERY: Final = "transfer_query"  # what a store says of itself that stores queries, and what engines ask for


# What a message may hold at most; checked where one is read.
_Key = Annotated[bytes, Meta(max_length=KEY_BYTES)]
_Sketch = Annotated[bytes, Meta(max_length=MAX_CHUNK_TOKENS // GRAIN_TOKENS * SKETCH_BYTES)]


class CacheKind(str, Enum):
    """What kind of tensor a chunk holds; part of every key."""

    KV = "kv"  # keys and values
    QUERY = "query"

    @classmethod
    def _missing_(cls, value: object) -> CacheKind:
        msg = f"{value!r} is no kind of tensor: one of {', '.join(kind.value for kind in cls)}"
        raise ValueError(msg)

    def server_model_name(self, model_name: str) -> str:
        """The display form of a model name for this kind: ``model`` or ``model##query`` (row 106)."""
        return model_name if self is CacheKind.KV else f"{model_name}##{self.value}"

    def base_model_name(self, server_name: str) -> str:
        """The model name that ``server_model_name`` makes ``server_name`` of; of a model's name, that name."""
        return server_name if self is CacheKind.KV else server_name.removesuffix(f"##{self.value}")


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


class RefRun(msgspec.Struct, frozen=True, array_like=True):
    """What ``count`` chunks in a row have in common."""

    count: int
    num_tokens: int
    image_bytes: int
    medium: Medium


class ChunkRefs(msgspec.Struct, frozen=True, array_like=True):
    """A sequence of ``ChunkRef`` in columns: what the chunks of a prompt have in common is said once.

    A prompt of 128k tokens has 512 chunks: to build, send and read as many structs would cost more than all else of a
    lookup.
    """

    keys: bytes = b""  # 48 bytes each; in the answer to a lookup only those that were not asked for
    offsets: bytes = b""  # 8 bytes each, little-endian
    runs: tuple[RefRun, ...] = ()

    @classmethod
    def of(cls, refs: Sequence[ChunkRef]) -> ChunkRefs:
        grouped = groupby(refs, key=lambda ref: (ref.num_tokens, ref.image_bytes, ref.medium))
        runs = tuple(RefRun(sum(1 for _ in group), *shared) for shared, group in grouped)
        return cls(b"".join(ref.key for ref in refs), pack_offsets([ref.offset for ref in refs]), runs)

    def with_asked(self, keys: bytes) -> ChunkRefs:
        """The same with all keys, of which the leading ones are those that a lookup asked for."""
        num_asked_bytes = len(self) * KEY_BYTES - len(self.keys)
        return ChunkRefs(keys[:num_asked_bytes] + self.keys, self.offsets, self.runs)

    def __len__(self) -> int:
        return len(self.offsets) // OFFSET_BYTES

    def __iter__(self) -> Iterator[ChunkRef]:
        """Every chunk, the head first."""
        offsets = iter(unpack_offsets(self.offsets))
        at = 0
        for run in self.runs:
            for _ in range(run.count):
                key = self.keys[at : at + KEY_BYTES]
                yield ChunkRef(key, next(offsets), run.image_bytes, run.num_tokens, run.medium)
                at += KEY_BYTES

    def __getitem__(self, at: int) -> ChunkRef:
        """Chunk number ``at``, from 0. Raises IndexError. To see all of them, iterate."""
        if not 0 <= at < len(self):
            msg = f"no chunk {at} among {len(self)}"
            raise IndexError(msg)
        return next(islice(self, at, None))

    @property
    def num_tokens(self) -> int:
        return sum(run.count * run.num_tokens for run in self.runs)


def pack_offsets(offsets: Sequence[int]) -> bytes:
    """Offsets as 8 little-endian bytes each."""
    packed = array("Q", offsets)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_offsets(data: bytes) -> Sequence[int]:
    """What ``pack_offsets`` packed. Raises ValueError if ``data`` is no multiple of 8 bytes."""
    packed = array("Q")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed


class NewChunk(msgspec.Struct, frozen=True, array_like=True):
    """A chunk somebody wants to store.

    ``sketch`` is ``image.sketch_of`` of its tokens (4 bytes each, little-endian): after every started grain of 16 the
    upper 3 bytes of their crc32 up to there, big-endian.
    """

    key: _Key
    parent: _Key  # key of the chunk before it; of the chain's root for the first chunk
    sketch: _Sketch
    num_tokens: Annotated[int, Meta(ge=1, le=MAX_CHUNK_TOKENS)]
    image_bytes: Annotated[int, Meta(ge=0, lt=1 << 62)]


class Outcome(str, Enum):
    """What became of one chunk that a client wanted to store."""

    RESERVED = "reserved"  # a slot was given
    PRESENT = "present"  # somebody has stored it, or is doing so
    NO_ROOM = "no_room"  # the pool, or what queries may have of it, is full, and nothing can be evicted
    FROZEN = "frozen"  # stores are switched off
    COLLISION = "collision"  # the key exists with other tokens
    BUSY = "busy"  # an older version is to go, but is still being read
