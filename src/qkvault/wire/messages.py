"""The messages: what a client may ask of a store, and what it answers. The same structs in process and on a socket.

Every request gets exactly one reply: the one named in its docstring, or ``Failed``. What a field of a request may hold
at most is part of its type, and seen to where a message is read, before there is memory for it (of text, after): one
client's message must not keep the others waiting.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from qkvault.types import (
    KEY_BYTES,
    MAX_CHUNK_TOKENS,
    SKETCH_BYTES,
    SPACE_BYTES,
    TOKEN_BYTES,
    CacheKind,
    ChunkRefs,
    Medium,
    NewChunk,
    Outcome,
)

PROTOCOL_VERSION: Final = 1
MAX_CHUNKS: Final = 1 << 14  # that one message may reserve, publish, forget or fetch: 4 million tokens
MAX_ASKED: Final = 1 << 20  # that one message may look for

Name = Annotated[str, Meta(max_length=1024)]
Key = Annotated[bytes, Meta(max_length=KEY_BYTES)]
Keys = Annotated[bytes, Meta(max_length=MAX_CHUNKS * KEY_BYTES)]
AskedKeys = Annotated[bytes, Meta(max_length=MAX_ASKED * KEY_BYTES)]
AskedChecks = Annotated[bytes, Meta(max_length=MAX_ASKED * SKETCH_BYTES)]
Tokens = Annotated[bytes, Meta(max_length=MAX_CHUNK_TOKENS * TOKEN_BYTES)]
Media = Annotated[tuple[Name, ...], Meta(max_length=64)]
Space = Annotated[bytes, Meta(max_length=SPACE_BYTES)]
Description = Annotated[bytes, Meta(max_length=1 << 12)]
Count = Annotated[int, Meta(ge=0, lt=1 << 32)]


class Instance(msgspec.Struct, frozen=True):
    """One process of an engine, as it registers itself."""

    instance_id: Name  # of the engine; its processes differ in role and worker_id
    role: Name  # "scheduler" or "worker"
    model_name: Name
    worker_id: Count = 0
    world_size: Count = 1
    pid: Count = 0
    host: Name = ""
    engine: Name = ""  # name and version
    spaces: Annotated[
        tuple[Description, ...], Meta(max_length=16)
    ] = ()  # descriptions of what it stores: space and layout, as in a chunk's header


class InstanceStatus(msgspec.Struct, frozen=True):
    """A registered instance, and when it was heard of last. ``num_leases`` are those of its session."""

    instance: Instance
    seconds_since_heard: float
    num_leases: int


class Request(msgspec.Struct, frozen=True, tag=True):
    """Anything a client asks."""


class Reply(msgspec.Struct, frozen=True, tag=True):
    """Anything a store answers."""


class Hello(Request, frozen=True):
    """The first message of a session. Answer: ``Welcome``.

    To another version, a wrong token or another first message the answer is ``Failed``, and the connection ends.
    """

    protocol_version: int
    client: Name  # a name for logs and status
    token: Name = ""  # where the server asks for one


class Lookup(Request, frozen=True):
    """Lease the longest run of chunks from the first of ``keys``, whose parent is ``root``. Answer: ``Located``.

    When all are found, the run goes on with the chunk that shares most of ``tail``, as by ``Match``. Of what is found
    the answer gives no keys that were asked for.
    """

    root: Key
    keys: AskedKeys  # 48 bytes each
    checks: AskedChecks  # of the tokens of each chunk: the upper 3 bytes of their crc32, big-endian
    tail: Tokens = b""  # that come after the last key, 4 bytes each, less than a chunk of them
    search_range: Media | None = None  # media that may be asked; None: all


class Match(Request, frozen=True):
    """Extend a lease (0: open one) by the child of ``parent`` that shares most of ``tokens``. Answer: ``Located``."""

    lease_id: int
    parent: Key
    tokens: Tokens  # at most a chunk of them
    search_range: Media | None = None  # as for Lookup


class Inspect(Request, frozen=True):
    """How much of a prompt is cached? Leases, promotes and counts nothing. Answer: ``Inspected``.

    The fields are those of ``Lookup``. When all of ``keys`` are found, the child of the last one that shares most of
    ``tail`` counts too: ``tail`` may be a whole chunk.
    """

    root: Key
    keys: AskedKeys
    checks: AskedChecks
    tail: Tokens = b""
    search_range: Media | None = None


class Poll(Request, frozen=True):
    """How far are the chunks of this lease? Renews it. Answer: ``Located``."""

    lease_id: int


class Release(Request, frozen=True):
    """Give up read leases. Answer: ``Done``."""

    lease_ids: Annotated[tuple[int, ...], Meta(max_length=1 << 16)]


class Reserve(Request, frozen=True):
    """Slots for new chunks. Answer: ``Reserved``. Queries have a share of their own."""

    chunks: Annotated[tuple[NewChunk, ...], Meta(max_length=MAX_CHUNKS)]
    kind: CacheKind = CacheKind.KV  # of all of them


class Commit(Request, frozen=True):
    """The slots of a write lease are filled. ``keys``: only these. Answer: ``Done`` with how many were published.

    A client that cannot map the pool sends the images of the whole lease, or of ``keys``, along as the frame's data.
    """

    lease_id: int
    keys: Annotated[tuple[Key, ...], Meta(max_length=MAX_CHUNKS)] | None = None


class Abort(Request, frozen=True):
    """Give up a write lease. Answer: ``Done``."""

    lease_id: int


class Clear(Request, frozen=True):
    """Forget everything, or only what is in RAM, or in some spaces. Answer: ``Done``: how many chunks are to go."""

    lower_tiers: bool = True
    spaces: Annotated[tuple[Space, ...], Meta(max_length=1024)] = ()  # 16 bytes each, as keys begin; none: all


class Forget(Request, frozen=True):
    """Forget the chunks ``keys`` of one chain, of which the first hangs on ``parent``, and all that hangs on them.

    Also chunks behind the last of them that begin ``tail``, or begin with it. Those before stay. Answer: ``Done`` with
    how many chunks are to go, without those that a scan of a tier has yet to find.
    """

    parent: Key
    keys: Keys  # 48 bytes each
    tail: Tokens = b""  # that come after the last key, less than a chunk of them


class Several(Request, frozen=True):
    """Questions that are answered together: one for each rank of an engine. Answer: ``Each``."""

    requests: Annotated[tuple[Lookup | Match | Poll, ...], Meta(max_length=1024)]


class Download(Request, frozen=True):
    """Send what is in the slots of ``keys``, for a client that cannot map the pool. Answer: ``Data``.

    The images follow as the frame's data, one after the other; then comes a frame of its own, ``Done`` if all is as it
    was sent or ``Failed`` if a slot had another owner meanwhile.
    """

    keys: Keys  # 48 bytes each


class Switch(Request, frozen=True):
    """Turn ``frozen`` or ``hot_cache`` on or off; None leaves it. Answer: ``Status``."""

    frozen: bool | None = None
    hot_cache: bool | None = None


class Ping(Request, frozen=True):
    """A sign of life. Answer: ``Done`` with 1 if the session is registered as an instance, else 0."""


class Register(Request, frozen=True):
    """This session is one of an engine's processes, of this engine. Answer: ``Done``. Repeating it is fine."""

    instance: Instance


class GetStatus(Request, frozen=True):
    """What is going on. Answer: ``Status``."""


class Check(Request, frozen=True):
    """Verify everything that must always hold. Answer: ``Done``, or ``Failed`` with code ``invariant``.

    ``Failed`` with code ``busy`` where there are so many chunks that it would hold up all others.
    """


class Welcome(Reply, frozen=True):
    """The session is open. A client on the machine maps the pool, ``pool_bytes`` long, whose descriptor comes along.

    ``features`` says what the store can do besides; chunk size and hash are what it was told that its clients use:
    those that use others share nothing with them. ``lease_seconds`` is how long a lease lives without a sign of life.
    """

    protocol_version: int
    pool_bytes: int
    features: tuple[str, ...] = ()
    chunk_size: int = 0
    hash_algorithm: str = ""
    server_version: str = ""
    lease_seconds: float = 0.0  # 0: it does not say


class Located(Reply, frozen=True):
    """What a lookup found: a contiguous run of chunks.

    ``ready`` may be read under the lease; ``num_pending`` more are on their way (``Poll``). ``lease_id`` is 0 when
    nothing was found. ``can_fork``: some child of the last chunk found may share more tokens (``Match``).
    ``pending_tokens`` are those of the chunks on their way, by where they come from.
    """

    lease_id: int
    ready: ChunkRefs
    num_pending: int
    can_fork: bool = False
    pending_tokens: dict[Medium, int] = msgspec.field(default_factory=dict)


class Inspected(Reply, frozen=True):
    """Tokens and chunks from the beginning of a prompt, by the medium that they would come from.

    ``can_fork``: some child of the last chunk found may share more tokens (``Inspect`` without keys, from there).
    """

    tokens: dict[Medium, int]
    chunks: dict[Medium, int]
    can_fork: bool = False


class Reserved(Reply, frozen=True):
    """Slots for the chunks that may be written: ``offsets[i]`` for chunk i, -1 where ``outcomes[i]`` says why not."""

    lease_id: int
    outcomes: tuple[Outcome, ...]
    offsets: tuple[int, ...]


class Done(Reply, frozen=True):
    """It is done; ``count`` is what the request's docstring says."""

    count: int = 0


class Each(Reply, frozen=True):
    """The answers to ``Several``, in order."""

    replies: tuple[Located, ...]


class Data(Reply, frozen=True):
    """The images that follow: the bytes of each that was asked for, 0 for one that is not in RAM."""

    image_bytes: tuple[int, ...]


class TierStatus(msgspec.Struct, frozen=True):
    """One medium of the store."""

    name: str
    capacity_bytes: int
    used_bytes: int
    num_chunks: int
    is_healthy: bool
    query_used_bytes: int = 0  # of used_bytes, those of queries
    query_share_bytes: int = 0  # how many these may be


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
    instances: tuple[InstanceStatus, ...] = ()
    spaces: tuple[bytes, ...] = ()  # what tiers held at the start, then what instances described; the latest last


class Failed(Reply, frozen=True):
    """The request was not done.

    Codes: ``protocol`` (it makes no sense), ``argument`` (it names a medium that is not there), ``unauthorized`` (a
    wrong token, no hello, or an order over TCP where the server has no token), ``closed`` (the session or the store
    has ended), ``expired`` (a lease has), ``busy`` (it would hold up all others), ``invariant`` and ``internal`` (a
    fault of the store's).
    """

    code: str
    message: str


AnyRequest = (
    Hello | Lookup | Match | Inspect | Poll | Several | Release | Reserve | Commit | Abort | Download | Clear | Forget
    | Switch | Ping | Register | GetStatus | Check
)  # fmt: skip
AnyReply = Welcome | Located | Inspected | Each | Reserved | Data | Done | Status | Failed
