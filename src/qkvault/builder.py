"""CacheEngineBuilder: engines by instance id (rows 5, 6), each over a store of this process or of a server."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import msgspec

from qkvault import autostart, embedded
from qkvault.connecting import engine_sessions
from qkvault.engine import CacheEngine, EngineMetadata

if TYPE_CHECKING:
    import torch

    from qkvault.config import Config


class _Built(NamedTuple):
    engine: CacheEngine
    store: embedded.EmbeddedStore | None  # None: a server's
    places: tuple[int, ...]  # addresses of the tensors


class CacheEngineBuilder:
    """Engines by instance id. Thread-safe."""

    _lock: ClassVar = threading.Lock()
    _engines: ClassVar[dict[str, _Built]] = {}

    @classmethod
    def get_or_create(
        cls, instance_id: str, config: Config, metadata: EngineMetadata, tensors: Sequence[torch.Tensor]
    ) -> CacheEngine:
        """The engine called ``instance_id``, built at the first call, which starts a server if ``config.autostart``.

        Blocks until that answers, a minute at most. Raises ValueError if it exists with another config, metadata or
        tensors (``destroy`` it first); if it cannot be built, ConfigError, LayoutMismatch, or Unavailable when no
        server answers at ``config.address``.
        """
        config = msgspec.structs.replace(config, instance_id=instance_id)
        places = tuple(tensor.data_ptr() for tensor in tensors)
        with cls._lock:
            built = cls._engines.get(instance_id)
            if built is None:
                built = cls._engines[instance_id] = _build(config, metadata, tensors)
            if (built.engine.config, built.engine.metadata, built.places) != (config, metadata, places):
                msg = f"engine {instance_id!r} exists with another config, metadata or tensors: destroy it first"
                raise ValueError(msg)
            return built.engine

    @classmethod
    def destroy(cls, instance_id: str) -> None:
        """Close the engine of that id and, if nobody else uses it, its store. Unknown ids are ignored."""
        with cls._lock:  # held to the end: who builds anew needs the directory of the disk tier
            built = cls._engines.pop(instance_id, None)
            if built is not None:
                built.engine.close()
                if built.store is not None:
                    embedded.release(built.store)


def _build(config: Config, metadata: EngineMetadata, tensors: Sequence[torch.Tensor]) -> _Built:
    if config.autostart:
        autostart.ensure_server(config)
    store = embedded.acquire(config) if config.address is None else None
    client, instance_id = None, config.instance_id
    try:
        client = engine_sessions(config, instance_id)() if store is None else store.connect(instance_id)
        engine = CacheEngine(config, metadata, tensors, client)
    except BaseException:
        if client is not None:
            client.close()
        if store is not None:
            embedded.release(store)
        raise
    return _Built(engine, store, tuple(tensor.data_ptr() for tensor in tensors))
