"""Where a server answers and whether it may, by its settings, and what of them no server starts with."""

from __future__ import annotations

import socket
import ssl
from typing import Final, NoReturn

from qkvault.address import TCP_SCHEME, UNIX_SCHEME, Address, parse_address
from qkvault.config import Config
from qkvault.connecting import address_of, listen_addresses
from qkvault.embedded import require_events
from qkvault.errors import ConfigError
from qkvault.policies import POLICIES
from qkvault.tokens import load_scheme

_PROBE_SECONDS: Final = 0.2


def require_servable(config: Config) -> None:
    """Raise ConfigError for settings that no server starts with, as this user on this machine.

    Reads the files that they name, and imports what they choose; makes nothing and asks nobody. Whether there is
    memory and whether its places are free a server asks when it starts.
    """
    http = http_place(config)
    # An engine's `address` may be another machine's: whether a server may listen there it says when it starts.
    places = store_places(config) if config.listen else [parse_address(config.address)] if config.address else []
    require_sound(config, [*places, *([] if http is None else [http])])
    server_tls(config)
    if config.hash_algorithm == "builtin":  # another package may be missing here: only engines hash
        load_scheme(config.hash_algorithm, shared=True)
    POLICIES.load(config.cache_policy)
    if config.disk_path is not None:
        from qkvault.tiers.disk_files import require_directory  # only when it is chosen

        require_directory(config.disk_path)
    require_events(config)
    if http is not None:
        _require_http()


def store_places(config: Config) -> list[Address]:
    """The addresses of the store itself: those of ``listen``, else ``address``, else the default.

    Raises ConfigError for one that cannot be read, or that other machines reach without TLS and a token.
    """
    places = listen_addresses(config) or [parse_address(address_of(config))]
    for place in places:
        if places.count(place) > 1 and (place.is_unix or place.port):
            msg = f"listen names {place} twice"
            raise ConfigError(msg)
        _require_safe(config, place, "listen")
    return places


def http_place(config: Config) -> Address | None:
    """The address of the HTTP server; None if there is to be none. Raises ConfigError as ``store_places``."""
    if not config.http:
        return None
    is_unix = config.http.startswith(UNIX_SCHEME)
    try:
        place = parse_address(config.http if is_unix else TCP_SCHEME + config.http)
    except ConfigError as error:
        msg = f"http={config.http!r}: expected host:port, or unix:///absolute/path of at most 107 bytes"
        raise ConfigError(msg) from error
    _require_safe(config, place, "http")
    return place


def server_tls(config: Config) -> ssl.SSLContext | None:
    """What a server of TCP proves itself by; None without a certificate. Raises ConfigError if it cannot be used."""
    if config.tls_cert_path is None or config.tls_key_path is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert_path, config.tls_key_path, password=_refuse_password)
    except OSError as error:  # SSLError is one
        msg = f"tls_cert_path={config.tls_cert_path!r} with tls_key_path={config.tls_key_path!r}: {error}"
        raise ConfigError(msg) from error
    return context


def require_sound(config: Config, places: list[Address]) -> None:
    """Raise ConfigError for settings of TLS that contradict each other or have no effect at ``places``."""
    if (config.tls_cert_path is None) != (config.tls_key_path is None):
        given, missing = ("cert", "key") if config.tls_key_path is None else ("key", "cert")
        msg = f"tls_{given}_path is set, and tls_{missing}_path is not: TLS needs both"
        raise ConfigError(msg)
    if config.tls_cert_path is not None and all(place.is_unix for place in places):
        msg = "tls_cert_path is set, and nothing listens on TCP: add a tcp:// address to listen, or remove it"
        raise ConfigError(msg)


def require_free(place: Address) -> None:
    """Raise ConfigError if somebody answers there. Asked before memory is taken; listening itself asks again."""
    if not place.is_unix and place.port == 0:
        return
    family = socket.AF_UNIX if place.is_unix else socket.AF_INET6 if ":" in place.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(place.path if place.is_unix else (place.host, place.port))
        except OSError:
            return
    msg = f"another server answers at {place}: stop it, or listen elsewhere"
    raise ConfigError(msg)


def _require_safe(config: Config, place: Address, setting: str) -> None:
    if place.is_local or config.insecure:
        return
    wanted = ("tls_cert_path", "tls_key_path", "token")
    if missing := [name for name in wanted if not getattr(config, name)]:
        msg = (
            f"{setting} at {place}: other machines reach it, and {' and '.join(missing)} is not set. Set them, listen "
            "at 127.0.0.1 or at unix:///path, or set insecure if all of that network may use the cache"
        )
        raise ConfigError(msg)


def _require_http() -> None:
    try:
        import starlette  # noqa: F401  # only whether it is there
        import uvicorn  # noqa: F401  # likewise
    except ImportError as error:
        msg = f"http is set, and {error.name} is not installed: pip install 'qkvault[server]', or remove http"
        raise ConfigError(msg) from error


def _refuse_password() -> NoReturn:
    msg = "tls_key_path is encrypted: give the server a key without a password"
    raise ConfigError(msg)
