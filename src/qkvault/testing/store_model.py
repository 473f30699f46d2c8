"""StoreModel: what a store may answer, as dictionaries. And chunks to try it with.

The model knows no pool, eviction or time: it holds every chunk that was committed and not cleared, and judges what a
store hands out. What is in RAM and in the tiers it learns from the store's events alone.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from qkvault.events import StoreEvent
from qkvault.image import Header, align_up, check_of, header_bytes_for, read_header, sketch_of, write_header
from qkvault.types import HASH_BYTES, SPACE_BYTES, TOKEN_BYTES, CacheKind, ChunkKey, ChunkRef, NewChunk
from qkvault.wire.messages import Located

SPACE: Final = bytes(range(SPACE_BYTES))
ROOT: Final = SPACE + bytes(HASH_BYTES)
QUERY_SPACE: Final = bytes(reversed(SPACE))
QUERY_ROOT: Final = QUERY_SPACE + bytes(HASH_BYTES)
_DESCRIPTION: Final = b"a space of tests"
_QUERY_DESCRIPTION: Final = msgspec.msgpack.encode({"space": {"kind": CacheKind.QUERY}})


class ModelChunk(NamedTuple):
    """A chunk whose key and payload follow from its tokens, and the payload from ``version`` too."""

    key: bytes
    parent: bytes
    tokens: bytes  # 4 bytes each
    payload: bytes

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def check(self) -> bytes:
        """What a lookup sends along with the key."""
        return check_of(self.tokens)

    @property
    def kind(self) -> CacheKind:
        return kind_of(self.key)

    @property
    def header_bytes(self) -> int:
        """Size of the header; the same for all chunks."""
        return header_bytes_for(self.num_tokens, len(_DESCRIPTION))

    def new(self) -> NewChunk:
        """What a client reserves."""
        image_bytes = self.header_bytes + len(self.payload)
        return NewChunk(self.key, self.parent, sketch_of(self.tokens), self.num_tokens, image_bytes)

    def write(self, image: memoryview) -> None:
        """Fill a slot, as a client does between reserve and commit."""
        image[self.header_bytes : self.header_bytes + len(self.payload)] = self.payload
        key, parent = ChunkKey(self.key), ChunkKey(self.parent)
        told = _QUERY_DESCRIPTION if self.kind is CacheKind.QUERY else _DESCRIPTION
        write_header(image, Header(key, parent, self.tokens, told, self.header_bytes, len(self.payload), 0))

    def is_in(self, image: memoryview) -> bool:
        """Whether ``image`` holds this very chunk."""
        try:
            header = read_header(image)
        except ValueError:
            return False
        payload = bytes(image[header.header_bytes : header.image_bytes])
        return self == (header.key, header.parent, header.tokens, payload)


def kind_of(key: bytes) -> CacheKind:
    """What kind of tensor a chunk of these tests holds: its space says so."""
    return CacheKind.QUERY if key.startswith(QUERY_SPACE) else CacheKind.KV


def tokens_of(numbers: Iterable[int]) -> bytes:
    """Token ids as bytes."""
    return b"".join(number.to_bytes(TOKEN_BYTES, "little") for number in numbers)


def chunks_of(
    tokens: bytes, chunk_size: int, *, root: bytes = ROOT, version: int = 0, token_payload_bytes: int = 64
) -> list[ModelChunk]:
    """``tokens`` as a chain of chunks; the last one may hold fewer than ``chunk_size`` tokens."""
    chunks, parent, step = [], root, chunk_size * TOKEN_BYTES
    for start in range(0, len(tokens), step):
        own = tokens[start : start + step]
        key = root[:SPACE_BYTES] + hashlib.sha256(parent + own).digest()
        payload_bytes = len(own) // TOKEN_BYTES * token_payload_bytes
        chunks.append(ModelChunk(key, parent, own, hashlib.shake_128(key + bytes([version])).digest(payload_bytes)))
        parent = key
    return chunks


def keys_of(chunks: Iterable[ModelChunk]) -> bytes:
    """Their keys, as a lookup asks for them."""
    return b"".join(chunk.key for chunk in chunks)


def checks_of(chunks: Iterable[ModelChunk]) -> bytes:
    """What a lookup sends along with the keys."""
    return b"".join(chunk.check for chunk in chunks)


class StoreModel:
    """Judges a store. Every ``check`` raises AssertionError with what is wrong."""

    def __init__(self, shares: Mapping[str, Mapping[CacheKind, int]] | None = None) -> None:
        """``shares`` tell how many bytes of each kind a medium has room for, whatever there is of the other."""
        self.shares = dict(shares or {})
        self.images: dict[bytes, ModelChunk] = {}  # what may be found now
        self.history: defaultdict[bytes, list[ModelChunk]] = defaultdict(list)  # what a lease may still give
        self.writing: dict[int, dict[bytes, ModelChunk]] = {}  # by write lease
        self.contents: defaultdict[str, dict[bytes, bytes]] = defaultdict(dict)  # by tier: key to parent

    def reserved(self, lease_id: int, chunks: Iterable[ModelChunk]) -> None:
        """``chunks`` have slots under a write lease."""
        self.writing[lease_id] = {chunk.key: chunk for chunk in chunks}

    def committed(self, lease_id: int, keys: Iterable[bytes]) -> None:
        """The lease was committed, and ``keys`` of it published."""
        written = self.writing.pop(lease_id)
        self.admit(written[key] for key in keys)

    def aborted(self, lease_id: int) -> None:
        """The lease has ended without a commit."""
        self.writing.pop(lease_id, None)

    def admit(self, chunks: Iterable[ModelChunk]) -> None:
        """``chunks`` may be found from now on: committed, or in a tier from the start."""
        for chunk in chunks:
            self.images[chunk.key] = chunk
            self.history[chunk.key].append(chunk)

    def forgotten(self, key: bytes) -> None:
        """``key`` is not to be found any more."""
        self.images.pop(key, None)

    def cleared(self) -> None:
        """Everything is forgotten. Leases live on: what was leased may be read, what is being written never appears."""
        self.images.clear()
        self.writing = {lease_id: {} for lease_id in self.writing}

    def forget(self, keys: Iterable[bytes]) -> None:
        """As ``cleared``, of ``keys`` only."""
        for key in keys:
            self.forgotten(key)
            for written in self.writing.values():
                written.pop(key, None)

    def hear(
        self,
        events: Iterable[StoreEvent],
        *,
        by: CacheKind | None = None,
        kv_bytes: Callable[[str], int] = lambda _tier: 0,
    ) -> None:
        """Follow the store's events: a chunk comes before it leaves, and is not evicted before its children.

        ``by`` is the kind of what wanted room, if that is known: for KV no queries leave, and for queries no KV but
        what is beyond its share. ``kv_bytes(tier)`` is how much KV is in use there now.
        """
        last_bytes: dict[str, int] = {}  # of the last KV that left for queries
        for event in events:
            if not event.key:  # the reader was late, and is told everything anew
                self.contents.clear()
                continue
            here = self.contents[event.tier]
            assert (event.key in here) != event.stored, f"told twice: {event}"
            assert bool(event.reason) != event.stored, f"a removal has a reason, a store none: {event}"
            if event.stored:
                here[event.key] = event.parent
            else:
                del here[event.key]
                if event.reason != "evicted":
                    continue
                assert event.key not in here.values(), f"a head before its tail: {event}"
                if kind_of(event.key) is CacheKind.QUERY:
                    assert by is not CacheKind.KV, f"queries left for KV: {event}"
                elif by is CacheKind.QUERY:
                    last_bytes[event.tier] = align_up(self.history[event.key][-1].new().image_bytes)
        for tier, num_bytes in last_bytes.items():
            share_bytes = self.shares[tier][CacheKind.KV]
            assert kv_bytes(tier) + num_bytes > share_bytes, f"{tier}: KV left for queries, and had borrowed nothing"

    def check_shares(self) -> None:
        """No medium has more bytes of queries than their share."""
        for tier, shares in self.shares.items():
            queries = [self.history[key][-1] for key in self.contents[tier] if kind_of(key) is CacheKind.QUERY]
            used_bytes = sum(chunk.new().image_bytes for chunk in queries)
            assert used_bytes <= shares[CacheKind.QUERY], f"{tier}: {used_bytes} bytes of queries, of {shares}"

    def check_lookup(
        self,
        located: Located,
        query: Sequence[ModelChunk],
        view: Callable[[int, int], memoryview],
        *,
        root: bytes = ROOT,
        tail: bytes = b"",
    ) -> None:
        """A lookup of ``query`` found a leading run of it, and nothing but what may be found now.

        ``tail`` are the tokens after the whole chunks of ``query``, if they were asked for (``match``).
        """
        for ref in self._walk(located, query, root, tail):
            assert ref.key in self.images, f"found and never committed, or cleared: {ref}"
            assert self.images[ref.key].is_in(view(ref.offset, ref.image_bytes)), f"other bytes: {ref}"
            assert ref.key in self.contents["ram"], f"no event told of {ref}"

    def num_in_ram(self, query: Sequence[ModelChunk]) -> int:
        """How many leading chunks of ``query`` lie in RAM: at least these must be found."""
        here = [chunk.key in self.contents["ram"] and chunk.key in self.images for chunk in query]
        return [*here, False].index(False)

    def check_poll(
        self,
        located: Located,
        query: Sequence[ModelChunk],
        view: Callable[[int, int], memoryview],
        *,
        root: bytes = ROOT,
        tail: bytes = b"",
    ) -> None:
        """A lease gives a leading run of what was asked for, in bytes that were committed at some time."""
        for ref in self._walk(located, query, root, tail):
            image = view(ref.offset, ref.image_bytes)
            assert any(chunk.is_in(image) for chunk in self.history[ref.key]), f"bytes nobody committed: {ref}"

    def _walk(self, located: Located, query: Sequence[ModelChunk], root: bytes, tail: bytes) -> Iterator[ChunkRef]:
        # The refs, each of which holds the tokens that were asked for at its place.
        parent = root
        for at, ref in enumerate(located.ready):
            asked = query[at] if at < len(query) else None
            tokens = asked.tokens if asked is not None else tail
            chunk = self.history[ref.key][-1] if self.history[ref.key] else None
            assert chunk is not None, f"found and never committed: {ref}"
            assert chunk.parent == parent, f"not contiguous: {ref}"
            shared = ref.num_tokens * TOKEN_BYTES
            assert 0 < shared <= len(tokens), f"more tokens than were asked for: {ref}"
            assert chunk.tokens[:shared] == tokens[:shared], f"other tokens: {ref}"
            is_whole = asked is not None and ref.key == asked.key
            assert is_whole or at == len(located.ready) + located.num_pending - 1, f"a partial chunk inside: {ref}"
            yield ref
            parent = ref.key
