"""Link: a session with a store that may go away and come back.

Whoever uses it does not wait for a store that is not there: but for the first attempt ``session()`` answers at once,
and a thread of the link's own tries to connect again. A session that has failed is replaced when its owner has said
that nothing of his is being copied any more: the store gives a session's slots to others when it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from qkvault.client import StoreClient
from qkvault.errors import QKVaultError, Unavailable
from qkvault.logs import RateLimited, get_logger
from qkvault.wire.messages import Instance

_FIRST_PAUSE_SECONDS: Final = 0.05
_MAX_PAUSE_SECONDS: Final = 1.0  # a store that is back is found within that time
_log = get_logger("link")
_limited = RateLimited(_log)


class Link:
    """Sessions with one store, one after the other. ``session`` and ``lost`` are for one thread: the owner's."""

    def __init__(
        self,
        connect: Callable[[], StoreClient],
        instance: Instance | None = None,
        *,
        ping_seconds: float = 0.0,
    ) -> None:
        """``connect`` opens a session or raises one of our errors; it is called by this and by another thread.

        ``instance`` registers every session. ``ping_seconds`` is the time between signs of life; 0: none are given.
        """
        self._connect = connect
        self._instance = instance
        self._ping_seconds = ping_seconds
        self._lock = threading.Lock()  # guards all that follows
        self._client: StoreClient | None = None
        self.num_sessions = 0  # that there have been; to be read only
        self._was_tried = False
        self._is_closed = False
        self._problem = ""
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()

    @property
    def is_up(self) -> bool:
        """Whether there is a session, as far as is known."""
        return self._client is not None

    def session(self) -> StoreClient:
        """The session. Blocks only at the first call, which connects. Raises Unavailable while there is none."""
        client = self._client
        if client is None and not self._was_tried:
            self._was_tried = True
            self._try()
            if not self.is_up or self._ping_seconds:
                self._look()
            client = self._client
        if client is None:
            msg = f"the store is away: {self._problem}"
            raise Unavailable(msg)
        return client

    def lost(self, error: Exception) -> None:
        """The session has failed, and nothing of its owner's is being copied: end it, and look for a new one."""
        with self._lock:
            client, self._client = self._client, None
        if client is None:
            return
        self._problem = str(error)
        _limited.warning("store_lost", error=str(error))
        with suppress(QKVaultError):
            client.close()
        self._look()

    def close(self) -> None:
        """End the session, and stop looking. Idempotent."""
        with self._lock:
            self._is_closed = True
            client, self._client = self._client, None
        self._wake.set()
        if client is not None:
            client.close()
        if self._thread is not None:
            self._thread.join()

    def _look(self) -> None:
        self._wake.set()
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._run, name="qkvault-link", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        pause_seconds = _FIRST_PAUSE_SECONDS
        while not self._is_closed:
            try:
                if self.is_up:
                    pause_seconds = _FIRST_PAUSE_SECONDS
                    self._ping()
                else:
                    self._try()
                    pause_seconds = min(2 * pause_seconds, _MAX_PAUSE_SECONDS)
            except Exception:  # thread top: the next attempt may go better
                _log.exception("link_failed")
            self._wake.wait((self._ping_seconds or None) if self.is_up else pause_seconds)
            self._wake.clear()

    def _try(self) -> None:
        client = None
        try:
            client = self._connect()
            if self._instance is not None:
                client.register(self._instance)
        except QKVaultError as error:
            self._problem = str(error)
            _limited.warning("store_not_reached", error=str(error))
            if client is not None:
                client.close()
            return
        with self._lock:
            is_wanted = not self._is_closed
            if is_wanted:
                self._client = client
                self.num_sessions += 1
        if is_wanted:
            _log.debug("store_reached", pool_bytes=client.pool.capacity_bytes)
        else:
            client.close()

    def _ping(self) -> None:
        # What fails here the owner finds out with his next call: only he knows when to end the session.
        client = self._client
        if client is None or not self._ping_seconds:
            return
        with suppress(QKVaultError):
            if not client.ping() and self._instance is not None:
                client.register(self._instance)
