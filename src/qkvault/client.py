"""StoreClient: what engines, connectors and tools call. Messages out, typed answers back, bytes through the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from qkvault.errors import InvariantError, ProtocolError, Unavailable
from qkvault.types import GRAIN_TOKENS, KEY_BYTES, TOKEN_BYTES, ChunkRef, NewChunk
from qkvault.wire import messages as m
from qkvault.wire.transport import PoolView, Transport

R = TypeVar("R", bound=m.Reply)

_GRAIN_BYTES: Final = GRAIN_TOKENS * TOKEN_BYTES
_NAP_SECONDS: Final = 0.005  # between two looks at a lease with chunks on their way
_ERRORS: Final[dict[str, type[Exception]]] = {"protocol": ProtocolError, "invariant": InvariantError}


class StoreClient:
    """One session with a store. Thread-safe as far as its transport is.

    Every method raises Unavailable when the store cannot be reached; integrations treat that as a miss.
    """

    def __init__(self, transport: Transport) -> None:
        """The client owns ``transport`` from now on."""
        self._transport = transport

    @property
    def pool(self) -> PoolView:
        """The store's memory."""
        return self._transport.pool

    def find(
        self,
        root: bytes,
        keys: bytes,
        checks: bytes,
        tokens_of: Callable[[int], bytes],
        *,
        search_range: Sequence[str] | None = None,
    ) -> m.Located:
        """Lease the longest run of tokens that is cached: whole chunks, then the leading grains of one more.

        ``root`` is the key of the chain's root, ``keys`` (48 bytes each) and ``checks`` (3) those of the whole chunks,
        ``tokens_of(i)`` the tokens (bytes) of chunk i, where i may be the tail after the last whole one. One question
        if all whole chunks are found, or none that shares a beginning; two if the prompt leaves another in the middle
        of a chunk. The lease is the caller's to ``release``; a ``lease_id`` of 0 means that nothing was found.
        """
        media = _tuple(search_range)
        tail = tokens_of(len(keys) // KEY_BYTES)
        if len(tail) < _GRAIN_BYTES:
            tail = b""
        found = self._ask(m.Lookup(root, keys, checks, tail, media), m.Located)
        if not found.can_fork:
            return msgspec.structs.replace(found, ready=found.ready.with_asked(keys))
        num_chunks = len(found.ready) + found.num_pending
        tokens = tokens_of(num_chunks)
        if len(tokens) < _GRAIN_BYTES:
            return msgspec.structs.replace(found, ready=found.ready.with_asked(keys))
        parent = keys[(num_chunks - 1) * KEY_BYTES : num_chunks * KEY_BYTES] if num_chunks else root
        return self._ask(m.Match(found.lease_id, parent, tokens, media), m.Located)

    def poll(self, lease_id: int) -> m.Located:
        """How far the chunks of a read lease have come. Renews it."""
        return self._ask(m.Poll(lease_id), m.Located)

    def wait(self, located: m.Located, timeout_seconds: float, clock: Callable[[], float]) -> m.Located:
        """Block until nothing of a lease is pending any more, at most ``timeout_seconds``; returns how far it came."""
        deadline = clock() + timeout_seconds
        while located.num_pending and (left_seconds := deadline - clock()) > 0:
            # Not the whole time: what changes between poll and sleep wakes nobody.
            self._transport.wait_change(min(left_seconds, _NAP_SECONDS))
            located = self.poll(located.lease_id)
        return located

    def wait_change(self, timeout_seconds: float) -> None:
        """Sleep until something may have changed for a pending lease, at most ``timeout_seconds``."""
        self._transport.wait_change(timeout_seconds)

    def fetch(self, refs: Sequence[ChunkRef]) -> None:
        """Make the pool show leased chunks; nothing to do where it is the store's own memory."""
        self._transport.fetch(refs)

    def release(self, *lease_ids: int) -> None:
        """Give up read leases."""
        if lease_ids:
            self._ask(m.Release(lease_ids), m.Done)

    def reserve(self, chunks: Sequence[NewChunk]) -> m.Reserved:
        """Slots for new chunks: fewer than asked for when there is no room, never an error."""
        return self._ask(m.Reserve(tuple(chunks)), m.Reserved)

    def commit(self, lease_id: int, keys: Sequence[bytes] | None = None) -> int:
        """Publish the slots of a write lease. Returns how many were: 0 if the lease had run out."""
        return self._ask(m.Commit(lease_id, None if keys is None else tuple(keys)), m.Done).count

    def abort(self, lease_id: int) -> None:
        """Give up a write lease: nothing of it becomes readable."""
        self._ask(m.Abort(lease_id), m.Done)

    def clear(self, *, lower_tiers: bool = True) -> int:
        """Forget everything, or only what is in RAM. Returns how many chunks are to go."""
        return self._ask(m.Clear(lower_tiers), m.Done).count

    def switch(self, *, frozen: bool | None = None, hot_cache: bool | None = None) -> m.Status:
        """Turn switches; None leaves one as it is."""
        return self._ask(m.Switch(frozen, hot_cache), m.Status)

    def ping(self) -> bool:
        """Give a sign of life. Returns whether this session is registered as an instance."""
        return self._ask(m.Ping(), m.Done).count > 0

    def register(self, instance: m.Instance) -> None:
        """Say which process of which engine this session is. Repeating it is fine."""
        self._ask(m.Register(instance), m.Done)

    def several(self, requests: Sequence[m.Lookup | m.Match | m.Poll]) -> tuple[m.Located, ...]:
        """Ask all of ``requests`` in one message."""
        return self._ask(m.Several(tuple(requests)), m.Each).replies

    def status(self) -> m.Status:
        """What is going on."""
        return self._ask(m.GetStatus(), m.Status)

    def check(self) -> None:
        """Raise InvariantError unless all that must always hold in the store does."""
        self._ask(m.Check(), m.Done)

    def close(self) -> None:
        """End the session: its leases end with it. Idempotent."""
        self._transport.close()

    def _ask(self, request: m.AnyRequest, expected: type[R]) -> R:
        reply = self._transport.call(request)
        if isinstance(reply, expected):
            return reply
        if isinstance(reply, m.Failed):
            raise _ERRORS.get(reply.code, Unavailable)(reply.message)
        msg = f"{type(request).__name__} was answered with {type(reply).__name__}"
        raise ProtocolError(msg)


def _tuple(names: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)
