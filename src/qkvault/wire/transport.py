"""The contract of a transport: how a client reaches a store. One method that matters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from qkvault.wire.messages import AnyReply, AnyRequest


class PoolView(Protocol):
    """The store's memory as a client sees it."""

    capacity_bytes: int

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """The bytes ``[offset, offset + num_bytes)`` of the pool."""


class Handler(Protocol):
    """What is at the other end: a store that answers, one call at a time."""

    def open_session(self, client: str) -> int:
        """A new session's id."""

    def close_session(self, session_id: int) -> None:
        """The client has gone: end its leases. Unknown ids are ignored."""

    def call(self, session_id: int, request: AnyRequest) -> AnyReply:
        """Answer ``request``. Never raises."""


class Transport(ABC):
    """One session with a store. May be used by several threads; calls are answered one at a time."""

    pool: PoolView

    @abstractmethod
    def call(self, request: AnyRequest) -> AnyReply:
        """Ask, and wait for the answer (never longer than the transport's timeout).

        Raises Unavailable when the store cannot be reached, ProtocolError when it does not make sense.
        """

    @abstractmethod
    def wait_change(self, timeout_seconds: float) -> None:
        """Sleep until something may have changed for a lease that has chunks pending, or the time is up."""

    @abstractmethod
    def close(self) -> None:
        """End the session. Idempotent."""
