"""Frames: how messages become bytes on a stream.

A frame is 24 bytes of head (body length, sequence number, epoch, data length), a msgpack body, and data: chunks as they
lie in slots, for a client that cannot map the pool. The epoch names one life of a store: a client that sees another
epoch in a reply knows that the store was restarted.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import msgspec

from qkvault.errors import ProtocolError
from qkvault.wire.messages import AnyReply, AnyRequest

HEAD: Final = struct.Struct("<IIQQ")
MAX_BODY_BYTES: Final = 64 << 20  # a lookup of a million chunks takes 52 MB

_ENCODER: Final = msgspec.msgpack.Encoder()
_REQUESTS: Final = msgspec.msgpack.Decoder(AnyRequest)
_REPLIES: Final = msgspec.msgpack.Decoder(AnyReply)


class Head(NamedTuple):
    """The head of a frame."""

    body_bytes: int
    sequence: int
    epoch: int
    data_bytes: int


def encode(message: AnyRequest | AnyReply, sequence: int, epoch: int, data_bytes: int = 0) -> bytes:
    """One whole frame but for its data, which is to follow. Raises ProtocolError if the message is too long."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_BODY_BYTES:
        msg = f"a message of {len(body)} bytes: at most {MAX_BODY_BYTES} are allowed"
        raise ProtocolError(msg)
    return HEAD.pack(len(body), sequence, epoch, data_bytes) + body


def decode_head(data: bytes | bytearray | memoryview) -> Head:
    """Parse a head. Raises ProtocolError if it announces more than a frame may hold."""
    head = Head(*HEAD.unpack_from(data))
    if head.body_bytes > MAX_BODY_BYTES:
        msg = f"a frame of {head.body_bytes} bytes: at most {MAX_BODY_BYTES} are allowed"
        raise ProtocolError(msg)
    return head


def decode_request(body: bytes | bytearray | memoryview) -> AnyRequest:
    """Parse a request. Raises ProtocolError."""
    try:
        return _REQUESTS.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(str(error)) from error


def decode_reply(body: bytes | bytearray | memoryview) -> AnyReply:
    """Parse a reply. Raises ProtocolError."""
    try:
        return _REPLIES.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(str(error)) from error
