"""StorageManager: the state machine of the store. Values in, answers and tier jobs out.

Life of a chunk in RAM::

    ABSENT --reserve--> WRITING --commit--> READY --evict--> ABSENT
       |                   `----abort / expiry / end of session--> ABSENT
       `--lookup of a chunk that a tier has--> LOADING --job done--> READY
                                                  `----job failed--> ABSENT

Not thread-safe: one caller at a time (``driver``). Time is an argument. After every method all that ``check`` asks
holds. Unknown and foreign leases are ignored; of what a client may do wrong only a malformed chunk raises.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from qkvault.events import StoreEvent
from qkvault.image import PREFIX_BYTES, key_in, sketch_bytes_for
from qkvault.store.book import TierBook
from qkvault.store.check import check_store
from qkvault.store.core import Core, not_ready
from qkvault.store.feed import PAGE
from qkvault.store.index import NOWHERE, Packed
from qkvault.store.leases import Lease
from qkvault.store.tier_jobs import CORRUPT
from qkvault.tiers.base import Found, JobKind, JobResult, TierJob
from qkvault.types import (
    KEY_BYTES,
    SKETCH_BYTES,
    TOKEN_BYTES,
    CacheKind,
    ChunkRefs,
    ChunkState,
    NewChunk,
    Outcome,
)
from qkvault.wire.messages import Located, Reserved


class StorageManager(Core):
    """The store: an index, a pool with an eviction order, leases, and tiers below."""

    def lookup(
        self,
        session_id: int,
        root: bytes,
        keys: bytes,
        checks: bytes,
        now: float,
        *,
        tail: bytes = b"",
        search_range: Container[str] | None = None,
    ) -> Located:
        """Lease the longest contiguous run of chunks from the first key, and start promoting what is not in RAM.

        (Row 20.) ``keys`` are 48 bytes each, the first hangs on ``root``; ``checks`` (3 bytes each) are
        ``image.check_of`` the tokens of each chunk: one with other tokens is a miss. When all are found, the run goes
        on as by ``match`` with ``tail``. The answer leaves out the keys that were asked for. ``search_range`` names the
        media that may be asked (row 22): ``ram`` and the tiers' names; None is all.
        """
        counters = self.ledger.counters
        counters.lookups += 1
        num_asked = min(len(keys) // KEY_BYTES, len(checks) // SKETCH_BYTES)
        counters.chunks_asked += num_asked
        run = self.index.run(root, keys[: num_asked * KEY_BYTES])
        packed = Packed(run)
        alike = run[: packed.num_alike(checks)]
        is_ready = search_range is None and self.num_doomed == 0 and not not_ready(alike)  # nearly always
        found = alike if is_ready else self._reachable(alike, search_range)
        if len(found) == len(alike) < num_asked and self._is_taken(keys, len(alike), search_range):
            counters.collisions += 1
        lease = self.leases.open(session_id, is_write=False, now=now)
        self._pin_all(lease, found, search_range, is_ready=is_ready)
        counters.chunks_found += len(lease.entries)
        last = lease.entries[-1] if lease.entries else self.index.get(root)
        can_fork = last is not None and last.has_children
        if can_fork and last is not None and tail and len(lease.entries) == num_asked:
            self._fork(lease, last.key, tail, search_range)
            can_fork = is_ready = False
        return self._located(lease, can_fork=can_fork, num_asked=len(found), packed=packed if is_ready else None)

    def match(
        self,
        session_id: int,
        lease_id: int,
        parent: bytes,
        tokens: bytes,
        now: float,
        *,
        search_range: Container[str] | None = None,
    ) -> Located:
        """Lease the child of ``parent`` that shares the longest run of whole grains with ``tokens`` (4 bytes each).

        Extends ``lease_id``, whose last chunk is ``parent``, or opens a lease if that is 0. The shared tokens
        themselves are compared, at once if the chunk is in RAM, else when it arrives. The new chunk, if any, is the
        last of the answer's. Nothing is added to a lease that has lost its last chunks meanwhile, or has run out.
        """
        if lease_id:
            lease = self.leases.get(lease_id, session_id)
            if lease is None or lease.is_write:
                return Located(0, ChunkRefs(), 0)
            self.leases.renew(lease, now)
            if not lease.ends_with(parent):
                return self._located(lease)
        else:
            lease = self.leases.open(session_id, is_write=False, now=now)
        self._fork(lease, parent, tokens, search_range)
        return self._located(lease)

    def poll(self, session_id: int, lease_id: int, now: float) -> Located:
        """How far the chunks of a read lease have come; renews it. Chunks after one that failed to load are let go."""
        lease = self.leases.get(lease_id, session_id)
        if lease is None or lease.is_write:
            return Located(0, ChunkRefs(), 0)
        self.leases.renew(lease, now)
        return self._located(lease)

    def release(self, session_id: int, lease_id: int) -> None:
        """Give up a read lease: its chunks count as used, the tail first, and may be evicted again."""
        lease = self.leases.get(lease_id, session_id)
        if lease is not None and not lease.is_write:
            self._cut(lease, 0)
            self.leases.close(lease)

    def reserve(
        self, session_id: int, chunks: Sequence[NewChunk], now: float, *, kind: CacheKind = CacheKind.KV
    ) -> Reserved:
        """Slots for those of ``chunks`` (one or more chains, heads first) that are not here yet; others say why not.

        ``kind`` is that of all of them: it says whose room they take and who leaves for them.

        Evicts on demand. When there is no room the rest of the chunks get none: fewer chunks are stored (row 11). A
        chunk whose tokens a longer stored sibling has already is PRESENT (row 44). What hangs on a chunk that collides
        collides too. Raises ValueError, and changes nothing, if a chunk is malformed.
        """
        for chunk in chunks:
            _require_sane(chunk)
        lease = self.leases.open(session_id, is_write=True, now=now)
        outcomes: list[Outcome] = []
        offsets: list[int] = []
        collided: set[bytes] = set()
        has_room = True
        for chunk in chunks:
            if chunk.parent in collided:
                outcome = Outcome.COLLISION
            elif has_room:
                outcome = self._reserve_one(lease, chunk, kind)
            else:
                outcome = Outcome.NO_ROOM
            has_room = has_room and outcome is not Outcome.NO_ROOM
            if outcome is Outcome.COLLISION:
                collided.add(chunk.key)
            outcomes.append(outcome)
            offsets.append(lease.entries[-1].offset if outcome is Outcome.RESERVED else NOWHERE)
        self.ledger.count_outcomes(outcomes)
        lease_id = lease.lease_id
        if not lease.entries:
            self.leases.close(lease)
            lease_id = 0
        return Reserved(lease_id, tuple(outcomes), tuple(offsets))

    def _reserve_one(self, lease: Lease, chunk: NewChunk, kind: CacheKind) -> Outcome:
        if self.is_frozen:
            return Outcome.FROZEN
        if not self.index.accepts(chunk.key, chunk.parent, chunk.sketch, chunk.num_tokens):
            self.ledger.counters.collisions += 1
            return Outcome.COLLISION
        self._inherit(chunk.key, chunk.parent)
        known = self.index.get(chunk.key)
        shape = (chunk.num_tokens, chunk.image_bytes, kind)
        if known is not None and known.is_somewhere and not self._is_lost(known, shape):
            self.room.residents.policies[known.kind].touch_all((chunk.key,))
            self.tiering.miss(known)
            return Outcome.BUSY if known.doom else Outcome.PRESENT
        covering = self.index.covering_child(chunk.parent, chunk.sketch)
        if covering is not None and covering is not known:
            self.tiering.miss(covering)
            return Outcome.PRESENT
        entry = self.index.add(chunk.key, chunk.parent, chunk.sketch, shape)
        if not self._give_under_parent(entry):
            self.index.prune(entry)
            return Outcome.NO_ROOM
        lease.entries.append(entry)
        return Outcome.RESERVED

    def commit(self, session_id: int, lease_id: int, keys: Sequence[bytes] | None = None) -> int:
        """The slots of ``keys`` (None: of all) are written: publish them, and start writing them to the tiers.

        The lease ends; chunks not named are aborted, and so are those whose slot does not carry their key: nobody wrote
        them. Returns how many were published: 0 for a lease that has run out.
        """
        lease = self.leases.get(lease_id, session_id)
        if lease is None or not lease.is_write:
            self._end_quarantine(session_id, lease_id)
            return 0
        named = None if keys is None else frozenset(keys)
        self.leases.close(lease)
        published = []
        for entry in lease.entries:
            is_named = named is None or entry.key in named
            if entry.doom or not is_named or key_in(self.room.image(entry)) != entry.key:
                self._abort_entry(entry)
                continue
            entry.pins -= 1
            published.append(entry)
        self._publish(published)
        self._extend_all(published)
        self._supersede_all(published)
        left = [entry for entry in published if entry.state is ChunkState.READY]  # one may cover another
        self.tiering.store(left)
        for entry in left:
            self._settle(entry)
        return len(published)

    def abort(self, session_id: int, lease_id: int) -> None:
        """Give up a write lease: nothing of it was or becomes readable; its slots are free again."""
        lease = self.leases.get(lease_id, session_id)
        if lease is None or not lease.is_write:
            self._end_quarantine(session_id, lease_id)
            return
        self.leases.close(lease)
        for entry in lease.entries:
            self._abort_entry(entry)

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
            for entry in lease.entries:
                slots.append((entry.offset, entry.kind))
                self._abort_entry(entry, keep_slot=True)

    def on_job_done(self, result: JobResult) -> None:
        """A tier finished a job."""
        finished = self.tiering.finish(result)
        if finished is None:
            return
        kind, book, done, failed = finished
        if kind is JobKind.LOAD:
            self._publish(done)
            for entry in done:
                self.ledger.loaded(book.name, entry)
            self.tiering.store(done)  # tiers that lack it
        else:
            for entry in done:
                self.ledger.stored(entry, book.medium, book.name)
            self._supersede_all(done)  # when all are told of: one may be the beginning of another
        for entry, reason in failed:
            self.ledger.failed(book.name, reason)
            if kind is JobKind.LOAD:
                self.room.take(entry)
            elif reason == CORRUPT:  # no tier can keep it, so nobody should read it
                self._doom(entry, CORRUPT)
        self.tiering.store_again()
        for entry in [*done, *(entry for entry, _ in failed)]:
            self._settle(entry)

    def adopt(self, book: TierBook, found: Sequence[Found]) -> None:
        """Learn what a tier held before this store began, oldest use first. What was forgotten is removed instead."""
        for chunk in found:
            self._inherit(chunk.key, chunk.parent)
            entry = self.tiering.adopt(book, chunk, is_forgotten=self.forgotten.covers(chunk))
            if entry is not None:
                self.ledger.stored(entry, book.medium, book.name, chunk)

    def catch_up(self, now: float) -> bool:
        """As ``Tiering.catch_up``. To be called now and then, and again soon if it says so."""
        return self.tiering.catch_up(now, is_frozen=self.is_frozen)

    def take_jobs(self) -> list[tuple[int, TierJob]]:
        """Jobs that the tiers are to be given, each with its tier's number."""
        return self.tiering.take_jobs()

    def take_events(self, limit: int = PAGE, *, start_over: bool = False) -> list[StoreEvent]:
        """As ``Feed.take``: the first call switches events on and tells what is here."""
        return self.ledger.feed.take(limit, start_over=start_over)

    def check(self) -> None:
        """Raise InvariantError unless all that must always hold does."""
        check_store(self)


def _require_sane(chunk: NewChunk) -> None:
    is_sane = (
        len(chunk.key) == len(chunk.parent) == KEY_BYTES
        and chunk.num_tokens > 0
        and len(chunk.sketch) == sketch_bytes_for(chunk.num_tokens)
        and chunk.image_bytes >= PREFIX_BYTES + chunk.num_tokens * TOKEN_BYTES
    )
    if not is_sane:
        key = chunk.key[:KEY_BYTES].hex()
        msg = f"a malformed chunk: key {key}, {chunk.num_tokens} tokens, {chunk.image_bytes} bytes"
        raise ValueError(msg)
