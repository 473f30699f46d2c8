"""StoreClient: few messages, typed answers, and every failure as the error that callers know."""

from __future__ import annotations

import pytest

from qkvault.client import StoreClient
from qkvault.errors import InvariantError, ProtocolError, Unavailable
from qkvault.testing import FakeClock
from qkvault.types import KEY_BYTES, ChunkRef, ChunkRefs
from qkvault.wire import messages as m
from qkvault.wire.transport import Transport

KEYS = tuple(bytes([n]) * KEY_BYTES for n in (1, 2, 3))
ALL_KEYS = b"".join(KEYS)
CHECKS = b"onetwotiredo"
NOTHING = m.Located(0, ChunkRefs(), 0)


class Scripted(Transport):
    """Answers what it was given, in order, and remembers what was asked."""

    def __init__(self, *replies):
        self.pool = None
        self.replies = list(replies)
        self.asked = []
        self.clock = FakeClock()
        self.is_closed = False

    def call(self, request, timeout_seconds=None):
        self.asked.append(request)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def wait_change(self, timeout_seconds):
        self.clock.advance(min(timeout_seconds, 1.0))

    def close(self):
        self.is_closed = True


def refs(count):
    return ChunkRefs.of([ChunkRef(key, 0, 8192, 16) for key in KEYS[:count]])


def tokens_of(at):
    return bytes([at]) * 64


def test_a_lookup_asks_once_where_no_fork_can_share_more():
    """The second question is spared."""
    transport = Scripted(m.Located(5, refs(2), 0))
    assert StoreClient(transport).find(b"root", ALL_KEYS, CHECKS, tokens_of, search_range=["ram"]) == m.Located(
        5, refs(2), 0
    )
    assert transport.asked == [m.Lookup(b"root", ALL_KEYS, CHECKS, tokens_of(3), ("ram",))]


@pytest.mark.parametrize("num_ready", [0, 1, 2, 3])
@pytest.mark.parametrize("num_pending", [0, 1])
def test_the_chunk_after_the_last_one_is_matched(num_ready, num_pending):
    """It hangs on the last chunk that was found, ready or not; on the root if none was."""
    num_found = min(num_ready + num_pending, 3)
    transport = Scripted(m.Located(5, refs(num_found - num_pending), num_pending, can_fork=True), NOTHING)
    assert StoreClient(transport).find(b"root", ALL_KEYS, CHECKS, tokens_of) == NOTHING
    parent = (b"root", *KEYS)[num_found]
    assert transport.asked[1] == m.Match(5, parent, tokens_of(num_found))


def test_the_tail_is_looked_for_in_the_same_media():
    """B22: `search_range` holds for both questions."""
    transport = Scripted(m.Located(0, ChunkRefs(), 0, can_fork=True), NOTHING)
    StoreClient(transport).find(b"root", b"", b"", tokens_of, search_range=("LocalDiskBackend",))
    assert [request.search_range for request in transport.asked] == [("disk",), ("disk",)]


@pytest.mark.parametrize("tokens", [b"", bytes(60)])
def test_less_than_a_grain_is_not_asked_for(tokens):
    """Nothing could match."""
    transport = Scripted(m.Located(5, refs(3), 0, can_fork=True))
    assert StoreClient(transport).find(b"root", ALL_KEYS, CHECKS, lambda _: tokens).lease_id == 5
    assert len(transport.asked) == 1


def test_waiting_polls_until_nothing_is_pending():
    """The answer is the last one; a wake-up that is missed costs one nap, not the whole time."""
    transport = Scripted(m.Located(5, refs(1), 2), m.Located(5, refs(3), 0))
    client = StoreClient(transport)
    assert client.wait(m.Located(5, ChunkRefs(), 3), 10.0, transport.clock) == m.Located(5, refs(3), 0)
    assert transport.clock() == pytest.approx(0.01)


def test_waiting_ends_at_the_deadline():
    """B133: with what has come by then."""
    transport = Scripted(*[m.Located(5, refs(1), 2)] * 3)
    assert StoreClient(transport).wait(m.Located(5, ChunkRefs(), 3), 0.0125, transport.clock).ready == refs(1)
    assert transport.clock() == pytest.approx(0.0125)


def test_waiting_for_nothing_asks_nothing():
    transport = Scripted()
    assert StoreClient(transport).wait(NOTHING, 10.0, transport.clock) == NOTHING


def test_waiting_ends_with_the_lease():
    """A lease that ran out is a clean miss."""
    transport = Scripted(NOTHING)
    assert StoreClient(transport).wait(m.Located(5, ChunkRefs(), 3), 10.0, transport.clock) == NOTHING


def test_releasing_nothing_asks_nothing():
    transport = Scripted(m.Done())
    client = StoreClient(transport)
    client.release()
    client.release(4, 5)
    assert transport.asked == [m.Release((4, 5))]


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (m.Failed("protocol", "why"), ProtocolError),
        (m.Failed("invariant", "why"), InvariantError),
        (m.Failed("closed", "why"), Unavailable),
        (m.Failed("internal", "why"), Unavailable),
        (m.Failed("of a later version", "why"), Unavailable),
        (Unavailable("why"), Unavailable),
    ],
)
def test_a_failure_is_the_error_of_its_code(reply, error):
    """What a caller cannot know is the same to him as a store that is gone."""
    with pytest.raises(error, match="why"):
        StoreClient(Scripted(reply)).commit(1)


def test_another_kind_of_answer_is_a_protocol_error():
    with pytest.raises(ProtocolError, match="Commit was answered with Located"):
        StoreClient(Scripted(NOTHING)).commit(1)


def test_closing_ends_the_session():
    transport = Scripted()
    StoreClient(transport).close()
    assert transport.is_closed
