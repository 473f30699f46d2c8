"""Server: one store, answered at every address that the settings name, and over HTTP if they ask for it.

Knows no signals and no process (``process.py``): it can as well run in a test.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from qkvault.client import StoreClient
from qkvault.config import Loaded
from qkvault.embedded import open_driver, publish
from qkvault.server.places import http_place, require_free, require_servable, server_tls, store_places
from qkvault.wire.inproc import InprocTransport
from qkvault.wire.server import SocketServer

if TYPE_CHECKING:
    from qkvault.publisher import Publisher
    from qkvault.server.http import HttpServer


class Server:
    """A store that other processes reach. Running once it is made."""

    def __init__(self, loaded: Loaded) -> None:
        """Build the store and answer. ``loaded`` are the settings, with their sources for ``/config``.

        Takes as long as pre-faulting the pool does, and some 10 ms. Raises ConfigError, leaving nothing behind.
        """
        self.loaded = loaded
        config = loaded.config
        require_servable(config)
        places, http, tls = store_places(config), http_place(config), server_tls(config)
        for place in [*places, *([] if http is None else [http])]:
            require_free(place)
        self.epoch = time.time_ns()
        self.started_seconds = time.time()
        self.is_closing = False
        self.driver = open_driver(config, shared=True)
        self._sockets: list[SocketServer] = []
        self._http: HttpServer | None = None
        self._publisher: Publisher | None = None
        try:
            self._publisher = publish(config, self.driver)
            for place in places:
                self._sockets.append(
                    SocketServer(
                        self.driver, self.driver.pool, str(place), epoch=self.epoch, token=config.token, tls=tls
                    )
                )
            if http is not None:
                from qkvault.server.http import HttpServer

                self._http = HttpServer(self, http)
        except BaseException:
            self.close(drain_seconds=0.0)
            raise

    @property
    def addresses(self) -> list[str]:
        """Where the store answers, with the ports that the system chose."""
        return [server.address for server in self._sockets]

    @property
    def http_address(self) -> str:
        """Where HTTP is spoken; empty if nowhere."""
        return "" if self._http is None else self._http.address

    @property
    def dead_threads(self) -> list[str]:
        """Names of threads that have to be alive, and have ended by a fault of ours."""
        threads = [*self.driver.threads, *(each.thread for each in self._sockets)]
        if self._publisher is not None:
            threads.append(self._publisher.thread)
        return [thread.name for thread in threads if not thread.is_alive()]

    def connect(self, client: str) -> StoreClient:
        return StoreClient(InprocTransport(self.driver, self.driver.pool, self.driver.wait_change, client))

    def close(self, *, drain_seconds: float | None = None) -> int:
        """Stop answering: what clients have not committed is void. Then finish writing to disk.

        That takes ``drain_seconds`` at most; None: as the settings say. Returns how many chunks were not written or not
        removed. Idempotent. Removes the sockets' files.
        """
        config = self.loaded.config
        seconds = config.drain_seconds if drain_seconds is None else drain_seconds
        self.is_closing = True
        for server in self._sockets:
            server.close()
        if self._publisher is not None:
            self._publisher.close()
        num_lost = self.driver.close(drain_seconds=seconds, purge=not config.disk_keep)
        if self._http is not None:  # last: until then /healthz says that we are stopping
            self._http.close()
        return num_lost
