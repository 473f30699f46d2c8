"""What every tier promises, as tests. A new tier is done when this passes.

    class TestMyTier(TierContract):
        is_persistent = True

        def make_tier(self, folder):
            return MyTier(folder)

Works through the interface only; whatever else a tier promises is for its own tests.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from qkvault.image import Header, header_bytes_for, sketch_of, write_header
from qkvault.pool import Pool
from qkvault.tiers.base import Found, JobKind, JobResult, Piece, Tier, TierJob
from qkvault.types import HASH_BYTES, SPACE_BYTES, TOKEN_BYTES, ChunkKey

DRAIN_SECONDS: Final = 30.0
POOL_BYTES: Final = 16 << 20
CHUNK_TOKENS: Final = 64
SPACE: Final = bytes(range(SPACE_BYTES))
DESCRIPTION: Final = b"a space of tests"  # of the space; real ones are msgpack
REASONS: Final = frozenset({"absent", "corrupt", "refused", "unavailable"})


def key_of(number: int, space: bytes = SPACE) -> ChunkKey:
    """The key of test chunk ``number``."""
    return ChunkKey(space + random.Random(f"key {number}").randbytes(HASH_BYTES))  # noqa: S311  # repeatable, not secret


def tokens_of(number: int, num_tokens: int = CHUNK_TOKENS) -> bytes:
    """The tokens of test chunk ``number``."""
    return b"".join((number * 1000 + n).to_bytes(TOKEN_BYTES, "little") for n in range(num_tokens))


class Slots:
    """A small pool, and images in its slots."""

    def __init__(self, capacity_bytes: int = POOL_BYTES) -> None:
        self.pool = Pool(capacity_bytes, prefault=False)

    def image(
        self, number: int, payload_bytes: int = 10_000, *, version: int = 0, key: ChunkKey | None = None
    ) -> Piece:
        """A slot with the image of chunk ``number``; ``version`` varies its payload."""
        key = key or key_of(number)
        header_bytes = header_bytes_for(CHUNK_TOKENS, len(DESCRIPTION))
        image = self.blank(key, header_bytes + payload_bytes).image
        seed = f"payload {number} {version}"
        image[header_bytes:] = random.Random(seed).randbytes(payload_bytes)  # noqa: S311  # repeatable, not secret
        tokens = tokens_of(number)
        write_header(image, Header(key, key_of(number - 1), tokens, DESCRIPTION, header_bytes, payload_bytes, 0))
        return Piece(key, image)

    def blank(self, key: bytes, image_bytes: int) -> Piece:
        """An empty slot to load ``key`` into."""
        offset = self.pool.allocate(image_bytes)
        assert offset is not None, "the test's pool is too small"
        image = self.pool.view(offset, image_bytes)
        image[:] = b"\xa5" * image_bytes
        return Piece(key, image)

    def blank_for(self, piece: Piece) -> Piece:
        """An empty slot to load what was stored from ``piece`` into."""
        return self.blank(piece.key, len(piece.image))


class TierDesk:
    """Submits jobs to a tier and waits for their results."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self._last_id = 0

    def submit(self, kind: JobKind, pieces: Sequence[Piece], *, delete_first: Sequence[bytes] = ()) -> int:
        """Submit a job; returns its id."""
        self._last_id += 1
        self.tier.submit(TierJob(self._last_id, kind, tuple(pieces), tuple(delete_first)))
        return self._last_id

    def settle(self) -> dict[int, JobResult]:
        """All results, once every job has ended."""
        assert self.tier.drain(DRAIN_SECONDS), "jobs did not end"
        results = self.tier.poll()
        by_id = {result.job_id: result for result in results}
        assert len(by_id) == len(results), "a job was returned twice"
        return by_id

    def do(self, kind: JobKind, pieces: Sequence[Piece], *, delete_first: Sequence[bytes] = ()) -> JobResult:
        """Submit a job and wait for it. Every key must be told of once."""
        job_id = self.submit(kind, pieces, delete_first=delete_first)
        result = self.settle()[job_id]
        told = sorted([*result.done, *(key for key, _ in result.failed)])
        assert told == sorted(piece.key for piece in pieces)
        assert {reason for _, reason in result.failed} <= REASONS
        return result

    def store(self, *pieces: Piece, delete_first: Sequence[bytes] = ()) -> JobResult:
        return self.do(JobKind.STORE, pieces, delete_first=delete_first)

    def load(self, *pieces: Piece) -> JobResult:
        return self.do(JobKind.LOAD, pieces)

    def delete(self, *keys: bytes) -> JobResult:
        return self.do(JobKind.DELETE, [Piece(key, memoryview(b"")) for key in keys])

    def scan(self) -> list[Found]:
        """All that a scan finds, in order."""
        return [found for batch in self.tier.scan() for found in batch]


class TierContract:
    """Subclass, and say how the tier is made."""

    is_persistent = False  # what was stored is there when the tier is made again in the same folder

    def make_tier(self, folder: Path) -> Tier:
        """A tier that keeps what it has below ``folder``, if anywhere."""
        raise NotImplementedError

    @pytest.fixture
    def slots(self) -> Iterator[Slots]:
        slots = Slots()
        yield slots
        slots.pool.close()

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        """The tier under test; closed afterwards."""
        with closing(self.make_tier(tmp_path / "tier")) as tier:
            yield tier

    @pytest.fixture
    def desk(self, tier: Tier) -> TierDesk:
        return TierDesk(tier)

    @pytest.mark.parametrize("payload_bytes", [1, 4095, 4096, 10_000, 1 << 20])
    def test_what_was_stored_is_loaded(self, desk: TierDesk, slots: Slots, payload_bytes: int) -> None:
        """A load gives the bytes that were stored, whatever their number."""
        stored = slots.image(1, payload_bytes)
        assert desk.store(stored).done == (stored.key,)
        loaded = slots.blank_for(stored)
        assert desk.load(loaded).done == (stored.key,)
        assert loaded.image == stored.image

    def test_an_absent_key_fails_without_an_error(self, desk: TierDesk, slots: Slots) -> None:
        """Part of a load may be there, and part not."""
        stored = slots.image(1)
        desk.store(stored)
        result = desk.load(slots.blank(key_of(2), 8192), slots.blank_for(stored))
        assert result.done == (stored.key,)
        assert result.failed == ((key_of(2), "absent"),)

    def test_every_job_is_returned_once(self, desk: TierDesk, slots: Slots) -> None:
        """Many jobs at a time, of one piece and of several, and of none."""
        ids = {desk.submit(JobKind.STORE, [slots.image(n * 4 + i) for i in range(n % 4)]) for n in range(24)}
        assert set(desk.settle()) == ids
        ids = {desk.submit(JobKind.LOAD, [slots.blank(key_of(n), 14_096)]) for n in range(24)}
        assert set(desk.settle()) == ids
        assert desk.tier.poll() == []

    def test_a_job_of_several_pieces_tells_of_each(self, desk: TierDesk, slots: Slots) -> None:
        """Each key is done or failed, and each slot has its own bytes."""
        stored = [slots.image(n, 1000 + n) for n in range(20)]
        assert set(desk.store(*stored).done) == {piece.key for piece in stored}
        loaded = [slots.blank_for(piece) for piece in stored]
        assert set(desk.load(*loaded).done) == {piece.key for piece in stored}
        assert [piece.image for piece in loaded] == [piece.image for piece in stored]

    def test_what_was_deleted_is_absent(self, desk: TierDesk, slots: Slots) -> None:
        """Deleting what is not there is no error."""
        stored = slots.image(1)
        desk.store(stored)
        assert desk.delete(stored.key).done == (stored.key,)
        assert desk.load(slots.blank_for(stored)).failed == ((stored.key, "absent"),)
        assert desk.delete(stored.key).failed == ((stored.key, "absent"),)

    def test_a_store_first_deletes_what_must_make_room(self, desk: TierDesk, slots: Slots) -> None:
        """Keys to delete may be absent."""
        old, new = slots.image(1), slots.image(2)
        desk.store(old)
        assert desk.store(new, delete_first=[old.key, key_of(9)]).done == (new.key,)
        assert desk.load(slots.blank_for(old)).failed == ((old.key, "absent"),)
        assert desk.load(slots.blank_for(new)).done == (new.key,)

    def test_a_key_may_be_stored_again(self, desk: TierDesk, slots: Slots) -> None:
        """The last one counts, of another size or not."""
        for version, payload_bytes in enumerate([5000, 5000, 9000, 100]):
            stored = slots.image(1, payload_bytes, version=version)
            assert desk.store(stored).done == (stored.key,)
            loaded = slots.blank_for(stored)
            assert desk.load(loaded).done == (stored.key,)
            assert loaded.image == stored.image

    @pytest.mark.parametrize("other_bytes", [4096, 20_000])
    def test_an_image_of_another_size_is_not_loaded(self, desk: TierDesk, slots: Slots, other_bytes: int) -> None:
        """It is failed, never half a slot; and it does not come back."""
        stored = slots.image(1, 10_000)
        desk.store(stored)
        assert desk.load(slots.blank(stored.key, other_bytes)).failed == ((stored.key, "corrupt"),)
        assert desk.load(slots.blank_for(stored)).failed == ((stored.key, "absent"),)

    def test_a_slot_that_holds_no_image_is_not_stored(self, desk: TierDesk, slots: Slots) -> None:
        """Nothing raises, and nothing can be loaded afterwards."""
        blank = slots.blank(key_of(1), 8192)
        assert desk.store(blank).failed == ((blank.key, "corrupt"),)
        assert desk.load(slots.blank_for(blank)).failed == ((blank.key, "absent"),)

    def test_contains_is_a_hint(self, desk: TierDesk, slots: Slots) -> None:
        """It may say that it does not know, but is not wrong while nothing goes on."""
        stored = slots.image(1)
        assert desk.tier.contains(stored.key) in (False, None)
        desk.store(stored)
        assert desk.tier.contains(stored.key) in (True, None)

    def test_capacity_is_left_to_the_store(self, desk: TierDesk, slots: Slots) -> None:
        """The tier tells what an image takes, and does not refuse or evict by itself."""
        assert desk.tier.capacity_bytes > 0
        assert desk.tier.stored_bytes(10_000) > 0
        desk.tier.capacity_bytes = 4096
        pieces = [slots.image(n) for n in range(3)]
        assert len(desk.store(*pieces).done) == len(pieces)
        assert len(desk.load(*map(slots.blank_for, pieces)).done) == len(pieces)

    def test_results_are_announced(self, desk: TierDesk, slots: Slots) -> None:
        """Whoever has asked is told when polling has become worth a call."""
        told = threading.Event()
        desk.tier.notify(told.set)
        job_id = desk.submit(JobKind.STORE, [slots.image(1)])
        results: list[JobResult] = []
        while not results:
            assert told.wait(DRAIN_SECONDS), "nobody told of the result"
            told.clear()
            results = desk.tier.poll()
        assert [result.job_id for result in results] == [job_id]

    def test_a_scan_finds_what_is_there(self, desk: TierDesk, slots: Slots) -> None:
        """Each chunk once, with all that the store has to know of it."""
        pieces = {piece.key: piece for piece in (slots.image(n, 1000 * n + 1) for n in range(10))}
        desk.store(*pieces.values())
        desk.delete(key_of(3))
        del pieces[key_of(3)]
        found = {chunk.key: chunk for chunk in desk.scan()}
        assert found.keys() == pieces.keys()
        for n in set(range(10)) - {3}:
            chunk, image_bytes = found[key_of(n)], len(pieces[key_of(n)].image)
            assert (chunk.parent, chunk.num_tokens) == (key_of(n - 1), CHUNK_TOKENS)
            assert (chunk.sketch, chunk.image_bytes) == (sketch_of(tokens_of(n)), image_bytes)
            assert 0 < chunk.stored_bytes <= desk.tier.stored_bytes(image_bytes)

    def test_what_is_found_by_key_is_what_a_scan_finds(self, desk: TierDesk, slots: Slots) -> None:
        """A tier need not answer; if it does, it tells the same, and nothing of what is not there."""
        desk.store(*(slots.image(n, 1000 * n + 1) for n in range(5)))
        scanned = {chunk.key: chunk for chunk in desk.scan()}
        found = desk.tier.find([key_of(3), key_of(99), key_of(0)])
        assert found in ([], [scanned[key_of(3)], scanned[key_of(0)]])

    def test_a_sample_has_one_chunk_of_each_space(self, desk: TierDesk, slots: Slots) -> None:
        """A tier need not answer; if it does, the chunks are those that a scan finds, with what their headers say."""
        other = bytes(SPACE_BYTES)
        desk.store(*(slots.image(n) for n in range(4)), *(slots.image(n, key=key_of(n, other)) for n in range(4)))
        found = desk.tier.sample()
        assert all(chunk in desk.scan() for chunk in found)
        assert sorted(chunk.key[:SPACE_BYTES] for chunk in found) in ([], [other, SPACE])
        assert {chunk.space for chunk in found} <= {DESCRIPTION}

    def test_a_scan_may_be_left(self, desk: TierDesk, slots: Slots) -> None:
        """Jobs run while it lasts and after it was given up."""
        desk.store(*(slots.image(n) for n in range(3)))
        batches = iter(desk.tier.scan())
        assert next(batches)
        assert desk.store(slots.image(5)).done == (key_of(5),)
        del batches
        assert desk.load(slots.blank(key_of(5), len(slots.image(5).image))).done == (key_of(5),)

    def test_a_tier_made_again_knows_what_was_there(self, slots: Slots, tmp_path: Path) -> None:
        """If it is one that keeps."""
        if not self.is_persistent:
            pytest.skip("not a persistent tier")
        stored = slots.image(1)
        with closing(self.make_tier(tmp_path / "tier")) as tier:
            TierDesk(tier).store(stored)
        with closing(self.make_tier(tmp_path / "tier")) as tier:
            desk = TierDesk(tier)
            assert [chunk.key for chunk in desk.scan()] == [stored.key]
            loaded = slots.blank_for(stored)
            assert desk.load(loaded).done == (stored.key,)
            assert loaded.image == stored.image

    def test_close_may_come_at_any_time(self, desk: TierDesk, slots: Slots) -> None:
        """With jobs under way, and twice; what is asked of it afterwards fails or is ignored, and raises nothing."""
        for n in range(10):
            desk.submit(JobKind.STORE, [slots.image(n, 200_000)])
        desk.tier.close()
        desk.tier.close()
        desk.submit(JobKind.LOAD, [slots.blank(key_of(1), 204_096)])
        desk.tier.poll()
        assert desk.tier.drain(DRAIN_SECONDS)

    def test_what_was_purged_is_absent(self, desk: TierDesk, slots: Slots) -> None:
        """A tier that purges says how many chunks it removed, and can go on."""
        stored = [slots.image(n) for n in range(4)]
        desk.store(*stored)
        if desk.tier.purge() == 0:
            pytest.skip("a tier that does not purge")
        assert desk.scan() == []
        assert desk.load(slots.blank_for(stored[0])).failed == ((stored[0].key, "absent"),)
        assert desk.store(stored[0]).done

    def test_drain_waits_no_longer_than_told(self, desk: TierDesk, slots: Slots) -> None:
        """With nothing to do it is true at once."""
        assert desk.tier.drain(0.0)
        desk.submit(JobKind.STORE, [slots.image(n, 100_000) for n in range(10)])
        assert desk.tier.drain(0.0) in (True, False)
        assert desk.tier.drain(DRAIN_SECONDS)
        assert len(desk.tier.poll()) == 1
