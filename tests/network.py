"""A network between clients and a server of TCP that becomes slow, or loses some questions and no others."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from qkvault.wire import codec
from qkvault.wire.messages import AnyRequest

DRIP_SECONDS = 0.02


class Network:
    """Passes frames on. What ``loses`` says yes to never arrives; ``is_slow``: long answers come a few bytes at a time.

    To be closed after the clients and before the server.
    """

    def __init__(self, address: str) -> None:
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.is_slow = False
        self.loses: Callable[[AnyRequest], bool] = lambda _: False
        self._ends = [self._listener]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        self.is_slow = False
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()

    def _start(self, run: Callable[..., None], *args: socket.socket) -> None:
        self._threads.append(threading.Thread(target=run, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._ends.append(client)
                try:
                    server = socket.create_connection(self._target)
                except ConnectionRefusedError:  # it is away: so are we
                    client.shutdown(socket.SHUT_RDWR)
                    continue
                self._ends.append(server)
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._start(self._ask, client, server)
                self._start(self._answer, server, client)

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while head := _exactly(client, codec.HEAD.size):
                body = _exactly(client, codec.decode_head(head).body_bytes)
                data = _exactly(client, codec.decode_head(head).data_bytes)
                if not self.loses(codec.decode_request(body)):
                    server.sendall(head + body + data)
        _end(client, server)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 16):
                while data and self.is_slow and len(data) > 1000:
                    client.sendall(data[:10])
                    data = data[10:]
                    time.sleep(DRIP_SECONDS)
                client.sendall(data)
        _end(client, server)


def _exactly(end: socket.socket, count: int) -> bytes:
    """So many bytes; none if the connection has ended."""
    data = bytearray()
    while len(data) < count:
        got = end.recv(min(1 << 16, count - len(data)))
        if not got:
            return b""
        data += got
    return bytes(data)


def _end(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
