"""What must always hold in a store. Called after every test, and by an idle server."""

from __future__ import annotations

from collections import Counter

from qkvault.errors import InvariantError
from qkvault.store.core import Core, not_ready
from qkvault.store.index import NOWHERE, Entry
from qkvault.types import CacheKind, ChunkState


def check_store(store: Core) -> None:
    """Raise InvariantError unless slots, pins, leases, tiers and the tree agree with one another."""
    store.room.pool.check()
    store.index.check()
    store.tiering.check()
    _check_slots(store)
    held = Counter(entry.key for lease in store.leases.all() for entry in lease.entries)
    held.update(store.tiering.pins())
    waiting = store.waiting()
    for entry in store.index:
        _check_entry(entry, held[entry.key], is_due=id(entry) in waiting)
    if any(not_ready(lease.entries) for lease in store.leases.all() if lease.is_ready and not lease.is_write):
        msg = "a lease counts as READY, and not all of its chunks are"
        raise InvariantError(msg)
    if store.num_doomed != sum(bool(entry.doom) for entry in store.index):
        msg = f"{store.num_doomed} entries are said to be doomed"
        raise InvariantError(msg)


def _check_slots(store: Core) -> None:
    owned = [(entry.offset, entry.kind) for entry in store.index if entry.offset != NOWHERE]
    owned += [slot for slots in store.quarantine.values() for slot in slots]
    used = store.room.pool.slots
    if sorted(offset for offset, _ in owned) != sorted(used):
        msg = f"{len(used)} slots are in use, {len(owned)} have an owner"
        raise InvariantError(msg)
    held_bytes = Counter[CacheKind]()
    for offset, kind in owned:
        held_bytes[kind] += used[offset]
    num_ready = Counter(entry.kind for entry in store.index if entry.state is ChunkState.READY)
    store.room.residents.check("ram", held_bytes, num_ready)


def _check_entry(entry: Entry, num_holders: int, *, is_due: bool) -> None:
    name = entry.key.hex()[-16:]
    if (entry.offset == NOWHERE) != (entry.state is ChunkState.ABSENT):
        msg = f"{name} is {entry.state.value} at offset {entry.offset}"
        raise InvariantError(msg)
    if entry.pins != num_holders:
        msg = f"{name} has {entry.pins} pins and {num_holders} holders"
        raise InvariantError(msg)
    if not entry.pins and ((entry.doom and not is_due) or entry.state in (ChunkState.WRITING, ChunkState.LOADING)):
        msg = f"{name} is {entry.state.value} and nobody's"
        raise InvariantError(msg)
