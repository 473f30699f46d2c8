"""Lives of engines as the bench sees them, and which connectors there are to compare."""

from __future__ import annotations

import json
import runpy
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from bench import children, machine
from bench.children import Child
from bench.machine import ROOT
from bench.peers import MALLOC_TUNED, QUIET
from bench.rawfiles import folder_bytes
from bench.samples import Role, Sample, Skip
from bench.settings import Settings

START_SECONDS: Final = 600.0
LIFE_BYTES: Final = 8 << 30  # of memory to begin with: an engine takes 3, 2 more in a cold prompt, and others live too
POOL_BYTES: Final = 512 << 20  # some prompts: each is asked for again at once
# Before each prompt: for a second after their last, vLLM's processes wait for the next on a busy core, which others
# would then lack; and a connector may still be storing.
REST_SECONDS: Final = 1.5
CORES: Final = "0-1"  # else vLLM keeps a core back in its default mode, and modes cannot be compared


class Connector(NamedTuple):
    """A connector: what to tell vLLM, and in which environment."""

    case: str  # how --case names it
    name: str
    role: Role
    config: Mapping[str, object] | None = None
    env: Mapping[str, str] = MappingProxyType({})
    is_foreign: bool = False  # runs in the peer's environment
    folder: Path | None = None  # what survives a restart lies here
    is_counted: bool = False  # vLLM keeps its metrics, for ``Life.numbers``


class Answer(NamedTuple):
    """What an engine says of one prompt."""

    sample: Sample
    cached: int  # tokens it did not compute
    tokens: list[int]


def none() -> Connector:
    """No connector at all."""
    return Connector("none", "vLLM without a connector", Role.LIMIT)


def ours(disk: Path | None = None) -> Connector:
    """Our connector, in RAM or with a disk below it."""
    extra = {"qkvault.ram_bytes": str(POOL_BYTES)}
    if disk is not None:
        extra["qkvault.disk_path"] = str(disk)
    config = {"kv_connector": "QKVaultConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return Connector("ram" if disk is None else "disk", "QKVault", Role.OURS, config, folder=disk)


def capturing(case: str, name: str, role: Role, extra: Mapping[str, object]) -> Connector:
    """Our connector in RAM, with room for queries beside K and V, and more settings."""
    settings = {"qkvault.ram_bytes": str(2 * POOL_BYTES)} | dict(extra)
    config = {"kv_connector": "QKVaultConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings}
    return Connector(case, name, role, config, is_counted=True)


def lmcache(chunk_tokens: int, *, is_tuned: bool = False) -> Connector:
    """LMCache in process, in RAM."""
    config: dict[str, object] = {
        "kv_connector": "LMCacheOnCpu",
        "kv_connector_module_path": "bench.peers_vllm",
        "kv_role": "kv_both",
    }
    env = {
        "LMCACHE_CHUNK_SIZE": str(chunk_tokens),
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": str(POOL_BYTES / 2**30),
    }
    case, name = f"lmcache-{chunk_tokens}", f"LMCache in process, chunks of {chunk_tokens}"
    if is_tuned:
        case, name, env = f"{case}-tuned", f"{name}, malloc tuned", env | MALLOC_TUNED
    return Connector(case, name, Role.PEER, config, env, is_foreign=True)


def example(folder: Path) -> Connector:
    """The connector that vLLM ships as an example: a folder of safetensors, whole prompts only."""
    config: dict[str, object] = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return Connector("example", "vLLM's ExampleConnector", Role.PEER, config, folder=folder)


def model_of(settings: Settings) -> Path:
    """The model's directory. Raises Skip if it is not there."""
    path = settings.model or Path(runpy.run_path(str(ROOT / "scripts" / "fetch_model.py"))["model_path"]())
    if not (path / "config.json").is_file():
        msg = f"no model at {path}: make setup fetches one, --model names another"
        raise Skip(msg)
    return path


class Life:
    """One running engine. Raises Skip for whatever goes wrong in it."""

    def __init__(self, settings: Settings, connector: Connector, *, is_multiprocess: bool) -> None:
        """Begin to start it; ``wait_ready`` tells when it has."""
        python = settings.peer_python if connector.is_foreign else Path(sys.executable)
        if python is None or not python.exists():
            msg = f"{connector.name}: no environment with it; --peer-venv names one"
            raise Skip(msg)
        if (available := machine.available_bytes()) < LIFE_BYTES:
            msg = f"needs {LIFE_BYTES / 1e9:.1f} GB of memory, {available / 1e9:.1f} are free"
            raise Skip(msg)
        self.connector = connector
        work = {
            "model": str(model_of(settings)),
            "dtype": settings.dtype,
            "connector": connector.config,
            "seed": settings.seed,
            "is_counted": connector.is_counted,
        }
        env = QUIET | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if is_multiprocess else "0",
            "VLLM_CPU_OMP_THREADS_BIND": CORES,
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        command = [str(python), "-m", "bench.e2e.life", json.dumps(work)]
        self._child = Child(connector.name, command, env | dict(connector.env))

    def wait_ready(self) -> None:
        """Block until it answers."""
        self._child.receive(START_SECONDS)

    def tokenize(self, text: str) -> list[int]:
        """The token ids of a text."""
        ids = children.ask(self._child, do="tokenize", text=text)["ids"]
        return list(ids) if isinstance(ids, list) else []

    def ask(self, ids: list[int], num_tokens: int = 1) -> Answer:
        """Answer a prompt, after a rest."""
        time.sleep(REST_SECONDS)
        told = children.ask(self._child, do="ask", ids=ids, num_tokens=num_tokens)
        sample = Sample(float(str(told["seconds"])), float(str(told["cpu_seconds"])))
        tokens = told["tokens"]
        return Answer(sample, int(str(told["cached"])), list(tokens) if isinstance(tokens, list) else [])

    def drop(self) -> None:
        """Empty vLLM's own prefix cache."""
        children.ask(self._child, do="drop")

    def numbers(self) -> dict[str, float]:
        """What vLLM's metrics say of captured queries, by name and labels. Only of a connector that is counted."""
        return {name: float(str(value)) for name, value in children.ask(self._child, do="numbers").items()}

    def settle_on_disk(self) -> None:
        """Wait until its folder has stopped growing."""
        folder, before = self.connector.folder, -1
        while folder is not None and (now := folder_bytes(folder)) != before:
            before = now
            time.sleep(REST_SECONDS)

    def end(self) -> None:
        """End the engine, and wait until what was begun is finished."""
        children.ask(self._child, do="end")

    def close(self) -> None:
        """End the process. Idempotent."""
        self._child.close()
