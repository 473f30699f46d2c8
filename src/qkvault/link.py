"""Link: a session with a store that may go away and come back.

Whoever uses it does not wait for a store that is not there: but for the first attempt ``session()`` answers at once,
and a thread of the link's own gives signs of life and connects again. That thread never ends the owner's session: the
store gives a session's slots to others when it ends, so it is replaced when its owner has said that nothing of his is
being copied any more. Until then its successor, open and registered, waits. A store that says hello and does not answer
the owner's calls in time is left alone for a while, longer each time (docs/decisions/0019).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from qkvault.client import StoreClient
from qkvault.errors import DeadlineExceeded, QKVaultError, Unavailable
from qkvault.logs import RateLimited, get_logger
from qkvault.wire.messages import Instance

_FIRST_PAUSE_SECONDS: Final = 0.05
_MAX_PAUSE_SECONDS: Final = 1.0  # a store that is back is found within that time
_FIRST_REST_SECONDS: Final = 0.5  # after a call of the owner's that was not answered in time; doubled with the next one
_MAX_REST_SECONDS: Final = 8.0
_FORGIVEN_SECONDS: Final = 60.0  # without such a call, and the next rest is the first again
_log = get_logger("link")
_limited = RateLimited(_log)


class Link:
    """Sessions with one store, one after the other. All but ``is_up`` is for one thread: the owner's."""

    def __init__(
        self,
        connect: Callable[[], StoreClient],
        instance: Instance | None = None,
        *,
        ping_seconds: float = 0.0,
        timeout_seconds: float = 1.0,
        revive: Callable[[Callable[[], bool]], None] | None = None,
    ) -> None:
        """``connect`` opens a session or raises one of our errors; it is called by this and by another thread.

        ``instance`` registers every session. ``ping_seconds`` is the time between signs of life; 0: none are given.
        ``timeout_seconds`` is for an attempt: what ``connect`` takes of it is not left to register. ``revive(is_over)``
        is called by the link's own thread after an attempt has failed, and ends soon when ``is_over()``.
        """
        self._connect = connect
        self._instance = instance
        self._ping_seconds = ping_seconds
        self._timeout_seconds = timeout_seconds
        self._revive = revive
        self._lock = threading.Lock()  # guards all that follows
        self._client: StoreClient | None = None  # the owner's
        self._successor: StoreClient | None = None  # only while there is one to succeed
        self.num_sessions = 0  # that the owner has had; to be read only
        self._was_tried = False
        self._is_closed = False
        self._problem = ""
        self._epoch: int | None = None  # of the last session: another one is another life of the store
        self._rest_seconds = 0.0  # the last rest; 0: this life of the store has always answered in time
        self._rests_until = 0.0  # on the monotonic clock
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()

    @property
    def is_up(self) -> bool:
        """Whether there is a session, as far as is known."""
        return self._client is not None

    @property
    def is_superseded(self) -> bool:
        """Whether the session has failed, or its store was restarted, and another is ready: ``lost`` changes to it."""
        return self._successor is not None

    def start(self) -> None:
        """Connect and register now, so that the first ``session()`` does not. Blocks as that would; raises nothing."""
        with suppress(Unavailable):
            self.session()

    def session(self) -> StoreClient:
        """The session. Blocks only at the first call, which connects. Raises Unavailable while there is none."""
        client = self._client
        if client is None and not self._was_tried:
            self._was_tried = True
            if not self._try() or self._ping_seconds:
                self._look()
            client = self._client
        if client is None:
            msg = f"the store is away: {self._problem}"
            raise Unavailable(msg)
        return client

    def lost(self, error: Exception) -> None:
        """The session has failed, and nothing of its owner's is being copied: end it, and go on with another."""
        with self._lock:
            client, self._client, self._successor = self._client, self._successor, None
            self.num_sessions += self._client is not None
            if client is not None and isinstance(error, DeadlineExceeded):
                now = time.monotonic()
                before_seconds = self._rest_seconds if now - self._rests_until < _FORGIVEN_SECONDS else 0.0
                self._rest_seconds = min(max(2 * before_seconds, _FIRST_REST_SECONDS), _MAX_REST_SECONDS)
                self._rests_until = now + self._rest_seconds
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
            clients = self._client, self._successor
            self._client = self._successor = None
        self._wake.set()
        for client in clients:
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
            is_well = False
            try:
                is_well = self._ping() or self._try()
                self._bury()
                if not is_well and self._revive is not None:
                    self._revive(lambda: self._is_closed)
            except Exception:  # thread top: the next attempt may go better
                _log.exception("link_failed")
            pause_seconds = _FIRST_PAUSE_SECONDS if is_well else min(2 * pause_seconds, _MAX_PAUSE_SECONDS)
            self._wake.wait((self._ping_seconds or None) if is_well else pause_seconds)
            self._wake.clear()

    def _try(self) -> bool:
        # Whether a session was opened and registered: the owner's, or its successor.
        client, deadline = None, time.monotonic() + self._timeout_seconds
        try:
            client = self._connect()
            self._require_answers(client)
            if self._instance is not None:
                client.register(self._instance, deadline - time.monotonic())
        except QKVaultError as error:
            self._problem = str(error)
            _limited.warning("store_not_reached", error=str(error))
            if client is not None:
                client.close()
            return False
        with self._lock:
            if self._is_closed:
                is_spare = True
            elif self._client is None:
                is_spare, self._client = False, client
                self.num_sessions += 1
            else:
                is_spare, self._successor = self._successor is not None, self._successor or client
        if is_spare:
            client.close()
        _log.debug("store_reached", pool_bytes=client.pool.capacity_bytes)
        return True

    def _require_answers(self, client: StoreClient) -> None:
        # Where the owner's calls were not, the rest has to be over, and such calls have to be answered to us.
        with self._lock:
            if client.epoch != self._epoch:
                self._epoch, self._rest_seconds = client.epoch, 0.0
            if not self._rest_seconds:
                return
            left_seconds = self._rests_until - time.monotonic()
        if left_seconds > 0:
            msg = f"it did not answer in time, and is left alone for {left_seconds:.1f} s"
            raise Unavailable(msg)
        client.rehearse()

    def _bury(self) -> None:
        # An owner who has nothing to do keeps the session of a store that has died; its memory is wanted elsewhere.
        client = self._client
        if client is not None and not client.is_usable:
            client.bury()

    def _ping(self) -> bool:
        # Whether the latest session is well. One that has failed is its owner's to end, unless it is not his yet.
        client = self._successor or self._client
        if client is None:
            return False
        with suppress(QKVaultError):
            if self._ping_seconds and not client.ping() and self._instance is not None:
                client.register(self._instance)
        if client.is_usable:
            return True
        with self._lock:
            was_ours = self._successor is client
            if was_ours:
                self._successor = None
        if was_ours:
            client.close()
        return False
