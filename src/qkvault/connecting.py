"""Sessions with a server, from settings: an address becomes a transport, and where a server is if nobody says.

Knows no store: what answers at the address is the other side's business.
"""

from __future__ import annotations

import os
import ssl
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from qkvault.address import UNIX_SCHEME, Address, parse_address
from qkvault.client import StoreClient
from qkvault.config import Config
from qkvault.errors import ConfigError
from qkvault.logs import get_logger
from qkvault.wire.messages import Welcome
from qkvault.wire.remote import RemoteTransport
from qkvault.wire.sockets import SocketTransport

SERVER_NAME: Final = "server"
_ASKED_AT: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # on this machine, what listens everywhere
_log = get_logger("connecting")


def open_client(config: Config, client: str, *, address: str | None = None) -> StoreClient:
    """A session with the store at ``address``; without it at ``address_of(config)``.

    ``client`` is a name for the server's logs. Blocks for ``config.timeout_seconds`` at most. Raises
    ConfigError for an address or certificate that cannot be used, or a token that would go to another machine in clear
    text, Unavailable if no store answers, Unwelcome, which is one, if it refuses us,
    and ProtocolError if it speaks another protocol.
    """
    return StoreClient(open_transport(config, client, address=address))


def open_transport(config: Config, client: str, *, address: str | None = None) -> SocketTransport:
    """The same, one layer below."""
    chosen = address or address_of(config)
    where = parse_address(chosen)
    if where.is_unix:
        return SocketTransport(chosen, client, timeout_seconds=config.timeout_seconds)
    tls = tls_for(config, where)
    return RemoteTransport(chosen, client, timeout_seconds=config.timeout_seconds, token=config.token, tls=tls)


def engine_sessions(config: Config, client: str) -> Callable[[], StoreClient]:
    """Opens sessions of an engine, as ``open_client`` does. What of the server's settings does not fit is told once."""
    told: set[str] = set()

    def connect() -> StoreClient:
        transport = open_transport(config, client)
        for misfit in set(misfits(config, transport.welcome)) - told:
            told.add(misfit)
            _log.warning("server_does_not_fit", address=transport.address, why=misfit)
        return StoreClient(transport)

    return connect


def misfits(config: Config, welcome: Welcome) -> Iterator[str]:
    """What of the server's settings does not fit those of an engine here, what follows, and what to do."""
    for name in ("chunk_size", "hash_algorithm"):
        ours, theirs = getattr(config, name), getattr(welcome, name)
        if theirs and theirs != ours:
            yield (
                f"{name}={ours} here, {theirs} at the server: engines with one of them find nothing that engines with "
                "the other have stored; give all the same"
            )
    if 0 < welcome.lease_seconds < config.load_deadline_seconds:
        yield (
            f"load_deadline_seconds={config.load_deadline_seconds:g} here, lease_seconds={welcome.lease_seconds:g} at "
            "the server: chunks could leave while they are being loaded; give the server more or the engine less"
        )


def tls_for(config: Config, where: Address) -> ssl.SSLContext | None:
    """What a client checks the server at ``where`` by; None: they speak without TLS.

    Raises ConfigError if ``tls_ca_path`` is no certificate, or a token would go to another machine in clear text.
    """
    if where.is_unix:
        return None
    if config.tls_ca_path is None:
        if config.token and not (where.is_local or config.insecure):
            msg = (
                f"the token would go to {where} in clear text: set tls_ca_path to the certificate of that server, or "
                "set insecure if all of that network may know the token"
            )
            raise ConfigError(msg)
        return None
    try:
        return ssl.create_default_context(cafile=config.tls_ca_path)
    except OSError as error:  # SSLError is one
        msg = f"tls_ca_path={config.tls_ca_path!r} cannot be used: {error}"
        raise ConfigError(msg) from error


def address_of(config: Config) -> str:
    """Where the store of these settings is: ``address``, or where a server with the same settings listens.

    Raises ConfigError.
    """
    if config.address is not None:
        return config.address
    places = [place for place in listen_addresses(config) if place.is_unix or place.port]
    places.sort(key=lambda place: not place.is_local)
    if not places:
        return default_address()
    return str(places[0]._replace(host=_ASKED_AT.get(places[0].host, places[0].host)))


def listen_addresses(config: Config) -> list[Address]:
    """What ``listen`` names. Raises ConfigError."""
    return [parse_address(text.strip()) for text in config.listen.split(",") if text.strip()]


def default_address() -> str:
    """Where a server listens that was told nothing, and where its clients look for it. Raises ConfigError."""
    return socket_address(SERVER_NAME)


def socket_address(name: str) -> str:
    """A Unix socket in the runtime directory: the same in all processes of this user.

    Raises ConfigError if others than this user could put something there.
    """
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    folder = base / f"qkvault-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        msg = f"{folder} cannot be made: {error}"
        raise ConfigError(msg) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        msg = f"{folder} is not a folder that only this user can write to"
        raise ConfigError(msg)
    return f"{UNIX_SCHEME}{folder}/{name}.sock"
