"""The chunk image: what is written is read back, and nothing damaged is taken for whole."""

from __future__ import annotations

import os
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkvault import image as img
from qkvault.types import GRAIN_TOKENS, KEY_BYTES, SKETCH_BYTES, TOKEN_BYTES, ChunkKey

PAYLOAD_BYTES = 5000
GRAIN_BYTES = GRAIN_TOKENS * TOKEN_BYTES
GROUP_BYTES = 32 * 4152  # that the check sum of a payload adds up
PAYLOAD = os.urandom(3 * GROUP_BYTES + 4096)
PAYLOAD_CHECK = img.payload_check_of(memoryview(PAYLOAD))

tokens_of = st.integers(1, 256).flatmap(lambda n: st.binary(min_size=n * TOKEN_BYTES, max_size=n * TOKEN_BYTES))
keys = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES).map(ChunkKey)


def make_header(tokens: bytes = bytes(range(64)), space: bytes = b"a space", **changes) -> img.Header:
    fields = {
        "key": ChunkKey(b"k" * KEY_BYTES),
        "parent": ChunkKey(b"p" * KEY_BYTES),
        "tokens": tokens,
        "space": space,
        "header_bytes": img.header_bytes_for(256, len(space)),
        "payload_bytes": PAYLOAD_BYTES,
        "payload_check": 0,
    }
    return img.Header(**{**fields, **changes})


def make_image(header: img.Header, *, is_sealed: bool = True) -> memoryview:
    image = memoryview(bytearray(os.urandom(img.align_up(header.header_bytes + header.payload_bytes))))
    img.write_header(image, header)
    if is_sealed:
        img.seal(image)
    return image


def is_whole(image: memoryview) -> bool:
    try:
        img.verify_payload(image, img.read_header(image))
    except ValueError:
        return False
    return True


@given(tokens_of, st.binary(max_size=5000), keys, keys)
def test_a_header_is_read_back_as_it_was_written(tokens, space, key, parent):
    header = make_header(tokens, space, key=key, parent=parent)
    image = make_image(header, is_sealed=False)
    assert img.read_header(image) == header
    assert img.read_header(image[: header.header_bytes]) == header
    assert header.num_tokens == len(tokens) // TOKEN_BYTES
    assert img.key_in(image) == key
    assert bytes(img.tokens_in(image, header.num_tokens)) == tokens


def test_what_a_slot_held_before_leaves_no_trace_in_the_header():
    header = make_header()
    first, second = (bytes(make_image(header, is_sealed=False)[: header.header_bytes]) for _ in range(2))
    assert first == second


def test_a_sealed_image_is_whole_and_an_unsealed_one_is_not():
    image = make_image(make_header(), is_sealed=False)
    assert not is_whole(image)
    img.seal(image)
    assert is_whole(image)
    header = img.read_header(image)
    payload = image[header.header_bytes : header.header_bytes + header.payload_bytes]
    assert header.payload_check == img.payload_check_of(payload)


@pytest.mark.parametrize("num_bytes", [0, 7, 4152, GROUP_BYTES - 1, GROUP_BYTES, 2 * GROUP_BYTES + 4099])
def test_a_payloads_check_sum_is_that_of_its_specification(num_bytes):
    """Sums modulo 2**64 over 32 spans of 519 words, crc32 over them and over the rest."""
    payload = os.urandom(num_bytes)
    whole = num_bytes // GROUP_BYTES * GROUP_BYTES
    sums = b""
    for start in range(0, whole, GROUP_BYTES):
        for at in range(start, start + 4152, 8):
            words = [
                int.from_bytes(payload[word : word + 8], "little") for word in range(at, start + GROUP_BYTES, 4152)
            ]
            assert len(words) == 32
            sums += (sum(words) % 2**64).to_bytes(8, "little")
    assert img.payload_check_of(memoryview(payload)) == zlib.crc32(payload[whole:], zlib.crc32(sums))


@pytest.mark.parametrize("unit_bytes", [8, 64, 512, 4096, 1 << 15])
def test_pieces_that_changed_places_are_detected(unit_bytes):
    """A misdirected write leaves every word as it was, elsewhere."""
    payload = os.urandom(1 << 20)
    right = img.payload_check_of(memoryview(payload))
    for distance in range(1, 1 + min(600, len(payload) // unit_bytes - 1)):
        moved = bytearray(payload)
        at = distance * unit_bytes
        moved[:unit_bytes], moved[at : at + unit_bytes] = payload[at : at + unit_bytes], payload[:unit_bytes]
        is_unseen = at % 4152 == 0 and at + unit_bytes <= GROUP_BYTES
        assert (img.payload_check_of(memoryview(moved)) == right) == is_unseen


@given(st.data())
def test_any_two_changes_within_a_page_are_detected(data):
    """Sums of sectors let words of one sector change places, and two bits flip that cancel one another."""
    payload = bytearray(PAYLOAD)
    page = data.draw(st.integers(0, len(payload) // 4096 - 1)) * 4096
    one, other = data.draw(st.lists(st.integers(0, 511), min_size=2, max_size=2, unique=True))
    words = np.frombuffer(payload, dtype="<u8")[page // 8 : page // 8 + 512]
    before = words.copy()
    if data.draw(st.booleans()):
        words[[one, other]] = words[[other, one]]
    else:
        words[[one, other]] ^= np.uint64(1) << np.uint64(data.draw(st.integers(0, 63)))
    assert (words != before).any()
    assert img.payload_check_of(memoryview(payload)) != PAYLOAD_CHECK


@given(st.data())
def test_any_flipped_bit_of_header_or_payload_is_detected(data):
    header = make_header()
    image = make_image(header)
    at = data.draw(st.integers(0, header.header_bytes + header.payload_bytes - 1))
    image[at] ^= 1 << data.draw(st.integers(0, 7))
    assert not is_whole(image)


def test_every_byte_of_the_prefix_counts():
    header = make_header()
    image = make_image(header)
    missed = []
    for at in range(img.PREFIX_BYTES + len(header.tokens) + len(header.space)):
        image[at] ^= 0x10
        missed += [at] * is_whole(image)
        image[at] ^= 0x10
    assert not missed
    assert is_whole(image)


@given(st.integers(0, PAYLOAD_BYTES + 8191))
def test_a_truncated_image_is_detected(num_bytes):
    header = make_header()
    image = make_image(header)
    assert is_whole(image[:num_bytes]) == (num_bytes >= header.header_bytes + header.payload_bytes)


def test_what_is_missing_of_a_payload_is_told():
    image = make_image(make_header())
    header = img.read_header(image)
    with pytest.raises(ValueError, match=f"10 of {PAYLOAD_BYTES} bytes"):
        img.verify_payload(image[: header.header_bytes + 10], header)


@given(st.binary(max_size=9000))
def test_foreign_bytes_are_refused_with_a_value_error(junk):
    with pytest.raises(ValueError, match=r"bytes|format"):
        img.read_header(memoryview(junk))


@pytest.mark.parametrize("version", [0, 1, 3, 65535])
def test_another_format_version_is_refused_by_name(version):
    image = make_image(make_header())
    image[4:6] = version.to_bytes(2, "little")
    with pytest.raises(ValueError, match=f"format {version}"):
        img.read_header(image)


def test_a_wiped_header_is_no_header_and_its_key_is_gone():
    header = make_header()
    image = make_image(header)
    payload = bytes(image[header.header_bytes :])
    img.wipe_header(image)
    with pytest.raises(ValueError, match="not a chunk image"):
        img.read_header(image)
    assert img.key_in(image) == bytes(KEY_BYTES)
    assert bytes(image[header.header_bytes :]) == payload


@pytest.mark.parametrize(
    "changes",
    [
        {"header_bytes": 192},
        {"payload_bytes": 1 << 20},
        {"key": b"short"},
        {"parent": b"k" * (KEY_BYTES + 1)},
        {"tokens": b"123"},
    ],
)
def test_an_impossible_header_is_not_written(changes):
    header = make_header()
    image = memoryview(bytearray(img.align_up(header.header_bytes + PAYLOAD_BYTES)))
    with pytest.raises(ValueError, match="bytes"):
        img.write_header(image, make_header(**changes))
    assert not any(image)


@given(st.integers(0, 1 << 40))
def test_sizes_are_rounded_up_to_the_alignment(num_bytes):
    aligned = img.align_up(num_bytes)
    assert aligned % img.ALIGNMENT_BYTES == 0
    assert 0 <= aligned - num_bytes < img.ALIGNMENT_BYTES


@given(tokens_of)
def test_the_check_is_the_end_of_the_sketch(tokens):
    sketch = img.sketch_of(tokens)
    assert img.check_of(tokens) == sketch[-SKETCH_BYTES:]
    assert len(sketch) == SKETCH_BYTES * -(-len(tokens) // GRAIN_BYTES)
    assert img.sketch_of(memoryview(tokens)) == sketch


@given(tokens_of, st.data())
def test_sketches_agree_in_as_many_leading_grains_as_the_tokens_do(tokens, data):
    other = bytearray(tokens[: data.draw(st.integers(1, len(tokens) // TOKEN_BYTES)) * TOKEN_BYTES])
    if data.draw(st.booleans()):
        other[data.draw(st.integers(0, len(other) - 1))] ^= 1
    assert agreement(img.sketch_of(tokens), img.sketch_of(bytes(other)), SKETCH_BYTES) == agreement(
        tokens, other, GRAIN_BYTES
    )


def agreement(a: bytes, b: bytes, piece_bytes: int) -> int:
    """How many leading pieces of ``a`` and ``b`` are equal."""
    count = 0
    for start in range(0, min(len(a), len(b)), piece_bytes):
        if a[start : start + piece_bytes] != b[start : start + piece_bytes]:
            break
        count += 1
    return count
