"""Peers, each in its own environment and process; ``bench/peers.md`` says how to make the environment.

A peer that cannot be started is told about and left out.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Final

from bench.children import Child
from bench.geometry import CHUNK_TOKENS, Geometry
from bench.report import Screen
from bench.samples import Skip
from bench.settings import Settings

LMCACHE: Final = "LMCache, in process"
LMCACHE_TUNED: Final = "LMCache, in process, malloc tuned"
# Without these, glibc gives large blocks back at each free and takes them page by page at each malloc.
MALLOC_TUNED: Final = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}
QUIET: Final = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_DISABLE_BANNER": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",  # its default keys are Python's hash()
}
READY_SECONDS: Final = 180.0


@contextlib.contextmanager
def lmcache_engine(
    settings: Settings,
    screen: Screen,
    geometry: Geometry,
    num_tokens: int,
    bench: str,
    *,
    is_random: bool = False,
    is_tuned: bool = False,
) -> Iterator[Child | None]:
    """LMCache's engine over pages of the same geometry; None, and said why, if it does not run here."""
    if settings.peer_python is None:
        yield None
        return
    work = geometry._asdict() | {
        "num_tokens": num_tokens, "is_random": is_random, "seed": settings.seed, "chunk_size": CHUNK_TOKENS,
    }  # fmt: skip
    name = LMCACHE_TUNED if is_tuned else LMCACHE
    command = [str(settings.peer_python), "-m", "bench.peers_lmcache", json.dumps(work)]
    try:
        child = Child(name, command, QUIET | (MALLOC_TUNED if is_tuned else {}))
    except OSError as error:
        screen.skip(f"{bench}: {name}", str(error))
        yield None
        return
    try:
        try:
            child.receive(READY_SECONDS)
        except Skip as reason:
            screen.skip(f"{bench}: {name}", str(reason))
            yield None
        else:
            yield child
    finally:
        child.close()


@contextlib.contextmanager
def lmcache_engines(
    settings: Settings, screen: Screen, geometry: Geometry, num_tokens: int, *, is_random: bool
) -> Iterator[dict[str, Child]]:
    """As it comes, and with malloc tuned: by name, those that run."""
    with contextlib.ExitStack() as stack:
        found = {}
        for is_tuned in (False, True):
            child = stack.enter_context(
                lmcache_engine(settings, screen, geometry, num_tokens, "copy", is_random=is_random, is_tuned=is_tuned)
            )
            if child is not None:
                found[child.name] = child
        yield found
