"""What an image tells of its chunk besides the tokens. Read by engines, and by servers, which have no torch."""

from __future__ import annotations

import msgspec

from qkvault.keys import KeySpace
from qkvault.layout import ChunkLayout
from qkvault.types import SPACE_BYTES


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
        except msgspec.MsgspecError as error:
            msg = f"not the description of a space: {error}"
            raise ValueError(msg) from error


def describes(description: bytes, key: bytes) -> bool:
    """Whether ``description`` is that of the space in which ``key`` lies."""
    try:
        return SpaceDescription.decode(description).space.space_id == key[:SPACE_BYTES]
    except ValueError:
        return False
