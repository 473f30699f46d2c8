"""A large index: what a lookup takes among a thousand keys and among a million, and what a key takes in memory.

The store is a state machine without tiers' threads here. Memory is that of a process of its own, the pool left out:

python -m bench.micro.index
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import Final

import numpy as np

from bench import orders
from bench.children import Child, ask
from bench.report import Screen
from bench.rig import require_memory
from bench.samples import Case, Measure, Role, Row, Sample, Skip, Target, Unit, measure
from bench.settings import Settings
from qkvault.policies.lru import LruPolicy
from qkvault.pool import Pool
from qkvault.store.book import TierBook
from qkvault.store.manager import StorageManager
from qkvault.store.residents import Residents
from qkvault.tiers.base import Found
from qkvault.types import GRAIN_TOKENS, KEY_BYTES, SKETCH_BYTES, Medium, NewChunk

CHAIN: Final = 512  # chunks of a prompt
CHUNK_TOKENS: Final = 256
IMAGE_BYTES: Final = 4096
ROOT: Final = bytes(KEY_BYTES)
MAX_RATIO: Final = 1.5
MAX_KEY_BYTES: Final = 400
_PROMPTS: Final = 8  # looked up in one sample, each another one
_SKETCH_BYTES: Final = CHUNK_TOKENS // GRAIN_TOKENS * SKETCH_BYTES


class Chains:
    """Prompts of 512 chunks each: random keys and sketches, made when they are asked for, always the same."""

    def __init__(self, num_keys: int, seed: int) -> None:
        """``num_keys`` is rounded up to whole prompts."""
        self.num_chains = -(-num_keys // CHAIN)
        self._seed = seed

    def keys(self, number: int) -> bytes:
        """The keys of a prompt."""
        return np.random.default_rng([self._seed, number]).bytes(CHAIN * KEY_BYTES)

    def sketches(self, number: int) -> bytes:
        """The sketches of its chunks."""
        return np.random.default_rng([self._seed + 1, number]).bytes(CHAIN * _SKETCH_BYTES)

    def chunks(self, number: int) -> list[tuple[bytes, bytes, bytes]]:
        """Key, parent and sketch of each chunk of a prompt."""
        keys, sketches, made, parent = self.keys(number), self.sketches(number), [], ROOT
        for at in range(CHAIN):
            key = keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
            made.append((key, parent, sketches[at * _SKETCH_BYTES : (at + 1) * _SKETCH_BYTES]))
            parent = key
        return made


class Full:
    """A store that has all of some chains."""

    def __init__(self, num_keys: int, seed: int, *, in_ram: bool) -> None:
        """Fill it: RAM, as a client would, or else a tier, as a scan does."""
        self.chains = Chains(num_keys, seed)
        self.num_keys = self.chains.num_chains * CHAIN
        ram_bytes = self.num_keys * IMAGE_BYTES if in_ram else 1 << 20
        self.pool = Pool(ram_bytes, name="qkvault-bench", prefault=False)
        book = TierBook(0, "disk", Medium.DISK, _same, Residents(LruPolicy, 1 << 60))
        residents = Residents(LruPolicy, self.pool.capacity_bytes)
        self.store = StorageManager(self.pool, residents, [] if in_ram else [book], lease_seconds=1e9)
        self.rng = np.random.default_rng(seed)
        for number in range(self.chains.num_chains):
            if in_ram:
                self._write(number)
            else:
                found = [Found(*chunk, CHUNK_TOKENS, IMAGE_BYTES, IMAGE_BYTES) for chunk in self.chains.chunks(number)]
                self.store.adopt(book, found)

    def _write(self, number: int) -> None:
        new = [NewChunk(*chunk, CHUNK_TOKENS, IMAGE_BYTES) for chunk in self.chains.chunks(number)]
        reserved = self.store.reserve(1, new, 0.0)
        for chunk, offset in zip(new, reserved.offsets, strict=True):
            self.pool.view(offset, IMAGE_BYTES)[36 : 36 + KEY_BYTES] = chunk.key
        if self.store.commit(1, reserved.lease_id) != CHAIN:
            msg = "not all chunks were stored"
            raise RuntimeError(msg)

    def draw(self) -> list[tuple[bytes, bytes]]:
        """Keys and checks of some prompts, to be looked up."""
        drawn = []
        for number in self.rng.integers(0, self.chains.num_chains, _PROMPTS).tolist():
            sketches = np.frombuffer(self.chains.sketches(number), np.uint8).reshape(CHAIN, _SKETCH_BYTES)
            drawn.append((self.chains.keys(number), sketches[:, -SKETCH_BYTES:].tobytes()))
        return drawn

    def look_up(self, drawn: list[tuple[bytes, bytes]]) -> Sample:
        """Lease each. The leases are given back afterwards, which is not timed."""
        cpu, start = time.process_time(), time.perf_counter()
        found = [self.store.lookup(1, ROOT, keys, checks, 0.0) for keys, checks in drawn]
        sample = Sample(time.perf_counter() - start, time.process_time() - cpu)
        for located in found:
            if len(located.ready) != CHAIN:
                msg = f"{len(located.ready)} of {CHAIN} chunks were found"
                raise RuntimeError(msg)
            self.store.release(1, located.lease_id)
        return sample


def run(settings: Settings, screen: Screen) -> list[Row]:
    """All rows."""
    sizes = settings.sizes.index_keys
    require_memory(sum(sizes) * (IMAGE_BYTES + MAX_KEY_BYTES))
    row = _lookups(settings, screen)
    if row.ours is not None:
        for where in ("tier", "ram"):
            row.ours.facts[f"bytes a key, in {where}"] = _bytes_a_key(sizes[-1], settings.seed, where)
    return [row]


def _lookups(settings: Settings, screen: Screen) -> Row:
    rounds = settings.sizes.short_rounds
    stores = [Full(size, settings.seed, in_ram=True) for size in settings.sizes.index_keys]
    row = f"lookup of {CHAIN} chunks, {_PROMPTS} prompts, among {stores[-1].num_keys // 1000}k keys"
    drawn: list[list[tuple[bytes, bytes]]] = []

    def draw(_: int) -> None:
        drawn[:] = [store.draw() for store in stores]

    def looking(at: int) -> Case:
        is_last = at == len(stores) - 1
        name, role = ("QKVault", Role.OURS) if is_last else (_among(stores[at].num_keys), Role.LIMIT)
        return Case(row, name, role, lambda: stores[at].look_up(drawn[at]))

    gc.freeze()  # a million objects are looked through now and then, which is not the lookup's doing
    group = [looking(at) for at in range(len(stores))]
    try:
        with screen.task("index, lookup", rounds + 3) as advance:
            found = measure([group], rounds=rounds, warmup=3, advance=advance, before=draw)
    finally:
        gc.unfreeze()
        for store in stores:
            store.pool.close()
    target = Target(Measure.TIME, MAX_RATIO, _among(stores[0].num_keys))
    return Row(name=row, unit=Unit.CALLS, amount=_PROMPTS, series=found[row], targets=(target,))


def _among(num_keys: int) -> str:
    return f"among {num_keys // 1000}k keys"


def _bytes_a_key(num_keys: int, seed: int, where: str) -> float:
    child = Child("the index", [sys.executable, "-m", "bench.micro.index"])
    try:
        child.receive(60.0)
        return float(str(ask(child, do="fill", num_keys=num_keys, seed=seed, where=where)["bytes_a_key"]))
    finally:
        child.close()


def _same(num_bytes: int) -> int:
    return num_bytes


def _fill(num_keys: int, seed: int, where: str) -> dict[str, float]:
    Full(CHAIN, seed, in_ram=where == "ram").pool.close()  # what is imported and made once
    gc.collect()
    before, start = _own_bytes(), time.perf_counter()
    full = Full(num_keys, seed, in_ram=where == "ram")
    seconds = time.perf_counter() - start
    gc.collect()
    grown = _own_bytes() - before
    full.pool.close()
    return {"bytes_a_key": round(grown / full.num_keys, 1), "seconds": seconds}


def _own_bytes() -> int:
    # Memory of this process; the pool is shared memory, and counts elsewhere.
    for line in Path(f"/proc/{os.getpid()}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    msg = "the kernel does not tell what is whose"
    raise Skip(msg)


if __name__ == "__main__":
    orders.serve({"fill": _fill}, lambda: None)
