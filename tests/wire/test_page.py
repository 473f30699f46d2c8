"""The page on the wire says all there is to know."""

from __future__ import annotations

import re
from typing import get_args

import msgspec

from qkvault.wire import codec
from qkvault.wire import messages as m
from qkvault.wire.page import wire_markdown


def test_every_message_and_field_is_on_the_page():
    """B259: with its type, and what it may hold at most."""
    page = wire_markdown()
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL))
    structs = [*get_args(m.AnyRequest), *get_args(m.AnyReply), m.Instance, m.InstanceStatus, m.TierStatus]
    for struct in structs:
        fields = re.findall(r"^\| `(\w+)` \| \S", sections[struct.__name__], re.MULTILINE)
        assert fields == list(struct.__struct_fields__)
    assert f"array of NewChunk (at most {m.MAX_CHUNKS} of them)" in sections["Reserve"]
    assert f"protocol {m.PROTOCOL_VERSION}." in page


def test_the_head_on_the_page_is_the_head_of_frames():
    """B259: place and size of each number, and the longest body."""
    rows = re.findall(r"^\| (\d+) \| u(\d+) \|", wire_markdown(), re.MULTILINE)
    letters = {"I": 32, "Q": 64}
    sizes = [letters[letter] for letter in codec.HEAD.format.removeprefix("<")]
    assert [int(bits) for _, bits in rows] == sizes
    assert [int(offset) * 8 for offset, _ in rows] == [sum(sizes[:at]) for at in range(len(sizes))]
    assert str(codec.MAX_BODY_BYTES) in wire_markdown()


def test_a_message_on_the_page_is_what_is_sent():
    """B259: a map with the name of the message as its type, fields with their default left out or not."""
    body = msgspec.msgpack.encode({"type": "Commit", "lease_id": 5, "unknown": 1})
    assert codec.decode_request(body) == m.Commit(5)
    assert msgspec.msgpack.decode(codec.encode(m.Done(3), 1, 2)[codec.HEAD.size :]) == {"type": "Done", "count": 3}
