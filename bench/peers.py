"""Peers, each in its own environment and process; ``bench/peers.md`` says how to make the environment.

A peer that cannot be started is told about and left out.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bench.children import Child
from bench.geometry import CHUNK_TOKENS, Geometry
from bench.report import Screen
from bench.rig import require_memory
from bench.samples import Row, Skip
from bench.settings import Settings

LMCACHE: Final = "LMCache, in process"
LMCACHE_HASHES: Final = {"LMCache (its default, 64 bits)": "builtin", "LMCache (SHA-256)": "sha256_cbor"}
LMCACHE_DIRECT: Final = "LMCache, in process, O_DIRECT"
LMCACHE_TUNED: Final = "LMCache, in process, malloc tuned"
LMCACHE_SERVER: Final = "LMCache, server"
LMCACHE_SERVER_SHM: Final = "LMCache, server, shm"
LMCACHE_SERVER_TUNED: Final = "LMCache, server, shm, malloc tuned"
SERVERS: Final = (LMCACHE_SERVER, LMCACHE_SERVER_SHM, LMCACHE_SERVER_TUNED)
# What a server and its client take, in prompts: pages, the pool, and copies on their way. Pickling makes five of those.
PROMPTS_PICKLED: Final = 8.6
PROMPTS_SHM: Final = 3.6
PROCESSES_BYTES: Final = 1_500_000_000  # and besides
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


def with_peers_or_without(
    settings: Settings, screen: Screen, name: str, run: Callable[[Settings], list[Row]]
) -> list[Row]:
    """What ``run`` finds, measured again without peers if it could not be with them: ours is not lost with theirs."""
    tries = [settings] if settings.peer_venv is None else [settings, replace(settings, peer_venv=None)]
    for each in tries:
        try:
            return run(each)
        except Skip as reason:
            screen.skip(name, str(reason))
    return []


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
    name = LMCACHE_TUNED if is_tuned else LMCACHE
    work = _work(settings, geometry, num_tokens, is_random=is_random)
    with _child(settings, screen, "bench.peers_lmcache", work, name=name, bench=bench, is_tuned=is_tuned) as child:
        yield child


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


@contextlib.contextmanager
def lmcache_hashing(settings: Settings, screen: Screen, geometry: Geometry, num_tokens: int) -> Iterator[Child | None]:
    """LMCache's names of chunks; None, and said why, if it does not run here."""
    work = _work(settings, geometry, num_tokens, is_random=False)
    with _child(settings, screen, "bench.peers_hashing", work, name=LMCACHE, bench="hash", is_tuned=False) as child:
        yield child


@contextlib.contextmanager
def lmcache_disks(
    settings: Settings, screen: Screen, geometry: Geometry, num_tokens: int, folder: Path
) -> Iterator[dict[str, Child]]:
    """LMCache's engine over files below ``folder`` alone: by name, as it comes and past the page cache."""
    with contextlib.ExitStack() as stack:
        found = {}
        for name in (LMCACHE, LMCACHE_DIRECT):
            at = {"disk": str(folder / f"lmcache-{len(found)}"), "is_direct": name == LMCACHE_DIRECT}
            work = _work(settings, geometry, num_tokens, is_random=True) | at
            child = stack.enter_context(
                _child(settings, screen, "bench.peers_lmcache", work, name=name, bench="disk", is_tuned=False)
            )
            if child is not None:
                found[name] = child
        yield found


@contextlib.contextmanager
def lmcache_servers(
    settings: Settings,
    screen: Screen,
    geometry: Geometry,
    num_tokens: int,
    *,
    names: tuple[str, ...] = SERVERS,
    is_random: bool = False,
    beside: int = 0,
) -> Iterator[dict[str, Child]]:
    """LMCache's server with a client in another process, by name; those that run in the memory that ``beside`` leaves.

    ``LMCACHE_SERVER`` is as it comes: chunks are pickled and pass the socket.
    """
    if settings.peer_python is None:
        yield {}
        return
    bench = f"socket, {geometry.name}"
    fitting = []
    for name in names:  # all before the first starts: what is not touched yet counts as free
        prompts = PROMPTS_PICKLED if name == LMCACHE_SERVER else PROMPTS_SHM
        needed = int(prompts * num_tokens * geometry.token_bytes) + PROCESSES_BYTES
        try:
            require_memory(beside + needed)
        except Skip as reason:
            screen.skip(f"{bench}: {name}", str(reason))
        else:
            beside += needed
            fitting.append(name)
    work = _work(settings, geometry, num_tokens, is_random=is_random)
    found: dict[str, Child] = {}
    with contextlib.ExitStack() as stack:
        for name in fitting:
            asked = work | {"has_shm": name != LMCACHE_SERVER}
            is_tuned = name == LMCACHE_SERVER_TUNED
            child = stack.enter_context(
                _child(settings, screen, "bench.peers_server", asked, name=name, bench=bench, is_tuned=is_tuned)
            )
            if child is not None:
                found[name] = child
        yield found


def _work(settings: Settings, geometry: Geometry, num_tokens: int, *, is_random: bool) -> dict[str, Any]:
    return geometry._asdict() | {
        "num_tokens": num_tokens, "is_random": is_random, "seed": settings.seed, "chunk_size": CHUNK_TOKENS,
    }  # fmt: skip


@contextlib.contextmanager
def _child(
    settings: Settings,
    screen: Screen,
    module: str,
    work: Mapping[str, Any],
    *,
    name: str,
    bench: str,
    is_tuned: bool,
) -> Iterator[Child | None]:
    # ``module`` in the peer's environment; None, and said why, if it does not start there
    if settings.peer_python is None:
        yield None
        return
    command = [str(settings.peer_python), "-m", module, json.dumps(work)]
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
