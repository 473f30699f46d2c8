"""The contract of a transport: how a client reaches a store. One method that matters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from qkvault.types import ChunkRef
from qkvault.wire.messages import AnyReply, AnyRequest


class PoolView(Protocol):
    """The store's memory as a client sees it."""

    capacity_bytes: int

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """The bytes ``[offset, offset + num_bytes)`` of the pool."""

    def close(self) -> None:
        """Give the mapping back. Only for one of its own, that a transport has made."""


class Early(NamedTuple):
    """What a request waits for before it is answered, and until when at the latest, on the monotonic clock."""

    answer: Future[None]
    until_seconds: float


class Handler(Protocol):
    """What is at the other end: a store that answers, one call at a time."""

    def open_session(self, client: str) -> int:
        """A new session's id."""

    def close_session(self, session_id: int) -> None:
        """The client has gone: end its leases. Unknown ids are ignored."""

    def prepare(self, request: AnyRequest) -> Early | None:
        """What is better waited for before ``call`` of ``request``, if anything. Does not block."""

    def call(self, session_id: int, request: AnyRequest) -> AnyReply:
        """Answer ``request``, with what is known. Does not block, and never raises."""

    def slots_of(self, session_id: int, lease_id: int, keys: Sequence[bytes] | None) -> list[memoryview] | None:
        """The slots that a live write lease of the session may fill, those of ``keys`` or all; None if there is none.

        They may be filled until the session ends, also when the lease runs out meanwhile.
        """

    def open_download(self, session_id: int, keys: bytes) -> tuple[int, list[memoryview]]:
        """Lease what is in RAM of ``keys``. Returns the lease, and the images: an empty view for one that is not."""

    def close_download(self, session_id: int, lease_id: int) -> AnyReply:
        """End that lease. ``Done`` if it has lived until now, else ``Failed``: other bytes may have been sent."""


class Transport(ABC):
    """One session with a store. May be used by several threads; calls are answered one at a time."""

    pool: PoolView
    features: tuple[str, ...] = ()  # what the store said that it can do besides
    epoch: int | None = None  # which life of the store this is a session with, where it is in another process

    @property
    def is_usable(self) -> bool:
        """Whether calls may succeed: not after one has failed, or after ``close``. While one is under way: yes."""
        return True

    @abstractmethod
    def call(self, request: AnyRequest, timeout_seconds: float | None = None) -> AnyReply:
        """Ask, and wait for the answer, for ``timeout_seconds`` at most; None: for the transport's own timeout.

        Data that goes along has the time besides that its size takes. Raises Unavailable when the store cannot be
        reached, ProtocolError when it does not make sense.
        """

    def fetch(self, refs: Sequence[ChunkRef], timeout_seconds: float | None = None) -> int:
        """Make ``pool`` show leased chunks, if it does not share the store's memory. Raises as ``call``.

        Returns how many bytes were sent: 0 if it does.

        Blocks for ``timeout_seconds`` at most; None: for a time that fits the size. A store that falls silent meanwhile
        is waited for no longer than for an answer.
        A chunk that is not in RAM any more has no header then, as if its slot had got another owner.
        """
        del refs, timeout_seconds
        return 0

    @abstractmethod
    def wait_change(self, timeout_seconds: float) -> None:
        """Sleep until something may have changed for a lease that has chunks pending, or the time is up."""

    def bury(self) -> None:
        """Give back what is mapped of a store that has died; it takes seconds. For another thread than the owner's."""
        return

    @abstractmethod
    def close(self) -> None:
        """End the session. Idempotent."""
