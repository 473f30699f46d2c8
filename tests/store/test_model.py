"""Random operations on the state machine, against a dictionary.

Every rule ends with ``check()``, and everything that was handed out is looked at again after every rule: leased bytes
never change. ``--hypothesis-profile=long`` runs many more sequences.
"""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from qkvault.image import key_in, read_header, seal, sketch_of, verify_payload
from qkvault.policies import POLICIES
from qkvault.pool import Pool
from qkvault.store.book import TierBook
from qkvault.store.manager import StorageManager
from qkvault.store.residents import Residents
from qkvault.testing import DictTier, FakeClock, StoreModel
from qkvault.testing.store_model import QUERY_ROOT, ROOT, checks_of, chunks_of, keys_of, tokens_of
from qkvault.tiers.base import Found, JobKind, JobResult
from qkvault.types import GRAIN_TOKENS, CacheKind, ChunkState, Medium, Outcome

GRAINS = 3  # in a chunk
CHUNK_SIZE = GRAINS * GRAIN_TOKENS
CHUNK_BYTES = 8192
LEASE_SECONDS = 10.0
TIERS = ("disk", "far")
ENOUGH = 1000  # chunks: a tier of so many is never full

NUM_EXAMPLES = max(200, settings().max_examples)

MAX_GRAINS = 3 * GRAINS + 2  # of a prompt
pick = st.integers(0, 1 << 30)  # which of those there are
# A prompt: its length in grains, the grain in which it differs from most others, and what is stored of it.
prompts = st.tuples(
    st.sampled_from([9, 11, 6, 5, 3, *range(1, MAX_GRAINS + 1)]),
    st.integers(-MAX_GRAINS, MAX_GRAINS),
    st.sampled_from([CacheKind.KV, CacheKind.KV, CacheKind.QUERY]),
)
sessions = st.integers(1, 3)
# What happens to the pieces of a job, in order; those after the last one go well.
reasons = st.sampled_from(["unavailable", "absent", "corrupt", "mute"])
search_ranges = st.sampled_from([None, None, ("ram",), ("disk",), ("ram", "far")])
faults = st.one_of(st.just([]), st.tuples(st.integers(0, 2), reasons).map(lambda fault: [""] * fault[0] + [fault[1]]))


def shares_of(residents):
    query_bytes = residents.query_bytes
    return {CacheKind.KV: residents.capacity_bytes - query_bytes, CacheKind.QUERY: query_bytes}


def root_of(prompt):
    return QUERY_ROOT if prompt[2] is CacheKind.QUERY else ROOT


class Read(NamedTuple):
    session: int
    root: bytes
    query: list
    tail: bytes
    held: dict  # offset to (bytes, as first seen)


class Write(NamedTuple):
    session: int
    kind: CacheKind
    slots: dict  # key to (chunk, offset)


class SlowManager(StorageManager):
    """Lets go of few chunks at a time, as of many in a large cache."""

    slice_chunks = 1

    def work_off(self, limit=0):
        super().work_off(limit or self.slice_chunks)


class Told(DictTier):
    """How a tier is; its files are the machine's."""

    can_store, num_losses = True, 0


class StoreMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(["lru", "lfu", "fifo", "mru"]),
        sizes=st.tuples(st.sampled_from([4, 8, 6, 9, 3, 2, 5]), st.sampled_from([4, 2, 8, 0, 3])),
        caps=st.sampled_from([[4], [ENOUGH], [8], [2, 6], [ENOUGH, ENOUGH], [1], [8, 3], []]),
        hot=st.sampled_from([True, True, False]),
        slice_chunks=st.sampled_from([500, 1, 2, 0]),
    )
    def start(self, policy, sizes, caps, hot, slice_chunks):
        pool_chunks, share_chunks = sizes
        self.clock = FakeClock()
        self.pool = Pool(pool_chunks * CHUNK_BYTES, prefault=False)
        make = POLICIES.load(policy)
        self.books = [
            TierBook(
                n,
                TIERS[n],
                list(Medium)[n + 1],
                lambda size: size,
                Residents(make, cap * CHUNK_BYTES, (ENOUGH // 2 if cap == ENOUGH else share_chunks) * CHUNK_BYTES),
            )
            for n, cap in enumerate(caps)
        ]
        residents = Residents(make, self.pool.capacity_bytes, share_chunks * CHUNK_BYTES)
        self.store = SlowManager(self.pool, residents, self.books, lease_seconds=LEASE_SECONDS, hot_cache=hot)
        self.store.slice_chunks = slice_chunks
        self.store.take_events()
        self.residents = {"ram": residents} | {book.name: book.residents for book in self.books}
        self.model = StoreModel({name: shares_of(each) for name, each in self.residents.items()})
        self.files = [{} for _ in caps]  # what the tiers hold: key to image
        self.tiers = [Told() for _ in caps]
        self.put = {}  # what the tiers were given behind the store's back
        self.jobs = []
        self.reads = {}
        self.writes = {}
        self.late = {}  # write leases that ran out, whose writers do not know
        self.version = 0  # of payloads: a new one after each clear
        self.is_void = False
        self.gone = set()  # keys that were forgotten; they may be stored anew
        self.parents = {}  # of all chunks of all prompts

    # What clients do

    def chunks(self, prompt):
        num_grains, differs_at, kind = prompt
        grains = [int(at == differs_at) for at in range(1, num_grains + 1)]
        tokens = tokens_of(n + 1000 * grain for grain in grains for n in range(GRAIN_TOKENS))
        size = 200 if kind is CacheKind.QUERY else 40  # 2 slots of KV, or one and a part of it
        root = root_of(prompt)
        chunks = chunks_of(tokens, CHUNK_SIZE, root=root, version=self.version, token_payload_bytes=size)
        self.parents.update((chunk.key, chunk.parent) for chunk in chunks)
        return chunks

    def hangs_on_gone(self, key):
        """Whether it is known by now, or may be, that a chunk before it was forgotten at some time."""
        while key in self.parents:
            key = self.parents[key]
            if key in self.gone:
                return True
        return False

    @rule(session=sessions, prompt=prompts, media=search_ranges, asks_for_tail=st.booleans())
    def find(self, session, prompt, media, asks_for_tail):
        chunks, root, kind = self.chunks(prompt), root_of(prompt), prompt[2]
        query = [chunk for chunk in chunks if chunk.num_tokens == CHUNK_SIZE]
        whole_tail = chunks[-1].tokens if asks_for_tail and len(query) < len(chunks) else b""
        located = self.store.lookup(
            session, root, keys_of(query), checks_of(query), self.clock(), tail=whole_tail, search_range=media
        )
        located = replace(located, ready=located.ready.with_asked(keys_of(query)))
        self.follow(by=kind)
        self.model.check_lookup(located, query, self.pool.view, root=root, tail=whole_tail)
        if media is None or "ram" in media:
            assert len(located.ready) >= self.model.num_in_ram(query)
        num_found = len(located.ready) + located.num_pending
        tail = chunks[num_found].tokens if num_found < len(chunks) else whole_tail
        if located.can_fork and tail:
            parent = query[num_found - 1].key if num_found else root
            located = self.store.match(session, located.lease_id, parent, tail, self.clock(), search_range=media)
            self.follow(by=kind)
            self.model.check_lookup(located, query, self.pool.view, root=root, tail=tail)
            assert num_found <= len(located.ready) + located.num_pending <= num_found + 1
        if located.lease_id:
            self.reads[located.lease_id] = Read(session, root, query, tail, {})
            self.hold(located)

    def hold(self, located):
        held = self.reads[located.lease_id].held
        for ref in located.ready:
            held.setdefault(ref.offset, bytes(self.pool.view(ref.offset, ref.image_bytes)))

    @precondition(lambda self: self.reads)
    @rule(which=pick)
    def poll(self, which):
        lease_id, read = self.one_of(self.reads, which)
        located = self.store.poll(read.session, lease_id, self.clock())
        self.model.check_poll(located, read.query, self.pool.view, root=read.root, tail=read.tail)
        if located.lease_id:
            assert len(located.ready) >= len(read.held) or not located.num_pending
            self.hold(located)
        else:
            del self.reads[lease_id]

    @rule(session=sessions, prompt=prompts, faults=faults)
    def load(self, session, prompt, faults):
        """What was stored comes up from a tier, or fails to; who waits for it looks again."""
        self.save(session, prompt)
        self.end_all_jobs()
        self.clear(lower_tiers=False)
        before = set(self.reads)
        self.find(session, prompt, None, asks_for_tail=False)
        while self.jobs:
            self.end_job(0, faults)
            self.follow()
        for lease_id in self.reads.keys() - before:
            self.poll(sorted(self.reads).index(lease_id))

    @precondition(lambda self: self.reads)
    @rule(which=pick)
    def release(self, which):
        lease_id, read = self.one_of(self.reads, which)
        self.store.release(read.session % 3 + 1, lease_id)  # somebody else's: ignored
        self.store.release(read.session, lease_id)
        self.store.release(read.session, lease_id)
        del self.reads[lease_id]

    @rule(session=sessions, prompt=prompts, start=st.integers(0, 2), writes_all=st.booleans())
    def reserve(self, session, prompt, start, writes_all):
        chunks, kind = self.chunks(prompt)[start:], prompt[2]
        reserved = self.store.reserve(session, [chunk.new() for chunk in chunks], self.clock(), kind=kind)
        self.follow(by=kind)
        given = [outcome is Outcome.RESERVED for outcome in reserved.outcomes]
        assert [offset >= 0 for offset in reserved.offsets] == given
        assert (reserved.lease_id > 0) == any(given)
        if Outcome.NO_ROOM in reserved.outcomes:
            first = reserved.outcomes.index(Outcome.NO_ROOM)
            assert set(reserved.outcomes[first:]) == {Outcome.NO_ROOM}
        if not reserved.lease_id:
            return
        slots = {
            chunk.key: (chunk, offset) for chunk, offset in zip(chunks, reserved.offsets, strict=True) if offset >= 0
        }
        for at, (chunk, offset) in enumerate(slots.values()):
            if writes_all or at % 2 == 0:
                chunk.write(self.pool.view(offset, chunk.new().image_bytes))
        self.writes[reserved.lease_id] = Write(session, kind, slots)
        self.model.reserved(reserved.lease_id, [chunk for chunk, _ in slots.values()])

    @rule(session=sessions, prompt=prompts)
    def save(self, session, prompt):
        before = set(self.writes)
        self.reserve(session, prompt, 0, writes_all=True)
        for lease_id in self.writes.keys() - before:
            self.commit(sorted(self.writes).index(lease_id), 7)

    @precondition(lambda self: self.writes)
    @rule(which=pick, part=st.integers(0, 7))
    def commit(self, which, part):
        lease_id, write = self.one_of(self.writes, which)
        written = [
            key
            for key, (chunk, offset) in write.slots.items()
            if chunk.is_in(self.pool.view(offset, chunk.new().image_bytes))
        ]
        named = None if part > 3 else [key for at, key in enumerate(write.slots) if part >> at & 1 or at > 1]
        may = {key for key in written if named is None or key in named}
        self.follow()
        num_published = self.store.commit(write.session, lease_id, named)
        events = self.store.take_events()
        published = {event.key for event in events if event.stored and event.tier == "ram"}
        assert num_published == len(published)
        assert published <= may
        known = (*self.model.images.values(), *self.model.writing[lease_id].values())
        longer = [chunk.tokens for chunk in known if chunk.kind is write.kind]
        for key in (may & self.model.writing[lease_id].keys()) - published:  # not cleared, so superseded
            if self.hangs_on_gone(key):
                continue
            tokens = write.slots[key][0].tokens
            assert any(other.startswith(tokens) and len(other) > len(tokens) for other in longer)
        self.model.committed(lease_id, published)
        self.model.hear(events, by=write.kind, kv_bytes=self.kv_bytes)
        del self.writes[lease_id]

    @precondition(lambda self: self.writes)
    @rule(which=pick)
    def abort(self, which):
        lease_id, write = self.one_of(self.writes, which)
        self.store.abort(write.session, lease_id)
        self.model.aborted(lease_id)
        del self.writes[lease_id]

    @precondition(lambda self: self.late)
    @rule(which=pick, does_commit=st.booleans())
    def write_late(self, which, does_commit):
        lease_id, write = self.one_of(self.late, which)
        for chunk, offset in write.slots.values():
            chunk._replace(payload=b"\xee" * len(chunk.payload)).write(self.pool.view(offset, chunk.new().image_bytes))
        if does_commit:
            assert self.store.commit(write.session, lease_id) == 0
        else:
            self.store.abort(write.session, lease_id)
        del self.late[lease_id]

    def end_session(self, session):
        self.store.end_session(session)
        for lease_id in [lease_id for lease_id, write in self.writes.items() if write.session == session]:
            self.model.aborted(lease_id)
        for leases in (self.reads, self.writes, self.late):
            for lease_id in [lease_id for lease_id, lease in leases.items() if lease.session == session]:
                del leases[lease_id]

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def pass_time(self, seconds):
        self.clock.advance(seconds)
        self.store.expire(self.clock())
        live = {lease.lease_id for lease in self.store.leases.all()}
        self.reads = {lease_id: read for lease_id, read in self.reads.items() if lease_id in live}
        for lease_id in self.writes.keys() - live:
            self.model.aborted(lease_id)
            self.late[lease_id] = self.writes.pop(lease_id)

    # What operators do

    @rule(act=st.sampled_from(["clear", "thaw", "warm", "freeze", "cool", "clear RAM", "end"]), session=sessions)
    def operate(self, act, session):
        if act in ("thaw", "freeze"):
            self.store.is_frozen = act == "freeze"
        elif act in ("warm", "cool"):
            self.store.set_hot_cache(enabled=act == "warm")
        elif act == "end":
            self.end_session(session)
        else:
            self.clear(lower_tiers=act == "clear")

    def clear(self, *, lower_tiers):
        self.store.clear(lower_tiers=lower_tiers)
        if lower_tiers:
            self.model.cleared()
            self.version += 1
            self.is_void = True

    @precondition(lambda self: self.store.due)
    @rule(limit=st.integers(1, 3))
    def work_off(self, limit):
        self.store.work_off(limit)

    @rule(prompt=prompts, start=st.integers(0, 2))
    def forget(self, prompt, start):
        """B290: what was forgotten, and all that hangs on it, is not found and never appears."""
        chunks = self.chunks(prompt)
        whole = [chunk for chunk in chunks if chunk.num_tokens == CHUNK_SIZE]
        tail = chunks[-1].tokens if len(whole) < len(chunks) else b""
        parent = chunks[start - 1].key if 0 < start <= len(whole) else root_of(prompt)
        named = whole[start:] if start <= len(whole) else whole
        self.store.forget(parent, keys_of(named), tail)
        last = named[-1].key if named else parent
        known = {chunk.key: chunk for chunks in self.model.history.values() for chunk in chunks}
        known |= {chunk.key: chunk for write in self.writes.values() for chunk, _ in write.slots.values()}
        # What hangs on a chunk that the store does not know is not known to hang on the one before that.
        known = {key: each for key, each in known.items() if (entry := self.store.index.get(key)) and entry.parent}
        gone = {chunk.key for chunk in named}
        behind = {chunk.key: chunk.tokens for chunk in known.values() if chunk.parent == last and tail}
        gone |= {key for key, own in behind.items() if tail.startswith(own) or own.startswith(tail)}
        while more := {chunk.key for chunk in known.values() if chunk.parent in gone} - gone:
            gone |= more
        self.model.forget(gone)
        self.gone |= gone

    # What tiers do

    @precondition(lambda self: self.jobs)
    @rule(which=pick, faults=faults)
    def end_job(self, which, faults):
        number, job = self.jobs.pop(which % len(self.jobs))
        files = self.files[number]
        for key in job.delete_first:
            files.pop(key, None)
        done, failed = [], []
        for at, piece in enumerate(job.pieces):
            fault = faults[at] if at < len(faults) else ""
            if job.kind is JobKind.STORE and not self.tiers[number].can_store:
                fault = fault or "unavailable"
            reason = self.run_piece(job.kind, piece, files, fault)
            if reason == "mute":
                continue  # a tier that forgets to tell
            if reason:
                failed.append((piece.key, reason))
            else:
                done.append(piece.key)
        failed.reverse()  # the order says nothing
        self.store.on_job_done(JobResult(job.job_id, tuple(done), tuple(failed)))
        self.store.on_job_done(JobResult(job.job_id, tuple(done), ()))  # told twice: ignored

    @rule()
    def end_all_jobs(self):
        self.follow()
        while self.jobs:
            self.end_job(0, [])
            self.follow()

    def run_piece(self, kind, piece, files, fault):
        if kind is JobKind.DELETE:
            if not fault:
                files.pop(piece.key, None)
            return fault
        if kind is JobKind.STORE:
            assert any(chunk.is_in(piece.image) for chunk in self.model.history[piece.key]), "stored unwritten bytes"
            if not fault:
                seal(piece.image)
                files[piece.key] = bytes(piece.image)
            elif fault == "corrupt":  # then it is no use in RAM either
                self.model.forgotten(piece.key)
            return fault
        piece.image[:] = b"\xa5" * len(piece.image)
        if fault in ("absent", "corrupt"):
            files.pop(piece.key, None)
        if not fault and len(files.get(piece.key, b"")) != len(piece.image):
            return "absent"
        if not fault:
            piece.image[:] = files[piece.key]
            verify_payload(piece.image, read_header(piece.image))
        return fault

    @precondition(lambda self: self.books)
    @rule(which=pick, is_up=st.booleans(), can_store=st.booleans(), is_lost=st.sampled_from([False, False, True]))
    def health(self, which, is_up, can_store, is_lost):
        """A tier goes and comes back, maybe to be read only, or with nothing of what it had."""
        number = which % len(self.books)
        tier = self.tiers[number]
        tier.is_healthy, tier.can_store = is_up, can_store
        if is_lost:
            self.files[number].clear()
            tier.num_losses += 1
        self.store.tiering.hear(self.books[number], tier)

    @rule()
    def catch_up(self):
        self.store.catch_up(self.clock())

    @precondition(lambda self: self.books)
    @rule(which=pick, prompt=prompts)
    def adopt(self, which, prompt):
        number = which % len(self.books)
        files = self.files[number]
        chunks = self.chunks(prompt)
        if not self.is_void and not self.books[number].is_emptied:  # files of an earlier run
            for chunk in chunks[-2:]:
                if chunk.key not in files and chunk.key not in self.books[number].deleting:
                    image = bytearray(chunk.new().image_bytes)
                    chunk.write(memoryview(image))
                    seal(memoryview(image))
                    files[chunk.key] = bytes(image)
                    self.put[chunk.key] = chunk
        found = []
        for image in files.values():
            head = read_header(memoryview(image))
            size = len(image)
            sketch = sketch_of(head.tokens)
            found.append(Found(head.key, head.parent, sketch, head.num_tokens, size, size, space=head.space))
        self.store.adopt(self.books[number], found)
        for chunk in self.put.values():  # earlier ones too: a file may have outlived the order to remove it
            entry = self.store.index.get(chunk.key)
            if entry is not None and entry.tiers and chunk.key not in self.model.images and not entry.doom:
                self.model.admit([chunk])
                while entry is not None:
                    assert entry.key not in self.gone, "a scan has brought back what hangs on what was forgotten"
                    entry = entry.parent

    # What must hold

    def one_of(self, leases, which):
        lease_ids = sorted(leases)
        lease_id = lease_ids[which % len(lease_ids)]
        return lease_id, leases[lease_id]

    def kv_bytes(self, tier):
        return self.residents[tier].bytes_of[CacheKind.KV]

    def follow(self, by=None):
        """Hear the events, and give the jobs to the tiers: no two at a time touch one chunk of a tier.

        B311, B312: whoever leaves for ``by``.
        """
        self.model.hear(self.store.take_events(), by=by, kv_bytes=self.kv_bytes)
        num_known = len(self.jobs)
        self.jobs += self.store.take_jobs()
        touched = [(n, key) for n, job in self.jobs for key in (*job.delete_first, *(p.key for p in job.pieces))]
        assert len(touched) == len(set(touched)), "two jobs at a time for one chunk"
        for number, job in self.jobs[num_known:]:
            if job.kind is JobKind.STORE:
                entries = [self.store.index.get(piece.key) for piece in job.pieces]
                assert all(map(self.books[number].holds_parent, entries)), "a chunk is written that nobody would find"

    @invariant()
    def all_holds(self):
        if not hasattr(self, "store"):
            return
        self.follow()
        self.store.check()
        ready = {entry.key for entry in self.store.index if entry.state is ChunkState.READY}
        assert self.model.contents["ram"].keys() == ready
        for book in self.books:
            assert self.model.contents[book.name].keys() == {e.key for e in self.store.index if e.tiers & book.bit}
            assert book.residents.used_bytes <= book.residents.capacity_bytes
        assert self.pool.used_bytes <= self.pool.capacity_bytes
        self.model.check_shares()
        for read in self.reads.values():
            for offset, image in read.held.items():
                view = self.pool.view(offset, len(image))
                assert key_in(view) == key_in(memoryview(image))
                assert view[32:] == image[32:], "leased bytes changed"  # the check sums come with the first store

    def recover(self):
        """B430: tiers that are well again, and have room, get what they missed."""
        self.store.is_frozen = False
        for tier in self.tiers:
            tier.is_healthy = tier.can_store = True
        for _ in range(20):
            for book, tier in zip(self.books, self.tiers, strict=True):
                self.store.tiering.hear(book, tier)
            self.store.catch_up(self.clock())
            self.clock.advance(1.0)
            self.end_all_jobs()
            self.store.check()
        for book in self.books:
            if book.residents.capacity_bytes == ENOUGH * CHUNK_BYTES:
                for entry in self.store.index:
                    is_there = entry.tiers & book.bit or entry.doom or not book.holds_parent(entry)
                    assert is_there or entry.state is not ChunkState.READY, f"{book.name} has missed a chunk"

    def teardown(self):
        if not hasattr(self, "store"):
            return
        for session in (1, 2, 3):
            self.store.end_session(session)
        self.follow()
        self.end_all_jobs()
        self.recover()
        for number, book in enumerate(self.books):
            booked = sum(
                len(image) for key, image in self.files[number].items() if key in self.model.contents[book.name]
            )
            assert booked == book.residents.used_bytes, "the tier holds another number of bytes than its book says"
        self.store.clear()
        while self.store.due:
            self.store.work_off(5)
        self.follow()
        self.end_all_jobs()
        self.store.check()
        assert len(self.store.index) == 0
        assert len(self.store.leases) == 0
        assert self.pool._bin_sizes == [self.pool.capacity_bytes], "not one free run"
        assert not any(self.model.contents.values())
        assert all(book.residents.used_bytes == 0 and not book.deleting for book in self.books)
        self.pool.close()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=NUM_EXAMPLES, stateful_step_count=50)
