"""Names of machines, looked up by a deadline: the system's own lookup has none."""

from __future__ import annotations

import socket
import threading
import time
from typing import Final, NamedTuple


class Place(NamedTuple):
    """What a socket needs to know to connect."""

    family: int
    address: tuple[str | int | bytes, ...]


class _Lookup:
    """One question to the system, in a thread of its own: nobody can end it."""

    def __init__(self, host: str, port: int) -> None:
        self.places: list[Place] = []
        self.error: OSError | None = None
        self.is_done = threading.Event()
        threading.Thread(target=self._run, args=(host, port), name="qkvault-resolve", daemon=True).start()

    def _run(self, host: str, port: int) -> None:
        try:
            self.places = _ask(host, port)
        except (OSError, UnicodeError) as error:  # a name that no name can be is not found either
            self.error = error if isinstance(error, OSError) else OSError(str(error))
        finally:
            self.is_done.set()


_lookups: Final[dict[tuple[str, int], _Lookup]] = {}  # under way, or done and taken by nobody yet
_lock: Final = threading.Lock()


def resolve(host: str, port: int, deadline: float) -> list[Place]:
    """Where ``host`` is, the likeliest place first. Blocks until ``deadline`` (monotonic) at most; thread-safe.

    A lookup that takes longer goes on, one for each name, and the next call has its answer. Raises OSError,
    TimeoutError among them.
    """
    try:
        return _ask(host, port, socket.AI_NUMERICHOST)  # an address asks nobody
    except OSError:
        pass
    with _lock:
        lookup = _lookups.get((host, port)) or _Lookup(host, port)
        _lookups[host, port] = lookup
    if not lookup.is_done.wait(max(0.0, deadline - time.monotonic())):
        msg = f"the name {host} is not found in time"
        raise TimeoutError(msg)
    with _lock:
        if _lookups.get((host, port)) is lookup:
            del _lookups[host, port]
    if lookup.error is not None:
        raise lookup.error
    return lookup.places


def _ask(host: str, port: int, flags: int = 0) -> list[Place]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [Place(family, address) for family, _, _, _, address in found]
