"""Store and retrieve, the whole path from token ids to committed chunks and back, beside plain copies of the bytes.

The plain copies go between the same pages and memory of the same kind as the pool: in one piece, and page by page. The
second is what we are held to (docs/decisions/0022-which-memcpy-is-the-limit.md).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from bench import children
from bench.children import Child
from bench.geometry import Bytes, Geometry, Pages, copy_all, geometries, piece_copies
from bench.peers import lmcache_engines, with_peers_or_without
from bench.report import Screen
from bench.rig import Rig, own_store, pool_bytes, require_memory
from bench.samples import Case, Measure, Role, Row, Target, Unit, measure
from bench.settings import Settings
from qkvault.pool import Pool

WHOLE = "memcpy, in one piece"
PAGEWISE = "memcpy, page by page"
IN_PROCESS = "QKVault, in process"
PART_OF_MEMCPY = 0.8
PART_OF_IN_PROCESS = 0.8
PROMPTS = 1.25  # in the pool: in every round some chunks of the one before are evicted


class PlainCopies:
    """The least that a store and a retrieve can do, between memory of their own and the rig's pages or others."""

    def __init__(self, pages: Pages, memory: Bytes) -> None:
        """``memory`` is of the kind and size that a pool would give the prompt."""
        self._memory = memory[: pages.num_bytes]
        # Memory of the kind that an engine's pages lie in: nothing that has to be right is written over.
        self._whole = torch.empty(pages.num_bytes, dtype=torch.uint8).numpy()
        num_blocks = len(pages.source)
        order = pages.source_ids if num_blocks < 2 else (np.argsort(np.argsort(pages.target))).tolist()
        others = list(self._whole.reshape(len(pages.arrays), num_blocks, -1))
        self._into_memory = piece_copies(pages.arrays, pages.source_ids, self._memory, to_memory=True)
        self._into_pages = piece_copies(others, order, self._memory, to_memory=False)

    def store_pages(self) -> None:
        """Page by page, in the order of the block table."""
        copy_all(self._into_memory)

    def retrieve_pages(self) -> None:
        """The same back."""
        copy_all(self._into_pages)

    def store_whole(self) -> None:
        """All bytes at once."""
        np.copyto(self._memory, self._whole)

    def retrieve_whole(self) -> None:
        """The same back."""
        np.copyto(self._whole, self._memory)


def run(settings: Settings, screen: Screen) -> list[Row]:
    """All rows: each geometry, with blocks anywhere and one after the other."""
    rows: list[Row] = []
    for geometry in geometries(settings):
        for is_random in (True, False):
            one = functools.partial(_one, screen=screen, geometry=geometry, is_random=is_random)
            rows += with_peers_or_without(settings, screen, f"copy, {geometry.name}", one)
    return rows


def _one(settings: Settings, screen: Screen, geometry: Geometry, *, is_random: bool) -> list[Row]:
    num_tokens = geometry.num_tokens(settings.sizes.copy_bytes)
    ram_bytes = pool_bytes(geometry, num_tokens, prompts=PROMPTS)
    num_peers = 0 if settings.peer_venv is None else 2
    require_memory(
        (1 + num_peers) * (2 * num_tokens * geometry.token_bytes + ram_bytes) + 2 * settings.sizes.copy_bytes
    )
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(own_store(ram_bytes))
        pages = Pages(geometry, num_tokens, is_random=is_random, seed=settings.seed)
        rig = Rig(store.config, store.connect("bench"), pages, settings.seed)
        peers = stack.enter_context(lmcache_engines(settings, screen, geometry, num_tokens, is_random=is_random))
        rows = copy_rows(settings, screen, rig, is_random=is_random, peers=peers)
        rig.engine.close()
    return rows


def copy_rows(
    settings: Settings,
    screen: Screen,
    rig: Rig,
    *,
    is_random: bool,
    peers: dict[str, Child],
    in_process: Rig | None = None,
) -> list[Row]:
    """The two rows of a rig. ``in_process``: the rig's store is in another process, and this one's is what that costs.

    The plain copies then go to shared memory, too.
    """
    pages, rounds = rig.pages, settings.sizes.copy_rounds
    how = f"{pages.geometry.name}, {'random' if is_random else 'consecutive'} blocks"
    storing, loading = f"store, {how}", f"retrieve, {how}"
    memory = Pool(pages.num_bytes, name=None if in_process is None else "bench")
    plain = PlainCopies(pages, np.frombuffer(memory.memory, np.uint8))
    groups = [
        _group(storing, (rig.store, plain.store_whole, plain.store_pages), peers, "store"),
        _group(loading, (rig.retrieve, plain.retrieve_whole, plain.retrieve_pages), peers, "retrieve"),
    ]
    rigs = [rig]
    if in_process is not None:
        rigs.append(in_process)
        groups[0].append(Case(storing, IN_PROCESS, Role.LIMIT, in_process.store))
        groups[1].append(Case(loading, IN_PROCESS, Role.LIMIT, in_process.retrieve))

    def before(_: int) -> None:
        for each in rigs:
            each.renew()
        for peer in peers.values():
            children.ask(peer, do="renew")

    def after(_: int) -> None:
        for each in rigs:
            each.pages.require_arrived()
        for peer in peers.values():
            children.ask(peer, do="verify")

    with screen.task(f"copy, {how}", rounds + 2) as advance:
        found = measure(groups, rounds=rounds, warmup=2, advance=advance, before=before, after=after)
    del plain, groups  # their arrays look at the memory
    memory.close()
    targets = [Target(Measure.SPEED, PART_OF_MEMCPY, PAGEWISE)]
    if in_process is not None:
        targets.append(Target(Measure.SPEED, PART_OF_IN_PROCESS, IN_PROCESS))
    return [
        Row(name=name, unit=Unit.BYTES, amount=pages.num_bytes, series=series, targets=tuple(targets))
        for name, series in found.items()
    ]


def _group(row: str, ways: Sequence[Callable[[], None]], peers: dict[str, Child], what: str) -> list[Case]:
    ours, whole, pagewise = ways
    cases = [
        Case(row, "QKVault", Role.OURS, ours),
        Case(row, WHOLE, Role.LIMIT, whole),
        Case(row, PAGEWISE, Role.LIMIT, pagewise),
    ]
    return cases + [
        Case(row, name, Role.PEER, functools.partial(children.timed, peer, do=what)) for name, peer in peers.items()
    ]
