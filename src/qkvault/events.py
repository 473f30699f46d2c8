"""KV events: what a store tells of its chunks, and the form in which routers read it.

The form is that of vLLM 0.32: structs in msgpack, blocks named by 64-bit integers. A chunk is a block here. Knows no
store, socket or thread.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from qkvault.image import FIRST, PLAIN
from qkvault.spaces import SpaceDescription
from qkvault.types import SPACE_BYTES, TOKEN_BYTES, CacheKind, Medium

CPU: Final = "CPU"  # the wire's names of media; a consumer does not count what it does not know
STORAGE: Final = "STORAGE"
_HASH_BYTES: Final = 8


class StoreEvent(msgspec.Struct, frozen=True):
    """A chunk has become readable in a medium, or has left it. Without a key: all that was told before is void.

    ``reason`` says why it left: ``evicted``, ``cooled`` (the hot cache is off), ``cleared``, ``forgotten``,
    ``superseded`` (a longer chunk holds its tokens), ``absent`` or ``corrupt`` (the tier did not have what it should).
    ``tier`` is the tier's name, ``ram`` for RAM. ``num_tiers`` is how many tiers below RAM have the chunk after this.
    What its header says is there if it was at hand; ``tokens`` only if they are PLAIN.
    """

    stored: bool
    medium: Medium
    key: bytes
    parent: bytes
    num_tokens: int
    reason: str = ""
    tier: str = ""
    num_tiers: int = 0
    tokens: bytes = b""
    space: bytes = b""
    flags: int = 0


RESTART: Final = StoreEvent(False, Medium.RAM, b"", b"", 0, "restart")  # what is here is told once more, after this


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """A block has become readable in ``medium``. Without tokens nobody can tell which prompts it is for."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int  # tokens
    medium: str
    lora_id: int | None = None
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """A block has left ``medium``; it may be in another one."""

    block_hashes: tuple[int, ...]
    medium: str


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """All that was told before is void."""


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """What one message carries. ``ts`` is seconds since 1970."""

    ts: float
    events: tuple[WireEvent, ...]
    data_parallel_rank: int = 0


def block_hash_of(key: bytes) -> int:
    """The 64 bits, unsigned, that stand for a chunk's key: the hash's last, mixed with the space's first."""
    return int.from_bytes(key[-_HASH_BYTES:], "big") ^ int.from_bytes(key[:_HASH_BYTES], "big")


class Translator:
    """Events of a store as those of the wire, for one stream. Not thread-safe.

    Told of are the K and V of the first rank: that of another has the same tokens, and comes and goes with it.
    """

    def __init__(self) -> None:
        self._models: dict[bytes, str | None] = {}  # space id to model; None: not told of

    def translate(self, events: Iterable[StoreEvent]) -> Iterator[tuple[str, WireEvent]]:
        """Each event that a router should hear, with the name of its model; "" with AllBlocksCleared."""
        for event in events:
            if not event.key:
                yield "", AllBlocksCleared()
                continue
            model = self._model_of(event)
            is_ram = event.medium is Medium.RAM
            if model is None or (not is_ram and event.num_tiers != event.stored):
                continue  # for storage: another tier has it still, or had it already
            medium = CPU if is_ram else STORAGE
            yield model, _stored(event, medium) if event.stored else BlockRemoved((block_hash_of(event.key),), medium)

    def _model_of(self, event: StoreEvent) -> str | None:
        space_id = event.key[:SPACE_BYTES]
        if event.space and space_id not in self._models:
            self._models[space_id] = _told_model(event.space, space_id)
        return self._models.get(space_id)


def _told_model(description: bytes, space_id: bytes) -> str | None:
    try:
        space = SpaceDescription.decode(description).space
    except ValueError:
        return None
    is_told = space.kind is CacheKind.KV and space.worker_id == space.layer_group == 0 and space.space_id == space_id
    return space.model_name if is_told else None


def _stored(event: StoreEvent, medium: str) -> BlockStored:
    hashes = (block_hash_of(event.key),)
    if not event.flags & PLAIN or not event.tokens:
        return BlockStored(hashes, None, (), 0, medium)  # as vLLM's own connector tells of what it cannot describe
    parent = None if event.flags & FIRST else block_hash_of(event.parent)
    token_ids = struct.unpack(f"<{len(event.tokens) // TOKEN_BYTES}I", event.tokens)
    return BlockStored(hashes, parent, token_ids, event.num_tokens, medium)
