"""The HTTP server: a thread with an event loop over a socket of ours. What the pages say is in ``app.py``.

Loaded only when HTTP is asked for.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from typing import TYPE_CHECKING, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from qkvault.address import TCP_SCHEME, Address
from qkvault.errors import ConfigError
from qkvault.server.app import Access, make_app
from qkvault.server.places import server_tls
from qkvault.wire.listen import Listener

if TYPE_CHECKING:
    from qkvault.server.server import Server

_MAX_CONNECTIONS: Final = 64  # of operators; the descriptors are for engines
_ASK_SECONDS: Final = 10.0  # that a request's head may take, after the first connect with the handshake of TLS
_IDLE_SECONDS: Final = 5
_END_SECONDS: Final = 2
_LOOK_SECONDS: Final = 0.005


class HttpServer:
    """Answers operators at one address. A Unix socket's file has mode 0600."""

    def __init__(self, server: Server, place: Address) -> None:
        """Listen and start. Raises ConfigError if something else answers, or lies, at ``place``."""
        config = server.loaded.config
        self._listener = Listener(place)
        tls = None if place.is_unix else server_tls(config)
        where = str(self._listener.address)
        self.address = where if place.is_unix else f"http{'s' * (tls is not None)}://{where.removeprefix(TCP_SCHEME)}"
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                make_app(server, Access(place, config.token)),
                loop="asyncio",
                http=type("_Patient", (_Patient,), {"tls": tls}),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",  # faults of pages are logged by ``app``, those of clients are theirs
                access_log=False,
                server_header=False,
                backlog=_MAX_CONNECTIONS,  # so many are accepted before the first is counted
                timeout_keep_alive=_IDLE_SECONDS,
                timeout_graceful_shutdown=_END_SECONDS,
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
        self._listener.withdraw()  # the loop closes the socket
        self._uvicorn.should_exit = True
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        self._uvicorn.run(sockets=[self._listener.socket])  # off the main thread it leaves signals alone


class _Patient(H11Protocol):
    """One connection; cut off if it takes too long to ask, or is one too many, with or without TLS.

    TLS is begun here: a loop that listens with TLS tells of a connection when its handshake is over, and not before.
    """

    tls: ssl.SSLContext | None = None  # of the server
    _handshake: asyncio.Task[None] | None = None
    _early: bytes | None = None  # what came through TLS before we had its transport; None if we have it
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > _MAX_CONNECTIONS:
            transport.abort()
            return
        self._watch()
        if self.tls is not None:
            self._early = b""
            self._handshake = self.loop.create_task(self._start_tls(self.tls, transport))

    def data_received(self, data: bytes) -> None:
        if self._early is not None:
            self._early += data
            return
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    async def _start_tls(self, tls: ssl.SSLContext, plain: asyncio.Transport) -> None:
        self._early = b""  # nothing that came in the clear counts as said through TLS
        try:
            secured = await self.loop.start_tls(plain, self, tls, server_side=True, ssl_handshake_timeout=_ASK_SECONDS)
        except OSError as error:  # no TLS, or it has gone
            self.connection_lost(error)
            return
        if secured is None or self not in self.connections:  # it has gone just then
            self.connection_lost(None)
            return
        super().connection_made(secured)
        early, self._early = self._early, None
        if early:
            self.data_received(early)

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()  # the whole head has come
        elif self._timer is None:
            self._timer = self.loop.call_later(_ASK_SECONDS, self._cut_off)

    def _cut_off(self) -> None:
        self.transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
