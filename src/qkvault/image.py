"""The chunk image: how one chunk looks in a pool slot, in a file and on a wire. All three are the same bytes.

    offset 0     prefix   192 bytes: magic, version, sizes, check sums, key, parent
           192   tokens   4 bytes each, unsigned, little-endian
                 space    msgpack of the space's description (model, layout, ...), so that a file explains itself
                 zeros    up to header_bytes
    header_bytes payload  the engine's pages; the layout says how to see them as K and V

``header_bytes`` is a multiple of 4096, so that images can be read and written with O_DIRECT. This module knows bytes
only: no files, no tensors, no clock.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final, NamedTuple

import msgspec
import numpy as np

from qkvault.types import GRAIN_TOKENS, KEY_BYTES, SKETCH_BYTES, TOKEN_BYTES, ChunkKey

MAGIC: Final = b"QKVC"
FORMAT_VERSION: Final = 2  # 1 had another check sum of the payload
ALIGNMENT_BYTES: Final = 4096
PREFIX_BYTES: Final = 192
# magic, version, flags, header_bytes, num_tokens, payload_bytes, payload_check, header_crc, space_bytes, key, parent
_PREFIX: Final = struct.Struct("<4sHHIIQIII48s48s")
MAGIC_AND_FORMAT: Final = MAGIC + FORMAT_VERSION.to_bytes(2, "little")  # how every image begins
_CRC_SPAN: Final = slice(28, 32)  # header_crc inside the prefix; zero while the check sum is computed
_PAYLOAD_CHECK: Final = struct.Struct("<I")
_PAYLOAD_CHECK_OFFSET: Final = 24
_KEY_SPAN: Final = slice(36, 84)
_SPAN_BYTES: Final = 4152  # 519 words: more than a page, and no multiple of anything that disks move
_NUM_SPANS: Final = 32  # that are added up
FIRST: Final = 1  # flag: no chunk comes before it
PLAIN: Final = 2  # flag: its tokens are token ids, and say all: no salt, adapter, tag or media, here or before it
_GRAIN_BYTES: Final = GRAIN_TOKENS * TOKEN_BYTES


class Header(msgspec.Struct, frozen=True):
    """What an image says of itself. ``tokens`` are ``4 * num_tokens`` bytes; ``space`` is the encoded description."""

    key: ChunkKey
    parent: ChunkKey
    tokens: bytes
    space: bytes
    header_bytes: int
    payload_bytes: int
    payload_check: int  # payload_check_of the payload; 0 until sealed
    flags: int = 0  # FIRST, PLAIN

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def image_bytes(self) -> int:
        """Of header and payload together."""
        return self.header_bytes + self.payload_bytes


def align_up(num_bytes: int) -> int:
    """The next multiple of the image alignment."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def header_bytes_for(chunk_size: int, space_bytes: int) -> int:
    """Size of the header of every chunk of a space, whatever its number of tokens."""
    return align_up(PREFIX_BYTES + chunk_size * TOKEN_BYTES + space_bytes)


def sketch_of(tokens: bytes | memoryview) -> bytes:
    """Running crc32 of ``tokens`` after each started grain of 16 tokens: its upper 3 bytes, big-endian.

    Two chunks with the same parent agree in exactly as many leading grains as their sketches do (but for a chance of
    2**-24 a grain: whoever uses a match compares the tokens too). The last 3 bytes check the whole chunk.
    """
    crc, out = 0, bytearray()
    for start in range(0, len(tokens), _GRAIN_BYTES):
        crc = zlib.crc32(tokens[start : start + _GRAIN_BYTES], crc)
        out += crc.to_bytes(4, "big")[:SKETCH_BYTES]
    return bytes(out)


def sketch_bytes_for(num_tokens: int) -> int:
    """Length of the sketch of so many tokens."""
    return -(-num_tokens // GRAIN_TOKENS) * SKETCH_BYTES


def check_of(tokens: bytes | memoryview) -> bytes:
    """The last 3 bytes of ``sketch_of(tokens)``, at a tenth of its cost."""
    return zlib.crc32(tokens).to_bytes(4, "big")[:SKETCH_BYTES]


def checks_of(tokens: memoryview, chunk_bytes: int) -> bytes:
    """``check_of`` each whole chunk of ``tokens``, in order, at half the cost."""
    starts = range(0, len(tokens) - chunk_bytes + 1, chunk_bytes)
    sums = np.array([zlib.crc32(tokens[start : start + chunk_bytes]) for start in starts], dtype=">u4")
    return sums.view(np.uint8).reshape(-1, sums.itemsize)[:, :SKETCH_BYTES].tobytes()


def payload_check_of(payload: memoryview) -> int:
    """Check sum of a payload, 32 bits: crc32 over the sums of groups of 32 spans, then over what is left.

    A span has 519 little-endian words of 64 bits; those at one place in all spans of a group are added up, modulo
    2**64. Three times as fast as crc32 of all bytes. Any change within 4,152 bytes goes unseen once in 2**32, and so
    do sectors and pages that are lost, moved or another chunk's; unseen are changes of words that lie a multiple of
    4,152 bytes apart and cancel one another.
    """
    group_bytes = _NUM_SPANS * _SPAN_BYTES
    whole_bytes = len(payload) // group_bytes * group_bytes
    words = np.frombuffer(payload[:whole_bytes], dtype="<u8").reshape(-1, _NUM_SPANS, _SPAN_BYTES // 8)
    sums = np.add.reduce(words, axis=1)  # without the interpreter's lock, as crc32
    return zlib.crc32(payload[whole_bytes:], zlib.crc32(sums.astype("<u8", copy=False)))


def write_header(image: memoryview, header: Header) -> None:
    """Write ``header`` over the first ``header_bytes`` of ``image``. The payload is left alone.

    Raises ValueError, and writes nothing, if the image is too small, the header does not fit its ``header_bytes``, or a
    key or the tokens have an impossible length.
    """
    end = PREFIX_BYTES + len(header.tokens) + len(header.space)
    if end > header.header_bytes or header.image_bytes > len(image):
        msg = f"a header of {end} bytes and {header.payload_bytes} of payload do not fit an image of {len(image)}"
        raise ValueError(msg)
    if len(header.key) != KEY_BYTES or len(header.parent) != KEY_BYTES or len(header.tokens) % TOKEN_BYTES:
        msg = (
            f"key {len(header.key)}, parent {len(header.parent)} or tokens {len(header.tokens)}: wrong number of bytes"
        )
        raise ValueError(msg)
    prefix = bytearray(PREFIX_BYTES)
    _PREFIX.pack_into(
        prefix, 0, MAGIC, FORMAT_VERSION, header.flags, header.header_bytes, header.num_tokens, header.payload_bytes,
        0, 0, len(header.space), header.key, header.parent,
    )  # fmt: skip
    rest = header.tokens + header.space + bytes(header.header_bytes - end)
    prefix[_CRC_SPAN] = zlib.crc32(rest, zlib.crc32(prefix)).to_bytes(4, "little")
    _PAYLOAD_CHECK.pack_into(prefix, _PAYLOAD_CHECK_OFFSET, header.payload_check)
    image[PREFIX_BYTES : header.header_bytes] = rest
    image[:PREFIX_BYTES] = prefix  # last, since it carries the key


def seal(image: memoryview) -> None:
    """Compute the payload's check sum and write it into the header, so that the image may leave RAM."""
    header = read_header(image)
    payload_check = payload_check_of(image[header.header_bytes : header.image_bytes])
    _PAYLOAD_CHECK.pack_into(image, _PAYLOAD_CHECK_OFFSET, payload_check)


def read_header(image: memoryview) -> Header:
    """Parse and verify the header of ``image`` (which may end with the header).

    Raises ValueError, with the reason, for anything but a whole header of this format version.
    """
    if len(image) < PREFIX_BYTES:
        msg = f"{len(image)} bytes are too few for a header"
        raise ValueError(msg)
    (
        magic, version, flags, header_bytes, num_tokens, payload_bytes, payload_check, header_crc, space_bytes,
        key, parent,
    ) = _PREFIX.unpack_from(image, 0)  # fmt: skip
    if magic != MAGIC or version != FORMAT_VERSION:
        msg = f"not a chunk image of format {FORMAT_VERSION}: magic {magic!r}, format {version}"
        raise ValueError(msg)
    tokens_bytes = num_tokens * TOKEN_BYTES
    end = PREFIX_BYTES + tokens_bytes + space_bytes
    if end > header_bytes or header_bytes > len(image):
        msg = f"header of {end} bytes in {header_bytes} of {len(image)}"
        raise ValueError(msg)
    prefix = bytearray(image[:PREFIX_BYTES])
    prefix[_PAYLOAD_CHECK_OFFSET : _CRC_SPAN.stop] = bytes(8)
    rest = bytes(image[PREFIX_BYTES:header_bytes])  # what is returned is what was verified, whoever writes meanwhile
    if zlib.crc32(rest, zlib.crc32(prefix)) != header_crc:
        msg = "the header's check sum is wrong"
        raise ValueError(msg)
    tokens, space = rest[:tokens_bytes], rest[tokens_bytes : tokens_bytes + space_bytes]
    return Header(ChunkKey(key), ChunkKey(parent), tokens, space, header_bytes, payload_bytes, payload_check, flags)


def verify_payload(image: memoryview, header: Header) -> None:
    """Raise ValueError unless the payload in ``image`` is whole and has the check sum that ``header`` tells."""
    payload = image[header.header_bytes : header.image_bytes]
    if len(payload) != header.payload_bytes:
        msg = f"payload is {len(payload)} of {header.payload_bytes} bytes"
        raise ValueError(msg)
    if payload_check_of(payload) != header.payload_check:
        msg = "the payload's check sum is wrong"
        raise ValueError(msg)


def key_in(image: memoryview) -> bytes:
    """The key that an image in RAM carries right now, unverified: a cheap check that a slot was not reused."""
    return bytes(image[_KEY_SPAN])


def wipe_header(image: memoryview) -> None:
    """Make ``image`` unreadable: done when its slot gets a new owner, before that owner writes."""
    image[:PREFIX_BYTES] = bytes(PREFIX_BYTES)


def tokens_in(image: memoryview, num_tokens: int) -> memoryview:
    """The first ``num_tokens`` tokens of an image in RAM, as bytes, unverified."""
    return image[PREFIX_BYTES : PREFIX_BYTES + num_tokens * TOKEN_BYTES]


class Peek(NamedTuple):
    """The parts of a header that a reader in RAM needs, unverified."""

    key: bytes
    num_tokens: int
    header_bytes: int
    payload_bytes: int
    space: bytes
    flags: int


def peek(image: memoryview) -> Peek | None:
    """What an image in RAM says right now, at the cost of one unpack; None if its header was wiped."""
    magic, _, flags, header_bytes, num_tokens, payload_bytes, _, _, space_bytes, key, _ = _PREFIX.unpack_from(image, 0)
    if magic != MAGIC:
        return None
    start = PREFIX_BYTES + num_tokens * TOKEN_BYTES
    return Peek(key, num_tokens, header_bytes, payload_bytes, bytes(image[start : start + space_bytes]), flags)
