"""StoreClient: what engines, connectors and tools call. Messages out, typed answers back, bytes through the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from msgspec.structs import replace

from qkvault.errors import InvariantError, ProtocolError, Refused, Unavailable, UnknownMedium
from qkvault.types import GRAIN_TOKENS, KEY_BYTES, TOKEN_BYTES, CacheKind, ChunkRef, Medium, NewChunk
from qkvault.wire import messages as m
from qkvault.wire.transport import PoolView, Transport

R = TypeVar("R", bound=m.Reply)

_NAP_SECONDS: Final = 0.005  # between two looks at a lease with chunks on their way
_ERRORS: Final[dict[str, type[Exception]]] = {
    "protocol": ProtocolError,
    "unauthorized": Refused,
    "argument": UnknownMedium,
    "invariant": InvariantError,
}
# What the media are called elsewhere (decision 0002): taken for ours.
_ALIASES: Final = {"LocalCPUBackend": Medium.RAM.value, "LocalDiskBackend": Medium.DISK.value}


class StoreClient:
    """One session with a store. Thread-safe as far as its transport is.

    Every method raises Unavailable when the store cannot be reached; integrations treat that as a miss. ``clear``,
    ``forget``, ``switch`` and ``check`` raise Refused where a store of TCP has no token. Where a ``search_range`` is
    given, a medium that the store does not have is UnknownMedium, a ValueError.
    """

    def __init__(self, transport: Transport) -> None:
        """The client owns ``transport`` from now on."""
        self._transport = transport

    @property
    def pool(self) -> PoolView:
        return self._transport.pool

    @property
    def is_usable(self) -> bool:
        """Whether no call has failed so far; all that come after one fail too, at once."""
        return self._transport.is_usable

    @property
    def features(self) -> tuple[str, ...]:
        return self._transport.features

    @property
    def epoch(self) -> int | None:
        """Which life of the store this is a session with; None if it is in this process."""
        return self._transport.epoch

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
        return self.find_each([(root, keys)], checks, tokens_of, search_range=search_range)[0]

    def find_each(
        self,
        chains: Sequence[tuple[bytes, bytes]],
        checks: bytes,
        tokens_of: Callable[[int], bytes],
        *,
        search_range: Sequence[str] | None = None,
    ) -> list[m.Located]:
        """``find`` for several chains (root, keys) of the same tokens, one for each rank, in as many messages."""
        media = _tuple(search_range)
        num_chunks = len(chains[0][1]) // KEY_BYTES
        lookups = [m.Lookup(root, keys, checks, _grains(tokens_of(num_chunks)), media) for root, keys in chains]
        found = [
            replace(located, ready=located.ready.with_asked(keys))
            for located, (_, keys) in zip(self.several(lookups), chains, strict=True)
        ]
        forks = {}
        for at, (located, (root, keys)) in enumerate(zip(found, chains, strict=True)):
            number = len(located.ready) + located.num_pending
            if located.can_fork and (tokens := _grains(tokens_of(number))):
                parent = _parent_of(number, root, keys)
                forks[at] = m.Match(located.lease_id, parent, tokens, media)
        for at, located in zip(forks, self.several(list(forks.values())), strict=True):
            found[at] = located
        return found

    def several(self, requests: Sequence[m.Lookup | m.Match | m.Poll]) -> tuple[m.Located, ...]:
        """Ask all of ``requests`` in one message. The answers are those to each asked alone, in order."""
        if len(requests) <= 1:
            return tuple(self._ask(request, m.Located) for request in requests)
        replies = self._ask(m.Several(tuple(requests)), m.Each).replies
        if len(replies) != len(requests):
            msg = f"{len(requests)} questions, {len(replies)} answers"
            raise ProtocolError(msg)
        return replies

    def poll_each(self, lease_ids: Sequence[int]) -> list[m.Located]:
        """``poll`` several leases in one message."""
        return list(self.several([m.Poll(lease_id) for lease_id in lease_ids]))

    def inspect(
        self,
        root: bytes,
        keys: bytes,
        checks: bytes,
        tokens_of: Callable[[int], bytes],
        *,
        search_range: Sequence[str] | None = None,
    ) -> m.Inspected:
        """How much of a prompt ``find`` would find, and where. Nothing is leased, and nothing moves."""
        media = _tuple(search_range)
        tail = _grains(tokens_of(len(keys) // KEY_BYTES))
        found = self._ask(m.Inspect(root, keys, checks, tail, media), m.Inspected)
        num_chunks = sum(found.chunks.values())
        if not found.can_fork or not _grains(tokens_of(num_chunks)):
            return found
        parent = _parent_of(num_chunks, root, keys)
        more = self._ask(m.Inspect(parent, b"", b"", tokens_of(num_chunks), media), m.Inspected)
        return m.Inspected(_sum(found.tokens, more.tokens), _sum(found.chunks, more.chunks))

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

    def fetch(self, refs: Sequence[ChunkRef], timeout_seconds: float | None = None) -> int:
        """Make the pool show leased chunks; nothing to do where it is the store's own memory.

        Returns how many bytes were sent for it. Blocks for ``timeout_seconds`` at most; None: for a time that fits.
        """
        return self._transport.fetch(refs, timeout_seconds)

    def release(self, *lease_ids: int) -> None:
        """Give up read leases."""
        if lease_ids:
            self._ask(m.Release(lease_ids), m.Done)

    def reserve(self, chunks: Sequence[NewChunk], kind: CacheKind = CacheKind.KV) -> m.Reserved:
        """Slots for new chunks of one kind: fewer than asked for when there is no room, never an error."""
        return self._ask(m.Reserve(tuple(chunks), kind), m.Reserved)

    def commit(self, lease_id: int, keys: Sequence[bytes] | None = None) -> int:
        """Publish the slots of a write lease. Returns how many were: 0 if the lease had run out."""
        return self._ask(m.Commit(lease_id, None if keys is None else tuple(keys)), m.Done).count

    def abort(self, lease_id: int) -> None:
        """Give up a write lease: nothing of it becomes readable."""
        self._ask(m.Abort(lease_id), m.Done)

    def clear(self, *, lower_tiers: bool = True, spaces: Sequence[bytes] = ()) -> int:
        """Forget everything, or what is in RAM only, or in ``spaces`` only. Returns how many chunks are to go."""
        return self._ask(m.Clear(lower_tiers, tuple(spaces)), m.Done).count

    def forget(self, parent: bytes, keys: bytes, tail: bytes = b"") -> int:
        """Forget chunks of one chain and all that hangs on them, as ``Forget`` says. Returns how many are to go."""
        step, counts = m.MAX_CHUNKS * KEY_BYTES, 0
        for end in range(len(keys), 0, -step):  # the tail first: what hangs on a chunk is found while it is there
            start = max(0, end - step)
            head = keys[start - KEY_BYTES : start] if start else parent
            counts += self._ask(m.Forget(head, keys[start:end], tail if end == len(keys) else b""), m.Done).count
        return counts if keys else self._ask(m.Forget(parent, b"", tail), m.Done).count

    def switch(self, *, frozen: bool | None = None, hot_cache: bool | None = None) -> m.Status:
        """Turn switches; None leaves one as it is."""
        return self._ask(m.Switch(frozen, hot_cache), m.Status)

    def ping(self) -> bool:
        """Give a sign of life. Returns whether this session is registered as an instance."""
        return self._ask(m.Ping(), m.Done).count > 0

    def rehearse(self) -> None:
        """Ask all that an engine's step asks, for nothing: Unavailable unless each question is answered in time."""
        located = self.find(bytes(KEY_BYTES), b"", b"", lambda _: b"")
        self.poll(located.lease_id)
        self.commit(self.reserve(()).lease_id)
        self.release(located.lease_id)

    def register(self, instance: m.Instance, timeout_seconds: float | None = None) -> None:
        """Say which process of which engine this session is, in ``timeout_seconds`` if given. Repeating it is fine."""
        self._ask(m.Register(instance), m.Done, timeout_seconds)

    def status(self) -> m.Status:
        return self._ask(m.GetStatus(), m.Status)

    def check(self) -> None:
        """Raise InvariantError unless all that must always hold in the store does."""
        self._ask(m.Check(), m.Done)

    def bury(self) -> None:
        self._transport.bury()

    def close(self) -> None:
        """End the session: its leases end with it. Idempotent."""
        self._transport.close()

    def _ask(self, request: m.AnyRequest, expected: type[R], timeout_seconds: float | None = None) -> R:
        reply = self._transport.call(request, timeout_seconds)
        if isinstance(reply, expected):
            return reply
        if isinstance(reply, m.Failed):
            raise _ERRORS.get(reply.code, Unavailable)(reply.message)
        msg = f"{type(request).__name__} was answered with {type(reply).__name__}"
        raise ProtocolError(msg)


def _parent_of(number: int, root: bytes, keys: bytes) -> bytes:
    """The key that chunk ``number`` of a chain hangs on."""
    return keys[(number - 1) * KEY_BYTES : number * KEY_BYTES] if number else root


def _grains(tokens: bytes) -> bytes:
    """``tokens``, or nothing if they are less than what can match."""
    return tokens if len(tokens) >= GRAIN_TOKENS * TOKEN_BYTES else b""


def _sum(one: dict[Medium, int], other: dict[Medium, int]) -> dict[Medium, int]:
    return {medium: one.get(medium, 0) + other.get(medium, 0) for medium in {**one, **other}}


def _tuple(names: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(_ALIASES.get(name, name) for name in names)
