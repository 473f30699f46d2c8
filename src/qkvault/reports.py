"""What a store tells, for people and programs: its status as plain values, and how much of a prompt it has.

The command and the HTTP server print the same. Loads no torch: a space says how its keys are made.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from qkvault.client import StoreClient
from qkvault.errors import ConfigError
from qkvault.keys import RequestIdentity
from qkvault.spaces import SpaceDescription
from qkvault.wire.messages import Status

if TYPE_CHECKING:
    from qkvault.keys import KeySpace
    from qkvault.tokens import TokenHasher, Tokens

_MAX_TOKENS: Final = 1 << 20  # hashing them takes a second of a core that others may need


class CachedPrefix(msgspec.Struct, frozen=True):
    """How much of a prompt is cached in one space: of one model, rank and kind of tensor."""

    model_name: str
    kind: str
    worker_id: int
    world_size: int
    dtype: str
    chunk_size: int
    num_tokens: int  # of the prompt
    cached_tokens: int  # from its beginning
    tokens: dict[str, int]  # the cached ones, by medium
    chunks: dict[str, int]  # likewise
    problem: str = ""  # why it could not be asked


def spaces_of(status: Status) -> list[SpaceDescription]:
    """The spaces that the store knows, the latest first: of engines and of files. What cannot be read is left out."""
    found = []
    for description in reversed(status.spaces):
        try:
            found.append(SpaceDescription.decode(description))
        except ValueError:
            continue  # of another version, or of a client that says what it likes
    return found


def status_report(status: Status) -> dict[str, object]:
    """The status as plain values. ``models`` stands for the descriptions of spaces, which are bytes."""
    report: dict[str, object] = msgspec.to_builtins(msgspec.structs.replace(status, instances=(), spaces=()))
    del report["type"], report["spaces"]
    report["instances"] = [
        {
            **{name: value for name, value in msgspec.structs.asdict(each.instance).items() if name != "spaces"},
            "seconds_since_heard": each.seconds_since_heard,
            "num_leases": each.num_leases,
        }
        for each in status.instances
    ]
    report["models"] = [
        {
            **msgspec.to_builtins(each.space),
            "block_size": each.layout.block_size,
            "token_bytes": each.layout.token_bytes,
        }
        for each in spaces_of(status)
    ]
    asked, found = status.counters.get("chunks_asked", 0), status.counters.get("chunks_found", 0)
    report["hit_rate"] = round(found / asked, 4) if asked else None
    return report


def cached_prefixes(
    client: StoreClient,
    tokens: Tokens,
    *,
    model_name: str | None = None,
    identity: RequestIdentity | None = None,
    search_range: Sequence[str] | None = None,
) -> list[CachedPrefix]:
    """How much of ``tokens`` the store has: for each space it knows, or for those of ``model_name``.

    Nothing is leased or promoted. Raises Unavailable, and ValueError for tokens that are none, or more than 2**20.
    """
    if len(tokens) > _MAX_TOKENS:
        msg = f"{len(tokens)} tokens, at most {_MAX_TOKENS}"
        raise ValueError(msg)
    spaces = {
        each.space.space_id: each.space
        for each in reversed(spaces_of(client.status()))
        if model_name in (None, each.space.model_name)
    }
    who = RequestIdentity() if identity is None else identity
    hashers: dict[tuple[int, str], TokenHasher | str] = {}  # ranks and models that hash alike share one
    for space in spaces.values():
        if (space.chunk_size, space.hash_algorithm) not in hashers:
            hashers[space.chunk_size, space.hash_algorithm] = _hasher_of(space, who, tokens)
    return [
        _cached_in(client, space, hashers[space.chunk_size, space.hash_algorithm], len(tokens), search_range)
        for space in spaces.values()
    ]


def read_tokenizer(path: str, text: str) -> list[int]:
    """The token ids of ``text``, by the ``tokenizer.json`` at ``path`` or in the folder there. Raises ConfigError."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        msg = "text needs the package tokenizers: pip install tokenizers, or give token ids"
        raise ConfigError(msg) from error
    file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path  # noqa: PTH112, PTH118  # Path's raise
    if not os.path.isfile(file):  # noqa: PTH113  # likewise
        msg = f"no tokenizer.json at {path}"
        raise ConfigError(msg)
    try:
        token_ids: list[int] = Tokenizer.from_file(file).encode(text).ids
    except Exception as error:  # thread top: the package raises bare Exception for a file that it cannot read
        msg = f"{file} is no tokenizer: {error}"
        raise ConfigError(msg) from error
    return token_ids


def _hasher_of(space: KeySpace, identity: RequestIdentity, tokens: Tokens) -> TokenHasher | str:
    """The chain of ``tokens``, or why this process cannot make such hashes."""
    from qkvault.tokens import TokenHasher

    try:
        hasher = TokenHasher(identity, space.chunk_size, space.hash_algorithm)
    except ConfigError as error:
        return str(error)
    hasher.extend(tokens)
    return hasher


def _cached_in(
    client: StoreClient,
    space: KeySpace,
    hasher: TokenHasher | str,
    num_tokens: int,
    search_range: Sequence[str] | None,
) -> CachedPrefix:
    by_tokens: dict[str, int] = {}
    by_chunks: dict[str, int] = {}
    if not isinstance(hasher, str):
        root, keys = space.chunk_key(hasher.root), space.chunk_keys(hasher.hashes)
        found = client.inspect(root, keys, hasher.checks, hasher.tokens_from, search_range=search_range)
        by_tokens = {medium.value: count for medium, count in found.tokens.items()}
        by_chunks = {medium.value: count for medium, count in found.chunks.items()}
    return CachedPrefix(
        space.model_name,
        space.kind.value,
        space.worker_id,
        space.world_size,
        space.dtype,
        space.chunk_size,
        num_tokens,
        sum(by_tokens.values()),
        by_tokens,
        by_chunks,
        hasher if isinstance(hasher, str) else "",
    )
