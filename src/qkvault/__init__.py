"""QKVault keeps the attention state of language models, so that no prefix is ever prefilled twice.

Names are loaded when first used: ``import qkvault`` alone loads neither torch nor anything else that is heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from qkvault.builder import CacheEngineBuilder
    from qkvault.config import Config
    from qkvault.engine import CacheEngine
    from qkvault.stats import StatsMonitor
    from qkvault.tokens import CacheEngineKey, ChunkedTokenDatabase
    from qkvault.types import CacheKind

    __version__: str

_HOME: Final = {
    "CacheEngine": "engine",
    "CacheEngineBuilder": "builder",
    "CacheEngineKey": "tokens",
    "CacheKind": "types",
    "ChunkedTokenDatabase": "tokens",
    "Config": "config",
    "StatsMonitor": "stats",
}

__all__ = [
    "CacheEngine",
    "CacheEngineBuilder",
    "CacheEngineKey",
    "CacheKind",
    "ChunkedTokenDatabase",
    "Config",
    "StatsMonitor",
    "__version__",
]


def __getattr__(name: str) -> object:
    """Load a public name. Raises AttributeError for any other."""
    if name == "__version__":
        value = _version()
    elif name in _HOME:
        value = getattr(importlib.import_module(f"qkvault.{_HOME[name]}"), name)
    else:
        msg = f"module 'qkvault' has no attribute {name!r}"
        raise AttributeError(msg)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("qkvault")
    except metadata.PackageNotFoundError:
        return "0+unknown"  # run from a source tree that was not installed
