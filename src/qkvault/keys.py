"""The names of chunks: who asks (RequestIdentity), for which tensors (KeySpace), and the readable form of a whole key.

docs/key-format.md specifies every byte ("key format 1"). This module hashes names; it never sees a token.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, TypeVar
from urllib.parse import quote, unquote

import msgspec
from msgspec.structs import asdict, force_setattr, replace

from qkvault.layout import ELEMENT_BYTES
from qkvault.types import HASH_BYTES, SPACE_BYTES, CacheKind, ChunkKey, SpaceId

DEFAULT_CHUNK_SIZE: Final = 256  # tokens
DEFAULT_HASH: Final = "sha256"
TAG_PREFIXES: Final = ("qkvault.tag.", "lmcache.tag.")  # of keys in a request's configs
RESERVED_PREFIX: Final = "qkv."  # of tags that carry our own fields in the readable form of a key
KIND_EMBEDS: Final = "embeds"
KIND_MASK: Final = "mask"

_FRAME: Final = struct.Struct("<BI")  # tag, bytes of the value
_U32: Final = struct.Struct("<I")
_SPAN: Final = struct.Struct("<qQ")  # start relative to the chunk, length; in tokens
_U32_MAX: Final = 2**32 - 1


def frame(tag: int, value: bytes) -> bytes:
    """``value`` with its tag and length, so that no value of one field can be read as another field."""
    return _FRAME.pack(tag, len(value)) + value


def _text(tag: int, value: str) -> bytes:
    return frame(tag, value.encode())


def _number(tag: int, value: int) -> bytes:
    return frame(tag, _U32.pack(value))


def _require_u32(minimum: int, **values: int) -> None:
    for name, value in values.items():
        if not minimum <= value <= _U32_MAX:
            msg = f"{name} must be from {minimum} to {_U32_MAX}, not {value}"
            raise ValueError(msg)


def _require_space(space: KeySpace | CacheEngineKey) -> None:
    if space.dtype not in ELEMENT_BYTES:
        msg = f"unsupported dtype {space.dtype!r}: one of {', '.join(sorted(ELEMENT_BYTES))}"
        raise ValueError(msg)
    _require_u32(0, worker_id=space.worker_id, layer_group=space.layer_group)
    _require_u32(1, world_size=space.world_size, chunk_size=space.chunk_size)


def _require_hash(chunk_hash: bytes) -> None:
    if len(chunk_hash) != HASH_BYTES:
        msg = f"a chunk hash has {HASH_BYTES} bytes, not {len(chunk_hash)}"
        raise ValueError(msg)


def _sorted_tags(tags: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    distinct = sorted(set(tags))
    if len({name for name, _ in distinct}) != len(distinct):
        msg = f"a tag has two values: {distinct}"
        raise ValueError(msg)
    return tuple(distinct)


class MediaSpan(msgspec.Struct, frozen=True):
    """Tokens whose rows depend on more than their ids: an image, a clip, prompt embeddings, a mask.

    The digest identifies the whole content and enters every key as it is; text stands for its UTF-8 bytes. An empty
    digest says that nothing identifies the content: the request cannot be cached. Raises ValueError for an empty span.
    """

    digest: bytes
    start: int  # tokens from the beginning of the prompt
    length: int  # tokens
    kind: str = "image"

    def __post_init__(self) -> None:
        digest: object = self.digest
        if isinstance(digest, str):
            force_setattr(self, "digest", digest.encode())
        _require_u32(0, start=self.start)
        _require_u32(1, length=self.length)

    @property
    def end(self) -> int:
        """The token after the last one."""
        return self.start + self.length

    def encode(self, chunk_start: int) -> bytes:
        """What the span adds to the hash of the chunk that begins at token ``chunk_start``."""
        where = _SPAN.pack(self.start - chunk_start, self.length)
        return frame(1, _text(1, self.kind) + frame(2, self.digest) + frame(3, where))


class RequestIdentity(msgspec.Struct, frozen=True):
    """Everything of a request, besides its tokens, that changes the bytes to be cached or who may see them.

    Tags and media are kept sorted, so that equal identities compare equal. Raises ValueError if a tag has two values.
    """

    cache_salt: str = ""
    adapter: str = ""  # "" is the base model
    tags: tuple[tuple[str, str], ...] = ()
    media: tuple[MediaSpan, ...] = ()

    def __post_init__(self) -> None:
        if self.tags:
            force_setattr(self, "tags", _sorted_tags(self.tags))
        if self.media:
            force_setattr(self, "media", tuple(sorted(self.media, key=lambda s: (s.start, s.length, s.kind, s.digest))))

    @property
    def uncacheable_reason(self) -> str | None:
        """Why nothing of the request may be stored or looked up; None if it may.

        Each span needs a digest, and prompt embeddings a mask span over them that tells which rows are tokens.
        """
        masks = [span for span in self.media if span.kind == KIND_MASK]
        for span in self.media:
            if not span.digest:
                return f"{span.kind} at token {span.start} has no digest"
            is_masked = any(mask.start <= span.start and span.end <= mask.end for mask in masks)
            if span.kind == KIND_EMBEDS and not is_masked:
                return f"{span.kind} at token {span.start} have no mask"
        return None

    @property
    def cache_salt_digest(self) -> str:
        """32 hex digits that stand for the salt in names; empty without a salt."""
        if not self.cache_salt:
            return ""
        return hashlib.sha256(_text(0, "qkvault salt 1") + _text(1, self.cache_salt)).hexdigest()[:32]

    def with_request_configs(self, configs: Mapping[str, object] | None) -> RequestIdentity:
        """This identity with the tags among ``configs`` added. Raises ValueError if a tag gets two values."""
        found = [
            (key[len(prefix) :], str(value))
            for key, value in (configs or {}).items()
            for prefix in TAG_PREFIXES
            if key.startswith(prefix)
        ]
        return replace(self, tags=(*self.tags, *found)) if found else self

    def root(self, scheme: str, chunk_size: int) -> bytes:
        """The parent of a request's first chunk: 32 bytes. Media are not in it, but in the chunks they touch.

        Under the builtin scheme an identity without salt, adapter and tags starts at 0, the reference's NONE_HASH.
        """
        pairs = (frame(3, _text(1, name) + _text(2, value)) for name, value in self.tags)
        fields = (
            _text(0, "qkvault root 1"), _text(1, self.cache_salt), _text(2, self.adapter), *pairs,
            _text(4, scheme), _number(5, chunk_size),
        )  # fmt: skip
        digest = hashlib.sha256(b"".join(fields)).digest()
        if scheme != "builtin":
            return digest
        is_plain = not (self.cache_salt or self.adapter or self.tags)
        return bytes(HASH_BYTES) if is_plain else digest[:8].rjust(HASH_BYTES, b"\0")

    def extra_of(self, start: int, end: int) -> bytes:
        """What the media add to the hash of the chunk of tokens [start, end); empty if no span touches it."""
        spans = []
        for span in self.media:
            if span.start >= end:
                break  # they are sorted
            if span.end > start:
                spans.append(span.encode(start))
        return b"".join(spans)


class KeySpace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that is constant for the keys of one engine, one rank and one kind of tensor.

    Raises ValueError for an unsupported dtype and for numbers that are not u32.
    """

    model_name: str
    model_fingerprint: str  # of config and weights revision: two checkpoints may be served under one name
    world_size: int = 1
    worker_id: int = 0
    dtype: str
    kind: CacheKind = CacheKind.KV
    layer_group: int = 0
    chunk_size: int = DEFAULT_CHUNK_SIZE  # tokens
    tensors: str  # ChunkLayout.logical
    hash_algorithm: str = DEFAULT_HASH

    def __post_init__(self) -> None:
        _require_space(self)

    @property
    def space_id(self) -> SpaceId:
        """The first 16 bytes of each key of the space."""
        return _space_id(self)

    def chunk_key(self, chunk_hash: bytes) -> ChunkKey:
        """The key of one chunk. Raises ValueError unless the hash has 32 bytes."""
        _require_hash(chunk_hash)
        return ChunkKey(self.space_id + chunk_hash)

    def chunk_keys(self, chunk_hashes: Sequence[bytes]) -> bytes:
        """The keys of many chunks, whose hashes come from a TokenHasher: 48 bytes each, one after the other."""
        space_id = self.space_id
        return space_id + space_id.join(chunk_hashes) if chunk_hashes else b""

    def with_kind(self, kind: CacheKind) -> KeySpace:
        """The space of another kind of tensor of the same prompts."""
        return replace(self, kind=kind)

    def folded(self) -> KeySpace:
        """The space that all ranks share where only the first one saves, as with MLA: free of the world's size."""
        return replace(self, world_size=1, worker_id=0)


@lru_cache(maxsize=256)
def _space_id(space: KeySpace) -> SpaceId:
    fields = (
        _text(0, "qkvault space 1"), _text(1, space.model_name), _text(2, space.model_fingerprint),
        _number(3, space.world_size), _number(4, space.worker_id), _text(5, space.dtype), _text(6, space.kind.value),
        _number(7, space.layer_group), _number(8, space.chunk_size), _text(9, space.tensors),
        _text(10, space.hash_algorithm),
    )  # fmt: skip
    return SpaceId(hashlib.sha256(b"".join(fields)).digest()[:SPACE_BYTES])


# Reserved tag, field: in the order of the readable form. A field that has its default is left out.
_RESERVED: Final = {
    "qkv.group": "layer_group",
    "qkv.chunk": "chunk_size",
    "qkv.tensors": "tensors",
    "qkv.weights": "model_fingerprint",
    "qkv.hash": "hash_algorithm",
    "qkv.adapter": "adapter",
    "qkv.salt": "cache_salt_digest",
}
_HEAD: Final = ("model_name", "world_size", "worker_id", "chunk_hash", "dtype", "layer_id")


class CacheEngineKey(msgspec.Struct, frozen=True):
    """A chunk's key with its fields apart: to read, compare and print. ``chunk_key`` is what stores know.

    Raises ValueError for an unsupported dtype, a hash that has not 32 bytes, and numbers that are not u32.
    """

    model_name: str
    world_size: int
    worker_id: int
    chunk_hash: bytes
    dtype: str
    kind: CacheKind = CacheKind.KV
    layer_group: int = 0
    chunk_size: int = DEFAULT_CHUNK_SIZE  # tokens
    tensors: str = ""
    model_fingerprint: str = ""
    hash_algorithm: str = DEFAULT_HASH
    adapter: str = ""
    cache_salt_digest: str = ""  # never the salt
    tags: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        _require_space(self)
        _require_hash(self.chunk_hash)
        if self.tags:
            force_setattr(self, "tags", _sorted_tags(self.tags))

    @classmethod
    def of(cls, space: KeySpace, chunk_hash: bytes, identity: RequestIdentity) -> CacheEngineKey:
        """The key of the chunk with ``chunk_hash`` in ``space``, for the request that ``identity`` describes."""
        return CacheEngineKey(
            **asdict(space),
            chunk_hash=chunk_hash,
            adapter=identity.adapter,
            cache_salt_digest=identity.cache_salt_digest,
            tags=identity.tags,
        )

    @property
    def space(self) -> KeySpace:
        """The space that the key lies in."""
        return KeySpace(**{name: getattr(self, name) for name in KeySpace.__struct_fields__})

    @property
    def chunk_key(self) -> ChunkKey:
        """The 48 bytes that name the chunk; a layer's key names the chunk that the layer is part of."""
        return self.space.chunk_key(self.chunk_hash)

    def to_string(self) -> str:
        """``model@world_size@worker_id@hash_hex@dtype[@tag%value...]``, one-to-one: ``from_string`` reads it back."""
        reserved = (
            f"{tag}%{quote(str(getattr(self, field)))}"
            for tag, field in _RESERVED.items()
            if getattr(self, field) != _DEFAULTS[field]
        )
        return "@".join((*self._head(), *reserved, *(f"{_quote_name(tag)}%{quote(value)}" for tag, value in self.tags)))

    @classmethod
    def from_string(cls, text: str) -> CacheEngineKey:
        """Read what ``to_string`` wrote.

        Raises ValueError for fewer than 5 parts, a tag without ``%``, and anything ``to_string`` would write otherwise.
        """
        return _parse(cls, text, _HEAD[:5])

    def split_layers(self, num_layers: int) -> list[LayerCacheEngineKey]:
        """One key for each of the layers 0 to ``num_layers`` - 1."""
        fields = asdict(self)
        return [LayerCacheEngineKey(**{**fields, "layer_id": layer_id}) for layer_id in range(num_layers)]

    def get_first_layer(self) -> LayerCacheEngineKey:
        """The key of layer 0."""
        return self.split_layers(1)[0]

    def _head(self) -> tuple[str, ...]:
        model = self.kind.server_model_name(quote(self.model_name))
        return model, str(self.world_size), str(self.worker_id), self.chunk_hash.hex(), self.dtype


class LayerCacheEngineKey(CacheEngineKey, frozen=True, kw_only=True):
    """The key of one layer of a chunk. In its readable form the layer stands before the tags."""

    layer_id: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_u32(0, layer_id=self.layer_id)

    @classmethod
    def from_string(cls, text: str) -> LayerCacheEngineKey:
        return _parse(cls, text, _HEAD)

    def _head(self) -> tuple[str, ...]:
        return (*super()._head(), str(self.layer_id))


_DEFAULTS: Final = {field.name: field.default for field in msgspec.structs.fields(CacheEngineKey)}
_Key = TypeVar("_Key", bound=CacheEngineKey)


def _quote_name(name: str) -> str:
    # "=" instead of "%", which ends a tag's name; no tag of a request looks like one of ours
    quoted = quote(name).replace("%", "=")
    return f"=71{quoted[1:]}" if name.startswith(RESERVED_PREFIX) else quoted


def _parse(cls: type[_Key], text: str, head: tuple[str, ...]) -> _Key:
    parts = text.split("@")
    if len(parts) < len(head):
        msg = f"a key has at least {len(head)} parts between @, not {len(parts)}: {text!r}"
        raise ValueError(msg)
    model, marker, kind = parts[0].partition("##")
    fields: dict[str, object] = dict(zip(head, parts, strict=False))
    fields["model_name"] = unquote(model, errors="strict")
    fields["kind"] = kind if marker else CacheKind.KV.value
    fields["chunk_hash"] = bytes.fromhex(parts[3])
    tags = []
    for part in parts[len(head) :]:
        name, marker, value = part.partition("%")
        if not marker or (name.startswith(RESERVED_PREFIX) and name not in _RESERVED):
            msg = f"{part!r} is not a tag"
            raise ValueError(msg)
        if name in _RESERVED:
            fields[_RESERVED[name]] = unquote(value, errors="strict")
        else:
            tags.append((unquote(name.replace("=", "%"), errors="strict"), unquote(value, errors="strict")))
    fields["tags"] = tags
    try:
        key = msgspec.convert(fields, cls, strict=False)  # not strict: numbers come as text
    except msgspec.MsgspecError as error:
        msg = f"not a key: {text!r}: {error}"
        raise ValueError(msg) from error
    if key.to_string() != text:
        msg = f"a key is written {key.to_string()!r}, not {text!r}"
        raise ValueError(msg)
    return key
