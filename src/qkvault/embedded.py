"""A store inside this process: built from a Config, shared by everything here that names the same instance.

``serve`` also opens it to other processes of the machine (a serving engine's workers) over a Unix socket.
"""

from __future__ import annotations

import re
import threading
import time
from typing import TYPE_CHECKING, Final

import qkvault
from qkvault.address import is_local_endpoint
from qkvault.client import StoreClient
from qkvault.config import Config
from qkvault.connecting import socket_address
from qkvault.errors import ConfigError
from qkvault.policies import POLICIES
from qkvault.pool import Pool
from qkvault.store.book import TierBook
from qkvault.store.driver import StoreDriver, Traits
from qkvault.store.manager import StorageManager
from qkvault.store.residents import Residents
from qkvault.tiers.base import Tier
from qkvault.types import TRANSFER_QUERY, CacheKind, Medium
from qkvault.wire.inproc import InprocTransport
from qkvault.wire.server import SocketServer

if TYPE_CHECKING:
    from qkvault.publisher import Publisher

__all__ = ["EmbeddedStore", "acquire", "find", "open_driver", "publish", "release", "require_events", "socket_address"]

_ENDPOINT: Final = re.compile(r"(ipc|inproc)://.+|tcp://.+:([0-9]{1,5}|\*)")  # of ZeroMQ
_lock: Final = threading.Lock()
_stores: Final[dict[str, EmbeddedStore]] = {}  # by instance id


class EmbeddedStore:
    """A running store and, once somebody asks for it, the socket other processes reach it by."""

    def __init__(self, config: Config, *, shared: bool = False) -> None:
        """Build pool, tiers and driver. ``shared`` memory can be mapped by other processes (``serve``).

        Raises ConfigError.
        """
        self.config = config
        self.is_shared = shared
        self.epoch = time.time_ns()
        self.driver = open_driver(config, shared=shared)
        self._server: SocketServer | None = None
        self.num_users = 0
        try:
            self._publisher = publish(config, self.driver)
        except BaseException:
            self.driver.close(drain_seconds=0.0)
            raise

    def connect(self, client: str) -> StoreClient:
        """A new session, in this process."""
        return StoreClient(InprocTransport(self.driver, self.driver.pool, self.driver.wait_change, client))

    def serve(self, address: str) -> None:
        """Answer other processes at ``unix://...`` too. Raises ConfigError if that cannot be, or is done already."""
        if self._server is not None:
            msg = f"the store of {self.config.instance_id!r} is served already"
            raise ConfigError(msg)
        self._server = SocketServer(self.driver, self.driver.pool, address, epoch=self.epoch)

    def close(self) -> None:
        """End all sessions, finish what was begun, give back memory and threads. Idempotent."""
        if self._server is not None:
            self._server.close()
        if self._publisher is not None:
            self._publisher.close()
        self.driver.close(purge=not self.config.disk_keep)


def open_driver(config: Config, *, shared: bool) -> StoreDriver:
    """A running store as the settings want it: pool, tiers and driver.

    Raises ConfigError, leaving nothing behind.
    """
    policy = POLICIES.load(config.cache_policy)
    tiers = _open_tiers(config)
    try:
        pool = Pool(config.ram_bytes, name="qkvault" if shared else None, prefault=config.prefault)
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    books = [
        TierBook(
            number,
            tier.name,
            tier.medium,
            tier.stored_bytes,
            Residents(policy, tier.capacity_bytes, _query_bytes(config, tier)),
        )
        for number, tier in enumerate(tiers)
    ]
    residents = Residents(policy, pool.capacity_bytes, config.query_bytes)
    manager = StorageManager(pool, residents, books, lease_seconds=config.lease_seconds, hot_cache=config.hot_cache)
    manager.is_frozen = config.start_frozen
    return StoreDriver(manager, tiers, traits=_traits(config))


def acquire(config: Config, *, shared: bool = False) -> EmbeddedStore:
    """The store of ``config.instance_id``, built at the first call; every call must be paired with ``release``.

    Raises ConfigError if the instance runs with another configuration, or unshared where ``shared`` is asked for.
    """
    with _lock:
        store = _stores.get(config.instance_id)
        if store is None:
            store = _stores[config.instance_id] = EmbeddedStore(config, shared=shared)
        elif store.config != config or (shared and not store.is_shared):
            msg = f"instance {config.instance_id!r} runs with another configuration: use another instance_id"
            raise ConfigError(msg)
        store.num_users += 1
        return store


def find(instance_id: str) -> EmbeddedStore | None:
    """The running store of that instance in this process, if there is one; ``acquire`` it to keep it."""
    with _lock:
        return _stores.get(instance_id)


def release(store: EmbeddedStore) -> None:
    """One user fewer; the last one closes the store, before anybody can build its successor. Once too often is fine."""
    with _lock:
        store.num_users = max(0, store.num_users - 1)
        if store.num_users == 0 and _stores.get(store.config.instance_id) is store:
            del _stores[store.config.instance_id]
            store.close()


def publish(config: Config, driver: StoreDriver) -> Publisher | None:
    """The publisher that the settings ask for, if they do. To be closed before the driver. Raises ConfigError."""
    require_events(config)
    if not config.events_endpoint:
        return None
    from qkvault.publisher import Publisher  # only when it is chosen

    return Publisher(driver, config.events_endpoint, config.events_replay_endpoint, config.events_topic)


def require_events(config: Config) -> None:
    """Raise ConfigError for events that cannot be published, or, since they tell the tokens of prompts, may not be."""
    if not config.events_endpoint:
        return
    for setting in ("events_endpoint", "events_replay_endpoint"):
        endpoint = getattr(config, setting)
        if not (config.insecure or is_local_endpoint(endpoint)):
            msg = (
                f"{setting}={endpoint!r}: other machines reach it, and events tell the tokens of prompts to whoever "
                "asks. Publish at tcp://127.0.0.1:PORT or ipc:///path, or set insecure if all of that network may know"
            )
            raise ConfigError(msg)
        if endpoint and not _ENDPOINT.fullmatch(endpoint):
            msg = f"{setting}: events cannot be published at {endpoint!r}: expected tcp://host:port or ipc:///path"
            raise ConfigError(msg)
    try:
        import zmq  # noqa: F401  # only whether it is there
    except ImportError as error:
        msg = "events_endpoint needs the package pyzmq: pip install 'qkvault[server]'"
        raise ConfigError(msg) from error


def _open_tiers(config: Config) -> list[Tier]:
    if config.disk_path is None:
        return []
    from qkvault.tiers.disk import DiskTier  # only when it is chosen

    return [DiskTier(config.disk_path, config.disk_bytes, workers=config.disk_workers, direct_io=config.disk_direct_io)]


def _query_bytes(config: Config, tier: Tier) -> int | None:
    """How much of ``tier`` may hold queries: the same share as of RAM. None: the store's own default."""
    return None if config.query_bytes is None else tier.capacity_bytes * config.query_bytes // config.ram_bytes


def _traits(config: Config) -> Traits:
    """What the store tells its clients."""
    features = [*(kind.value for kind in CacheKind), Medium.RAM.value]
    features += [Medium.DISK.value] * (config.disk_path is not None)
    features += [TRANSFER_QUERY] * (config.query_bytes != 0)
    return Traits(
        features=tuple(features),
        chunk_size=config.chunk_size,
        hash_algorithm=config.hash_algorithm,
        version=qkvault.__version__,
        reap_timeout_seconds=config.reap_timeout_seconds,
        registration_grace_seconds=config.registration_grace_seconds,
    )
