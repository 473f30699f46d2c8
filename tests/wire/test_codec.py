"""Messages to frames and back; whatever is no message is a ProtocolError and nothing else."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect as shape

from qkvault.errors import ProtocolError
from qkvault.types import ChunkRef, ChunkRefs, Medium, NewChunk, Outcome
from qkvault.wire import codec
from qkvault.wire import messages as m

KEY = bytes(range(48))
INSTANCE = m.Instance("vllm-1", "worker", "model", 1, 2, 4711, "here", "vllm 0.32", (b"description",))
REQUESTS = [
    m.Hello(1, "a client", "a token"),
    m.Several((m.Poll(1), m.Match(3, KEY, b"tokens"), m.Lookup(KEY, b"", b""))),
    m.Download(KEY),
    m.Ping(),
    m.Register(INSTANCE),
    m.Lookup(KEY, KEY + KEY, b"12345678", b"tail", ("ram", "disk")),
    m.Lookup(KEY, b"", b""),
    m.Inspect(KEY, KEY, b"1234", b"tail", ("disk",)),
    m.Match(3, KEY, b"tokens", ("ram",)),
    m.Poll(2**40),
    m.Release((1, 2, 3)),
    m.Reserve((NewChunk(KEY, KEY, b"1234", 16, 8192),)),
    m.Commit(5),
    m.Commit(5, (KEY,)),
    m.Abort(6),
    m.Clear(lower_tiers=False),
    m.Forget(KEY, KEY, b"tail"),
    m.Switch(frozen=True),
    m.GetStatus(),
    m.Check(),
]
REPLIES = [
    m.Welcome(1, 1 << 40, ("q",), 256, "sha256", "1.0", 60.0),
    m.Each((m.Located(1, ChunkRefs(), 2),)),
    m.Data((8192, 0)),
    m.Located(
        1,
        ChunkRefs.of([ChunkRef(KEY, 4096, 8192, 16, Medium.DISK)]),
        2,
        can_fork=True,
        pending_tokens={Medium.DISK: 32},
    ),
    m.Inspected({Medium.RAM: 64}, {Medium.RAM: 2}, can_fork=True),
    m.Reserved(0, (Outcome.PRESENT, Outcome.NO_ROOM), (-1, -1)),
    m.Done(7),
    m.Status(
        (m.TierStatus("ram", 1, 2, 3, is_healthy=True),),
        1,
        2,
        3,
        False,
        True,
        False,
        {"lookups": 1},
        (m.InstanceStatus(INSTANCE, 0.5, 1),),
        (b"space",),
    ),
    m.Failed("protocol", "why"),
]


def body_of(frame):
    head = codec.decode_head(frame)
    assert len(frame) == codec.HEAD.size + head.body_bytes
    return head, frame[codec.HEAD.size :]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda message: type(message).__name__)
def test_a_request_survives_the_way(request_):
    head, body = body_of(codec.encode(request_, 2**32 - 1, 2**64 - 1))
    assert (head.sequence, head.epoch) == (2**32 - 1, 2**64 - 1)
    assert codec.decode_request(body) == request_


@pytest.mark.parametrize("reply", REPLIES, ids=lambda message: type(message).__name__)
def test_a_reply_survives_the_way(reply):
    _, body = body_of(codec.encode(reply, 1, 2))
    assert codec.decode_reply(body) == reply


def test_every_message_is_tried_here():
    """A new one is added above."""
    assert {type(message) for message in REQUESTS} == set(m.AnyRequest.__args__)
    assert {type(message) for message in REPLIES} == set(m.AnyReply.__args__)


def test_a_request_is_no_reply():
    _, body = body_of(codec.encode(m.Check(), 1, 2))
    with pytest.raises(ProtocolError):
        codec.decode_reply(body)


def test_a_frame_has_a_limit_in_both_directions():
    """What is longer is neither sent nor waited for."""
    with pytest.raises(ProtocolError, match="at most"):
        codec.decode_head(codec.HEAD.pack(codec.MAX_BODY_BYTES + 1, 0, 0, 0))
    with pytest.raises(ProtocolError, match="at most"):
        codec.encode(m.Match(0, KEY, bytes(codec.MAX_BODY_BYTES)), 0, 0)


def least_of(told):
    """The smallest value of a type, as it is sent."""
    if isinstance(told, shape.StructType):
        required = {field.name: least_of(field.type) for field in told.fields if field.required or told.array_like}
        return list(required.values()) if told.array_like else {"type": told.tag} | required
    return {shape.StrType: "", shape.BytesType: b"", shape.VarTupleType: []}.get(type(told), 1)


def too_long(told):
    """Values of a type that are too long in one place: (the place, how long it may be, the value)."""
    if isinstance(told, (shape.StrType, shape.BytesType)):
        yield "", told.max_length, ("x" if isinstance(told, shape.StrType) else b"x") * ((told.max_length or 0) + 1)
    elif isinstance(told, shape.VarTupleType):
        yield "", told.max_length, [least_of(told.item_type)] * ((told.max_length or 0) + 1)
        yield from ((f"[]{place}", limit, [value]) for place, limit, value in too_long(told.item_type))
    elif isinstance(told, shape.UnionType):
        for each in told.types:
            yield from too_long(each)
    elif isinstance(told, shape.StructType):
        for at, field in enumerate(told.fields):
            for place, limit, value in too_long(field.type):
                struct = least_of(told)
                struct[at if told.array_like else field.name] = value
                yield f".{told.cls.__name__}.{field.name}{place}", limit, struct
    else:
        assert isinstance(told, (shape.IntType, shape.BoolType, shape.EnumType, shape.NoneType)), f"{told} has no limit"


TOO_LONG = [each for request in m.AnyRequest.__args__ for each in too_long(shape.type_info(request))]


@pytest.mark.parametrize(("place", "limit", "message"), TOO_LONG, ids=[place for place, _, _ in TOO_LONG])
def test_what_is_longer_than_a_field_is_refused_before_there_is_memory_for_it(place, limit, message):
    """B255, B333: whatever is text, bytes or a list has a limit. Of text the whole is read before it is measured."""
    assert limit is not None
    body = msgspec.msgpack.encode(message)
    assert len(body) < codec.MAX_BODY_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=f"of length <= {limit} "):
            codec.decode_request(body)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 64 << 10  # a field of bytes may have megabytes; other threads allocate too


@pytest.mark.parametrize(
    "change", [{"worker_id": -1}, {"world_size": 1 << 32}, {"pid": 1 << 40}, {"pid": "1"}, {"spaces": b"x"}]
)
def test_an_instances_numbers_are_numbers_of_an_instance(change):
    """B333."""
    instance = msgspec.to_builtins(INSTANCE, builtin_types=(bytes,)) | change
    with pytest.raises(ProtocolError):
        codec.decode_request(msgspec.msgpack.encode({"type": "Register", "instance": instance}))


@pytest.mark.parametrize("change", [{3: 0}, {3: (1 << 18) + 1}, {4: -1}, {4: 1 << 62}])
def test_a_chunks_numbers_are_numbers_of_a_chunk(change):
    """B333."""
    chunk = [KEY, KEY, b"123", 16, 8192]
    for at, value in change.items():
        chunk[at] = value
    with pytest.raises(ProtocolError):
        codec.decode_request(msgspec.msgpack.encode({"type": "Reserve", "chunks": [chunk]}))


@pytest.mark.parametrize("deep", [b"\x91", b"\x81\xa1x"])
def test_nesting_without_end_is_a_protocol_error(deep):
    """Not an error of the interpreter's, which would cost the connection."""
    for decode in (codec.decode_request, codec.decode_reply):
        for body in (deep * 100_000, b"\x81\xa1x" + deep * 100_000):
            with pytest.raises(ProtocolError):
                decode(body)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_a_protocol_error(body):
    """Never another exception."""
    for decode in (codec.decode_request, codec.decode_reply):
        with suppress(ProtocolError):
            decode(body)


@given(st.sampled_from(REQUESTS), st.data())
def test_a_spoilt_request_is_another_request_or_a_protocol_error(request_, data):
    """Truncated, or with a byte changed."""
    _, body = body_of(codec.encode(request_, 1, 2))
    spoilt = bytearray(body[: data.draw(st.integers(0, len(body)))])
    if spoilt:
        spoilt[data.draw(st.integers(0, len(spoilt) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ProtocolError):
        assert isinstance(codec.decode_request(bytes(spoilt)), m.Request)
