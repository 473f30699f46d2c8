"""Store until all is on disk, and load again with nothing in RAM or page cache; beside raw O_DIRECT files.

The raw files are as many and as large as ours, and moved by as many threads; like ours they are not synced. Ours are
also checked: a sum over every payload, on the way out and on the way in. And they are copied, from an engine's blocks
and into them: what is loaded into RAM only shows the tier by itself. A peer stores until it finds all on disk, and its
files leave the page cache before they are loaded, as all do.

And the scan of a directory of many small files at start, beside listing it and reading the head of each: both out of
the page cache, so what is measured is the work of the processor.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from bench import children
from bench.children import Child
from bench.geometry import CHUNK_TOKENS, Geometry, Pages, geometries
from bench.peers import lmcache_disks, with_peers_or_without
from bench.rawfiles import RawFiles, drop_page_cache
from bench.report import Screen
from bench.rig import Rig, own_store, pool_bytes, require_memory
from bench.samples import Case, Measure, Role, Row, Skip, Target, Unit, measure
from bench.settings import Settings
from qkvault.embedded import EmbeddedStore
from qkvault.image import Header, write_header
from qkvault.pool import Pool
from qkvault.tiers import disk_files
from qkvault.tiers.disk import DiskTier
from qkvault.types import HASH_BYTES, SPACE_BYTES, TOKEN_BYTES, ChunkKey

PART_OF_RAW = 0.8
DRAIN_SECONDS = 300.0
SCAN_SECONDS_A_FILE = 100e-6  # 100,000 files in ten seconds
HEAD_BYTES = 4096


def run(settings: Settings, screen: Screen) -> list[Row]:
    """All rows."""
    rows: list[Row] = []
    for geometry in geometries(settings):
        rows += with_peers_or_without(
            settings, screen, f"disk, {geometry.name}", functools.partial(_one, screen=screen, geometry=geometry)
        )
    return [*rows, _scans(settings, screen)]


def _one(settings: Settings, screen: Screen, geometry: Geometry) -> list[Row]:
    num_tokens = geometry.num_tokens(settings.sizes.disk_bytes)
    num_bytes = num_tokens * geometry.token_bytes
    ram_bytes = pool_bytes(geometry, num_tokens, prompts=1)
    num_peers = 0 if settings.peer_venv is None else 2
    require_memory((1 + num_peers) * (4 * num_bytes + ram_bytes))
    disk_bytes = (8 + 2 * num_peers) * num_bytes
    if shutil.disk_usage(settings.scratch).free < disk_bytes:
        msg = f"{settings.scratch} has no room for {disk_bytes / 1e9:.1f} GB"
        raise Skip(msg)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qkvault-bench-", dir=settings.scratch)))
        store = stack.enter_context(own_store(ram_bytes, folder / "ours", 4 * num_bytes))
        threads = store.config.disk_workers
        pages = Pages(geometry, num_tokens, is_random=True, seed=settings.seed)
        rig = Rig(store.config, store.connect("bench"), pages, settings.seed)
        memory = Pool(num_bytes)
        stack.callback(memory.close)
        fill(memory.memory, settings.seed)
        count = num_tokens // CHUNK_TOKENS
        raw = stack.enter_context(RawFiles(folder / "raw", memory.memory, count, num_bytes // count, threads=threads))
        peers = stack.enter_context(lmcache_disks(settings, screen, geometry, num_tokens, folder))
        rows = _rounds(settings, screen, rig, store, raw, peers=peers)
        rig.engine.close()
    return rows


def fill(memory: memoryview, seed: int) -> None:
    """Bytes that no disk can make less of."""
    words = np.frombuffer(memory, np.int64)
    words[...] = np.random.default_rng(seed).integers(0, 1 << 62, len(words), dtype=np.int64)


def _rounds(
    settings: Settings, screen: Screen, rig: Rig, store: EmbeddedStore, raw: RawFiles, *, peers: dict[str, Child]
) -> list[Row]:
    pages, rounds = rig.pages, settings.sizes.disk_rounds
    limit = f"raw O_DIRECT files, {store.config.disk_workers} threads"
    storing, raising, loading = (
        f"{what}, {pages.geometry.name}"
        for what in ("store until on disk", "load from disk into RAM", "load from disk into blocks")
    )

    def drain() -> None:
        if not store.driver.drain(DRAIN_SECONDS):
            msg = f"the disk tier was not done after {DRAIN_SECONDS:g} s"
            raise RuntimeError(msg)

    def store_all() -> None:
        rig.store()
        drain()

    def before(_: int) -> None:
        rig.client.clear()
        drain()
        raw.remove()
        rig.renew()
        for peer in peers.values():
            children.ask(peer, do="renew")

    def after(_: int) -> None:
        pages.require_arrived()
        for peer in peers.values():
            children.ask(peer, do="verify")

    def between(_: int) -> None:
        rig.client.clear(lower_tiers=False)
        drop_page_cache(raw.folder.parent)

    groups = [
        [Case(storing, "QKVault", Role.OURS, store_all), Case(storing, limit, Role.LIMIT, raw.write)],
        [Case(raising, "QKVault", Role.OURS, rig.bring_up), Case(raising, limit, Role.LIMIT, raw.read)],
        [Case(loading, "QKVault", Role.OURS, rig.retrieve), Case(loading, limit, Role.LIMIT, raw.read)],
    ]
    for group, row, what in ((groups[0], storing, "store_down"), (groups[-1], loading, "retrieve")):
        group += [
            Case(row, name, Role.PEER, functools.partial(children.timed, peer, do=what)) for name, peer in peers.items()
        ]
    with screen.task(f"disk, {pages.geometry.name}", rounds + 1) as advance:
        found = measure(
            groups, rounds=rounds, advance=advance, before=before, between=between, after=after,
        )  # fmt: skip
    target = Target(Measure.SPEED, PART_OF_RAW, limit)
    return [
        Row(name=name, unit=Unit.BYTES, amount=pages.num_bytes, series=series, targets=(target,))
        for name, series in found.items()
    ]


def _scans(settings: Settings, screen: Screen) -> Row:
    count, rounds = settings.sizes.scan_files, settings.sizes.disk_rounds
    name, limit = f"scan of {count} files at start", "os.scandir, open and read of the heads"
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qkvault-bench-", dir=settings.scratch)))
        _make_files(folder, count, settings.seed)
        tier = DiskTier(folder, 1 << 40)
        stack.callback(tier.close)

        def scan() -> None:
            _require_all(sum(map(len, tier.scan())), count)

        def read() -> None:
            _require_all(_read_heads(str(folder)), count)

        group = [Case(name, "QKVault", Role.OURS, scan), Case(name, limit, Role.LIMIT, read)]
        with screen.task("disk, scan", rounds + 1) as advance:
            found = measure([group], rounds=rounds, advance=advance)
    target = Target(Measure.SECONDS, count * SCAN_SECONDS_A_FILE)
    return Row(name=name, unit=Unit.CALLS, amount=count, series=found[name], targets=(target,))


def _make_files(folder: Path, count: int, seed: int) -> None:
    # Chunks as an engine leaves them, one chain, with next to no payload: a page of header, a page that is a hole.
    rng = np.random.default_rng(seed)
    space, image = rng.bytes(SPACE_BYTES), memoryview(bytearray(HEAD_BYTES + 1))
    parent = ChunkKey(space + bytes(HASH_BYTES))
    for _ in range(count):
        key = ChunkKey(space + rng.bytes(HASH_BYTES))
        write_header(image, Header(key, parent, rng.bytes(CHUNK_TOKENS * TOKEN_BYTES), b"bench", HEAD_BYTES, 1, 0))
        path = disk_files.path_of(str(folder), key)
        disk_files.make_folders(path)
        with Path(path).open("wb") as file:
            file.write(image[:HEAD_BYTES])
            file.truncate(2 * HEAD_BYTES)
        parent = key


def _read_heads(folder: str) -> int:
    num_files = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                num_files += _read_heads(entry.path)
            elif entry.name.endswith(disk_files.CHUNK_SUFFIX):
                descriptor = os.open(entry.path, os.O_RDONLY)
                os.pread(descriptor, HEAD_BYTES, 0)
                os.close(descriptor)
                num_files += 1
    return num_files


def _require_all(num_found: int, count: int) -> None:
    if num_found != count:
        msg = f"{num_found} of {count} files were found"
        raise RuntimeError(msg)
