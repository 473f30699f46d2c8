"""The in-process transport: the same messages, handed over as they are."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Final

from qkvault.errors import Unavailable
from qkvault.wire.messages import PROTOCOL_VERSION, AnyReply, AnyRequest, Hello, Welcome
from qkvault.wire.transport import Handler, PoolView, Transport

_LOOK_SECONDS: Final = 0.002  # at most, between two looks at a lease that has chunks pending


class InprocTransport(Transport):
    """A session with a store in this process."""

    def __init__(self, handler: Handler, pool: PoolView, wait: Callable[[float], None], client: str) -> None:
        """``wait(seconds)`` sleeps until a tier job ends, or that long."""
        self.pool = pool
        self._handler = handler
        self._wait = wait
        self._session_id: int | None = handler.open_session(client)
        welcome = self.call(Hello(PROTOCOL_VERSION, client))
        self.features = welcome.features if isinstance(welcome, Welcome) else ()

    @property
    def is_usable(self) -> bool:
        return self._session_id is not None

    def call(self, request: AnyRequest, timeout_seconds: float | None = None) -> AnyReply:  # contract inherited
        del timeout_seconds  # nothing is waited for that lasts
        if self._session_id is None:
            msg = "the session is closed"
            raise Unavailable(msg)
        if early := self._handler.prepare(request):
            wait([early.answer], early.until_seconds - time.monotonic())
        return self._handler.call(self._session_id, request)

    def wait_change(self, timeout_seconds: float) -> None:
        self._wait(min(timeout_seconds, _LOOK_SECONDS))  # the job may have ended since the last look

    def close(self) -> None:
        session_id, self._session_id = self._session_id, None
        if session_id is not None:
            self._handler.close_session(session_id)
