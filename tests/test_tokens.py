"""Token ids to hashes: schemes, the incremental chain of a request, and the token databases."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkvault.errors import ConfigError
from qkvault.image import check_of
from qkvault.tokens import (
    HASH_SCHEMES,
    NONE_HASH,
    CacheEngineKey,
    ChunkedTokenDatabase,
    KeySpace,
    MediaSpan,
    RequestIdentity,
    TokenDatabase,
    TokenHasher,
    load_scheme,
    token_bytes,
)
from qkvault.types import SKETCH_BYTES, CacheKind

PLAIN = RequestIdentity()
IDENTITY = RequestIdentity("salt", "lora", (("t", "1"),), (MediaSpan(b"image", 6, 9),))
MISALIGNED = "The number of Falses in the mask is not a multiple of the chunk size."
SRC = Path(__file__).resolve().parent.parent / "src"

token_ids = st.integers(0, 2**32 - 1)
prompts = st.lists(token_ids, max_size=40)


def a_space(**changes) -> KeySpace:
    fields = {"model_name": "m", "model_fingerprint": "rev1", "dtype": "bfloat16", "tensors": "2x2x64x2"}
    return KeySpace(**{**fields, "chunk_size": 4, **changes})


def a_hasher(tokens=(), identity=PLAIN, scheme="sha256", chunk_size=4) -> TokenHasher:
    hasher = TokenHasher(identity, chunk_size, scheme, shared=False)
    hasher.extend(tokens)
    return hasher


def state_of(hasher: TokenHasher) -> tuple:
    """All that a chain tells of itself, its longest tail included."""
    hashes, num_left = hasher.hashes, hasher.num_tokens % hasher.chunk_size
    tokens = [hasher.tokens_from(index) for index in range(len(hashes))]
    parents = [hasher.parent_of(index) for index in range(len(hashes) + 1)]
    return hasher.num_tokens, hashes, hasher.checks, tokens, parents, hasher.tail(num_left) if num_left else None


def run(code: str, **environment: str) -> str:
    """What a fresh interpreter with only this environment prints."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    command = [sys.executable, "-c", code]
    environment = {**kept, "PYTHONPATH": str(SRC), **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


class FakeDeviceTensor:
    """A tensor on a device, as far as numpy is concerned."""

    def __repr__(self):
        return "on a device"

    def __init__(self, values: list) -> None:
        self._values = values

    def __array__(self, *args: object, **kwargs: object) -> np.ndarray:
        msg = "can't convert cuda:0 device type tensor to numpy"
        raise TypeError(msg)

    def tolist(self) -> list:
        return self._values

    def __len__(self) -> int:
        return len(self._values)


# Schemes


@pytest.mark.parametrize("scheme", ["sha256", "blake3"])
def test_keys_are_the_same_in_every_process(scheme):
    """DET-01, B42: three processes with different PYTHONHASHSEED, one of them random, print identical keys."""
    code = f"""
from qkvault.tokens import ChunkedTokenDatabase, KeySpace, MediaSpan, RequestIdentity
space = KeySpace(model_name="m", model_fingerprint="r", dtype="bfloat16", tensors="t", hash_algorithm={scheme!r})
identity = RequestIdentity("s", "a", (("b", "2"), ("a", "1")), (MediaSpan(b"i", 3, 5), MediaSpan(b"e", 3, 5)))
for _, _, key in ChunkedTokenDatabase(space, identity=identity).process_tokens(list(range(700))):
    print(key.to_string(), key.chunk_key.hex())
"""
    printed = {run(code, PYTHONHASHSEED=seed) for seed in ("0", "1234", "random")}
    assert len(printed) == 1
    assert len(printed.pop().splitlines()) == 3


def test_the_builtin_chain_is_the_same_under_one_seed():
    """B42: two processes with the same PYTHONHASHSEED agree under builtin, media included; another seed does not."""
    code = """
from qkvault.tokens import MediaSpan, RequestIdentity, TokenHasher
hasher = TokenHasher(RequestIdentity(media=(MediaSpan(b"i", 3, 5),)), 4, "builtin")
hasher.extend(range(16))
print([value.hex() for value in hasher.hashes])
"""
    assert run(code, PYTHONHASHSEED="1") == run(code, PYTHONHASHSEED="1") != run(code, PYTHONHASHSEED="2")


@pytest.mark.parametrize("seed", [None, "", "random"])
def test_builtin_is_refused_where_keys_are_shared(seed, monkeypatch):
    """B41, B42, B43: builtin raises ConfigError where keys are shared, unless PYTHONHASHSEED holds a number."""
    if seed is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    for start in (
        lambda shared: load_scheme("builtin", shared=shared),
        lambda shared: TokenHasher(PLAIN, 4, "builtin", shared=shared),
        lambda shared: ChunkedTokenDatabase(a_space(hash_algorithm="builtin"), shared=shared),
    ):
        with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
            start(shared=True)
        start(shared=False)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    load_scheme("builtin", shared=True)


def test_sharing_is_the_default(monkeypatch):
    """B43: who does not say that keys stay in the process gets the refusal, at start."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
        ChunkedTokenDatabase(a_space(hash_algorithm="builtin"))


def test_a_seed_that_the_interpreter_ignored_does_not_count():
    """B42: under python -E the variable is set and has no effect, so builtin is refused."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); from qkvault.tokens import load_scheme; load_scheme('builtin')"
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    for flags, has_failed in (((), False), (("-E",), True)):
        command = [sys.executable, *flags, "-c", code, str(SRC)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ("ConfigError" in done.stderr) == has_failed, done.stderr


@pytest.mark.parametrize("name", ["", "SHA256", "md5", "sha256_cbor", "vllm"])
def test_an_unknown_scheme_is_refused(name):
    """B41: a scheme that is not known raises ConfigError that lists the known ones; none takes its place."""
    with pytest.raises(ConfigError, match="sha256, blake3, builtin"):
        ChunkedTokenDatabase(a_space(hash_algorithm=name))


def test_a_missing_blake3_is_an_error(monkeypatch):
    """B41: without the package, choosing blake3 raises ConfigError that says what to install."""
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(ConfigError, match=r"pip install 'qkvault\[blake3\]'"):
        load_scheme("blake3")
    load_scheme("sha256")


def test_only_what_is_chosen_is_imported():
    """B41: neither blake3 nor torch is loaded by hashing a list under sha256."""
    code = """
import sys
from qkvault.tokens import RequestIdentity, TokenHasher
TokenHasher(RequestIdentity(), 4).extend([1, 2, 3, 4])
print({"blake3", "torch"} & set(sys.modules))
"""
    assert run(code) == "set()\n"


def test_the_builtin_chain_is_the_reference_chain():
    """B37, B38: under builtin, h = hash((h before, tokens, extra)) from NONE_HASH 0, where no extra is hash(None)."""
    parent, expected = NONE_HASH, []
    for start in (0, 4):
        parent = hash((parent, tuple(range(start, start + 4)), 0xFCA86420))
        expected.append(parent % 2**64)
    assert NONE_HASH == 0
    assert [int.from_bytes(value, "big") for value in a_hasher(range(8), scheme="builtin").hashes] == expected
    if sys.version_info >= (3, 12):
        assert hash(None) == 0xFCA86420


@given(prompts.filter(lambda tokens: len(tokens) >= 4))
def test_every_hash_has_32_bytes_and_builtin_only_64_bits(tokens):
    """B39: hashes of all schemes have 32 bytes; builtin fills the last 8, the others are not cut to 64 bits."""
    for scheme in HASH_SCHEMES:
        for value in a_hasher(tokens, scheme=scheme).hashes:
            assert len(value) == 32
            assert (value[:24] == bytes(24)) == (scheme == "builtin")


@pytest.mark.parametrize("scheme", HASH_SCHEMES)
def test_identities_are_apart_under_every_scheme(scheme):
    """KEY-03, KEY-07: salt, adapter, tag and image each give a chain that shares nothing with the plain one."""
    identities = [
        PLAIN,
        RequestIdentity(cache_salt="x"),
        RequestIdentity(adapter="x"),
        RequestIdentity(tags=(("x", ""),)),
        RequestIdentity(media=(MediaSpan(b"x", 0, 1),)),
    ]
    hashes = {value for identity in identities for value in a_hasher(range(12), identity, scheme).hashes}
    assert len(hashes) == 3 * len(identities)


def test_schemes_are_apart():
    """B41: the same tokens under two schemes share no hash."""
    assert not set(a_hasher(range(12)).hashes) & set(a_hasher(range(12), scheme="blake3").hashes)


# The chain


@pytest.mark.parametrize("scheme", HASH_SCHEMES)
@given(tokens=st.lists(token_ids, min_size=12, max_size=20), data=st.data())
def test_a_changed_token_changes_every_later_hash(scheme, tokens, data):
    """B37: hashes before the chunk of a changed token stay, and that chunk's and all later ones change."""
    at = data.draw(st.integers(0, len(tokens) // 4 * 4 - 1))
    changed = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    pairs = zip(a_hasher(tokens, scheme=scheme).hashes, a_hasher(changed, scheme=scheme).hashes, strict=True)
    assert [one == other for one, other in pairs] == [index < at // 4 for index in range(len(tokens) // 4)]


@pytest.mark.parametrize("identity", [PLAIN, IDENTITY], ids=["plain", "media"])
@pytest.mark.parametrize("scheme", HASH_SCHEMES)
@given(pieces=st.lists(st.lists(token_ids, max_size=9), max_size=6))
def test_an_incremental_chain_is_the_chain_from_scratch(scheme, identity, pieces):
    """DET-01: however a prompt arrives, by pieces or as a growing whole, everything the chain tells is the same."""
    by_pieces, growing, seen = a_hasher((), identity, scheme), a_hasher((), identity, scheme), []
    for piece in pieces:
        seen += piece
        by_pieces.extend(piece)
        growing.update_to(seen)
        assert state_of(by_pieces) == state_of(growing) == state_of(a_hasher(seen, identity, scheme))


@given(prompts, prompts, st.data())
def test_a_rolled_back_chain_is_the_chain_of_what_is_left(tokens, more, data):
    """DET-01: truncate, then other tokens: everything the chain tells is as if only those had ever been there."""
    num_kept = data.draw(st.integers(0, len(tokens)))
    hasher = a_hasher(tokens, IDENTITY)
    assert len(hasher.checks) == len(tokens) // 4 * SKETCH_BYTES  # asked for, so that they must be forgotten
    hasher.truncate(num_kept)
    assert state_of(hasher) == state_of(a_hasher(tokens[:num_kept], IDENTITY))
    hasher.update_to([*tokens[:num_kept], *more])
    assert state_of(hasher) == state_of(a_hasher([*tokens[:num_kept], *more], IDENTITY))


def test_each_token_is_hashed_once():
    """B37: a prompt that grows token by token hashes each whole chunk once, not once a step."""
    hasher, hashed = a_hasher(), []
    new_hash = hasher._new_hash
    hasher._new_hash = lambda head: hashed.append(head) or new_hash(head)
    for token in range(41):
        hasher.extend([token])
    assert len(hashed) == len(hasher.hashes) == 10


@pytest.mark.parametrize("scheme", HASH_SCHEMES)
def test_a_tail_leaves_the_chain_alone(scheme):
    """B14: tails of every length have hashes of their own, their tokens, and change nothing."""
    hasher = a_hasher(range(7), scheme=scheme)
    before = state_of(hasher)
    tails = [hasher.tail(num_tokens) for num_tokens in (1, 2, 3)]
    assert [tokens for _, tokens in tails] == [token_bytes(range(4, 4 + n)) for n in (1, 2, 3)]
    assert len({value for value, _ in tails} | set(a_hasher(range(8), scheme=scheme).hashes)) == 5
    assert state_of(hasher) == before
    for num_tokens in (-1, 0, 4):
        with pytest.raises(ValueError, match="tokens at chunk 1"):
            hasher.tail(num_tokens)


@pytest.mark.parametrize("identity", [PLAIN, IDENTITY], ids=["plain", "media"])
def test_any_beginning_of_any_chunk_has_the_hash_it_would_have_as_a_tail(identity):
    """B14: chunk gives hash and tokens of the first tokens of a chunk, as a shorter prompt's tail or chunk has them."""
    hasher = a_hasher(range(11), identity)
    before = state_of(hasher)
    for index, num_tokens in ((0, 1), (0, 4), (1, 3), (1, 4), (2, 1), (2, 3)):
        shorter = a_hasher(range(index * 4 + num_tokens), identity)
        expected = shorter.tail(num_tokens) if num_tokens < 4 else (shorter.hashes[-1], shorter.tokens_from(index))
        assert hasher.chunk(index, num_tokens) == expected
    assert state_of(hasher) == before
    for index, num_tokens in ((0, 0), (0, -1), (0, 5), (2, 4), (3, 1), (-1, 1)):
        with pytest.raises(ValueError, match=f"tokens at chunk {index}"):
            hasher.chunk(index, num_tokens)


def test_tokens_from_gives_what_there_is_of_a_chunk():
    """B14: tokens_from gives a whole chunk's tokens, what there is of a tail, and nothing after that."""
    hasher = a_hasher(range(6))
    assert [hasher.tokens_from(index) for index in range(3)] == [token_bytes(range(4)), token_bytes([4, 5]), b""]


def test_a_tail_is_not_a_chunk_padded_with_zeros():
    """KEY-05: the number of tokens is part of the hash, so [7] and [7, 0] differ."""
    hasher = a_hasher([7, 0])
    assert hasher.tail(1)[0] != hasher.tail(2)[0]


@given(prompts.filter(lambda tokens: len(tokens) >= 4))
def test_checks_are_of_the_tokens(tokens):
    """KEY-18: the checks kept with entries are crc32 of each chunk's tokens, and those are what was hashed."""
    hasher = a_hasher(tokens)
    expected = [token_bytes(tokens[start : start + 4]) for start in range(0, len(tokens) - 3, 4)]
    assert [hasher.tokens_from(index) for index in range(len(expected))] == expected
    assert hasher.checks == b"".join(check_of(chunk) for chunk in expected)


def test_a_hash_that_collides_is_told_by_the_check():
    """KEY-18: with a hash that is constant, two prompts have equal hashes and still differ in checks and tokens."""

    class Constant:
        def __init__(self, head: bytes) -> None: ...
        def update(self, data: bytes) -> None: ...
        def digest(self) -> bytes:
            return bytes(32)

    one, other = a_hasher(), a_hasher()
    for hasher, token in ((one, 1), (other, 2)):
        hasher._new_hash = Constant
        hasher.extend([token] * 4)
    assert one.hashes == other.hashes
    assert one.checks != other.checks
    assert one.tokens_from(0) != other.tokens_from(0)


def test_what_a_chain_returns_is_a_copy():
    """B37: changing the lists that a chain returned does not change the chain."""
    hasher = a_hasher(range(8))
    hasher.hashes[0] = b""
    assert state_of(hasher) == state_of(a_hasher(range(8)))


def test_wrong_calls_of_a_chain_are_refused():
    """B37: chunks that are not there, fewer tokens than were seen, and impossible sizes raise ValueError."""
    hasher = a_hasher(range(9))
    for call, args in (
        (hasher.parent_of, (-1,)), (hasher.parent_of, (3,)),
        (hasher.truncate, (-1,)), (hasher.truncate, (10,)), (hasher.update_to, (range(8),)),
        (TokenHasher, (PLAIN, 0)),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            call(*args)
    assert state_of(hasher) == state_of(a_hasher(range(9)))


# Forms of tokens


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40))
def test_lists_arrays_and_tensors_are_the_same_prompt(tokens):
    """B2: list, tuple, numpy of several types, torch and a tensor on a device give the same bytes."""
    torch = pytest.importorskip("torch")
    expected = b"".join(token.to_bytes(4, "little") for token in tokens)
    forms = [tokens, tuple(tokens), iter_only(tokens), FakeDeviceTensor(tokens)]
    forms += [np.array(tokens, dtype) for dtype in (np.int32, np.int64, np.uint32, np.uint64, ">i8")]
    forms += [np.array(tokens, np.int64).repeat(2)[::2], np.array(tokens)]
    forms += [torch.tensor(tokens, dtype=dtype) for dtype in (torch.int32, torch.int64)]
    for form in forms:
        assert token_bytes(form) == expected
        hasher = a_hasher()
        hasher.extend(form)
        assert hasher.hashes == a_hasher(tokens).hashes


def iter_only(tokens: list) -> object:
    """A sequence that is neither a list nor a buffer, as engines wrap theirs."""

    class Wrapped:
        def __len__(self) -> int:
            return len(tokens)

        def __getitem__(self, index: int | slice) -> object:
            return tokens[index]

    return Wrapped()


@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
def test_growing_arrays_are_hashed_from_where_they_were(dtype):
    """B37: update_to takes arrays too."""
    tokens = np.arange(11, dtype=dtype)
    hasher = a_hasher()
    for stop in (3, 9, 11):
        hasher.update_to(tokens[:stop])
    assert state_of(hasher) == state_of(a_hasher(range(11)))


@pytest.mark.parametrize(
    "tokens",
    [
        [-1], [2**32], [1, 2, 3, 4, -1], [1.5], ["1"], [None], [2**70], "1234", b"1234", bytearray(b"1234"),
        np.array([-1]), np.array([2**32]), np.array([1.0]), np.array([True]), np.array([[1, 2], [3, 4]]),
        np.array(3), np.array(["1"]), FakeDeviceTensor([-1]), FakeDeviceTensor([1.5]),
    ],
    ids=repr,
)  # fmt: skip
def test_tokens_that_are_not_u32_are_refused(tokens):
    """B37: anything but a row of integers from 0 to 2**32 - 1 raises ValueError and leaves the chain as it was."""
    hasher = a_hasher(range(6))
    with pytest.raises(ValueError):
        hasher.extend(tokens)
    assert state_of(hasher) == state_of(a_hasher(range(6)))


@pytest.mark.parametrize("tokens", [[], (), np.array([]), np.array([], np.int64), FakeDeviceTensor([])], ids=repr)
def test_no_tokens_are_no_change(tokens):
    """B37: an empty list or array, of whatever type, adds nothing."""
    assert token_bytes(tokens) == b""
    assert state_of(a_hasher(tokens)) == (0, [], b"", [], [PLAIN.root("sha256", 4)], None)


def test_the_largest_token_id_is_hashed():
    """B37: ids up to 2**32 - 1 are told apart, in lists and in arrays."""
    assert token_bytes([2**32 - 1, 0]) == token_bytes(np.array([2**32 - 1, 0])) == b"\xff" * 4 + bytes(4)


# The token databases


def spans_of(results) -> list[tuple[int, int]]:
    return [(start, end) for start, end, _ in results]


@given(prompts, st.booleans())
def test_a_prompt_is_cut_into_equal_chunks(tokens, save_unfull_chunk):
    """B2, B7, B8, B14: chunks come in order, equal in size; a shorter last one only with save_unfull_chunk."""
    database = ChunkedTokenDatabase(a_space(), save_unfull_chunk=save_unfull_chunk)
    expected = [(start, min(start + 4, len(tokens))) for start in range(0, len(tokens), 4)]
    if not save_unfull_chunk:
        expected = [span for span in expected if span[1] - span[0] == 4]
    results = list(database.process_tokens(tokens, make_key=False))
    hasher = a_hasher(tokens)
    tail = [hasher.tail(len(tokens) % 4)[0]] if len(tokens) % 4 and save_unfull_chunk else []
    assert spans_of(results) == expected
    assert [value for _, _, value in results] == [*hasher.hashes, *tail]


def test_the_defaults_are_those_of_the_reference():
    """B13, B14: chunks have 256 tokens, and a database that is built without a config keeps the tail."""
    space = KeySpace(model_name="m", model_fingerprint="r", dtype="bfloat16", tensors="t")
    database = ChunkedTokenDatabase(space)
    assert database.chunk_size == 256
    assert spans_of(database.process_tokens([1] * 600)) == [(0, 256), (256, 512), (512, 600)]


def test_keys_carry_the_space_and_the_hash():
    """B2, B32: with make_key the third item is the CacheEngineKey of the hash that it is without."""
    database = ChunkedTokenDatabase(a_space(), identity=IDENTITY)
    keys = [key for _, _, key in database.process_tokens(range(10))]
    hashes = [value for _, _, value in database.process_tokens(range(10), make_key=False)]
    assert keys == [CacheEngineKey.of(a_space(), value, IDENTITY) for value in hashes]
    assert b"".join(key.chunk_key for key in keys) == a_space().chunk_keys(hashes)


def test_store_lookup_and_retrieve_agree():
    """B2: two databases of one space, given a prompt in different forms or by its hashes, yield the same sequence."""
    one, other = (ChunkedTokenDatabase(a_space()) for _ in range(2))
    expected = list(one.process_tokens(list(range(11))))
    assert len(expected) == 3
    assert list(other.process_tokens(np.arange(11))) == expected
    hashes = [key.chunk_hash for _, _, key in expected]
    assert list(other.process_tokens(hashes=hashes, offsets=[4, 4, 3])) == expected
    assert isinstance(one, TokenDatabase)


def test_the_abstract_database_cannot_be_built():
    """B2: TokenDatabase is an interface; a subclass must say how it processes tokens."""
    with pytest.raises(TypeError, match="process_tokens"):
        TokenDatabase()


MASKS = {
    "list": lambda mask: mask,
    "tuple": tuple,
    "numpy": np.array,
    "ints": lambda mask: np.array(mask, np.int64),
    "device": FakeDeviceTensor,
    "torch": lambda mask: pytest.importorskip("torch").tensor(mask),
}


@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("num_masked", [0, 4, 8])
def test_masked_chunks_are_hashed_and_not_yielded(form, num_masked):
    """B15, B16: with the first chunks masked, the rest is yielded with the hashes it has without a mask."""
    database = ChunkedTokenDatabase(a_space())
    mask = MASKS[form]([False] * num_masked + [True] * (11 - num_masked))
    whole = list(database.process_tokens(range(11)))
    assert list(database.process_tokens(range(11), mask=mask)) == whole[num_masked // 4 :]


def test_a_mask_of_falses_yields_nothing():
    """B15: a mask that is False for all of a whole number of chunks leaves nothing to process."""
    assert list(ChunkedTokenDatabase(a_space()).process_tokens(range(8), mask=[False] * 8)) == []


@pytest.mark.parametrize("num_masked", [1, 3, 5, 11])
def test_a_mask_must_end_where_a_chunk_does(num_masked):
    """B16: a number of Falses that is no multiple of the chunk size raises the reference's ValueError, at the call."""
    mask = [False] * num_masked + [True] * (11 - num_masked)
    with pytest.raises(ValueError) as caught:
        ChunkedTokenDatabase(a_space()).process_tokens(range(11), mask=mask)
    assert str(caught.value) == MISALIGNED


@pytest.mark.parametrize("mask", ["TTTTFFFF", "FFTFTTFT", "FFFFTTTFT"[:8], "TTTT", "F" * 12, ""])
def test_a_mask_must_be_falses_then_trues(mask):
    """B15: a False after a True, or a mask of another length than the prompt, raises ValueError."""
    with pytest.raises(ValueError, match=r"F\.\.\.FT\.\.\.T"):
        ChunkedTokenDatabase(a_space()).process_tokens(range(8), mask=[letter == "T" for letter in mask])


def test_a_prompt_must_be_given():
    """B17: neither tokens nor hashes raises ValueError."""
    with pytest.raises(ValueError, match="Either tokens or hashes"):
        ChunkedTokenDatabase(a_space()).process_tokens()


@pytest.mark.parametrize("make_key", [True, False])
def test_hashes_with_offsets_are_a_prompt(make_key):
    """B17: with hashes, offsets gives each chunk's length, and a mask applies as to tokens."""
    database, hashes = ChunkedTokenDatabase(a_space()), [bytes([n]) * 32 for n in (1, 2, 3)]
    results = list(database.process_tokens(hashes=hashes, offsets=[4, 4, 2], make_key=make_key))
    assert spans_of(results) == [(0, 4), (4, 8), (8, 10)]
    assert [key.chunk_hash if make_key else key for _, _, key in results] == hashes
    mask = [False] * 4 + [True] * 6
    masked = database.process_tokens(hashes=hashes, offsets=[4, 4, 2], mask=mask, make_key=make_key)
    assert list(masked) == results[1:]
    assert list(database.process_tokens(hashes=[], offsets=[])) == []


@pytest.mark.parametrize("offsets", [None, [], [4], [4, 4, 4], [4, 0], [4, -4]])
def test_hashes_without_their_offsets_are_refused(offsets):
    """B17: hashes need one positive offset each, else ValueError."""
    with pytest.raises(ValueError, match="as many offsets"):
        ChunkedTokenDatabase(a_space()).process_tokens(hashes=[bytes(32)] * 2, offsets=offsets)


def test_a_hash_of_another_width_makes_no_key():
    """B17: a given hash that has not 32 bytes raises ValueError when its key is made."""
    with pytest.raises(ValueError, match="32 bytes, not 8"):
        list(ChunkedTokenDatabase(a_space()).process_tokens(hashes=[bytes(8)], offsets=[4]))


def test_request_configs_add_tags():
    """B35: tags among the request's configs change hashes and stand in the keys; other configs do neither."""
    database = ChunkedTokenDatabase(a_space())
    plain = list(database.process_tokens(range(8)))
    tagged = list(database.process_tokens(range(8), request_configs={"lmcache.tag.lora": "7"}))
    assert {key.tags for _, _, key in tagged} == {(("lora", "7"),)}
    assert not {key.chunk_hash for _, _, key in tagged} & {key.chunk_hash for _, _, key in plain}
    assert list(database.process_tokens(range(8), request_configs={"temperature": 0})) == plain


def test_an_identity_that_is_given_replaces_the_default():
    """KEY-07: the database's identity is used for requests that bring none, and for no other."""
    database = ChunkedTokenDatabase(a_space(), identity=RequestIdentity(cache_salt="A"))
    salts = {key.cache_salt_digest for _, _, key in database.process_tokens(range(8))}
    other = {key.cache_salt_digest for _, _, key in database.process_tokens(range(8), identity=PLAIN)}
    assert (salts, other) == ({RequestIdentity(cache_salt="A").cache_salt_digest}, {""})
    assert database.hasher().root == RequestIdentity(cache_salt="A").root("sha256", 4)
    assert database.hasher(PLAIN).root == PLAIN.root("sha256", 4)


def test_a_request_that_is_not_wholly_identified_yields_nothing():
    """KEY-13: embeddings without a digest yield no key, so the request is neither stored nor found."""
    identity = RequestIdentity(media=(MediaSpan(b"", 0, 4, "embeds"),))
    assert list(ChunkedTokenDatabase(a_space()).process_tokens(range(8), identity=identity)) == []
    assert len(list(ChunkedTokenDatabase(a_space()).process_tokens(range(8)))) == 2


def test_kv_and_query_databases_share_hashes_and_not_keys():
    """B106: the same prompt has equal hashes for both kinds and no key in common."""
    kv, query = (list(ChunkedTokenDatabase(a_space(kind=kind)).process_tokens(range(8))) for kind in CacheKind)
    assert [key.chunk_hash for _, _, key in kv] == [key.chunk_hash for _, _, key in query]
    assert not {key.chunk_key for _, _, key in kv} & {key.chunk_key for _, _, key in query}
    assert [key.to_string().partition("@")[0] for _, _, key in query] == ["m##query"] * 2


def test_dtypes_of_equal_size_do_not_share():
    """KEY-09: a prompt stored as one 8-bit type has no key in common with the other 8-bit types."""
    dtypes = ["float8_e4m3fn", "float8_e5m2", "int8", "uint8"]
    keys = {key.chunk_key for dtype in dtypes
            for _, _, key in ChunkedTokenDatabase(a_space(dtype=dtype)).process_tokens(range(8))}  # fmt: skip
    assert len(keys) == 8


def test_ranks_of_a_folded_space_agree():
    """B40: databases of any rank and world size yield the same keys once folded, and different ones unfolded."""
    spaces = [a_space(world_size=2, worker_id=0), a_space(world_size=2, worker_id=1), a_space(world_size=8)]
    prompt = range(4)
    folded = {key for space in spaces for _, _, key in ChunkedTokenDatabase(space.folded()).process_tokens(prompt)}
    unfolded = {key for space in spaces for _, _, key in ChunkedTokenDatabase(space).process_tokens(prompt)}
    assert (len(folded), len(unfolded)) == (1, 3)
