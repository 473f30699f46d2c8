"""What the tests of the store share: a desk to work at, with tiers that are run by hand.

A prompt is a word: each letter stands for 16 tokens, two letters are a chunk, an odd letter at the end a partial one.
A chunk is called by the prompt that ends with it, so ``aabbc`` is the third chunk of itself, on ``aabb`` and ``aa``.
Queries of a prompt are called by the prompt with a question mark before it: ``?aabb`` hangs on ``?aa``.
"""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from qkvault.image import read_header, seal, verify_payload
from qkvault.policies import POLICIES
from qkvault.pool import Pool
from qkvault.store.book import TierBook
from qkvault.store.manager import StorageManager
from qkvault.store.residents import Residents
from qkvault.testing import DictTier, FakeClock
from qkvault.testing.store_model import QUERY_ROOT, ROOT, checks_of, chunks_of, keys_of, tokens_of
from qkvault.tiers.base import JobKind, JobResult
from qkvault.types import CacheKind, ChunkState, Medium, Outcome

CHUNK_SIZE = 32
CHUNK_BYTES = 8192  # a whole chunk's image; a partial one takes a slot of that size too, and 6144 bytes in a tier
TIERS = ("disk", "far")


def tokens(prompt):
    return tokens_of(1000 * ord(letter) + n for letter in prompt.lstrip("?") for n in range(16))


def root_of(prompt):
    return QUERY_ROOT if prompt.startswith("?") else ROOT


def chunks(prompt, version=0):
    return chunks_of(tokens(prompt), CHUNK_SIZE, root=root_of(prompt), version=version, token_payload_bytes=128)


class Told(DictTier):
    """How a tier is."""

    can_store, num_losses = True, 0


class Desk:
    """A store of ``slots`` chunks in RAM over tiers of ``caps`` chunks, and what its clients and tiers do.

    So many of them may be ``queries`` in RAM, and ``tier_queries`` in each tier; None: a quarter.
    """

    def __init__(
        self, slots=8, caps=(), policy="lru", hot=True, lease_seconds=60.0, *, queries=None, tier_queries=None
    ):
        make = POLICIES.load(policy)
        self.clock = FakeClock()
        self.pool = Pool(slots * CHUNK_BYTES, prefault=False)
        share, tier_share = (n if n is None else n * CHUNK_BYTES for n in (queries, tier_queries))
        self.books = [
            TierBook(n, TIERS[n], list(Medium)[n + 1], lambda size: size, residents)
            for n, residents in enumerate(Residents(make, cap * CHUNK_BYTES, tier_share) for cap in caps)
        ]
        residents = Residents(make, self.pool.capacity_bytes, share)
        self.store = StorageManager(self.pool, residents, self.books, lease_seconds=lease_seconds, hot_cache=hot)
        self.files = [{} for _ in caps]
        self.jobs = []
        self.names = {ROOT: "", QUERY_ROOT: "?"}

    # Clients

    def chunks(self, prompt, version=0):
        made = chunks(prompt, version)
        start = len(prompt) - len(prompt.lstrip("?"))
        self.names.update((chunk.key, prompt[: start + 2 * at + 2]) for at, chunk in enumerate(made))
        return made

    def reserve(self, prompt, start=0, session=1, version=0):
        """Reserve the chunks from ``start`` on, and fill the slots."""
        made = self.chunks(prompt, version)[start:]
        kind = CacheKind.QUERY if prompt.startswith("?") else CacheKind.KV
        reserved = self.store.reserve(session, [chunk.new() for chunk in made], self.clock(), kind=kind)
        for chunk, offset in zip(made, reserved.offsets, strict=True):
            if offset >= 0:
                chunk.write(self.pool.view(offset, chunk.new().image_bytes))
        self.settle()
        return reserved

    def save(self, prompt, start=0, session=1, version=0):
        """Reserve, write, commit. Returns how many chunks were published."""
        reserved = self.reserve(prompt, start, session, version)
        published = self.store.commit(session, reserved.lease_id)
        self.settle()
        return published

    def lookup(self, prompt, session=1, media=None):
        """Look up whole chunks only."""
        whole = [chunk for chunk in self.chunks(prompt) if chunk.num_tokens == CHUNK_SIZE]
        keys, checks = keys_of(whole), checks_of(whole)
        located = self.store.lookup(session, root_of(prompt), keys, checks, self.clock(), search_range=media)
        self.settle()
        return replace(located, ready=located.ready.with_asked(keys))

    def find(self, prompt, session=1, media=None):
        """Look up and match, as a client does."""
        located = self.lookup(prompt, session, media)
        at = len(located.ready) + located.num_pending
        if at < len(self.chunks(prompt)):
            located = self.match(located.lease_id, prompt, at, session, media)
        return located

    def match(self, lease_id, prompt, at, session=1, media=None):
        chunk = self.chunks(prompt)[at]
        located = self.store.match(session, lease_id, chunk.parent, chunk.tokens, self.clock(), search_range=media)
        self.settle()
        return located

    def poll(self, located, session=1):
        located = self.store.poll(session, located.lease_id, self.clock())
        self.settle()
        return located

    def release(self, *leases, session=1):
        for located in leases:
            self.store.release(session, located.lease_id)
        self.settle()

    def use(self, prompt):
        """Look up and release."""
        self.release(self.lookup(prompt))

    def read(self, located, version=0):
        """The names of what may be read, each with how many of its tokens. The bytes are the ones that were written."""
        seen = []
        for ref in located.ready:
            name = self.names[ref.key]
            image = self.pool.view(ref.offset, ref.image_bytes)
            assert chunks(name, version)[-1].is_in(image)
            seen.append((name, ref.num_tokens))
        return seen

    def found(self, prompt):
        """How many tokens of ``prompt`` are found in the end."""
        located = self.find(prompt)
        self.end_jobs()
        if located.lease_id:
            located = self.poll(located)
        num_tokens = sum(num_tokens for _, num_tokens in self.read(located))
        self.release(located)
        return num_tokens

    # Tiers

    def settle(self):
        self.store.check()
        self.jobs += self.store.take_jobs()

    def end_jobs(self, fail=None, kind=None):
        """All jobs end (of ``kind``); ``fail`` tells which chunks fail for which reason."""
        jobs, self.jobs = self.jobs, []
        for number, job in jobs:
            if kind in (None, job.kind):
                self.end_job(number, job, fail or {})
            else:
                self.jobs.append((number, job))
        if any(kind in (None, job.kind) for _, job in self.jobs):
            self.end_jobs(fail, kind)

    def end_job(self, number, job, fail):
        done, failed = [], []
        for key in job.delete_first:
            self.files[number].pop(key, None)
        for piece in job.pieces:
            reason = fail.get(self.names[piece.key]) or self.run_piece(job.kind, piece, self.files[number])
            if reason:
                failed.append((piece.key, reason))
            else:
                done.append(piece.key)
        self.store.on_job_done(JobResult(job.job_id, tuple(done), tuple(failed)))
        self.settle()

    @staticmethod
    def run_piece(kind, piece, files):
        if kind is JobKind.STORE:
            seal(piece.image)
            files[piece.key] = bytes(piece.image)
        elif kind is JobKind.DELETE:
            return "" if files.pop(piece.key, None) else "absent"
        elif piece.key not in files:
            return "absent"
        else:
            piece.image[:] = files[piece.key]
            verify_payload(piece.image, read_header(piece.image))
        return ""

    def is_told(self, *, is_healthy=True, can_store=True, num_losses=0, number=0):
        """A tier says how it is."""
        tier = Told()
        tier.is_healthy, tier.can_store, tier.num_losses = is_healthy, can_store, num_losses
        self.store.tiering.hear(self.books[number], tier)

    def catch_up(self, num_rounds=6, fail=None):
        """Time passes, and tiers are given what they missed."""
        for _ in range(num_rounds):
            self.store.catch_up(self.clock())
            self.clock.advance(1.0)
            self.settle()
            self.end_jobs(fail)

    # State

    def assert_cache(self, ram=None, disk=None, pins=None):
        """The whole state: what is readable in RAM, in the first tier, and what is pinned (once for each pin)."""
        entries = list(self.store.index)
        if ram is not None:
            here = [self.names[entry.key] for entry in entries if entry.state is ChunkState.READY]
            assert sorted(here) == sorted(ram.split())
        if disk is not None:
            assert sorted(self.names[entry.key] for entry in entries if entry.tiers & 1) == sorted(disk.split())
            assert sorted(self.names[key] for key in self.files[0]) == sorted(disk.split())
        if pins is not None:
            assert Counter({self.names[e.key]: e.pins for e in entries if e.pins}) == Counter(pins.split())

    @property
    def counters(self):
        return self.store.ledger.counters

    def close(self):
        self.store.check()
        for session in (1, 2, 3):
            self.store.end_session(session)
        self.settle()
        self.end_jobs()
        self.store.clear()
        self.settle()
        self.end_jobs()
        assert (len(self.store.index), len(self.store.leases)) == (0, 0)
        assert self.pool._bin_sizes == [self.pool.capacity_bytes]
        assert all(book.residents.used_bytes == 0 for book in self.books)
        self.pool.close()


@pytest.fixture
def make_desk():
    """Makes desks. After the test everything is given up, and must leave nothing."""
    desks = []

    def make(*args, **kwargs):
        desks.append(Desk(*args, **kwargs))
        return desks[-1]

    yield make
    for desk in desks:
        desk.close()


@pytest.fixture
def desk(make_desk):
    return make_desk()


@pytest.fixture
def outcome():
    """Outcomes by their first letters, for comparison: ``outcome("RPN")``."""
    by_letter = {"R": "RESERVED", "P": "PRESENT", "N": "NO_ROOM", "F": "FROZEN", "C": "COLLISION", "B": "BUSY"}
    return lambda letters: tuple(Outcome[by_letter[letter]] for letter in letters)
