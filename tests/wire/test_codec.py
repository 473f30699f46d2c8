"""Messages to frames and back; whatever is no message is a ProtocolError and nothing else."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    m.Welcome(1, 1 << 40, ("q",), 256, "sha256", "1.0"),
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
