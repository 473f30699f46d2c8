"""How the halves of an engine reach their store: a server, or the store in the scheduler's process."""

from __future__ import annotations

from typing import Final

from qkvault import autostart, embedded
from qkvault.address import parse_address
from qkvault.client import StoreClient
from qkvault.config import Config
from qkvault.connecting import engine_sessions, open_client, tls_for
from qkvault.link import Link
from qkvault.wire.messages import Instance

_PING_SECONDS: Final = 5.0


def open_link(config: Config, instance: Instance, store: embedded.EmbeddedStore | None) -> Link:
    """Sessions of ``instance``; ``store`` is the engine's own, where it is in this process.

    With a server the first one is opened here, so that the engine is on its register and no request waits for it.
    Blocks for ``config.timeout_seconds`` at most if none answers, and longer only where it starts one. Raises
    ConfigError if it cannot be started, and for settings that ``open_client`` refuses.
    """
    name = f"vllm-{instance.role}"
    if config.address is None:
        return Link(lambda: _connect_embedded(config, instance.instance_id, store, name), instance)
    tls_for(config, parse_address(config.address))
    revive = None
    if config.autostart:
        autostart.ensure_server(config)
        revive = autostart.Reviver(config)
    link = Link(
        engine_sessions(config, name),
        instance,
        ping_seconds=_PING_SECONDS,
        timeout_seconds=config.timeout_seconds,
        revive=revive,
    )
    link.start()
    return link


def _connect_embedded(config: Config, instance_id: str, store: embedded.EmbeddedStore | None, name: str) -> StoreClient:
    found = store or embedded.find(instance_id)
    if found is not None:
        return found.connect(name)
    return open_client(config, name, address=embedded.socket_address(instance_id))
