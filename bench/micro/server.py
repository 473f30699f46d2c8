"""The other process of the socket bench: a store that answers at a Unix socket, and beside it a bare echo.

python -m bench.micro.server ADDRESS ECHO_PATH RAM_BYTES
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading

from bench import orders
from qkvault import embedded
from qkvault.config import Config

ECHO_BYTES = 100


def echo(listener: socket.socket) -> None:
    """Send back what one client sends, until it goes."""
    connection, _ = listener.accept()
    with connection, contextlib.suppress(OSError):
        while data := connection.recv(ECHO_BYTES):
            connection.sendall(data)


def main() -> None:
    """Serve until stdin ends."""
    address, echo_path, ram_bytes = sys.argv[1:]
    store = embedded.acquire(Config(ram_bytes=int(ram_bytes), instance_id="bench"), shared=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(echo_path)
    listener.listen(1)

    def begin() -> None:
        store.serve(address)
        threading.Thread(target=echo, args=(listener,), daemon=True).start()

    try:
        orders.serve({}, begin)
    finally:
        listener.close()
        embedded.release(store)


if __name__ == "__main__":
    main()
