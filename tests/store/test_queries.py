"""Queries beside KV: each has its share of every medium. ``?aa`` are the queries of ``aa``."""

from __future__ import annotations

import msgspec
import pytest

from qkvault.errors import InvariantError
from qkvault.image import read_header, seal, sketch_of
from qkvault.policies.lru import LruPolicy
from qkvault.store.residents import Residents
from qkvault.tiers.base import Found
from qkvault.types import CacheKind

POLICIES = ["lru", "lfu", "fifo", "mru"]


def put(desk, prompt):
    """Put the last chunk of ``prompt`` into the tier, as from an earlier run. Returns what a scan tells."""
    chunk = desk.chunks(prompt)[-1]
    image = memoryview(bytearray(chunk.new().image_bytes))
    chunk.write(image)
    seal(image)
    desk.files[0][chunk.key] = bytes(image)
    head, size = read_header(image), len(image)
    return Found(head.key, head.parent, sketch_of(head.tokens), head.num_tokens, size, size, space=head.space)


def adopt(desk, *prompts):
    desk.store.adopt(desk.books[0], [put(desk, prompt) for prompt in prompts])
    desk.settle()
    desk.end_jobs()


def num_of_each(medium):
    """How many chunks of KV there are, and of queries."""
    return tuple(len(medium.residents.policies[kind]) for kind in (CacheKind.KV, CacheKind.QUERY))


class TestQuota:
    def test_the_oldest_queries_leave_for_new_ones(self, make_desk):
        """B310: there is room in the pool, and none for more queries."""
        desk = make_desk(slots=8, queries=2)
        for prompt in ("xx", "?aa", "?bb", "?cc"):
            desk.save(prompt)
        desk.assert_cache(ram="xx ?bb ?cc")

    def test_what_is_beyond_the_share_has_no_room(self, make_desk, outcome):
        """B310: a prompt's own queries do not leave for one another."""
        desk = make_desk(slots=8, queries=2)
        assert desk.reserve("?aabbcc").outcomes == outcome("RRN")

    def test_queries_that_are_held_keep_others_out(self, make_desk, outcome):
        """B310."""
        desk = make_desk(slots=8, queries=1)
        desk.save("?aa")
        located = desk.lookup("?aa")
        assert desk.reserve("?bb").outcomes == outcome("N")
        desk.release(located)
        assert desk.reserve("?bb").outcomes == outcome("R")

    def test_without_a_share_none_are_stored(self, make_desk, outcome):
        """B310: 0 is none at all, in RAM or below."""
        desk = make_desk(slots=8, caps=[8], queries=0, tier_queries=0)
        assert desk.reserve("?aa").outcomes == outcome("N")
        adopt(desk, "?aa", "xx")
        desk.assert_cache(disk="xx")

    def test_unless_it_is_said_it_is_a_quarter(self, make_desk):
        """B310."""
        desk = make_desk(slots=8, caps=[4])
        for residents in (desk.store.room.residents, desk.books[0].residents):
            assert residents.query_bytes == residents.capacity_bytes // 4

    def test_bytes_count_and_not_chunks(self, make_desk, outcome):
        """B310: one chunk of two slots, or two of one."""
        desk = make_desk(slots=8, queries=2)
        desk.save("?aa")
        desk.save("?bb")
        double = msgspec.structs.replace(desk.chunks("?cc")[0].new(), image_bytes=2 * 8192)
        reserved = desk.store.reserve(1, [double], 0.0, kind=CacheKind.QUERY)
        desk.assert_cache(ram="")
        assert reserved.outcomes == outcome("R")
        triple = msgspec.structs.replace(desk.chunks("?dd")[0].new(), image_bytes=3 * 8192)
        desk.store.abort(1, reserved.lease_id)
        desk.save("?aa")
        assert desk.store.reserve(1, [triple], 0.0, kind=CacheKind.QUERY).outcomes == outcome("N")
        desk.assert_cache(ram="?aa")

    def test_a_tier_has_a_share_of_its_own(self, make_desk):
        """B310: what RAM keeps the tier need not."""
        desk = make_desk(slots=8, caps=[8], queries=3, tier_queries=2)
        for prompt in ("xx", "?aa", "?bb", "?cc"):
            desk.save(prompt)
            desk.end_jobs()
        desk.assert_cache(ram="xx ?aa ?bb ?cc", disk="xx ?bb ?cc")


@pytest.mark.parametrize("policy", POLICIES)
class TestWhoLeaves:
    def test_kv_gives_back_what_it_has_borrowed_and_no_more(self, make_desk, policy):
        """B311: a full pool takes queries up to their share; then they leave for one another."""
        desk = make_desk(slots=4, queries=2, policy=policy)
        for prompt in ("aa", "bb", "cc", "dd"):
            desk.save(prompt)
        assert desk.save("?xx") == 1
        assert num_of_each(desk.store.room) == (3, 1)
        for prompt in ("?yy", "?zz", "?vv"):
            assert desk.save(prompt) == 1
            assert num_of_each(desk.store.room) == (2, 2)

    def test_kv_on_disk_gives_back_what_it_has_borrowed_and_no_more(self, make_desk, policy):
        """B311."""
        desk = make_desk(slots=16, caps=[3], queries=8, tier_queries=1, policy=policy)
        for prompt in ("aa", "bb", "cc", "?xx", "?yy"):
            desk.save(prompt)
            desk.end_jobs()
        assert num_of_each(desk.books[0]) == (2, 1)

    def test_queries_do_not_leave_for_kv(self, make_desk, policy):
        """B312: however long they were not used; KV leaves for KV, beyond its share and within."""
        desk = make_desk(slots=4, queries=2, policy=policy)
        for prompt in ("?xx", "?yy", "aa", "bb", "cc", "dd"):
            assert desk.save(prompt) == 1
        assert num_of_each(desk.store.room) == (2, 2)

    def test_queries_on_disk_do_not_leave_for_kv(self, make_desk, policy):
        """B312."""
        desk = make_desk(slots=16, caps=[4], queries=8, tier_queries=2, policy=policy)
        for prompt in ("?xx", "aa", "bb", "cc", "dd"):
            desk.save(prompt)
            desk.end_jobs()
        assert num_of_each(desk.books[0]) == (3, 1)


class TestHeld:
    def test_kv_that_is_held_keeps_what_it_has_borrowed(self, make_desk, outcome):
        """B311: a reader is worth more than a share; queries make room for queries until he is done."""
        desk = make_desk(slots=3, queries=2)
        desk.save("aabbcc")
        located = desk.lookup("aabbcc")
        assert desk.reserve("?xx").outcomes == outcome("N")
        desk.assert_cache(ram="aa aabb aabbcc")
        desk.release(located)
        desk.save("?xx")
        located = desk.lookup("aabb")
        desk.save("?yy")
        desk.assert_cache(ram="aa aabb ?yy")
        desk.release(located)
        desk.save("?zz")
        desk.assert_cache(ram="aa ?yy ?zz")

    def test_nobody_leaves_in_vain(self, make_desk, outcome):
        """B311: queries and KV that could leave stay where both would not be enough."""
        desk = make_desk(slots=4, queries=3)
        for prompt in ("aa", "bb", "?xx", "?yy"):
            desk.save(prompt)
        located = desk.lookup("aa")
        triple = msgspec.structs.replace(desk.chunks("?dd")[0].new(), image_bytes=3 * 8192)
        held = desk.lookup("?xx")
        assert desk.store.reserve(1, [triple], 0.0, kind=CacheKind.QUERY).outcomes == outcome("N")
        desk.assert_cache(ram="aa bb ?xx ?yy")
        desk.release(held)
        assert desk.store.reserve(1, [triple], 0.0, kind=CacheKind.QUERY).outcomes == outcome("R")
        desk.assert_cache(ram="aa")
        desk.release(located)

    def test_kv_within_its_share_stays_where_free_slots_do_not_lie_together(self, make_desk, outcome):
        """B311: two slots side by side would take a chunk of KV, where the others are held."""
        desk = make_desk(slots=6, queries=3)
        for prompt in ("aa", "?xx", "bb", "?yy", "cc", "?zz"):
            desk.save(prompt)
        held = [desk.lookup("bb"), desk.lookup("cc")]
        double = msgspec.structs.replace(desk.chunks("?dd")[0].new(), image_bytes=2 * 8192)
        assert desk.store.reserve(1, [double], 0.0, kind=CacheKind.QUERY).outcomes == outcome("N")
        desk.assert_cache(ram="aa bb cc")
        for located in held:
            desk.release(located)
        assert desk.store.reserve(1, [double], 0.0, kind=CacheKind.QUERY).outcomes == outcome("R")
        desk.assert_cache(ram="aa bb cc")

    def test_queries_stay_where_kv_is_held(self, make_desk, outcome):
        """B312: KV finds no room among its own, and there is no other."""
        desk = make_desk(slots=3, queries=1)
        desk.save("aabb")
        desk.save("?xx")
        located = desk.lookup("aabb")
        assert desk.reserve("cc").outcomes == outcome("N")
        desk.assert_cache(ram="aa aabb ?xx")
        desk.release(located)
        assert desk.reserve("cc").outcomes == outcome("R")

    def test_queries_that_are_held_keep_others_out_of_a_full_pool(self, make_desk, outcome):
        """B310, B311: what KV gives back is no room beyond the share."""
        desk = make_desk(slots=3, queries=1)
        for prompt in ("aa", "bb", "?xx"):
            desk.save(prompt)
        located = desk.lookup("?xx")
        assert desk.reserve("?yy").outcomes == outcome("N")
        assert desk.read(located) == [("?xx", 32)]
        desk.assert_cache(ram="aa bb ?xx")

    def test_kv_that_hangs_on_a_query_holds_it(self, make_desk, outcome):
        """B311: whatever a client says of what it stores, no KV leaves for a query."""
        desk = make_desk(slots=8, queries=1)
        desk.save("?aa")
        stray = desk.chunks("?aabb")[1]
        reserved = desk.store.reserve(1, [stray.new()], 0.0)
        stray.write(desk.pool.view(reserved.offsets[0], stray.new().image_bytes))
        assert desk.store.commit(1, reserved.lease_id) == 1
        assert desk.reserve("?cc").outcomes == outcome("N")
        desk.assert_cache(ram="?aa ?aabb")

    def test_slots_of_a_late_writer_count(self, make_desk, outcome):
        """B314: they hold his queries until he is done, or gone."""
        desk = make_desk(slots=8, queries=1, lease_seconds=10.0)
        reserved = desk.reserve("?aa")
        desk.clock.advance(11.0)
        desk.store.expire(desk.clock())
        desk.settle()
        assert desk.store.room.residents.bytes_of[CacheKind.QUERY] == 8192
        assert desk.reserve("?bb", session=2).outcomes == outcome("N")
        assert desk.store.commit(1, reserved.lease_id) == 0
        assert desk.reserve("?bb", session=2).outcomes == outcome("R")


class TestFromATier:
    def test_a_chunk_found_at_the_start_is_of_the_kind_that_its_header_says(self, make_desk):
        """B313: of more queries than there may be the oldest go."""
        desk = make_desk(slots=8, caps=[4], tier_queries=2)
        adopt(desk, "?aa", "xx", "?bb", "?cc", "yy")
        desk.assert_cache(disk="xx yy ?bb ?cc")
        adopt(desk, "zz")
        desk.assert_cache(disk="yy zz ?bb ?cc")

    def test_what_comes_up_counts(self, make_desk):
        """B313: of two chunks one fits; the other is a miss, and a later one as long as the first is held."""
        desk = make_desk(slots=8, caps=[8], queries=1, tier_queries=8)
        adopt(desk, "?aa", "?aabb", "?cc")
        located = desk.lookup("?aabb")
        assert (len(located.ready), located.num_pending) == (0, 1)
        desk.end_jobs()
        assert not desk.lookup("?cc").lease_id
        desk.release(located)
        assert desk.found("?cc") == 32
        desk.assert_cache(ram="?cc", disk="?aa ?aabb ?cc")

    def test_kv_gives_back_what_it_has_borrowed_to_what_comes_up(self, make_desk):
        """B311: and to what a scan finds; what is within its share stays."""
        desk = make_desk(slots=2, caps=[3], queries=1, tier_queries=2)
        for prompt in ("xx", "yy", "zz"):
            desk.save(prompt)
            desk.end_jobs()
        adopt(desk, "?aa", "?bb", "?cc")
        desk.assert_cache(ram="yy zz", disk="zz ?bb ?cc")
        assert desk.found("?bb") == 32
        desk.assert_cache(ram="zz ?bb", disk="zz ?bb ?cc")
        assert desk.found("?cc") == 32
        desk.assert_cache(ram="zz ?cc", disk="zz ?bb ?cc")

    def test_a_copy_of_another_kind_is_not_taken(self, make_desk):
        """B313: a key is of one kind as long as its chunk is somewhere."""
        desk = make_desk(slots=8, caps=[8], queries=2, tier_queries=8)
        stray = desk.chunks("?aa")[0]
        reserved = desk.store.reserve(1, [stray.new()], 0.0)
        stray.write(desk.pool.view(reserved.offsets[0], stray.new().image_bytes))
        desk.books[0].is_healthy = False
        desk.store.commit(1, reserved.lease_id)
        adopt(desk, "?aa")
        desk.assert_cache(ram="?aa", disk="")

    def test_what_tiers_have_lost_can_be_stored_as_another_kind_only_anew(self, make_desk, outcome):
        """B313: with the tier down its chunk counts as what it was."""
        desk = make_desk(slots=8, caps=[8], queries=2, tier_queries=8)
        adopt(desk, "?aa")
        desk.books[0].is_healthy = False
        stray = desk.chunks("?aa")[0].new()
        assert desk.store.reserve(1, [stray], 0.0).outcomes == outcome("P")
        assert desk.store.reserve(1, [stray], 0.0, kind=CacheKind.QUERY).outcomes == outcome("R")


def test_books_that_are_wrong_are_noticed():
    """B314: bytes, order and cap of each kind, and of both together."""
    here = Residents(LruPolicy, 100, 30)
    here.bytes_of = {CacheKind.KV: 70, CacheKind.QUERY: 30}
    right = dict(here.bytes_of)
    here.check("ram", right, {})
    for held, numbers in (({CacheKind.KV: 100}, {}), (right, {CacheKind.QUERY: 1})):
        with pytest.raises(InvariantError, match="ram, "):
            here.check("ram", held, numbers)
    for wrong in ({CacheKind.KV: 60, CacheKind.QUERY: 31}, {CacheKind.KV: 71, CacheKind.QUERY: 30}):
        here.bytes_of = wrong
        with pytest.raises(InvariantError, match="ram"):
            here.check("ram", wrong, {})
