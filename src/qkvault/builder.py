"""CacheEngineBuilder: engines by instance id (rows 5, 6), each over a store of this process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import msgspec

from qkvault import embedded
from qkvault.engine import CacheEngine, EngineMetadata

if TYPE_CHECKING:
    import torch

    from qkvault.config import Config


class CacheEngineBuilder:
    """Engines by instance id. Thread-safe."""

    _lock: ClassVar = threading.Lock()
    _engines: ClassVar[dict[str, tuple[CacheEngine, embedded.EmbeddedStore]]] = {}

    @classmethod
    def get_or_create(
        cls, instance_id: str, config: Config, metadata: EngineMetadata, tensors: Sequence[torch.Tensor]
    ) -> CacheEngine:
        """The engine called ``instance_id``, built at the first call.

        Raises ValueError if it exists with another config or metadata (``destroy`` it first), ConfigError if it cannot
        be built.
        """
        config = msgspec.structs.replace(config, instance_id=instance_id)
        with cls._lock:
            if instance_id in cls._engines:
                engine, _ = cls._engines[instance_id]
                if (engine.config, engine.metadata) != (config, metadata):
                    msg = f"engine {instance_id!r} exists with another configuration or metadata: destroy it first"
                    raise ValueError(msg)
                return engine
            store = embedded.acquire(config)
            try:
                engine = CacheEngine(config, metadata, tensors, store.connect(instance_id))
            except BaseException:
                embedded.release(store)
                raise
            cls._engines[instance_id] = engine, store
            return engine

    @classmethod
    def destroy(cls, instance_id: str) -> None:
        """Close the engine of that id and its store. Unknown ids are ignored."""
        with cls._lock:
            engine, store = cls._engines.pop(instance_id, (None, None))
        if engine is not None and store is not None:
            engine.close()
            embedded.release(store)
