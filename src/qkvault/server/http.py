"""The HTTP server: a thread with an event loop over a socket of ours. What the pages say is in ``app.py``.

Loaded only when HTTP is asked for.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from qkvault.address import TCP_SCHEME, Address
from qkvault.errors import ConfigError
from qkvault.server.app import Access, make_app
from qkvault.wire.listen import Listener

if TYPE_CHECKING:
    from qkvault.server.server import Server

_MAX_CONNECTIONS: Final = 64  # of operators; the descriptors are for engines
_ASK_SECONDS: Final = 10.0  # that a request's head may take
_IDLE_SECONDS: Final = 5
_END_SECONDS: Final = 2
_LOOK_SECONDS: Final = 0.005


class HttpServer:
    """Answers operators at one address. A Unix socket's file has mode 0600."""

    def __init__(self, server: Server, place: Address) -> None:
        """Listen and start. Raises ConfigError if something else answers, or lies, at ``place``."""
        config = server.loaded.config
        self._listener = Listener(place)
        has_tls = config.tls_cert_path is not None and not place.is_unix
        where = str(self._listener.address)
        self.address = where if place.is_unix else f"http{'s' * has_tls}://{where.removeprefix(TCP_SCHEME)}"
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                make_app(server, Access(place, config.token)),
                loop="asyncio",
                http=_Patient,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",  # faults of pages are logged by ``app``, those of clients are theirs
                access_log=False,
                server_header=False,
                timeout_keep_alive=_IDLE_SECONDS,
                timeout_graceful_shutdown=_END_SECONDS,
                ssl_certfile=config.tls_cert_path if has_tls else None,
                ssl_keyfile=config.tls_key_path if has_tls else None,
            )
        )
        self._thread = threading.Thread(target=self._run, name="qkvault-http", daemon=True)
        self._thread.start()
        while not self._uvicorn.started:
            if not self._thread.is_alive():
                self._listener.close()
                msg = f"the HTTP server did not start at {place}"
                raise ConfigError(msg)
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """Stop answering, remove the socket file. Idempotent."""
        self._uvicorn.should_exit = True
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        self._uvicorn.run(sockets=[self._listener.socket])  # off the main thread it leaves signals alone


class _Patient(H11Protocol):
    """One connection; cut off if it takes too long to ask, or is one too many."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > _MAX_CONNECTIONS:
            transport.abort()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()  # the whole head has come
        elif self._timer is None:
            self._timer = self.loop.call_later(_ASK_SECONDS, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
