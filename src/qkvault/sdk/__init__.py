"""What a user of the cache has: K, V and Q of a prompt as tensors, by its token ids; attention from them; edits.

``connect`` opens a session. Works with any store, whether an engine is alive or not.
"""

from __future__ import annotations

from qkvault.sdk.context import Context, connect
from qkvault.sdk.tensors import CacheTensors, Span, Written
from qkvault.types import CacheKind

__all__ = ["CacheKind", "CacheTensors", "Context", "Span", "Written", "connect"]
