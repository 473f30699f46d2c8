"""Where a store is reached: ``unix:///path`` or ``tcp://host:port``."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from typing import Final, NamedTuple

from qkvault.errors import ConfigError

UNIX_SCHEME: Final = "unix://"
TCP_SCHEME: Final = "tcp://"
EXPECTED: Final = "expected unix:///absolute/path of at most 107 bytes, or tcp://host:port"
_TCP: Final = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})")
_UNIX_PATH_BYTES: Final = 107  # of sockaddr_un, without its terminating zero


class Address(NamedTuple):
    """A parsed address. ``path`` is for a Unix socket and empty for TCP, ``host`` and ``port`` the other way round."""

    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def is_unix(self) -> bool:
        return bool(self.path)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.is_unix or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name: it may stand for anything
            return False

    def __str__(self) -> str:
        """As it was written."""
        if self.is_unix:
            return f"{UNIX_SCHEME}{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{TCP_SCHEME}{host}:{self.port}"


def is_local_endpoint(endpoint: str) -> bool:
    """Whether no other machine reaches a ZeroMQ endpoint: a file, of this process, on loopback, or none at all."""
    scheme, separator, rest = endpoint.partition("://")
    if f"{scheme}://" == TCP_SCHEME:
        return Address(host=rest.rpartition(":")[0].strip("[]")).is_local
    return not separator or scheme in ("ipc", "inproc")


def parse_address(text: str) -> Address:
    """Read an address. Port 0 is for a server that lets the system choose. Raises ConfigError."""
    if text.startswith(UNIX_SCHEME):
        path = text.removeprefix(UNIX_SCHEME)
        if path.startswith("/") and len(os.fsencode(path)) <= _UNIX_PATH_BYTES:
            return Address(path=path)
    elif (match := _TCP.fullmatch(text)) is not None and int(match[2]) < 1 << 16:
        with contextlib.suppress(UnicodeError):  # a name that none can be: the system would not even look for it
            match[1].encode("idna")
            return Address(host=match[1].strip("[]"), port=int(match[2]))
    msg = f"address {text!r}: {EXPECTED}"
    raise ConfigError(msg)
