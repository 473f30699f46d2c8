"""What an image tells of its chunk besides the tokens. Read by engines, and by servers, which have no torch."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from qkvault.keys import KeySpace
from qkvault.layout import ChunkLayout
from qkvault.types import CacheKind, SpaceId


class SpaceDescription(msgspec.Struct, frozen=True):
    """Whose a chunk is, and how its payload is laid out."""

    space: KeySpace
    layout: ChunkLayout

    def encode(self) -> bytes:
        """The description in msgpack, names of fields included."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, description: bytes) -> SpaceDescription:
        """The inverse of ``encode``. Raises ValueError for anything else."""
        try:
            return msgspec.msgpack.decode(description, type=cls)
        except (msgspec.MsgspecError, RecursionError) as error:
            msg = f"not the description of a space: {error}"
            raise ValueError(msg) from error


def space_id_of(description: bytes) -> SpaceId | None:
    """Which space it describes: what keys of it begin with. None if it cannot be read."""
    try:
        return SpaceDescription.decode(description).space.space_id
    except ValueError:
        return None


class _Kind(msgspec.Struct):
    kind: CacheKind


class _Told(msgspec.Struct):
    space: _Kind


@lru_cache(maxsize=256)
def kind_in(description: bytes) -> CacheKind:
    """The kind of tensor that a chunk's header tells, also one of a later version; KV if it tells none."""
    try:
        return msgspec.msgpack.decode(description, type=_Told).space.kind
    except (msgspec.MsgspecError, RecursionError):
        return CacheKind.KV
