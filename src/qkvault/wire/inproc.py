"""The in-process transport: the same messages, handed over as they are."""

from __future__ import annotations

from collections.abc import Callable

from qkvault.errors import Unavailable
from qkvault.wire.messages import AnyReply, AnyRequest
from qkvault.wire.transport import Handler, PoolView, Transport


class InprocTransport(Transport):
    """A session with a store in this process."""

    def __init__(self, handler: Handler, pool: PoolView, wait: Callable[[float], None], client: str) -> None:
        """``wait(seconds)`` sleeps until a tier job has ended, or that long."""
        self.pool = pool
        self._handler = handler
        self._wait = wait
        self._session_id: int | None = handler.open_session(client)

    def call(self, request: AnyRequest) -> AnyReply:  # contract inherited
        if self._session_id is None:
            msg = "the session is closed"
            raise Unavailable(msg)
        return self._handler.call(self._session_id, request)

    def wait_change(self, timeout_seconds: float) -> None:
        self._wait(timeout_seconds)

    def close(self) -> None:
        session_id, self._session_id = self._session_id, None
        if session_id is not None:
            self._handler.close_session(session_id)
