"""The messages: what a client may ask of a store, and what it answers. The same structs in process and on a socket.

Every request gets exactly one reply: the one named in its docstring, or ``Failed``.
"""

from __future__ import annotations

from typing import Final

import msgspec

from qkvault.types import ChunkRef, Medium, NewChunk, Outcome

PROTOCOL_VERSION: Final = 1


class Request(msgspec.Struct, frozen=True, tag=True):
    """Anything a client asks."""


class Reply(msgspec.Struct, frozen=True, tag=True):
    """Anything a store answers."""


class Hello(Request, frozen=True):
    """The first message of a session. Answer: ``Welcome``."""

    protocol_version: int
    client: str  # a name for logs and status


class Lookup(Request, frozen=True):
    """Lease the longest run of chunks from ``keys[0]``, whose parent is ``root``. Answer: ``Located``."""

    root: bytes
    keys: tuple[bytes, ...]
    checks: tuple[bytes, ...]  # image.check_of the tokens of each chunk
    search_range: tuple[str, ...] | None = None  # media that may be asked; None: all


class Match(Request, frozen=True):
    """Extend a lease (0: open one) by the child of ``parent`` that shares most of ``tokens``. Answer: ``Located``."""

    lease_id: int
    parent: bytes
    tokens: bytes  # 4 bytes each, at most a chunk of them
    search_range: tuple[str, ...] | None = None  # as for Lookup


class Poll(Request, frozen=True):
    """How far are the chunks of this lease? Renews it. Answer: ``Located``."""

    lease_id: int


class Release(Request, frozen=True):
    """Give up read leases. Answer: ``Done``."""

    lease_ids: tuple[int, ...]


class Reserve(Request, frozen=True):
    """Slots for new chunks. Answer: ``Reserved``."""

    chunks: tuple[NewChunk, ...]


class Commit(Request, frozen=True):
    """The slots of a write lease are filled. ``keys``: only these. Answer: ``Done`` with how many were published."""

    lease_id: int
    keys: tuple[bytes, ...] | None = None


class Abort(Request, frozen=True):
    """Give up a write lease. Answer: ``Done``."""

    lease_id: int


class Clear(Request, frozen=True):
    """Forget everything, or only what is in RAM. Answer: ``Done`` with how many chunks are to go."""

    lower_tiers: bool = True


class Switch(Request, frozen=True):
    """Turn ``frozen`` or ``hot_cache`` on or off; None leaves it. Answer: ``Status``."""

    frozen: bool | None = None
    hot_cache: bool | None = None


class GetStatus(Request, frozen=True):
    """What is going on. Answer: ``Status``."""


class Check(Request, frozen=True):
    """Verify everything that must always hold. Answer: ``Done``, or ``Failed`` with code ``invariant``."""


class Welcome(Reply, frozen=True):
    """The session is open. A client on the machine maps the pool, ``pool_bytes`` long."""

    protocol_version: int
    pool_bytes: int


class Located(Reply, frozen=True):
    """What a lookup found: a contiguous run of chunks.

    ``ready`` may be read under the lease; ``num_pending`` more are on their way (``Poll``). ``lease_id`` is 0 when
    nothing was found. ``can_fork``: some child of the last chunk found may share more tokens (``Match``).
    ``pending_tokens`` are those of the chunks on their way, by where they come from.
    """

    lease_id: int
    ready: tuple[ChunkRef, ...]
    num_pending: int
    can_fork: bool = False
    pending_tokens: dict[Medium, int] = msgspec.field(default_factory=dict)


class Reserved(Reply, frozen=True):
    """Slots for the chunks that may be written: ``offsets[i]`` for chunk i, -1 where ``outcomes[i]`` says why not."""

    lease_id: int
    outcomes: tuple[Outcome, ...]
    offsets: tuple[int, ...]


class Done(Reply, frozen=True):
    """It is done; ``count`` is what the request's docstring says."""

    count: int = 0


class TierStatus(msgspec.Struct, frozen=True):
    """One medium of the store."""

    name: str
    capacity_bytes: int
    used_bytes: int
    num_chunks: int
    is_healthy: bool


class Status(Reply, frozen=True):
    """The store's state: media, nearest first, switches, and totals by outcome (names as in docs/metrics.md)."""

    media: tuple[TierStatus, ...]
    num_leases: int
    num_sessions: int
    num_jobs: int  # tier jobs under way
    is_frozen: bool
    hot_cache: bool
    is_scanning: bool  # tiers are still telling what they hold
    counters: dict[str, int]


class Failed(Reply, frozen=True):
    """The request was not done. Codes: ``protocol``, ``invariant``, ``closed``, ``internal``."""

    code: str
    message: str


AnyRequest = Hello | Lookup | Match | Poll | Release | Reserve | Commit | Abort | Clear | Switch | GetStatus | Check
AnyReply = Welcome | Located | Reserved | Done | Status | Failed
