"""The state of a store as one value, for operators and metrics."""

from __future__ import annotations

from collections.abc import Sequence

from qkvault.store.core import Core
from qkvault.store.leaving import RAM
from qkvault.store.ledger import Counters
from qkvault.store.residents import Residents
from qkvault.tiers.base import Tier
from qkvault.types import CacheKind, Medium, Outcome
from qkvault.wire.messages import InstanceStatus, Status, TierStatus


def status_of(
    store: Core,
    *,
    num_sessions: int,
    is_scanning: bool,
    instances: tuple[InstanceStatus, ...] = (),
    spaces: tuple[bytes, ...] = (),
    tiers: Sequence[Tier] = (),
) -> Status:
    """What is where, how full it is, and what happened so far."""
    media = [_medium(RAM, store.room.residents, is_healthy=True)]
    media += [_medium(book.name, book.residents, is_healthy=book.is_healthy) for book in store.tiering.books]
    return Status(
        tuple(media),
        num_leases=len(store.leases),
        num_sessions=num_sessions,
        num_jobs=store.tiering.num_pending,
        is_frozen=store.is_frozen,
        hot_cache=store.hot_cache,
        is_scanning=is_scanning,
        counters=flat_counters(store.ledger.counters)
        | {f"scan_removed.{t.name}.{why}": n for t in tiers for why, n in t.counters.scan_removed.items()},
        instances=instances,
        spaces=spaces,
    )


def _medium(name: str, here: Residents, *, is_healthy: bool) -> TierStatus:
    query_used_bytes = here.bytes_of[CacheKind.QUERY]
    return TierStatus(
        name, here.capacity_bytes, here.used_bytes, len(here), is_healthy, query_used_bytes, here.query_bytes
    )


def flat_counters(counters: Counters) -> dict[str, int]:
    """Counters by dotted name; every name that an outcome can have is there from the start."""
    names = ("lookups", "chunks_asked", "chunks_found", "chunks_promoted", "collisions", "leases_expired")
    flat: dict[str, int] = {name: getattr(counters, name) for name in names}
    flat |= {f"reserve.{outcome.value}": counters.outcomes[outcome] for outcome in Outcome}
    for medium in Medium:
        flat[f"stored.{medium.value}"] = counters.stored[medium]
        flat[f"stored_bytes.{medium.value}"] = counters.stored_bytes[medium]
    flat |= {f"loaded.{tier}": count for tier, count in counters.loaded.items()}
    flat |= {f"loaded_bytes.{tier}": count for tier, count in counters.loaded_bytes.items()}
    flat |= {f"removed.{medium.value}.{reason}": count for (medium, reason), count in counters.removed.items()}
    flat |= {f"failed.{tier}.{reason}": count for (tier, reason), count in counters.failed.items()}
    return flat
