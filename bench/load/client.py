"""One client of the load bench, in a process of its own: a mix of calls, each timed, each answer looked at.

python -m bench.load.client ADDRESS SEED
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from bench import orders
from bench.load.histogram import Histogram
from qkvault.client import StoreClient
from qkvault.config import Config
from qkvault.errors import QKVaultError
from qkvault.image import (
    Header,
    check_of,
    header_bytes_for,
    key_in,
    read_header,
    sketch_of,
    write_header,
)
from qkvault.types import HASH_BYTES, KEY_BYTES, SPACE_BYTES, ChunkKey, ChunkRef, NewChunk
from qkvault.wire.sockets import SocketTransport

CHUNK_TOKENS: Final = 256
PAYLOAD_BYTES: Final = 256 << 10
IMAGE_BYTES: Final = header_bytes_for(CHUNK_TOKENS, 0) + PAYLOAD_BYTES
ROOT: Final = bytes(KEY_BYTES)
CALLS: Final = ("lookup", "reserve", "copy in", "commit", "copy out", "release", "status")
# What may not happen: an error, other bytes than were stored, bytes of another chunk while a lease is held.
FAULTS: Final = ("failed", "wrong", "stale")
_MOST_FAILED: Final = 100  # then a client gives up
_SHARED: Final = 8  # chunks of a prompt that all of a family have
_OWN: Final = 8  # chunks that come after
_FAMILIES: Final = 16
_MEMBERS: Final = 32  # prompts of a family
_TIMEOUT_SECONDS: Final = Config().timeout_seconds  # as an engine: an answer after that is a failed call

Bytes = npt.NDArray[np.uint8]
R = TypeVar("R")


class Chunk:
    """A chunk all of which follows from its name: whoever reads it knows what must be in it."""

    def __init__(self, name: tuple[int, ...], parent: bytes) -> None:
        """``name`` is family, member, number."""
        rng = np.random.default_rng(name)
        self.key = ChunkKey(bytes(SPACE_BYTES) + rng.bytes(HASH_BYTES))
        self.parent = ChunkKey(parent)
        self.tokens = rng.bytes(CHUNK_TOKENS * 4)
        self.check = check_of(self.tokens)
        self.new = NewChunk(self.key, self.parent, sketch_of(self.tokens), CHUNK_TOKENS, IMAGE_BYTES)
        # As different as the keys, and written and compared at the speed of memory.
        self._word = np.frombuffer(self.key[-8:], np.int64)[0]

    def write(self, image: memoryview) -> None:
        """Fill a slot: the payload, then the header."""
        header_bytes = IMAGE_BYTES - PAYLOAD_BYTES
        np.frombuffer(image[header_bytes:], np.int64)[:] = self._word
        write_header(image, Header(self.key, self.parent, self.tokens, b"", header_bytes, PAYLOAD_BYTES, 0))

    def is_in(self, copy: Bytes) -> bool:
        """Whether a copy of an image has the right bytes."""
        header = read_header(memoryview(copy))
        payload = copy[IMAGE_BYTES - PAYLOAD_BYTES :].view(np.int64)
        return header.tokens == self.tokens and bool((payload == self._word).all())


def prompt(family: int, member: int) -> list[Chunk]:
    """Chunks that the family shares, then those of the member."""
    chunks, parent = [], ROOT
    for at in range(_SHARED + _OWN):
        chunks.append(Chunk((family, 0 if at < _SHARED else member + 1, at), parent))
        parent = chunks[-1].key
    return chunks


class Load:
    """What one client does, and how long each call took."""

    def __init__(self, address: str, seed: int) -> None:
        """Connect."""
        self._client = StoreClient(SocketTransport(address, f"load {seed}", timeout_seconds=_TIMEOUT_SECONDS))
        self._rng = np.random.default_rng(seed)
        self._copy = np.empty(IMAGE_BYTES, np.uint8)
        self._prompts: dict[tuple[int, int], list[Chunk]] = {}
        self.took = {name: Histogram() for name in CALLS}
        self.counts = dict.fromkeys((*FAULTS, "found", "published"), 0)

    def run(self, seconds: float) -> None:
        """Mixed calls until the time is up, or nothing works."""
        deadline, rounds = time.perf_counter() + seconds, 0
        while time.perf_counter() < deadline:
            chunks = self._draw()
            try:
                self._serve(chunks)
                if rounds % 16 == 0:
                    self._timed("status", self._client.status)
            except QKVaultError as error:
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
                self.counts["failed"] += 1
                if self.counts["failed"] > _MOST_FAILED:
                    return
            rounds += 1

    def _draw(self) -> list[Chunk]:
        # Few families and members are asked for often, many seldom.
        family = int(self._rng.zipf(1.3)) % _FAMILIES
        member = int(self._rng.zipf(1.2)) % _MEMBERS
        if (family, member) not in self._prompts:
            self._prompts[family, member] = prompt(family, member)
        return self._prompts[family, member]

    def _serve(self, chunks: list[Chunk]) -> None:
        # What a request does: what is cached is loaded, the rest is stored.
        keys, checks = b"".join(chunk.key for chunk in chunks), b"".join(chunk.check for chunk in chunks)
        found = self._timed("lookup", lambda: self._client.find(ROOT, keys, checks, lambda _: b""))
        refs = list(found.ready)
        self.counts["found"] += len(refs)
        for ref, chunk in zip(refs, chunks, strict=False):
            self._load(ref, chunk)
        if found.lease_id:
            self._timed("release", lambda: self._client.release(found.lease_id))
        if len(refs) < len(chunks):
            self._store(chunks[len(refs) :])

    def _load(self, ref: ChunkRef, chunk: Chunk) -> None:
        image = self._client.pool.view(ref.offset, ref.image_bytes)
        self._timed("copy out", lambda: np.copyto(self._copy, np.frombuffer(image, np.uint8)))
        if key_in(image) != chunk.key:
            self.counts["stale"] += 1  # its lease ran out: only a client that was stopped for a minute sees that
        elif not chunk.is_in(self._copy):
            self.counts["wrong"] += 1

    def _store(self, chunks: list[Chunk]) -> None:
        reserved = self._timed("reserve", lambda: self._client.reserve([chunk.new for chunk in chunks]))
        slots = [(chunk, at) for chunk, at in zip(chunks, reserved.offsets, strict=True) if at >= 0]
        for chunk, at in slots:
            image = self._client.pool.view(at, IMAGE_BYTES)
            self._timed("copy in", functools.partial(chunk.write, image))
        if reserved.lease_id:
            count = self._timed("commit", lambda: self._client.commit(reserved.lease_id))
            self.counts["published"] += count
            self.counts["failed"] += count != len(slots)

    def _timed(self, name: str, call: Callable[[], R]) -> R:
        start = time.perf_counter()
        answer = call()
        self.took[name].add(time.perf_counter() - start)
        return answer


def main() -> None:
    """Do what is ordered until stdin ends."""
    address, seed = sys.argv[1:]
    load = Load(address, int(seed))

    def run(seconds: float) -> dict[str, Any]:
        load.run(seconds)
        return {"took": {name: took.as_json() for name, took in load.took.items()}, "counts": load.counts}

    orders.serve({"run": run}, lambda: None)


if __name__ == "__main__":
    main()
