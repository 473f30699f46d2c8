"""Token ids to chained chunk hashes to keys.

Every hash covers the tokens before it through its parent, and the request through the chain's root (RequestIdentity);
docs/key-format.md specifies every byte. This module knows token ids: no text, no tensors, no store.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from qkvault.errors import ConfigError
from qkvault.image import checks_of
from qkvault.keys import DEFAULT_HASH, CacheEngineKey, KeySpace, LayerCacheEngineKey, MediaSpan, RequestIdentity
from qkvault.types import HASH_BYTES, SKETCH_BYTES, TOKEN_BYTES

__all__ = [
    "HASH_SCHEMES",
    "NONE_HASH",
    "CacheEngineKey",
    "ChunkedTokenDatabase",
    "KeySpace",
    "LayerCacheEngineKey",
    "MediaSpan",
    "RequestIdentity",
    "TokenDatabase",
    "TokenHasher",
    "load_scheme",
    "token_bytes",
]

HASH_SCHEMES: Final = ("sha256", "blake3", "builtin")
NONE_HASH: Final = 0  # where the builtin chain of a plain request starts

_HEAD: Final = struct.Struct("<II")  # tokens, bytes of extra; between the parent and the tokens
_U32_MAX: Final = 2**32 - 1
_HASH_OF_NONE: Final = 0xFCA86420  # hash(None) since Python 3.12; before, it is an address and differs per process
_EMPTY: Final = RequestIdentity()

Tokens = Sequence[int] | npt.NDArray[np.generic]  # or a torch tensor: 1-D, any device
Mask = Sequence[bool] | npt.NDArray[np.generic]  # or a torch tensor: 1-D, any device


class Hash(Protocol):
    """A hash in the making, as hashlib has it. ``digest`` gives 32 bytes."""

    def update(self, data: bytes | memoryview, /) -> object: ...
    def digest(self) -> bytes: ...


class _BuiltinHash:
    """The reference's hash((parent, tokens, extra)): 64 bits, right-aligned in 32 bytes."""

    def __init__(self, head: bytes) -> None:
        self._message = bytearray(head)

    def update(self, data: bytes | memoryview, /) -> None:
        self._message += data

    def digest(self) -> bytes:
        message = bytes(self._message)
        parent = int.from_bytes(message[HASH_BYTES - 8 : HASH_BYTES], "big", signed=True)
        num_tokens, extra_bytes = _HEAD.unpack_from(message, HASH_BYTES)
        tokens = struct.unpack_from(f"<{num_tokens}I", message, HASH_BYTES + _HEAD.size)
        extra = message[-extra_bytes:] if extra_bytes else _HASH_OF_NONE
        value = hash((parent, tokens, extra))
        return value.to_bytes(8, "big", signed=True).rjust(HASH_BYTES, b"\0")


def load_scheme(name: str, *, shared: bool = True) -> Callable[[bytes], Hash]:
    """The constructor of hashes called ``name``, one of HASH_SCHEMES. Nothing else is ever used in its place.

    ``shared``: keys meet other processes or later runs (disk, server, several ranks). ``builtin`` then needs a fixed
    PYTHONHASHSEED, the same everywhere. Raises ConfigError for that, an unknown name and a package that is missing.
    """
    if name == "sha256":
        return hashlib.sha256
    if name == "blake3":
        try:
            from blake3 import blake3
        except ImportError as error:
            msg = "hash scheme blake3 needs the package blake3: pip install 'qkvault[blake3]'"
            raise ConfigError(msg) from error
        new_hash: Callable[[bytes], Hash] = blake3
        return new_hash
    if name != "builtin":
        msg = f"unknown hash scheme {name!r}: one of {', '.join(HASH_SCHEMES)}"
        raise ConfigError(msg)
    seed = "" if sys.flags.ignore_environment else os.environ.get("PYTHONHASHSEED", "")
    if shared and not seed.isdecimal():
        msg = (
            "hash scheme builtin differs per process unless PYTHONHASHSEED is set to one number everywhere: use sha256"
        )
        raise ConfigError(msg)
    return _BuiltinHash


def token_bytes(tokens: Tokens) -> bytes:
    """Token ids as unsigned 32-bit little-endian integers, 4 bytes each.

    Raises ValueError unless ``tokens`` is one-dimensional and holds integers from 0 to 2**32 - 1.
    """
    if isinstance(tokens, (bytes, bytearray, str)):
        msg = f"tokens are integers, not {type(tokens).__name__}"
        raise ValueError(msg)  # noqa: TRY004  # one error for all wrong tokens
    if hasattr(tokens, "__array__"):
        return _array_bytes(_as_array(tokens))
    try:
        packed = array("I", tokens)  # for a list twice as fast as struct, five times as fast as numpy
    except (OverflowError, TypeError) as error:
        msg = f"a token id is not an integer from 0 to {_U32_MAX}: {error}"
        raise ValueError(msg) from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _as_array(values: Tokens | Mask) -> npt.NDArray[np.generic]:
    try:
        return np.asarray(values)
    except TypeError:  # a tensor on a device
        return np.asarray(values.tolist())  # type: ignore[union-attr]  # no sequence raises TypeError


def _array_bytes(values: npt.NDArray[np.generic]) -> bytes:
    if values.ndim != 1:
        msg = f"tokens have one dimension, not the shape {values.shape}"
        raise ValueError(msg)
    if values.size == 0:
        return b""
    if values.dtype.kind not in "iu" or int(values.min()) < 0 or int(values.max()) > _U32_MAX:
        msg = f"a token id is not an integer from 0 to {_U32_MAX}: an array of {values.dtype}"
        raise ValueError(msg)
    return values.astype("<u4", copy=False).tobytes()


class TokenHasher:
    """The chain of one request, hashing each token once as the request grows. Owned by one thread.

    Raises ValueError for an identity that cannot be cached, ConfigError as ``load_scheme`` does.
    """

    def __init__(
        self, identity: RequestIdentity, chunk_size: int, scheme: str = DEFAULT_HASH, *, shared: bool = True
    ) -> None:
        if (reason := identity.uncacheable_reason) is not None:
            msg = f"the request cannot be cached: {reason}"
            raise ValueError(msg)
        if chunk_size < 1:
            msg = f"a chunk of {chunk_size} tokens"
            raise ValueError(msg)
        self.identity = identity
        self.chunk_size = chunk_size
        self.root = identity.root(scheme, chunk_size)  # 32 bytes: the parent of chunk 0
        self._new_hash = load_scheme(scheme, shared=shared)
        self._chunk_bytes = chunk_size * TOKEN_BYTES
        self._tokens = bytearray()
        self._hashes: list[bytes] = []  # of whole chunks
        self._checks = bytearray()  # of the first whole chunks: as many as were asked for

    @property
    def num_tokens(self) -> int:
        return len(self._tokens) // TOKEN_BYTES

    @property
    def hashes(self) -> list[bytes]:
        """The hashes of all whole chunks, 32 bytes each."""
        return self._hashes.copy()

    @property
    def checks(self) -> bytes:
        """``image.check_of`` of all whole chunks: 3 bytes each, independent of the scheme and of the parent."""
        num_known = len(self._checks) // SKETCH_BYTES
        if num_known < len(self._hashes):
            with memoryview(self._tokens) as view:
                self._checks += checks_of(view[num_known * self._chunk_bytes :], self._chunk_bytes)
        return bytes(self._checks)

    def extend(self, tokens: Tokens) -> None:
        """Append ``tokens`` and hash the chunks that became whole.

        Raises ValueError as ``token_bytes`` does; nothing is appended then.
        """
        self._tokens += token_bytes(tokens)
        size, parent, head = self._chunk_bytes, self.parent_of(len(self._hashes)), _HEAD.pack(self.chunk_size, 0)
        with memoryview(self._tokens) as view:
            for start in range(len(self._hashes) * size, len(view) - size + 1, size):
                if self.identity.media:
                    parent = self._link(parent, view[start : start + size], start // TOKEN_BYTES)
                else:  # two updates spare a copy of the tokens: a third faster than one
                    state = self._new_hash(parent + head)
                    state.update(view[start : start + size])
                    parent = state.digest()
                self._hashes.append(parent)

    def update_to(self, all_tokens: Tokens) -> None:
        """Append what ``all_tokens`` holds beyond the tokens seen, which the caller knows to be its beginning.

        Raises ValueError if it holds fewer: ``truncate`` first.
        """
        if len(all_tokens) < self.num_tokens:
            msg = f"{len(all_tokens)} tokens, but {self.num_tokens} were seen: truncate first"
            raise ValueError(msg)
        self.extend(all_tokens[self.num_tokens :])

    def truncate(self, num_tokens: int) -> None:
        """Forget all but the first ``num_tokens`` tokens, after a rollback. Raises ValueError if fewer were seen."""
        if not 0 <= num_tokens <= self.num_tokens:
            msg = f"cannot keep {num_tokens} of {self.num_tokens} tokens"
            raise ValueError(msg)
        del self._tokens[num_tokens * TOKEN_BYTES :]
        del self._hashes[num_tokens // self.chunk_size :]
        del self._checks[num_tokens // self.chunk_size * SKETCH_BYTES :]

    def parent_of(self, index: int) -> bytes:
        """The hash before chunk ``index``, the root before chunk 0. ``index`` may be that of the tail.

        Raises ValueError if there is no such chunk.
        """
        if not 0 <= index <= len(self._hashes):
            msg = f"no chunk {index} after {len(self._hashes)} whole ones"
            raise ValueError(msg)
        return self._hashes[index - 1] if index else self.root

    def tokens_from(self, index: int) -> bytes:
        """At most a chunk of tokens, 4 bytes each, from the start of chunk ``index``, whole or not; maybe none."""
        return bytes(self._tokens[index * self._chunk_bytes : (index + 1) * self._chunk_bytes])

    def chunk(self, index: int, num_tokens: int) -> tuple[bytes, bytes]:
        """Hash and token bytes of the chunk of the first ``num_tokens`` tokens of chunk ``index``.

        Raises ValueError if there are fewer, and for 0.
        """
        tokens = self.tokens_from(index)[: num_tokens * TOKEN_BYTES]
        if num_tokens < 1 or len(tokens) != num_tokens * TOKEN_BYTES:
            msg = f"no {num_tokens} tokens at chunk {index}: {self.num_tokens} were seen, a chunk is {self.chunk_size}"
            raise ValueError(msg)
        if num_tokens == self.chunk_size:
            return self._hashes[index], tokens
        return self._link(self.parent_of(index), tokens, index * self.chunk_size), tokens

    def tail(self, num_tokens: int) -> tuple[bytes, bytes]:
        """As ``chunk``, for what follows the last whole chunk."""
        return self.chunk(len(self._hashes), num_tokens)

    def _link(self, parent: bytes, tokens: bytes | memoryview, first_token: int) -> bytes:
        num_tokens = len(tokens) // TOKEN_BYTES
        extra = self.identity.extra_of(first_token, first_token + num_tokens)
        state = self._new_hash(parent + _HEAD.pack(num_tokens, len(extra)))
        state.update(tokens)
        state.update(extra)
        return state.digest()


class TokenDatabase(ABC):
    """Cuts a prompt into pieces and names each, for who brings or wants names: the field's interface to keys.

    The engine names chunks by ``TokenHasher`` itself, a request at a time, and so does a database: their keys agree.
    """

    @abstractmethod
    def process_tokens(
        self,
        tokens: Tokens | None = None,
        hashes: Sequence[bytes] | None = None,
        offsets: Sequence[int] | None = None,
        mask: Mask | None = None,
        *,
        make_key: bool = True,
        request_configs: Mapping[str, object] | None = None,
        identity: RequestIdentity | None = None,
    ) -> Iterator[tuple[int, int, CacheEngineKey | bytes]]:
        """Yield ``(start, end, key)`` for the tokens [start, end) of each piece, in order.

        The prompt is given as ``tokens``, or as ``hashes`` of its pieces with ``offsets``, the tokens of each. Pieces
        under the mask's leading Falses are named for the sake of those after them, and not yielded. ``make_key=False``
        yields hashes in place of keys. ``request_configs`` adds its tags to the identity. A request that cannot be
        cached yields nothing.

        Raises ValueError at the call if both tokens and hashes are None, hashes and offsets differ in length, or the
        mask is not F...FT...T over whole chunks.
        """


class ChunkedTokenDatabase(TokenDatabase):
    """Chunks of equal size, each hash chained to the one before; the shorter last one if ``save_unfull_chunk``.

    ``identity`` is that of requests that bring none. Raises ConfigError as ``load_scheme`` does.
    """

    def __init__(
        self,
        space: KeySpace,
        *,
        save_unfull_chunk: bool = True,
        identity: RequestIdentity = _EMPTY,
        shared: bool = True,
    ) -> None:
        load_scheme(space.hash_algorithm, shared=shared)  # what is wrong with it is wrong at start
        self.space = space
        self.save_unfull_chunk = save_unfull_chunk
        self.identity = identity
        self._shared = shared

    @property
    def chunk_size(self) -> int:
        """Tokens of a whole chunk."""
        return self.space.chunk_size

    def hasher(self, identity: RequestIdentity | None = None) -> TokenHasher:
        """A new chain for one request. Raises ValueError if the request cannot be cached."""
        chosen = self.identity if identity is None else identity
        return TokenHasher(chosen, self.chunk_size, self.space.hash_algorithm, shared=self._shared)

    def process_tokens(
        self,
        tokens: Tokens | None = None,
        hashes: Sequence[bytes] | None = None,
        offsets: Sequence[int] | None = None,
        mask: Mask | None = None,
        *,
        make_key: bool = True,
        request_configs: Mapping[str, object] | None = None,
        identity: RequestIdentity | None = None,
    ) -> Iterator[tuple[int, int, CacheEngineKey | bytes]]:
        chosen = (self.identity if identity is None else identity).with_request_configs(request_configs)
        if chosen.uncacheable_reason is not None:
            return iter(())
        if tokens is not None:
            ends, hashes = self._hash_chunks(tokens, chosen)
            num_tokens = len(tokens)
        elif hashes is not None:
            ends = _ends_of(hashes, offsets)
            num_tokens = ends[-1] if ends else 0
        else:
            msg = "Either tokens or hashes must be provided."
            raise ValueError(msg)
        num_masked = num_masked_tokens(mask, num_tokens, self.chunk_size)
        pieces = [piece for piece in zip([0, *ends], ends, hashes, strict=False) if piece[0] >= num_masked]
        return self._named(pieces, chosen) if make_key else iter(pieces)

    def _hash_chunks(self, tokens: Tokens, identity: RequestIdentity) -> tuple[list[int], list[bytes]]:
        hasher = self.hasher(identity)
        hasher.extend(tokens)
        hashes, size = hasher.hashes, self.chunk_size
        ends = [size * (index + 1) for index in range(len(hashes))]
        num_left = hasher.num_tokens % size
        if num_left and self.save_unfull_chunk:
            ends.append(hasher.num_tokens)
            hashes.append(hasher.tail(num_left)[0])
        return ends, hashes

    def _named(
        self, pieces: list[tuple[int, int, bytes]], identity: RequestIdentity
    ) -> Iterator[tuple[int, int, CacheEngineKey]]:
        template = CacheEngineKey.of(self.space, bytes(HASH_BYTES), identity)
        for start, end, chunk_hash in pieces:
            yield start, end, replace(template, chunk_hash=chunk_hash)


def _ends_of(hashes: Sequence[bytes], offsets: Sequence[int] | None) -> list[int]:
    if offsets is None or len(offsets) != len(hashes) or any(offset < 1 for offset in offsets):
        msg = f"{len(hashes)} hashes need as many offsets, the tokens of each chunk: {offsets}"
        raise ValueError(msg)
    ends, end = [], 0
    for offset in offsets:
        end += offset
        ends.append(end)
    return ends


def num_masked_tokens(mask: Mask | None, num_tokens: int, unit_tokens: int, *, unit: str = "chunk") -> int:
    """How many leading tokens ``mask`` leaves out (rows 15, 16); None leaves out none.

    Raises ValueError unless it is F...FT...T, one for each token, with Falses in whole units (chunks or blocks).
    """
    if mask is None:
        return 0
    values = _as_array(mask).astype(bool)
    num_falses = int(np.count_nonzero(~values))
    if values.shape != (num_tokens,) or values[:num_falses].any():
        msg = f"a mask is F...FT...T, one for each of the {num_tokens} tokens"
        raise ValueError(msg)
    if num_falses % unit_tokens:
        msg = f"The number of Falses in the mask is not a multiple of the {unit} size."
        raise ValueError(msg)
    return num_falses
