"""StorageManager: the state machine of the store. Values in, answers and tier jobs out.

Life of a chunk in RAM::

    ABSENT --reserve--> WRITING --commit--> READY --evict--> ABSENT
       |                   `----abort / expiry / end of session--> ABSENT
       `--lookup of a chunk that a tier has--> LOADING --job done--> READY
                                                  `----job failed--> ABSENT

Not thread-safe: one caller at a time (``driver``). Time is an argument. After every method all that ``check`` asks
holds. No method raises for what a client may do wrong: unknown and foreign leases are ignored.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from qkvault.image import sketch_of
from qkvault.policies.base import Policy
from qkvault.pool import Pool
from qkvault.store.check import check_store
from qkvault.store.core import Core
from qkvault.store.index import NOWHERE, Entry
from qkvault.store.leases import Lease, LeaseItem
from qkvault.store.tiering import TierBook
from qkvault.tiers.base import Found, JobKind, JobResult, TierJob
from qkvault.types import GRAIN_TOKENS, TOKEN_BYTES, ChunkState, Medium, NewChunk, Outcome
from qkvault.wire.messages import Located, Reserved


class StorageManager(Core):
    """The store: an index, a pool with an eviction order, leases, and tiers below."""

    def __init__(
        self,
        pool: Pool,
        policy: Policy,
        books: Sequence[TierBook] = (),
        *,
        lease_seconds: float = 60.0,
        hot_cache: bool = True,
    ) -> None:
        """``books`` describe the tiers, nearest first. Without ``hot_cache`` RAM is only a way through."""
        super().__init__(pool, policy, books, lease_seconds=lease_seconds, hot_cache=hot_cache)

    def lookup(
        self,
        session_id: int,
        root: bytes,
        keys: Sequence[bytes],
        checks: Sequence[bytes],
        now: float,
        *,
        search_range: Container[str] | None = None,
    ) -> Located:
        """Lease the longest contiguous run of chunks from ``keys[0]`` and start promoting what is not in RAM (row 20).

        ``root`` is the key that ``keys[0]`` hangs on. ``checks[i]`` is ``image.check_of`` the tokens of chunk i: a
        chunk with other tokens is a miss. ``search_range`` names the media that may be asked (row 22): ``ram`` and
        the tiers' names; None is all.
        """
        counters = self.ledger.counters
        counters.lookups += 1
        counters.chunks_asked += len(keys)
        found: list[Entry] = []
        for key, check in zip(keys, checks, strict=True):
            entry = self.index.get(key)
            if entry is None or not self._is_reachable(entry, search_range):
                break
            if not entry.sketch.endswith(check):
                counters.collisions += 1
                break
            found.append(entry)
        lease = self.leases.open(session_id, is_write=False, now=now)
        self._pin_all(lease, found, search_range)
        counters.chunks_found += len(lease.items)
        last = self.index.get(keys[len(lease.items) - 1] if lease.items else root)
        return self._located(lease, can_fork=last is not None and bool(last.children))

    def match(self, session_id: int, lease_id: int, parent: bytes, tokens: bytes, now: float) -> Located:
        """Lease the child of ``parent`` that shares the longest run of whole grains with ``tokens`` (4 bytes each).

        Extends ``lease_id``, or opens a lease if that is 0. The shared tokens themselves are compared, at once if the
        chunk is in RAM, else when it arrives. The new chunk, if any, is the last of the answer's.
        """
        lease = self.leases.get(lease_id, session_id) or self.leases.open(session_id, is_write=False, now=now)
        self.leases.renew(lease, now)
        best = self.index.best_child(parent, sketch_of(tokens))
        if best is not None and self._is_reachable(best[0], None):
            entry, grains = best
            num_items = len(lease.items)
            self._pin_all(lease, [entry], None)
            if len(lease.items) > num_items:
                item = lease.items[-1]
                item.num_tokens = min(grains * GRAIN_TOKENS, entry.num_tokens, len(tokens) // TOKEN_BYTES)
                item.wanted = tokens[: item.num_tokens * TOKEN_BYTES]
        return self._located(lease)

    def poll(self, session_id: int, lease_id: int, now: float) -> Located:
        """How far the chunks of a read lease have come; renews it. Chunks after one that failed to load are let go."""
        lease = self.leases.get(lease_id, session_id)
        if lease is None or lease.is_write:
            return Located(0, (), 0)
        self.leases.renew(lease, now)
        return self._located(lease)

    def release(self, session_id: int, lease_id: int) -> None:
        """Give up a read lease: its chunks count as used, the tail first, and may be evicted again."""
        lease = self.leases.get(lease_id, session_id)
        if lease is not None and not lease.is_write:
            self._drop_items(lease, 0)
            self.leases.close(lease)

    def reserve(self, session_id: int, chunks: Sequence[NewChunk], now: float) -> Reserved:
        """Slots for those of ``chunks`` (one or more chains, heads first) that are not here yet; others say why not.

        Evicts on demand. When there is no room the rest of the chunks get none: fewer chunks are stored (row 11). A
        chunk whose tokens a longer stored sibling has already is PRESENT (row 44).
        """
        lease = self.leases.open(session_id, is_write=True, now=now)
        outcomes: list[Outcome] = []
        offsets: list[int] = []
        has_room = True
        for chunk in chunks:
            outcome = self._reserve_one(lease, chunk) if has_room else Outcome.NO_ROOM
            has_room = outcome is not Outcome.NO_ROOM
            outcomes.append(outcome)
            offsets.append(lease.items[-1].entry.offset if outcome is Outcome.RESERVED else NOWHERE)
        self.ledger.count_outcomes(outcomes)
        lease_id = lease.lease_id
        if not lease.items:
            self.leases.close(lease)
            lease_id = 0
        return Reserved(lease_id, tuple(outcomes), tuple(offsets))

    def _reserve_one(self, lease: Lease, chunk: NewChunk) -> Outcome:
        if self.is_frozen:
            return Outcome.FROZEN
        entry = self.index.get(chunk.key)
        if entry is not None and entry.parent is not None and entry.sketch != chunk.sketch:
            self.ledger.counters.collisions += 1
            return Outcome.COLLISION
        if entry is not None and entry.is_somewhere:
            self.room.policy.touch(chunk.key)
            return Outcome.BUSY if entry.is_doomed else Outcome.PRESENT
        if self.index.covering_child(chunk.parent, chunk.sketch) is not None:
            return Outcome.PRESENT
        entry = self.index.add(chunk.key, chunk.parent, chunk.sketch, chunk.num_tokens, chunk.image_bytes)
        if not self.room.give(entry, ChunkState.WRITING):
            self.index.prune(entry)
            return Outcome.NO_ROOM
        entry.pins += 1
        lease.items.append(LeaseItem(entry, Medium.RAM, chunk.num_tokens))
        return Outcome.RESERVED

    def commit(self, session_id: int, lease_id: int, keys: Sequence[bytes] | None = None) -> int:
        """The slots of ``keys`` (None: of all) are written: publish them, and start writing them to the tiers.

        The lease ends; chunks not named are aborted. Returns how many were published: 0 for a lease that has run out.
        """
        lease = self.leases.get(lease_id, session_id)
        if lease is None or not lease.is_write:
            self._end_quarantine(session_id, lease_id)
            return 0
        named = None if keys is None else frozenset(keys)
        self.leases.close(lease)
        published = []
        for item in lease.items:
            entry = item.entry
            if entry.is_doomed or not (named is None or entry.key in named):
                self._abort_entry(entry)
                continue
            entry.pins -= 1
            self.room.publish(entry)
            self.ledger.stored(Medium.RAM, entry)
            published.append(entry)
        for entry in published:
            for sibling in self.index.covered_siblings(entry):
                self._doom(sibling, "superseded")
        self.tiering.store(published)
        for entry in published:
            self._settle(entry)
        return len(published)

    def abort(self, session_id: int, lease_id: int) -> None:
        """Give up a write lease: nothing of it was or becomes readable; its slots are free again."""
        lease = self.leases.get(lease_id, session_id)
        if lease is None or not lease.is_write:
            self._end_quarantine(session_id, lease_id)
            return
        self.leases.close(lease)
        for item in lease.items:
            self._abort_entry(item.entry)

    def end_session(self, session_id: int) -> None:
        """The client is gone: abort its writes, release its reads, give back slots kept from its late copies."""
        for lease in self.leases.of_session(session_id):
            if lease.is_write:
                self.abort(session_id, lease.lease_id)
            else:
                self.release(session_id, lease.lease_id)
        for owner, lease_id in [key for key in self.quarantine if key[0] == session_id]:
            self._end_quarantine(owner, lease_id)

    def expire(self, now: float) -> None:
        """End leases past their deadline.

        A late reader finds out by the key in the slot's header. A late writer may still be copying: his slots stay
        out of use until he commits, aborts, or his session ends.
        """
        for lease in self.leases.overdue(now):
            self.ledger.counters.leases_expired += 1
            if not lease.is_write:
                self.release(lease.session_id, lease.lease_id)
                continue
            self.leases.close(lease)
            slots = self.quarantine.setdefault((lease.session_id, lease.lease_id), [])
            for item in lease.items:
                slots.append(item.entry.offset)
                self._abort_entry(item.entry, keep_slot=True)

    def on_job_done(self, result: JobResult) -> None:
        """A tier finished a job."""
        kind, book, done, failed = self.tiering.finish(result)
        for entry in done:
            if kind is JobKind.LOAD:
                self.room.publish(entry)
                self.ledger.loaded(book.name, entry)
            self.ledger.stored(Medium.RAM if kind is JobKind.LOAD else book.medium, entry)
        for entry, reason in failed:
            self.ledger.failed(book.name, reason)
            if kind is JobKind.LOAD:
                self.room.take(entry)
        for entry in [*done, *(entry for entry, _ in failed)]:
            self._settle(entry)

    def adopt(self, book: TierBook, found: Sequence[Found]) -> None:
        """Learn what a tier held before this store began."""
        for entry in self.tiering.adopt(book, found):
            self.ledger.stored(book.medium, entry)

    def take_jobs(self) -> list[tuple[int, TierJob]]:
        """Jobs that the tiers are to be given, each with its tier's number."""
        return self.tiering.take_jobs()

    def clear(self, *, lower_tiers: bool = True) -> int:
        """Forget everything (``lower_tiers=False``: only what is in RAM). Returns how many chunks are to go.

        A chunk that is being read goes when its readers are done; one that is being written never appears.
        """
        known = [entry for entry in self.index if entry.is_somewhere and not entry.is_doomed]
        if lower_tiers:
            for entry in known:
                self._doom(entry, "cleared")
            return len(known)
        idle = [entry for entry in known if entry.state is ChunkState.READY and not entry.pins]
        for entry in idle:
            self.room.take(entry)
            self._slot_lost(entry, "cleared")
        return len(idle)

    def set_hot_cache(self, *, enabled: bool) -> None:
        """Switch the hot cache (row 52). Off: RAM is emptied of what nobody reads, and keeps nothing from then on."""
        self.hot_cache = enabled
        for entry in [entry for entry in self.index if entry.state is ChunkState.READY]:
            self._settle(entry)

    def check(self) -> None:
        """Raise InvariantError unless all that must always hold does."""
        check_store(self)
