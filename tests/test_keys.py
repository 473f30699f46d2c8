"""The names of chunks: identities, spaces, and keys as text; and key format 1 against golden vectors."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from qkvault.keys import KIND_EMBEDS, KIND_MASK
from qkvault.layout import ELEMENT_BYTES
from qkvault.spaces import SpaceDescription
from qkvault.testing.spaces import described
from qkvault.tokens import (
    CacheEngineKey,
    KeySpace,
    LayerCacheEngineKey,
    MediaSpan,
    RequestIdentity,
    TokenHasher,
    load_scheme,
)
from qkvault.types import CacheKind

ROOT = Path(__file__).resolve().parent.parent
VECTORS = json.loads((ROOT / "tests" / "data" / "key_vectors.json").read_text(encoding="utf-8"))
HASH = bytes(range(32))
LAYOUT = described().layout

# What people put into names, and what our own syntax is made of.
NASTY = ["", "a", "b", "m@1", "a/b", "../x", "a%b", "%40", "=40", "a##query", "##query", "#", "qkv.salt", "x" * 300]
NASTY += ["模型", "é", "e\u0301", "a b\n", "qkv.adapter%x", "@", "%", "0", "--", "-SLASH-", "a__b"]
names = st.one_of(st.sampled_from(NASTY), st.text(max_size=300), st.text("@%#=/.qkv:~ \n", max_size=8))
numbers = st.integers(0, 2**32 - 1)
tag_sets = st.dictionaries(names, names, max_size=3).map(lambda tags: tuple(sorted(tags.items())))
keys = st.builds(
    CacheEngineKey,
    model_name=names,
    world_size=st.integers(1, 9),
    worker_id=st.integers(0, 9),
    chunk_hash=st.binary(min_size=32, max_size=32),
    dtype=st.sampled_from(sorted(ELEMENT_BYTES)),
    kind=st.sampled_from(CacheKind),
    layer_group=st.integers(0, 3),
    chunk_size=st.sampled_from([16, 256, 512]),
    tensors=st.sampled_from(["", "2x2x64x2"]),
    model_fingerprint=names,
    hash_algorithm=st.sampled_from(["sha256", "blake3", "builtin"]),
    adapter=names,
    cache_salt_digest=st.sampled_from(["", "00ff" * 8]),
    tags=tag_sets,
)
short = st.text("ab", max_size=2)  # so that values that could be taken for one another are likely
identities = st.builds(
    RequestIdentity,
    cache_salt=short,
    adapter=short,
    tags=st.dictionaries(short, short, max_size=2).map(lambda tags: tuple(tags.items())),
)


def a_space(**changes) -> KeySpace:
    fields = {"model_name": "m", "model_fingerprint": "rev1", "dtype": "bfloat16", "tensors": "2x2x64x2"}
    return KeySpace(**{**fields, **changes})


def a_key(**changes) -> CacheEngineKey:
    fields = {"model_name": "m", "world_size": 1, "worker_id": 0, "chunk_hash": HASH, "dtype": "bfloat16"}
    return CacheEngineKey(**{**fields, **changes})


def chain(identity: RequestIdentity, num_tokens: int = 64, chunk_size: int = 16) -> list[bytes]:
    hasher = TokenHasher(identity, chunk_size)
    hasher.extend([0] * num_tokens)
    return hasher.hashes


# A second implementation, written from docs/key-format.md. It calls nothing of ours.


def spec_frame(tag: int, value: bytes) -> bytes:
    return bytes([tag]) + len(value).to_bytes(4, "little") + value


def spec_fields(domain: str, *values: str | int | bytes) -> bytes:
    out = spec_frame(0, domain.encode())
    for tag, value in enumerate(values, start=1):
        if isinstance(value, bytes):  # pairs that are framed already
            out += value
        else:
            out += spec_frame(tag, value.encode() if isinstance(value, str) else value.to_bytes(4, "little"))
    return out


def spec_root(identity: dict, scheme: str, chunk_size: int) -> bytes:
    pairs = [spec_frame(1, name.encode()) + spec_frame(2, value.encode()) for name, value in sorted(identity["tags"])]
    tags = b"".join(spec_frame(3, pair) for pair in pairs)
    salt, adapter = identity["cache_salt"], identity["adapter"]
    return hashlib.sha256(spec_fields("qkvault root 1", salt, adapter, tags, scheme, chunk_size)).digest()


def spec_extra(media: list, start: int, end: int) -> bytes:
    out = b""
    for span in sorted(media, key=lambda span: (span["start"], span["length"], span["kind"], span["digest"])):
        if span["start"] < end and start < span["start"] + span["length"]:
            where = (span["start"] - start).to_bytes(8, "little", signed=True) + span["length"].to_bytes(8, "little")
            digest = bytes.fromhex(span["digest"])
            fields = spec_frame(1, span["kind"].encode()) + spec_frame(2, digest) + spec_frame(3, where)
            out += spec_frame(1, fields)
    return out


def spec_chain(vector: dict) -> list[str]:
    """All hashes, in hex; that of the tail is the last."""
    scheme = {"sha256": hashlib.sha256, "blake3": blake3}[vector["scheme"]]
    parent, hashes = spec_root(vector["identity"], vector["scheme"], vector["chunk_size"]), []
    tokens = [(i * 7919) % 151936 for i in range(vector["num_tokens"])]
    for start in range(0, len(tokens), vector["chunk_size"]):
        chunk = tokens[start : start + vector["chunk_size"]]
        extra = spec_extra(vector["identity"]["media"], start, start + len(chunk))
        words = [len(chunk), len(extra), *chunk]
        parent = scheme(parent + b"".join(word.to_bytes(4, "little") for word in words) + extra).digest()
        hashes.append(parent.hex())
    return hashes


def spec_space_id(space: dict) -> str:
    return hashlib.sha256(spec_fields("qkvault space 1", *space.values())).hexdigest()[:32]


def spec_text(space: dict, identity: dict, chunk_hash: str, layer: int | None) -> str:
    def escape(text: str) -> str:
        kept = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-~/"
        return "".join(chr(byte) if byte in kept else f"%{byte:02X}" for byte in text.encode())

    model = escape(space["model_name"]) + ("##query" if space["kind"] == "query" else "")
    parts = [model, str(space["world_size"]), str(space["worker_id"]), chunk_hash, space["dtype"]]
    parts += [] if layer is None else [str(layer)]
    salt = identity["cache_salt"]
    ours = [
        ("group", space["layer_group"], 0),
        ("chunk", space["chunk_size"], 256),
        ("tensors", space["tensors"], ""),
        ("weights", space["model_fingerprint"], ""),
        ("hash", space["hash_algorithm"], "sha256"),
        ("adapter", identity["adapter"], ""),
        ("salt", hashlib.sha256(spec_fields("qkvault salt 1", salt)).hexdigest()[:32] if salt else "", ""),
    ]
    parts += [f"qkv.{tag}%{escape(str(value))}" for tag, value, default in ours if value != default]
    for name, value in sorted(identity["tags"]):
        escaped = escape(name).replace("%", "=")
        parts.append(("=71" + escaped[1:] if name.startswith("qkv.") else escaped) + "%" + escape(value))
    return "@".join(parts)


def identity_of(vector: dict) -> RequestIdentity:
    media = [MediaSpan(bytes.fromhex(span["digest"]), span["start"], span["length"], span["kind"])
             for span in vector["media"]]  # fmt: skip
    tags = tuple((name, value) for name, value in vector["tags"])
    return RequestIdentity(vector["cache_salt"], vector["adapter"], tags, tuple(media))


def space_of(vector: dict) -> KeySpace:
    return KeySpace(**{**vector, "kind": CacheKind(vector["kind"])})


@pytest.mark.parametrize("vector", VECTORS["chains"], ids=lambda vector: vector["name"])
def test_the_golden_chains_are_what_the_code_and_the_page_say(vector):
    """Roots and hashes, tails included, of the vectors come out of our code and of an implementation of the page."""
    hasher = TokenHasher(identity_of(vector["identity"]), vector["chunk_size"], vector["scheme"])
    hasher.extend([(i * 7919) % 151936 for i in range(vector["num_tokens"])])
    ours = [value.hex() for value in hasher.hashes]
    if num_left := vector["num_tokens"] % vector["chunk_size"]:
        ours.append(hasher.tail(num_left)[0].hex())
    assert (hasher.root.hex(), ours) == (vector["root"], vector["hashes"])
    root = spec_root(vector["identity"], vector["scheme"], vector["chunk_size"])
    assert (root.hex(), spec_chain(vector)) == (vector["root"], vector["hashes"])


@pytest.mark.parametrize("vector", VECTORS["keys"], ids=lambda vector: vector["name"])
def test_the_golden_keys_are_what_the_code_and_the_page_say(vector):
    """Space ids, 48-byte keys, descriptions and texts of the vectors come out of our code and of the page's.

    The vector's description is that of the space, which a header holds as the first of two fields.
    """
    space, identity, chunk_hash = vector["space"], vector["identity"], vector["chunk_hash"]
    key = CacheEngineKey.of(space_of(space), bytes.fromhex(chunk_hash), identity_of(identity))
    named = key if vector["layer"] is None else key.split_layers(vector["layer"] + 1)[-1]
    assert key.space.space_id.hex() == spec_space_id(space) == vector["space_id"]
    hasher = TokenHasher(identity_of(identity), space["chunk_size"], space["hash_algorithm"])
    hasher.extend([(i * 7919) % 151936 for i in range(space["chunk_size"])])
    assert [value.hex() for value in hasher.hashes] == [chunk_hash]
    assert key.chunk_key.hex() == vector["space_id"] + chunk_hash
    assert named.to_string() == spec_text(space, identity, chunk_hash, vector["layer"]) == vector["text"]
    assert msgspec.msgpack.encode(space).hex() == vector["description"]
    held = SpaceDescription(key.space, LAYOUT).encode().hex()
    assert held.startswith(b"\x82\xa5space".hex() + vector["description"] + b"\xa6layout".hex())


def test_the_page_shows_golden_vectors():
    """Every hex number among the vectors of docs/key-format.md is one of the golden file's, and there are some."""
    page = (ROOT / "docs" / "key-format.md").read_text(encoding="utf-8").partition("## Vectors")[2]
    shown = re.findall(r"[0-9a-f]{32,}", page)
    known = json.dumps(VECTORS)
    assert len(shown) >= 6
    assert [number for number in shown if number not in known] == []
    assert all(vector["text"] in page for vector in VECTORS["keys"][:2])


# Identity of a request


@given(identities, identities)
def test_roots_differ_whenever_identities_do(one, other):
    """KEY-05: whatever salt, adapter and tags hold, two identities have one root only if they are equal."""
    assert (one.root("sha256", 256) == other.root("sha256", 256)) == (one == other)


@given(st.text(min_size=1, max_size=20))
def test_a_value_does_not_move_between_the_fields_of_an_identity(value):
    """KEY-05: the same text as salt, adapter, tag name, tag value and media digest gives different chains."""
    chains = [
        chain(identity)[-1]
        for identity in (
            RequestIdentity(),
            RequestIdentity(cache_salt=value),
            RequestIdentity(adapter=value),
            RequestIdentity(tags=((value, ""),)),
            RequestIdentity(tags=(("", value),)),
            RequestIdentity(tags=((value, value),)),
            RequestIdentity(media=(MediaSpan(value.encode(), 0, 1),)),
            RequestIdentity(media=(MediaSpan(b"d", 0, 1, f"kind {value}"),)),  # "embeds" alone needs a mask
        )
    ]
    assert len(set(chains)) == len(chains)


@pytest.mark.parametrize("field", ["cache_salt", "adapter"])
def test_text_does_not_move_across_the_border_of_two_fields(field):
    """KEY-05: ("ab", "c") differs from ("a", "bc") in neighbouring fields and in neighbouring tags."""
    tags = [(("ab", "c"),), (("a", "bc"),), (("a", "b"), ("c", "")), (("a", ""), ("b", "c"))]
    roots = [RequestIdentity(**{field: "ab"}, tags=(("c", ""),)), RequestIdentity(**{field: "a"}, tags=(("bc", ""),))]
    roots += [RequestIdentity("ab", "c"), RequestIdentity("a", "bc"), *(RequestIdentity(tags=pairs) for pairs in tags)]
    assert len({identity.root("sha256", 256) for identity in roots}) == len(roots)


def test_the_scheme_and_the_chunk_size_are_part_of_the_root():
    """KEY-11: the same request under another scheme or another chunk size has another root."""
    roots = {RequestIdentity().root(scheme, size) for scheme in ("sha256", "blake3") for size in (16, 256)}
    assert len(roots) == 4


def test_no_chain_of_one_adapter_is_one_of_another():
    """KEY-03: adapter A, adapter B and the base model share no hash; adapter A shares all with itself."""
    base, a, b = (chain(RequestIdentity(adapter=name)) for name in ("", "A", "B"))
    assert len({*base, *a, *b}) == len(base) * 3
    assert chain(RequestIdentity(adapter="A")) == a


def test_no_chain_of_one_salt_is_one_of_another():
    """KEY-07: salt A, salt B and no salt share no hash."""
    none, a, b = (chain(RequestIdentity(cache_salt=salt)) for salt in ("", "A", "B"))
    assert len({*none, *a, *b}) == len(none) * 3


def test_a_hundred_thousand_images_have_as_many_keys():
    """KEY-01: media identities are not shortened, so 100,000 images under one text give 100,000 hashes."""
    new_hash, parent, tokens = load_scheme("sha256"), bytes(32), bytes(64)
    seen = set()
    for number in range(100_000):
        state = new_hash(parent)
        state.update(tokens + RequestIdentity(media=(MediaSpan(number.to_bytes(32, "big"), 3, 9),)).extra_of(0, 16))
        seen.add(state.digest())
    assert len(seen) == 100_000


def test_images_that_share_the_end_of_their_digest_differ():
    """KEY-01: two digests with the same last four hex digits give different hashes in every chunk from the image on."""
    one, other = (chain(RequestIdentity(media=(MediaSpan(f"{n}abcd", 20, 24),))) for n in (1, 2))
    assert one[0] == other[0]
    assert all(mine != yours for mine, yours in zip(one[1:], other[1:], strict=True))


def test_where_in_a_chunk_an_image_lies_is_part_of_the_hash():
    """KEY-01: the same image one token later, one token longer, or under another kind gives another hash."""
    spans = [(5, 4, "image"), (6, 4, "image"), (5, 5, "image"), (5, 4, "audio")]
    hashes = {chain(RequestIdentity(media=(MediaSpan(b"d", *span),)))[0] for span in spans}
    assert len(hashes) == 4


def test_an_image_changes_exactly_the_chunks_from_its_first_one_on():
    """KEY-01: a span enters each chunk it touches, at its offset there, and no other chunk's own bytes."""
    identity = RequestIdentity(media=(MediaSpan(b"d", 20, 24),))  # tokens [20, 44): chunks 1 and 2 of 16 tokens
    extras = [identity.extra_of(start, start + 16) for start in (0, 16, 32, 48)]
    assert [bool(extra) for extra in extras] == [False, True, True, False]
    assert extras[1] != extras[2]
    plain = chain(RequestIdentity())
    assert [one == other for one, other in zip(chain(identity), plain, strict=True)] == [True, False, False, False]


def test_a_span_touches_chunks_by_half_open_bounds():
    """KEY-01: a span that ends where a chunk begins, or begins where it ends, does not touch it."""
    span = RequestIdentity(media=(MediaSpan(b"d", 16, 16),))
    touched = [bool(span.extra_of(start, end)) for start, end in ((0, 16), (0, 17), (16, 32), (31, 40), (32, 48))]
    assert touched == [False, True, True, True, False]


def test_prompts_of_embeddings_differ_by_their_digest():
    """KEY-13: two prompts whose token ids are all zero, with different embeddings, share no hash."""
    mask = MediaSpan(b"all", 0, 64, KIND_MASK)
    one, other = (
        chain(RequestIdentity(media=(MediaSpan(digest, 0, 64, KIND_EMBEDS), mask))) for digest in (b"1", b"2")
    )
    assert not set(one) & set(other)


def test_prompts_of_embeddings_differ_by_their_mask():
    """KEY-14: the same ids and embeddings under another mask share no hash."""
    embeds = MediaSpan(b"e", 0, 64, KIND_EMBEDS)
    one, other = (
        chain(RequestIdentity(media=(embeds, MediaSpan(digest, 0, 64, KIND_MASK)))) for digest in (b"1", b"2")
    )
    assert not set(one) & set(other)


@pytest.mark.parametrize(
    ("media", "reason"),
    [
        ((MediaSpan(b"", 4, 4),), "image at token 4 has no digest"),
        ((MediaSpan(b"", 0, 4, KIND_EMBEDS),), "embeds at token 0 has no digest"),
        ((MediaSpan(b"e", 8, 4, KIND_EMBEDS),), "embeds at token 8 have no mask"),
        ((MediaSpan(b"e", 8, 4, KIND_EMBEDS), MediaSpan(b"m", 8, 3, KIND_MASK)), "embeds at token 8 have no mask"),
        ((MediaSpan(b"e", 8, 4, KIND_EMBEDS), MediaSpan(b"m", 9, 9, KIND_MASK)), "embeds at token 8 have no mask"),
        ((MediaSpan(b"e", 8, 4, KIND_EMBEDS), MediaSpan(b"", 8, 4, KIND_MASK)), "mask at token 8 has no digest"),
        ((MediaSpan(b"e", 8, 4, KIND_EMBEDS), MediaSpan(b"m", 8, 4, KIND_MASK)), None),
        ((MediaSpan(b"i", 8, 4), MediaSpan(b"j", 80, 4)), None),
        ((), None),
    ],
)
def test_a_request_that_is_not_wholly_identified_says_why(media, reason):
    """KEY-13, KEY-14: media without a digest and embeddings without a mask over them make a request uncacheable."""
    assert RequestIdentity(media=media).uncacheable_reason == reason


def test_an_uncacheable_request_gets_no_hashes():
    """KEY-13: a chain refuses to start for embeddings without a digest, so nothing can be stored under it."""
    with pytest.raises(ValueError, match="embeds at token 0 has no digest"):
        TokenHasher(RequestIdentity(media=(MediaSpan(b"", 0, 4, KIND_EMBEDS),)), 16)


@given(st.permutations([("b", "1"), ("a", "2"), ("c", "")]), st.permutations(range(3)))
def test_the_order_of_tags_and_media_does_not_matter(tags, order):
    """B35: identities that list the same tags and media in another order are equal and have equal chains."""
    media = [MediaSpan(b"x", 0, 2), MediaSpan(b"y", 5, 2), MediaSpan(b"x", 5, 2)]
    one = RequestIdentity(tags=(("a", "2"), ("b", "1"), ("c", "")), media=tuple(media))
    other = RequestIdentity(tags=tuple(tags), media=tuple(media[i] for i in order))
    assert one == other
    assert chain(one) == chain(other)


def test_tags_come_from_the_configs_of_a_request():
    """B35: configs named qkvault.tag.* and lmcache.tag.* become tags, others do not; tags are part of the chain."""
    configs = {"lmcache.tag.lora": 7, "qkvault.tag.tenant": "t", "lmcache.salt": "s", "tag.x": "y"}
    identity = RequestIdentity(tags=(("own", "1"),)).with_request_configs(configs)
    assert identity.tags == (("lora", "7"), ("own", "1"), ("tenant", "t"))
    assert RequestIdentity().with_request_configs({"temperature": 1}) == RequestIdentity()
    assert RequestIdentity().with_request_configs(None) == RequestIdentity()
    assert not set(chain(identity)) & set(chain(RequestIdentity()))


def test_a_tag_with_two_values_is_refused():
    """B35: a tag that two configs set differently raises ValueError; set alike, it counts once."""
    with pytest.raises(ValueError, match="two values"):
        RequestIdentity().with_request_configs({"lmcache.tag.a": "1", "qkvault.tag.a": "2"})
    assert RequestIdentity(tags=(("a", "1"), ("a", "1"))).tags == (("a", "1"),)


@pytest.mark.parametrize(("start", "length"), [(-1, 3), (0, 0), (0, 2**32), (2**32, 1)])
def test_an_impossible_span_is_refused(start, length):
    """KEY-01: a span that is empty, or out of the bounds of a prompt, raises ValueError."""
    with pytest.raises(ValueError, match="must be from"):
        MediaSpan(b"d", start, length)


def test_text_that_has_no_bytes_is_refused():
    """KEY-15: a lone surrogate has no UTF-8 form and raises ValueError, in identities, spaces and texts."""
    with pytest.raises(ValueError, match="surrogates"):
        RequestIdentity(cache_salt="\ud800").root("sha256", 256)
    with pytest.raises(ValueError, match="surrogates"):
        _ = a_space(model_name="\ud800").space_id
    with pytest.raises(ValueError, match="surrogates"):
        a_key(adapter="\ud800").to_string()


def test_an_identity_survives_a_wire():
    """KEY-07: an identity goes through msgpack unchanged, salt and media included; text digests are bytes by then."""
    identity = RequestIdentity("salt", "lora", (("t", "1"),), (MediaSpan("ab", 1, 2), MediaSpan(b"\xff", 4, 1)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(identity), type=RequestIdentity) == identity
    assert identity.media[0].digest == b"ab"


# Spaces

CHANGES = {
    "model_name": "n",
    "model_fingerprint": "rev2",
    "world_size": 2,
    "worker_id": 1,
    "dtype": "float8_e4m3fn",
    "kind": CacheKind.QUERY,
    "layer_group": 1,
    "chunk_size": 512,
    "tensors": "2x2x64x1",
    "hash_algorithm": "blake3",
}


@pytest.mark.parametrize("field", KeySpace.__struct_fields__)
def test_every_field_of_a_space_separates_keys(field):
    """B33, KEY-09, KEY-10, KEY-11: spaces that differ in one field, whichever, have different ids and keys."""
    one, other = a_space(), a_space(**{field: CHANGES[field]})
    assert one.space_id != other.space_id
    assert one.chunk_key(HASH) != other.chunk_key(HASH)


@given(short, short, short, short)
def test_space_ids_differ_whenever_spaces_do(name, fingerprint, other_name, other_fingerprint):
    """KEY-05, KEY-15: names of any kind, split between the fields in any way, never meet in one space."""
    one = a_space(model_name=name, model_fingerprint=fingerprint, tensors=name)
    other = a_space(model_name=other_name, model_fingerprint=other_fingerprint, tensors=name)
    assert (one.space_id == other.space_id) == (one == other)


def test_a_key_is_the_space_then_the_hash():
    """B32: a chunk key is 16 bytes of space and 32 of hash, alone or in bulk; other lengths raise ValueError."""
    space = a_space()
    assert space.chunk_key(HASH) == space.space_id + HASH
    assert len(space.chunk_key(HASH)) == 48
    assert space.chunk_keys([HASH, bytes(32)]) == space.chunk_key(HASH) + space.chunk_key(bytes(32))
    assert space.chunk_keys([]) == b""
    with pytest.raises(ValueError, match="32 bytes, not 8"):
        space.chunk_key(bytes(8))


def test_folded_spaces_do_not_depend_on_the_number_of_ranks():
    """B40: where only the first rank saves, spaces of any world size and rank fold to one; unfolded they differ."""
    spaces = [a_space(world_size=size, worker_id=size - 1) for size in (1, 2, 8)]
    assert len({space.space_id for space in spaces}) == 3
    assert {space.folded() for space in spaces} == {a_space(world_size=1, worker_id=0)}


def test_kv_and_query_of_a_prompt_share_hashes_and_not_keys():
    """B106: the QUERY space differs from the KV space in the kind alone, and keys in their first 16 bytes alone."""
    kv = a_space()
    query = kv.with_kind(CacheKind.QUERY)
    one, other = kv.chunk_key(HASH), query.chunk_key(HASH)
    assert (one[16:] == other[16:], one[:16] == other[:16]) == (True, False)
    assert query.with_kind(CacheKind.KV) == kv


@given(names, numbers, st.sampled_from(CacheKind))
def test_a_space_survives_its_description(name, group, kind):
    """KEY-11: what a header says of its space reads back as the same space."""
    description = SpaceDescription(a_space(model_name=name, layer_group=group, kind=kind), LAYOUT)
    assert SpaceDescription.decode(description.encode()) == description


@pytest.mark.parametrize(
    "space",
    [
        1,
        {"model_name": "m"},
        *(
            {**msgspec.structs.asdict(a_space()), name: value}
            for name, value in (("kind", "hidden"), ("dtype", "int3"), ("more", 1))
        ),
    ],
)
def test_a_wrong_description_is_refused(space):
    """KEY-11: a description that is broken, lacks a field or has an unknown one raises ValueError."""
    whole = msgspec.to_builtins(SpaceDescription(a_space(), LAYOUT))
    for description in (
        b"",
        b"\xc1",
        msgspec.msgpack.encode({**whole, "space": space}),
        msgspec.msgpack.encode(whole) + b"\0",
    ):
        with pytest.raises(ValueError, match="not the description of a space"):
            SpaceDescription.decode(description)


@pytest.mark.parametrize(
    "changes",
    [{"world_size": 0}, {"worker_id": -1}, {"layer_group": -1}, {"chunk_size": 0}, {"chunk_size": 2**32}],
)
def test_impossible_numbers_are_refused(changes):
    """B33: counts of zero and numbers beyond u32 raise ValueError, in spaces and in keys."""
    with pytest.raises(ValueError, match="must be from"):
        a_space(**changes)
    with pytest.raises(ValueError, match="must be from"):
        a_key(**changes)


@pytest.mark.parametrize("dtype", ["", "int3", "torch.bfloat16", "bf16"])
def test_an_unsupported_dtype_is_refused(dtype):
    """B32: a dtype that we do not know raises ValueError, in spaces, in keys and in their texts."""
    for make in (a_space, a_key):
        with pytest.raises(ValueError, match="unsupported dtype"):
            make(dtype=dtype)
    with pytest.raises(ValueError):
        CacheEngineKey.from_string(f"m@1@0@{HASH.hex()}@{dtype}")


# Keys as text


@given(keys)
def test_a_key_survives_its_text(key):
    """B34, KEY-15: from_string reads back what to_string wrote, for every name."""
    assert CacheEngineKey.from_string(key.to_string()) == key


@given(keys, keys, st.sampled_from(CacheEngineKey.__struct_fields__))
def test_texts_differ_whenever_keys_do(one, donor, field):
    """B34, KEY-15: two keys that differ in at most one field have one text and one hash only if they are equal."""
    other = msgspec.structs.replace(one, **{field: getattr(donor, field)})
    is_equal = getattr(one, field) == getattr(donor, field)
    assert (one == other, one.to_string() == other.to_string(), hash(one) == hash(other)) == (is_equal,) * 3


@pytest.mark.parametrize("field", ["model_name", "model_fingerprint", "adapter", "tags"])
def test_nasty_names_are_all_distinct(field):
    """KEY-15: slashes, @, %, marker strings, unicode and 300 characters give distinct, plain, one-line texts."""
    values = [((name, "v"),) for name in NASTY] if field == "tags" else NASTY
    texts = [a_key(**{field: value}).to_string() for value in values]
    assert len(set(texts)) == len(texts)
    assert all(re.fullmatch(r"[\w.~/%@#=-]+", text, flags=re.ASCII) for text in texts)


def test_the_text_of_a_plain_key_is_that_of_the_reference():
    """B34: model@world_size@worker_id@hash@dtype, then tag%value for each tag."""
    key = a_key(model_name="org/model-7B", world_size=4, worker_id=2, tags=(("lora", "7"), ("tenant", "x y")))
    assert key.to_string() == f"org/model-7B@4@2@{HASH.hex()}@bfloat16@lora%7@tenant%x%20y"


def test_our_own_fields_are_reserved_tags():
    """B34: fields beyond the reference's stand under qkv.*, and a tag of a request never looks like one."""
    ours = a_key(adapter="x", cache_salt_digest="ab")
    theirs = a_key(tags=(("qkv.adapter", "x"), ("qkv.salt", "ab")))
    assert ours.to_string().endswith("@bfloat16@qkv.adapter%x@qkv.salt%ab")
    assert theirs.to_string().endswith("@bfloat16@=71kv.adapter%x@=71kv.salt%ab")
    assert CacheEngineKey.from_string(theirs.to_string()) == theirs


def test_a_query_key_shows_its_kind():
    """B106: the model of a QUERY key is written model##query; a model with that very name is another key."""
    query, fake = a_key(kind=CacheKind.QUERY), a_key(model_name="m##query")
    assert query.to_string().startswith("m##query@")
    assert fake.to_string().startswith("m%23%23query@")
    assert CacheEngineKey.from_string(query.to_string()).kind is CacheKind.QUERY
    assert query.chunk_key != fake.chunk_key


PLAIN = f"m@1@0@{HASH.hex()}@bfloat16"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "m",
        "m@1@0@00",
        f"m@1@0@{HASH.hex()}",
        f"{PLAIN}@",
        f"{PLAIN}@tag",
        f"{PLAIN}@3",
        f"{PLAIN}@qkv.bogus%1",
        f"{PLAIN}@qkv.salt%a@qkv.salt%b",
        f"{PLAIN}@b%1@a%1",
        f"{PLAIN}@a%1@a%1",
        f"{PLAIN}@a%1@a%2",
        f"{PLAIN}@a%%zz",
        f"{PLAIN}@a%%ff",
        f"{PLAIN}@a%%2f",
        f"{PLAIN}@qkv.group%0",
        f"{PLAIN}@qkv.chunk%0",
        PLAIN.replace("@1@", "@01@"),
        PLAIN.replace("@1@", "@+1@"),
        PLAIN.replace("@1@", "@\u0661@"),
        PLAIN.replace("@1@", "@1.0@"),
        PLAIN.replace("@0@", "@-1@"),
        PLAIN.replace("0a0b", "0A0B"),
        PLAIN.replace("0a0b", "0a 0b"),
        PLAIN[:6] + PLAIN[8:],
        PLAIN.replace("m@", "m##kv@"),
        PLAIN.replace("m@", "m##hidden@"),
        PLAIN.replace("m@", "m##query##query@"),
        PLAIN.replace("m@", "m n@"),
        PLAIN + "\n",
        PLAIN + "@" + "9" * 5000,
        PLAIN.replace("@1@", "@" + "9" * 5000 + "@"),
    ],
)
def test_text_that_is_no_key_is_refused(text):
    """B34: fewer than 5 parts, a tag without %, and whatever to_string would write otherwise raise ValueError."""
    assert text != PLAIN
    with pytest.raises(ValueError):
        CacheEngineKey.from_string(text)


@given(st.one_of(st.text(), st.text("m@1#%q0.=kvabcdef", max_size=40).map(lambda tail: PLAIN + tail)))
def test_any_text_is_a_key_or_a_value_error(text):
    """B34: text that is read at all is written back as it was; everything else raises ValueError and nothing else."""
    for kind in (CacheEngineKey, LayerCacheEngineKey):
        try:
            key = kind.from_string(text)
        except ValueError:
            continue
        assert key.to_string() == text


def test_plain_text_is_a_key():
    """B34: the text that the refused ones are variations of is itself a key."""
    assert CacheEngineKey.from_string(PLAIN) == a_key()


def test_a_key_cannot_change():
    """B32: keys are immutable values that work in sets."""
    key = a_key()
    with pytest.raises(AttributeError):
        key.world_size = 2
    assert not hasattr(key, "__dict__")
    assert {key, a_key(), a_key(worker_id=1)} == {key, a_key(worker_id=1)}


def test_keys_of_models_worlds_ranks_and_dtypes_are_apart():
    """B33: keys that differ in model, world size, rank or dtype are unequal and so are their 48 bytes."""
    changes = [{}, {"model_name": "n"}, {"world_size": 2}, {"worker_id": 1}, {"dtype": "float8_e4m3fn"}]
    different = [a_key(**change) for change in changes]
    assert len(set(different)) == len({key.chunk_key for key in different}) == 5


def test_a_key_of_a_space_and_an_identity_carries_both():
    """B35: adapter, tags and the salt's digest of the identity, and every field of the space, are in the key."""
    space = a_space(world_size=2, layer_group=3, kind=CacheKind.QUERY)
    key = CacheEngineKey.of(space, HASH, RequestIdentity("s", "lora", (("t", "1"),)))
    assert (key.space, key.chunk_key) == (space, space.chunk_key(HASH))
    assert (key.adapter, key.tags, len(key.cache_salt_digest)) == ("lora", (("t", "1"),), 32)


@pytest.mark.parametrize("salt", ["a/b", "../x", "tenant-7", "密"])
def test_no_name_shows_a_salt(salt):
    """KEY-17: neither the text of a key nor its bytes in hex hold the salt or anything that leaves a directory."""
    identity = RequestIdentity(cache_salt=salt)
    key = CacheEngineKey.of(a_space(), chain(identity)[0], identity)
    assert salt not in key.to_string()
    assert quote(salt) not in key.to_string()
    assert ".." not in key.to_string()
    assert re.fullmatch(r"[0-9a-f]{96}", key.chunk_key.hex())
    assert re.fullmatch(r"[0-9a-f]{32}", key.cache_salt_digest)


def test_salts_have_distinct_digests_in_names():
    """KEY-07: names of different salts differ, and no salt is told from the empty digest."""
    digests = [RequestIdentity(cache_salt=salt).cache_salt_digest for salt in ("", "a", "b", "a/b")]
    assert digests[0] == ""
    assert len(set(digests)) == 4


# Layers


def test_a_key_splits_into_layers():
    """B36: split_layers gives a key for each layer, different in the layer only; get_first_layer is the first."""
    key = a_key(tags=(("lora", "7"),), adapter="x")
    layers = key.split_layers(3)
    assert [layer.layer_id for layer in layers] == [0, 1, 2]
    assert len({*layers, key}) == 4
    assert {layer.chunk_key for layer in layers} == {key.chunk_key}
    assert key.get_first_layer() == layers[0]
    assert layers[2].split_layers(2) == layers[:2]
    assert key.split_layers(0) == []


def test_the_layer_stands_before_the_tags():
    """B36: the text of a layer's key has @layer_id between the dtype and the tags."""
    assert a_key(tags=(("lora", "7"),)).split_layers(13)[12].to_string() == f"{PLAIN}@12@lora%7"


@given(keys, st.integers(0, 200))
def test_a_layer_key_survives_its_text(key, layer_id):
    """B36: a layer's text reads back as that layer's key, and never as a chunk's key."""
    layer = LayerCacheEngineKey(**{**msgspec.structs.asdict(key), "layer_id": layer_id})
    text = layer.to_string()
    assert LayerCacheEngineKey.from_string(text) == layer
    with pytest.raises(ValueError, match="is not a tag"):
        CacheEngineKey.from_string(text)


@pytest.mark.parametrize("text", [PLAIN, f"{PLAIN}@a%1", f"{PLAIN}@-1", f"{PLAIN}@x@a%1", f"{PLAIN}@01"])
def test_text_without_a_layer_is_no_layer_key(text):
    """B36: a text whose sixth part is no layer number raises ValueError."""
    with pytest.raises(ValueError):
        LayerCacheEngineKey.from_string(text)
