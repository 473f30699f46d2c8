"""LMCache's in-process connector for vLLM, with the copy class that it lacks on the CPU.

vLLM loads ``LMCacheOnCpu`` from here by ``kv_connector_module_path``, in the peer's environment. As shipped, the
connector starts, logs that there is no connector for a CPU, and caches nothing.
"""

from __future__ import annotations

from typing import Any

import lmcache.v1.gpu_connector as copying
from llvmlite.binding import ffi
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

from bench.peers_copy import PageCopies


class _Library(type(ffi.lib)):  # type: ignore[misc]  # a class that has no name to import
    """Numba's library, with the empty ``__dict__`` that it lacks: vLLM's CPU worker asks every object for one."""

    __slots__ = ()
    __dict__ = property(lambda _: {})


def _create(*_: Any, **__: Any) -> PageCopies:  # seam: LMCache's factory
    return PageCopies()


ffi.lib.__class__ = _Library
copying.CreateGPUConnector = _create


class LMCacheOnCpu(LMCacheConnectorV1):  # type: ignore[misc]  # untyped
    """LMCache as it is, but for the copies."""
