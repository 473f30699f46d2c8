"""Reserve, write, commit: who gets a slot, who is told that it is there already, and what becomes readable."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from qkvault.testing.store_model import ROOT, SPACE
from qkvault.types import HASH_BYTES, Outcome


def test_a_chain_is_stored_by_one_reserve_and_one_commit(desk):
    """B12: all chunks of a store get their slots at once, and become readable at once."""
    reserved = desk.reserve("aabbc")
    desk.assert_cache(ram="", pins="aa aabb aabbc")
    assert desk.store.commit(1, reserved.lease_id) == 3
    desk.assert_cache(ram="aa aabb aabbc", pins="")


def test_when_room_runs_out_the_rest_is_dropped(make_desk, outcome):
    """B11: the chunks before it are stored, the caller neither waits nor sees an error."""
    desk = make_desk(slots=2)
    reserved = desk.reserve("aabbccdd")
    assert reserved.outcomes == outcome("RRNN")
    assert reserved.offsets[2:] == (-1, -1)
    assert desk.store.commit(1, reserved.lease_id) == 2
    desk.assert_cache(ram="aa aabb")


def test_with_everything_pinned_nothing_is_stored(make_desk, outcome):
    """B11: a pool full of chunks that are being read refuses at once, whatever the settings."""
    for hot in (True, False):
        desk = make_desk(slots=2, caps=[4], hot=hot)
        desk.save("aabb")
        desk.end_jobs()
        held = desk.lookup("aabb")
        desk.end_jobs()
        reserved = desk.reserve("xx")
        assert (reserved.lease_id, reserved.outcomes) == (0, outcome("N"))
        desk.release(held)
        assert desk.save("xx") == 1


def test_a_chunk_that_could_never_fit_evicts_nothing(make_desk, outcome):
    """B11: nobody leaves in vain."""
    desk = make_desk(slots=4)
    desk.save("aabbcc")
    huge = msgspec.structs.replace(desk.chunks("xx")[0].new(), image_bytes=desk.pool.capacity_bytes + 1)
    assert desk.store.reserve(1, [huge], 0.0).outcomes == outcome("N")
    held = desk.lookup("aabb")
    large = msgspec.structs.replace(huge, image_bytes=desk.pool.capacity_bytes // 2 + 1)
    assert desk.store.reserve(1, [large], 0.0).outcomes == outcome("N")
    desk.assert_cache(ram="aa aabb aabbcc")
    desk.release(held)


def test_what_is_there_is_not_stored_again(desk, outcome):
    """B44: a chunk that exists costs neither a slot nor a copy."""
    desk.save("aabb")
    used_bytes = desk.pool.used_bytes
    reserved = desk.reserve("aabbcc")
    assert reserved.outcomes == outcome("PPR")
    assert desk.pool.used_bytes == used_bytes + 8192
    assert desk.reserve("aabbcc", session=2).outcomes == outcome("PPP")  # somebody is about to store it


def test_what_a_lower_tier_has_is_not_stored_again(make_desk, outcome):
    """B44: also not when it has left RAM."""
    desk = make_desk(caps=[4])
    desk.save("aa")
    desk.end_jobs()
    desk.store.clear(lower_tiers=False)
    assert desk.reserve("aa").outcomes == outcome("P")


def test_what_a_tier_that_is_down_has_is_kept_in_ram_meanwhile(make_desk, outcome):
    """A chunk that cannot be read can be stored, and is one chunk when the tier comes back."""
    desk = make_desk(caps=[4])
    desk.save("aa")
    desk.end_jobs()
    desk.store.clear(lower_tiers=False)
    desk.books[0].is_healthy = False
    assert desk.found("aa") == 0
    (chunk,) = desk.chunks("aa")
    other_size = msgspec.structs.replace(chunk.new(), image_bytes=chunk.new().image_bytes + 4096)
    assert desk.store.reserve(1, [other_size], 0.0).outcomes == outcome("P")
    assert desk.save("aa") == 1
    assert desk.found("aa") == 32
    desk.books[0].is_healthy = True
    assert desk.jobs == []
    desk.assert_cache(ram="aa", disk="aa")


def test_the_same_chunk_twice_in_a_store_gets_one_slot(desk, outcome):
    """B44: the second one is present."""
    (chunk,) = desk.chunks("aa")
    reserved = desk.store.reserve(1, [chunk.new(), chunk.new()], 0.0)
    assert reserved.outcomes == outcome("RP")
    desk.store.abort(1, reserved.lease_id)


class TestTails:
    def test_a_tail_whose_tokens_a_longer_chunk_has_is_not_stored(self, desk, outcome):
        """B44: the longer sibling serves it."""
        desk.save("aabb")
        assert desk.reserve("aab").outcomes == outcome("PP")
        assert desk.reserve("b").outcomes == outcome("R")

    def test_a_tail_is_replaced_when_it_has_grown(self, desk):
        """B44, B120: the longer chunk takes the place of the shorter one with the same parent."""
        desk.save("aab")
        desk.assert_cache(ram="aa aab")
        desk.save("aabb")
        desk.assert_cache(ram="aa aabb")
        assert desk.found("aabb") == 64

    def test_a_fork_leaves_the_tail_alone(self, desk):
        """A sibling with other tokens is another chunk."""
        desk.save("aab")
        desk.save("aaxx")
        desk.assert_cache(ram="aa aab aaxx")

    def test_a_tail_that_is_being_read_goes_afterwards(self, make_desk):
        """B120: its reader keeps it; the lookups that follow get the longer one."""
        desk = make_desk(caps=[8])
        desk.save("aab")
        desk.end_jobs()
        located = desk.find("aab")
        desk.save("aabb")
        desk.assert_cache(ram="aa aab aabb", pins="aa aab aabb")
        assert desk.read(desk.poll(located)) == [("aa", 32), ("aab", 16)]
        assert desk.read(desk.find("aab", session=2)) == [("aa", 32), ("aabb", 16)]
        desk.release(located)
        desk.end_jobs()
        desk.assert_cache(ram="aa aabb", disk="aa aabb")
        assert desk.counters.removed[("ram", "superseded")] == 1

    def test_a_tail_that_is_being_written_never_appears(self, desk, outcome):
        """The longer one was there first."""
        late = desk.reserve("aab", session=2)
        desk.save("aabb", start=1)
        assert desk.store.commit(2, late.lease_id) == 1  # the head only
        desk.assert_cache(ram="aa aabb")

    def test_both_in_one_store_leave_the_longer(self, make_desk):
        """What one commit publishes may cover itself; only what stays goes to the tiers."""
        desk = make_desk(caps=[8])
        short, long = desk.chunks("b")[0], desk.chunks("bb")[0]
        reserved = desk.store.reserve(1, [short.new(), long.new()], 0.0)
        for chunk, offset in zip((short, long), reserved.offsets, strict=True):
            chunk.write(desk.pool.view(offset, chunk.new().image_bytes))
        assert desk.store.commit(1, reserved.lease_id) == 2
        desk.settle()
        desk.end_jobs()
        desk.assert_cache(ram="bb", disk="bb")


class TestCommit:
    def test_only_the_chunks_that_are_named_are_published(self, desk):
        """The others are aborted."""
        reserved = desk.reserve("aabbcc")
        keys = [chunk.key for chunk in desk.chunks("aabbcc")]
        assert desk.store.commit(1, reserved.lease_id, [*keys[:2], SPACE + bytes(HASH_BYTES)]) == 2
        desk.assert_cache(ram="aa aabb", pins="")

    def test_a_slot_that_nobody_wrote_is_not_published(self, desk):
        """B121: the key in the slot's header says whose bytes they are."""
        reserved = desk.reserve("aabb")
        desk.chunks("xx")[0].write(desk.pool.view(reserved.offsets[1], 8192))
        assert desk.store.commit(1, reserved.lease_id) == 1
        desk.assert_cache(ram="aa")

    def test_a_lease_is_committed_once_and_by_its_owner(self, desk):
        """Unknown, foreign, ended and read leases publish nothing."""
        reserved = desk.reserve("aa")
        assert desk.store.commit(2, reserved.lease_id) == 0
        assert desk.store.commit(1, reserved.lease_id + 1) == 0
        assert desk.store.commit(1, reserved.lease_id) == 1
        assert desk.store.commit(1, reserved.lease_id) == 0
        located = desk.lookup("aa")
        assert desk.store.commit(1, located.lease_id) == 0
        assert len(desk.poll(located).ready) == 1

    def test_an_aborted_write_leaves_nothing(self, make_desk):
        """B121: abort neither publishes, nor tells, nor stores in a tier."""
        desk = make_desk(caps=[8])
        desk.store.take_events()
        reserved = desk.reserve("aabb")
        desk.store.abort(2, reserved.lease_id)
        desk.assert_cache(pins="aa aabb")
        desk.store.abort(1, reserved.lease_id)
        desk.settle()
        assert desk.store.commit(1, reserved.lease_id) == 0
        assert (desk.store.take_events(), desk.jobs, desk.found("aabb")) == ([], [], 0)
        assert desk.pool.used_bytes == 0


class TestFreeze:
    def test_frozen_nothing_is_stored_or_evicted(self, make_desk, outcome):
        """B51: stores are skipped, RAM is served, and stays as it is."""
        desk = make_desk(slots=2)
        desk.save("aabb")
        desk.store.is_frozen = True
        assert desk.reserve("xx").outcomes == outcome("F")
        assert desk.found("aabb") == 64
        desk.assert_cache(ram="aa aabb")
        desk.store.is_frozen = False
        assert desk.save("xx") == 1

    def test_frozen_only_ram_serves(self, make_desk):
        """B51: nothing is promoted, so nothing is admitted."""
        desk = make_desk(slots=2, caps=[8])
        desk.save("aabb")
        desk.end_jobs()
        desk.save("xx")
        desk.end_jobs()
        desk.assert_cache(ram="aa xx", disk="aa aabb xx")
        desk.store.is_frozen = True
        assert desk.found("aabb") == 32
        assert desk.jobs == []
        desk.store.is_frozen = False
        assert desk.found("aabb") == 64

    def test_what_was_begun_before_is_finished(self, make_desk):
        """A write that has its slots may be committed."""
        desk = make_desk(caps=[8])
        reserved = desk.reserve("aa")
        desk.store.is_frozen = True
        assert desk.store.commit(1, reserved.lease_id) == 1


class TestMalformed:
    @pytest.mark.parametrize(
        "wrong",
        [
            {"key": b"short"},
            {"parent": b""},
            {"num_tokens": 0},
            {"num_tokens": -1},
            {"num_tokens": 33},
            {"sketch": b""},
            {"sketch": b"123456789"},
            {"image_bytes": 0},
            {"image_bytes": -5},
            {"image_bytes": 192},
        ],
    )
    def test_a_malformed_chunk_is_refused_with_all_of_its_store(self, desk, wrong):
        """Nothing changes, whatever stands beside it."""
        good, bad = desk.chunks("aa")[0].new(), desk.chunks("xx")[0].new()
        with pytest.raises(ValueError, match="malformed"):
            desk.store.reserve(1, [good, msgspec.structs.replace(bad, **wrong)], 0.0)
        desk.assert_cache(ram="", pins="")
        assert (len(desk.store.leases), len(desk.store.index), desk.pool.used_bytes) == (0, 0, 0)

    def test_no_chunk_becomes_its_own_ancestor(self, make_desk):
        """A ring of parents is a collision: eviction walks the tree."""
        desk = make_desk(slots=2)
        base = desk.chunks("aa")[0]
        a, b, c = (SPACE + letter * HASH_BYTES for letter in (b"a", b"b", b"c"))
        ring = [base._replace(key=key, parent=parent) for key, parent in ((a, b), (b, c), (c, a), (c, c))]
        reserved = desk.store.reserve(1, [chunk.new() for chunk in ring], 0.0)
        assert reserved.outcomes[2:] == (Outcome.COLLISION, Outcome.COLLISION)
        desk.store.abort(1, reserved.lease_id)
        desk.save("aabbcc")
        assert desk.store.reserve(1, [base._replace(key=ROOT, parent=ROOT).new()], 0.0).outcomes == (Outcome.COLLISION,)


def test_a_chunk_does_not_lose_its_parent_to_its_own_store(make_desk, outcome):
    """B122: the room for a tail is not made by its head, in whatever order chunks leave."""
    for policy in ("mru", "lru", "fifo", "lfu"):
        desk = make_desk(slots=2, policy=policy)
        desk.save("aa")
        desk.save("xx")
        desk.save("aabb", start=1)
        desk.assert_cache(ram="aa aabb")
        desk.save("aabbcc", start=2)
        desk.assert_cache(ram="aa aabb")


def test_a_head_may_be_stored_under_a_tail_that_is_there(make_desk):
    """Room for it may be made by that very tail, its only trace."""
    desk = make_desk(slots=1)
    desk.save("aabb", start=1)
    desk.assert_cache(ram="aabb")
    desk.save("aa")
    desk.assert_cache(ram="aa")


def test_bytes_that_look_like_a_header_are_none(make_desk):
    """What lies inside a payload is not taken for the header of a slot that begins there later, and was not written."""
    desk = make_desk(slots=1)
    small = desk.chunks("b")[0]
    (chunk,) = desk.chunks("aa")
    image = memoryview(bytearray(8192))
    small._replace(payload=b"").write(image[4096:])
    reserved = desk.store.reserve(1, [chunk.new()], 0.0)
    chunk._replace(payload=bytes(image[4096:])).write(desk.pool.view(reserved.offsets[0], 8192))
    assert desk.store.commit(1, reserved.lease_id) == 1
    desk.store.clear()
    reserved = desk.store.reserve(1, [replace(small.new(), image_bytes=4096)], 0.0)
    assert reserved.offsets == (4096,)
    assert desk.store.commit(1, reserved.lease_id) == 0
