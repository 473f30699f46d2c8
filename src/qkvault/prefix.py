"""Prefix: one request's tokens as chunks, and the two questions asked of them: what is cached, what is to be stored.

Shared by CacheEngine and the serving integrations. Positions are tokens from the start of the request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from qkvault.image import FIRST, PLAIN, check_of
from qkvault.keys import KeySpace, RequestIdentity
from qkvault.tokens import TokenHasher, token_bytes
from qkvault.transfer import LoadItem, SaveItem
from qkvault.types import GRAIN_TOKENS, SKETCH_BYTES, TOKEN_BYTES, ChunkRef

if TYPE_CHECKING:
    from qkvault.client import StoreClient
    from qkvault.tokens import Tokens
    from qkvault.wire.messages import Located

_GRAIN_BYTES: Final = GRAIN_TOKENS * TOKEN_BYTES


class Prefix:
    """A growing sequence of tokens in one space. Each token is hashed once. Owned by one thread."""

    def __init__(self, space: KeySpace, identity: RequestIdentity, tokens: Tokens = (), *, shared: bool = True) -> None:
        """``shared``: others than this process read the keys. Raises ValueError and ConfigError as TokenHasher does."""
        self._space = space
        self._hasher = TokenHasher(identity, space.chunk_size, space.hash_algorithm, shared=shared)
        self._hasher.extend(tokens)

    @property
    def num_tokens(self) -> int:
        return self._hasher.num_tokens

    def update_to(self, all_tokens: Tokens) -> None:
        """Append what ``all_tokens`` holds beyond the tokens that are here."""
        if len(all_tokens) > self._hasher.num_tokens:
            self._hasher.update_to(all_tokens)

    def find(self, client: StoreClient, *, start_chunk: int = 0, search_range: Sequence[str] | None = None) -> Located:
        """Lease the longest cached run, in the media of ``search_range`` (None: in all). Raises Unavailable.

        The run begins at ``start_chunk``: what is before it need not be cached, and is not touched.
        """
        return self.find_each(client, (self._space,), start_chunk=start_chunk, search_range=search_range)[0]

    def find_each(
        self,
        client: StoreClient,
        spaces: Sequence[KeySpace],
        *,
        start_chunk: int = 0,
        search_range: Sequence[str] | None = None,
    ) -> list[Located]:
        """``find`` in several spaces that differ in the rank only. Raises Unavailable."""
        hashes = self._hasher.hashes[start_chunk:]
        parent = self._hasher.parent_of(start_chunk)
        chains = [(space.chunk_key(parent), space.chunk_keys(hashes)) for space in spaces]
        if self._hasher.identity.media:
            checks = b"".join(check_of(self._compared(start_chunk + number)) for number in range(len(hashes)))
        else:
            checks = self._hasher.checks[start_chunk * SKETCH_BYTES :]
        return client.find_each(
            chains, checks, lambda number: self._compared(start_chunk + number), search_range=search_range
        )

    def forget(self, client: StoreClient, spaces: Sequence[KeySpace], *, start_chunk: int = 0) -> int:
        """Have the store forget the chunks from ``start_chunk`` on in ``spaces``, and all that hangs on them.

        Returns how many chunks are to go. Raises Unavailable.
        """
        hashes, parent = self._hasher.hashes, self._hasher.parent_of(start_chunk)
        tail = self._compared(len(hashes))
        chains = [(space.chunk_key(parent), space.chunk_keys(hashes[start_chunk:])) for space in spaces]
        return sum(client.forget(root, keys, tail) for root, keys in chains)

    def agrees_with(self, tokens: Tokens, identity: RequestIdentity) -> bool:
        """Whether ``tokens`` begin with those that are here, or the other way round, for the same ``identity``."""
        count = min(len(tokens), self.num_tokens)
        num_chunks = -(-count // self._space.chunk_size)
        here = b"".join(self._hasher.tokens_from(number) for number in range(num_chunks))[: count * TOKEN_BYTES]
        return identity == self._hasher.identity and token_bytes(tokens[:count]) == here

    def save_items(self, start: int, end: int, block_ids: Sequence[int], block_size: int) -> list[SaveItem]:
        """The chunks of ``[start, end)``, the last one maybe partial: ``start`` begins a chunk, ``end`` ends a block.

        ``block_ids`` is the request's whole block table. Raises ValueError if it is too short, or the range is another.
        """
        if start % self._space.chunk_size or end % block_size or len(block_ids) * block_size < end:
            msg = (
                f"tokens {start} to {end} are not whole blocks of {len(block_ids)} of {block_size} tokens, from the "
                f"start of a chunk of {self._space.chunk_size}"
            )
            raise ValueError(msg)
        items = []
        for first in range(start, end, self._space.chunk_size):
            number = first // self._space.chunk_size
            stop = min(end, first + self._space.chunk_size)
            chunk_hash, tokens = self._hasher.chunk(number, stop - first)
            tokens = self._compared(number, tokens)
            key, parent = self._space.chunk_key(chunk_hash), self._space.chunk_key(self._hasher.parent_of(number))
            ids = tuple(block_ids[first // block_size : stop // block_size])
            items.append(SaveItem(key, parent, tokens, ids, self._flags(first, stop)))
        return items

    def _flags(self, first: int, stop: int) -> int:
        identity = self._hasher.identity
        is_plain = not (identity.cache_salt or identity.adapter or identity.tags)
        is_plain = is_plain and all(span.start >= stop for span in identity.media)
        return (0 if first else FIRST) | (PLAIN if is_plain else 0)

    def _compared(self, number: int, tokens: bytes | None = None) -> bytes:
        """``tokens`` of a chunk (None: all that there are), as they are compared with those of other chunks.

        Chunks are also matched by tokens alone, and a picture is more than its tokens: a grain that media touch is a
        digest of it and of them. So a match ends before them unless the media are the same.
        """
        tokens = self._hasher.tokens_from(number) if tokens is None else tokens
        if not self._hasher.identity.media:
            return tokens
        grains = []
        for at in range(0, len(tokens), _GRAIN_BYTES):
            grain, start = tokens[at : at + _GRAIN_BYTES], number * self._space.chunk_size + at // TOKEN_BYTES
            if extra := self._hasher.identity.extra_of(start, start + len(grain) // TOKEN_BYTES):
                grain = hashlib.sha512(grain + extra).digest()[: len(grain)]
            grains.append(grain)
        return b"".join(grains)


def load_items(
    ready: Iterable[ChunkRef], start: int, stop: int, block_ids: Sequence[int], *, chunk_size: int, block_size: int
) -> list[LoadItem]:
    """What to copy of leased chunks for the tokens ``[start, stop)``, which begin and end blocks.

    ``ready`` are the request's chunks from the first one on; blocks outside the range are not touched. Raises
    ValueError if ``block_ids``, the request's whole block table, is too short.
    """
    require_blocks(block_ids, stop, block_size)
    items = []
    for number, ref in enumerate(ready):
        base = number * chunk_size
        lo, hi = max(start, base), min(stop, base + ref.num_tokens)
        if lo < hi:
            ids = tuple(block_ids[lo // block_size : hi // block_size])
            items.append(LoadItem(ref, lo, ids))
    return items


def require_blocks(block_ids: Sequence[int], num_tokens: int, block_size: int) -> None:
    """Raise ValueError unless ``block_ids`` hold so many tokens."""
    if len(block_ids) * block_size < num_tokens:
        msg = f"{len(block_ids)} blocks of {block_size} tokens do not hold {num_tokens}"
        raise ValueError(msg)
