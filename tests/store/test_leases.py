"""Leases: pinned while they are read, kept apart while they are written, and always given back."""

from __future__ import annotations

import msgspec
import pytest

from qkvault.image import key_in
from qkvault.types import Outcome


class TestRead:
    def test_what_a_lookup_found_is_pinned(self, make_desk):
        """B23: nothing of a lease is evicted."""
        desk = make_desk(slots=3)
        desk.save("aabb")
        located = desk.lookup("aabb")
        desk.save("xx")
        assert desk.save("yy") == 1  # xx has to go
        assert desk.reserve("zzzz").outcomes == (Outcome.RESERVED, Outcome.NO_ROOM)
        assert desk.read(desk.poll(located)) == [("aa", 32), ("aabb", 32)]
        desk.assert_cache(pins="aa aabb zz")

    def test_each_lookup_has_a_lease_of_its_own(self, desk):
        """B23: a second lookup of the same chunks leaks nothing of the first."""
        desk.save("aa")
        first, second = desk.lookup("aa"), desk.lookup("aa")
        desk.assert_cache(pins="aa aa")
        desk.release(first)
        desk.assert_cache(pins="aa")
        desk.release(second, second, first)
        desk.assert_cache(pins="")

    def test_release_ends_the_pins_and_counts_as_a_use(self, make_desk):
        """B24: the chunks may be evicted again, the tail of the least used prompt first."""
        desk = make_desk(slots=4)
        desk.save("aabb")
        desk.save("xxyy")
        desk.release(desk.lookup("aabb"))
        desk.save("zz")
        desk.assert_cache(ram="aa aabb xx zz", pins="")

    def test_only_its_owner_releases_a_lease(self, desk):
        """Foreign, unknown and write leases are left alone."""
        desk.save("aa")
        located, reserved = desk.lookup("aa"), desk.reserve("xx")
        desk.release(located, session=2)
        desk.store.release(1, reserved.lease_id)
        desk.store.release(1, 99)
        desk.assert_cache(pins="aa xx")

    def test_leases_that_are_never_used_end_with_their_session(self, make_desk):
        """A thousand lookups without a release pin nothing once the client has gone."""
        desk = make_desk(slots=2)
        desk.save("aabb")
        for _ in range(1000):
            desk.lookup("aabb")
        desk.store.end_session(1)
        desk.assert_cache(pins="")
        assert desk.save("xxyy") == 2

    def test_leases_that_are_never_used_run_out(self, make_desk):
        """The same for a client that is there and forgets."""
        desk = make_desk(slots=2, lease_seconds=10.0)
        desk.save("aabb")
        for _ in range(1000):
            desk.lookup("aabb")
        desk.clock.advance(10.5)
        desk.store.expire(desk.clock())
        assert len(desk.store.leases) == 0
        assert desk.save("xxyy") == 2
        assert desk.counters.leases_expired == 1000

    def test_a_sign_of_life_renews_a_lease(self, make_desk):
        """Polling keeps what was found while its bytes are slow to come; without it the lease is a clean miss."""
        desk = make_desk(lease_seconds=0.05)
        desk.save("aa")
        located = desk.lookup("aa")
        for _ in range(10):
            desk.clock.advance(0.04)
            desk.store.expire(desk.clock())
            assert desk.read(desk.poll(located)) == [("aa", 32)]
        desk.clock.advance(0.06)
        desk.store.expire(desk.clock())
        assert desk.poll(located).lease_id == 0

    def test_a_late_reader_sees_that_the_slot_has_another_owner(self, make_desk):
        """B134: the header of a slot is wiped before its new owner writes."""
        desk = make_desk(slots=1)
        desk.save("aa")
        located = desk.lookup("aa")
        (ref,) = located.ready
        image = desk.pool.view(ref.offset, ref.image_bytes)
        desk.release(located)
        assert key_in(image) == ref.key
        reserved = desk.store.reserve(1, [desk.chunks("xx")[0].new()], 0.0)
        assert reserved.offsets == (ref.offset,)
        assert key_in(image) != ref.key
        desk.store.abort(1, reserved.lease_id)

    def test_a_late_reader_sees_it_also_where_the_new_slot_begins_elsewhere(self, make_desk):
        """B134: no old header is left in the middle of another chunk's bytes."""
        desk = make_desk(slots=2)
        desk.save("aabb")
        located = desk.lookup("aabb")
        desk.release(located)
        double = msgspec.structs.replace(desk.chunks("xx")[0].new(), image_bytes=2 * 8192)
        reserved = desk.store.reserve(1, [double], 0.0)
        assert reserved.outcomes == (Outcome.RESERVED,)
        for ref in located.ready:
            assert key_in(desk.pool.view(ref.offset, ref.image_bytes)) != ref.key
        desk.store.abort(1, reserved.lease_id)

    def test_reading_one_chunk_of_several_leases_keeps_their_order(self, desk):
        """Poll answers with the same chunks as the lookup, in order."""
        desk.save("aabbcc")
        located = desk.lookup("aabbcc")
        assert desk.poll(located).ready == located.ready
        assert desk.poll(located, session=2).lease_id == 0


class TestWrite:
    def test_a_write_that_ran_out_is_aborted(self, make_desk):
        """B121: its chunks are misses, and its late commit publishes nothing."""
        desk = make_desk(lease_seconds=10.0)
        reserved = desk.reserve("aabb")
        desk.clock.advance(11.0)
        desk.store.expire(desk.clock())
        assert desk.found("aabb") == 0
        assert desk.store.commit(1, reserved.lease_id) == 0
        desk.assert_cache(ram="")

    @pytest.mark.parametrize("end", ["commit", "abort", "end_session"])
    def test_slots_of_a_write_that_ran_out_are_kept_from_others(self, make_desk, end):
        """A late writer may still be copying: his slots get no owner before he says that he is through."""
        desk = make_desk(slots=2, lease_seconds=10.0)
        reserved = desk.reserve("aabb")
        desk.clock.advance(11.0)
        desk.store.expire(desk.clock())
        assert desk.reserve("xx", session=2).outcomes == (Outcome.NO_ROOM,)
        desk.store.abort(2, reserved.lease_id)  # not his
        assert desk.reserve("xx", session=2).outcomes == (Outcome.NO_ROOM,)
        if end == "end_session":
            desk.store.end_session(1)
        else:
            getattr(desk.store, end)(1, reserved.lease_id)
        assert desk.save("xxyy", session=2) == 2

    def test_others_may_store_what_a_late_writer_did_not(self, make_desk):
        """Two writers of one chunk never share a slot."""
        desk = make_desk(lease_seconds=10.0)
        late = desk.reserve("aa")
        desk.clock.advance(11.0)
        desk.store.expire(desk.clock())
        assert desk.save("aa", session=2) == 1
        desk.chunks("aa")[0]._replace(payload=b"\xee" * 4096).write(desk.pool.view(late.offsets[0], 8192))
        assert desk.read(desk.lookup("aa")) == [("aa", 32)]

    def test_a_session_that_ends_aborts_its_writes(self, make_desk):
        """B121: nothing of it is ever readable, and its slots are free at once."""
        desk = make_desk(slots=2, caps=[8])
        desk.save("x", session=2)
        desk.end_jobs()
        held = desk.find("x", session=2)
        desk.reserve("aa")
        desk.lookup("x")
        desk.store.end_session(1)
        desk.settle()
        desk.assert_cache(ram="x", pins="x")
        desk.release(held, session=2)
        assert desk.save("aabb") == 2
        assert desk.found("aabb") == 64

    def test_what_a_late_writer_left_is_not_taken_for_his_successors(self, make_desk):
        """A slot is blank when it is given, so that one who writes nothing publishes nothing."""
        desk = make_desk(slots=1, lease_seconds=10.0)
        late = desk.reserve("aa")
        desk.clock.advance(11.0)
        desk.store.expire(desk.clock())
        (chunk,) = desk.chunks("aa")
        chunk.write(desk.pool.view(late.offsets[0], 8192))
        assert desk.store.commit(1, late.lease_id) == 0
        reserved = desk.store.reserve(2, [chunk.new()], desk.clock())
        assert reserved.offsets == late.offsets
        assert desk.store.commit(2, reserved.lease_id) == 0


STEPS = [
    lambda desk: desk.find("aabbc"),
    lambda desk: desk.poll(desk.find("aabbc")),
    lambda desk: desk.end_jobs(),
    lambda desk: desk.reserve("aabbccdd"),
    lambda desk: desk.save("aabbccdd"),
    lambda desk: desk.end_jobs(fail={"aabbcc": "unavailable"}),
    lambda desk: desk.find("aabbccdd"),
    lambda desk: desk.end_jobs(),
]


@pytest.mark.parametrize("num_steps", range(1, len(STEPS) + 1))
@pytest.mark.parametrize("by", ["session", "time"])
def test_a_client_may_vanish_after_any_step(make_desk, num_steps, by):
    """Whatever it was doing, no lease, pin or slot is left behind."""
    desk = make_desk(slots=4, caps=[8], lease_seconds=10.0)
    desk.save("aabbc", session=2)
    desk.end_jobs()
    desk.store.clear(lower_tiers=False)
    for step in STEPS[:num_steps]:
        step(desk)
    if by == "time":
        desk.clock.advance(11.0)
        desk.store.expire(desk.clock())
    desk.store.end_session(1)
    desk.settle()
    desk.end_jobs()
    desk.assert_cache(pins="")
    assert (len(desk.store.leases), desk.store.tiering.num_pending, desk.store.quarantine) == (0, 0, {})
    assert desk.save("wwxxyyzz", session=2) == 4
