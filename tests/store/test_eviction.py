"""Who leaves when there is no room: on demand, in the policy's order, the tail before its head, never what is held."""

from __future__ import annotations

import msgspec
import pytest

from qkvault.image import key_in
from qkvault.testing.store_model import ROOT
from qkvault.types import CacheKind, Outcome


def test_eviction_is_on_demand_and_to_the_byte(make_desk):
    """A full pool is full: one chunk leaves for one that comes, and none before."""
    desk = make_desk(slots=4)
    for prompt in ("aa", "bb", "cc", "dd"):
        desk.save(prompt)
    desk.assert_cache(ram="aa bb cc dd")
    desk.save("ee")
    desk.assert_cache(ram="bb cc dd ee")
    assert desk.counters.removed == {("ram", "evicted"): 1}


def double_of(desk, prompt):
    """What would store ``prompt`` in two slots instead of one."""
    return msgspec.structs.replace(desk.chunks(prompt)[0].new(), image_bytes=2 * 8192)


def forget(desk, prompt):
    desk.store.forget(ROOT, desk.chunks(prompt)[0].key)


def test_what_is_free_counts_towards_what_is_needed(make_desk):
    """Only the difference is evicted."""
    desk = make_desk(slots=4)
    for prompt in ("aa", "bb", "cc"):
        desk.save(prompt)
    reserved = desk.store.reserve(1, [double_of(desk, "ee")], 0.0)
    assert reserved.outcomes == (Outcome.RESERVED,)
    desk.assert_cache(ram="bb cc")
    desk.store.abort(1, reserved.lease_id)
    assert desk.found("bb") == desk.found("cc") == 32


def test_slots_that_do_not_lie_together_are_moved_and_nobody_leaves(make_desk):
    """B385: what was moved is found as it was, and somebody whose lease ran out sees that its old slot is not it."""
    desk = make_desk(slots=8, lease_seconds=10.0)
    for letter in "abcdefgh":
        desk.save(letter * 2)
    late = [ref for letter in "bdfh" for ref in desk.lookup(letter * 2).ready]
    desk.clock.advance(11.0)
    desk.store.expire(desk.clock())
    for letter in "aceg":
        forget(desk, letter * 2)
    reserved = desk.store.reserve(1, [double_of(desk, "xx"), double_of(desk, "yy")], desk.clock())
    assert reserved.outcomes == (Outcome.RESERVED, Outcome.RESERVED)
    desk.assert_cache(ram="bb dd ff hh")
    for prompt in ("bb", "dd", "ff", "hh"):
        assert desk.found(prompt) == 32
    here = {entry.key: entry.offset for entry in desk.store.index}
    moved = [ref for ref in late if here[ref.key] != ref.offset]
    assert moved
    assert all(key_in(desk.pool.view(ref.offset, ref.image_bytes)) != ref.key for ref in moved)
    desk.store.abort(1, reserved.lease_id)


def test_what_is_held_or_written_is_not_moved(make_desk, outcome):
    """B385: it lies where its lease says; room is made of others."""
    desk = make_desk(slots=6)
    for letter in "abcdef":
        desk.save(letter * 2)
    for letter in "bdf":
        forget(desk, letter * 2)
    located = desk.lookup("cc")
    writing = desk.reserve("bb")
    assert desk.store.reserve(1, [double_of(desk, "xx")], 0.0).outcomes == outcome("R")
    assert desk.read(located) == [("cc", 32)]
    assert desk.store.commit(1, writing.lease_id) == 1
    assert desk.found("bb") == 32


def test_a_late_writer_s_slot_is_not_moved_whatever_he_writes_there(make_desk, outcome):
    """B385: also a chunk that somebody else has stored meanwhile."""
    desk = make_desk(slots=5, lease_seconds=10.0)
    desk.save("zz")
    late = desk.reserve("aa")
    desk.clock.advance(11.0)
    desk.store.expire(desk.clock())
    for prompt in ("aa", "bb"):
        desk.save(prompt, session=2)
    chunk = desk.chunks("aa")[0]
    chunk.write(desk.pool.view(late.offsets[0], chunk.new().image_bytes))
    forget(desk, "zz")
    assert desk.store.reserve(2, [double_of(desk, "xx")], desk.clock()).outcomes == outcome("R")
    desk.settle()
    desk.assert_cache(ram="bb")
    assert desk.store.commit(1, late.lease_id) == 0


def test_where_slots_cannot_be_moved_together_more_leave(make_desk, outcome):
    """B385: as many as make a run between those that are held, and none if there is none."""
    desk = make_desk(slots=6)
    for letter in "abcdef":
        desk.save(letter * 2)
    located = [desk.lookup(letter * 2) for letter in "bd"]
    for letter in "ac":
        forget(desk, letter * 2)
    assert desk.store.reserve(1, [double_of(desk, "xx")], 0.0).outcomes == outcome("R")
    held = desk.lookup("ff")
    desk.assert_cache(ram="bb dd ff" if held.lease_id else "bb dd")
    triple = msgspec.structs.replace(desk.chunks("yy")[0].new(), image_bytes=3 * 8192)
    assert desk.store.reserve(1, [triple], 0.0).outcomes == outcome("N")
    assert [desk.read(each) for each in located] == [[("bb", 32)], [("dd", 32)]]


def test_loads_evict_too(make_desk):
    """A pool of 28 with 18 residents that may leave takes all of a load of 11."""
    desk = make_desk(slots=28, caps=[64])
    wanted = "aabbccddeeffgghhiijjkk"
    desk.save(wanted)
    desk.end_jobs()
    desk.store.clear(lower_tiers=False)
    for letter in "lmnopqrstuvwxyzABC"[:18]:
        desk.save(letter * 2)
    desk.end_jobs()
    located = desk.lookup(wanted)
    assert (len(located.ready), located.num_pending) == (0, 11)
    desk.end_jobs()
    assert len(desk.read(desk.poll(located))) == 11
    assert desk.counters.removed["ram", "evicted"] == 1


def test_a_load_that_does_not_fit_is_shorter(make_desk):
    """What there is room for is promoted; the rest is let go."""
    desk = make_desk(slots=3, caps=[8])
    desk.save("aabb")
    desk.save("xxyy", start=0)
    desk.end_jobs()
    desk.store.clear(lower_tiers=False)
    held = desk.lookup("aabb")
    desk.end_jobs()
    located = desk.lookup("xxyy")
    assert (len(located.ready), located.num_pending) == (0, 1)
    desk.end_jobs()
    assert desk.read(desk.poll(located)) == [("xx", 32)]
    assert desk.read(desk.poll(held)) == [("aa", 32), ("aabb", 32)]


def test_the_chunks_of_a_prompt_do_not_make_room_for_one_another(make_desk):
    """A promotion never evicts what the same lookup found."""
    for policy in ("lru", "mru", "fifo", "lfu"):
        desk = make_desk(slots=2, caps=[8], policy=policy)
        desk.save("aabbcc")
        desk.end_jobs()
        located = desk.lookup("aabbcc")
        assert (len(located.ready), located.num_pending) == (2, 0)
        desk.assert_cache(ram="aa aabb")


ORDERS = {
    "lru": ["bb", "cc", "aa"],
    "fifo": ["aa", "bb", "cc"],
    "mru": ["aa", "cc", "bb"],
    "lfu": ["cc", "bb", "aa"],
}


@pytest.mark.parametrize("policy", ORDERS)
def test_the_policy_says_who_leaves_first(make_desk, policy):
    """Used were: aa three times and last, bb twice, cc once."""
    desk = make_desk(slots=3, policy=policy)
    for prompt in ("aa", "bb", "cc"):
        desk.save(prompt)
    for prompt in ("aa", "bb", "aa", "bb", "cc", "aa"):
        desk.use(prompt)
    left = []
    for prompt in ("xx", "yy", "zz"):
        before = {desk.names[key] for key in desk.store.room.residents.policies[CacheKind.KV].victims()}
        reserved = desk.reserve(prompt)
        left += before - {desk.names[key] for key in desk.store.room.residents.policies[CacheKind.KV].victims()}
        assert reserved.outcomes == (Outcome.RESERVED,)
    assert left == ORDERS[policy]


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "mru"])
def test_a_head_never_leaves_before_its_tail(make_desk, policy):
    """B122: in every order a chain loses its end first."""
    desk = make_desk(slots=6, policy=policy)
    desk.save("aabbccdd")
    desk.use("aa")
    desk.save("xxyy")
    desk.reserve("uu")
    desk.reserve("vv")
    here = {desk.names[key] for key in desk.store.room.residents.policies[CacheKind.KV].victims()}
    for name in here:
        assert name[:-2] in here | {""}
    assert len(here) == 4


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_what_a_chain_is_extended_by_does_not_leave_in_the_turn_of_its_head(make_desk, policy):
    """B550: in RAM and in a tier; what others have stored meanwhile is older."""
    desk = make_desk(slots=4, caps=[4], policy=policy, queries=0, tier_queries=0)
    for prompt, start in (("aa", 0), ("bb", 0), ("cc", 0), ("aadd", 1), ("ee", 0)):
        desk.save(prompt, start)
        desk.end_jobs()
    here = [name for name in ("aa", "bb", "cc", "aadd", "ee") if desk.lookup(name, media=["ram"]).ready]
    assert here == ["aa", "cc", "aadd", "ee"]
    assert {desk.names[key] for key in desk.files[0]} == set(here)


def test_to_be_extended_is_no_use_for_those_that_count_them(make_desk):
    """B550: a prompt that comes in many steps, once, leaves before one that was used."""
    desk = make_desk(slots=6, policy="lfu", queries=0)
    desk.save("bb")
    desk.release(desk.lookup("bb"))
    for steps in (2, 4, 6, 8):
        desk.save("aaccddee"[:steps], start=steps // 2 - 1)
    desk.save("ff")
    desk.save("gg")
    assert len(desk.lookup("bb").ready) == 1
    assert len(desk.lookup("aaccddee").ready) == 3


def test_what_is_held_stays_with_all_it_hangs_on(make_desk):
    """B122: a pinned tail holds its head; its siblings may leave."""
    desk = make_desk(slots=5)
    desk.save("aabb")
    desk.save("aacc")
    desk.save("aaccdd")
    located = desk.lookup("aaccdd")
    desk.use("aabb")
    desk.reserve("uuvvww")
    desk.assert_cache(ram="aa aacc aaccdd", pins="aa aacc aaccdd uu uuvv")
    assert len(desk.read(desk.poll(located))) == 3


def test_a_long_chain_that_is_held_is_passed_over_quickly(make_desk):
    """Looking for a victim visits each chunk of a pinned chain once, not once for each of its chunks."""
    desk = make_desk(slots=402)
    long = "".join(f"{a}{b}" for a in "abcdefghijklmnopqrst" for b in "ABCDEFGHIJKLMNOPQRST")
    desk.save(long)
    held = desk.lookup(long)
    desk.save("11")
    desk.save("22")
    visits = []
    policy = desk.store.room.residents.policies[CacheKind.KV]
    original = desk.store.index.get
    desk.store.index.get = lambda key: visits.append(key) or original(key)
    desk.save("33")
    assert held.lease_id
    assert len(visits) < 3 * len(policy)
    desk.store.index.get = original


def test_the_same_prompt_again_in_a_tiny_pool(make_desk):
    """Its bytes or a miss, however often, and never an error."""
    desk = make_desk(slots=1, caps=[1])
    for _ in range(20):
        desk.save("aabb")
        assert desk.found("aabb") in (0, 32)
        desk.save("b")
        desk.end_jobs()


def test_what_has_left_leaves_no_trace(make_desk):
    """The index is as large as the cache, however many chunks have come and gone."""
    desk = make_desk(slots=6, caps=[4])
    for at in range(600):
        desk.save(f"{chr(100 + at)}{chr(900 + at % 7)}ab"[: 2 + at % 3])
        desk.found(f"{chr(100 + at // 2)}{chr(900 + at // 2 % 7)}ab")
        desk.end_jobs()
    assert len(desk.store.index) <= 2 * (6 + 4) + 1
    assert len(desk.store.leases) == 0


class TestTiers:
    def test_a_tier_never_passes_its_cap(self, make_desk):
        """B125: three times the cap is stored; the oldest leave, before what needs their room is written."""
        desk = make_desk(slots=8, caps=[2])
        for letter in "abcdef":
            desk.save(letter * 2)
            assert desk.books[0].residents.used_bytes <= 2 * 8192
            desk.end_jobs()
            assert sum(map(len, desk.files[0].values())) <= 2 * 8192
        desk.assert_cache(disk="ee ff")

    def test_bytes_are_given_back_however_a_chunk_leaves(self, make_desk):
        """B125: after ten times the capacity was stored and removed the tier still takes what it has room for."""
        desk = make_desk(slots=8, caps=[3])
        for at in range(30):
            desk.save("ab"[at % 2] * 2 + "xx"[: at % 3])
            desk.end_jobs(fail={"aa": "unavailable"} if at % 4 == 0 else None)
            if at % 5 == 0:
                desk.store.clear()
                desk.settle()
        desk.end_jobs()
        desk.store.clear()
        desk.settle()
        desk.end_jobs()
        assert desk.books[0].residents.used_bytes == 0
        desk.save("aabbcc")
        desk.end_jobs()
        desk.assert_cache(disk="aa aabb aabbcc")

    def test_a_tier_evicts_the_tail_first(self, make_desk):
        """B122: a head that is being relied on does not leave for its own tail, nor before it."""
        desk = make_desk(slots=8, caps=[2])
        desk.save("aabbcc")
        desk.end_jobs()
        desk.assert_cache(disk="aa aabb")  # no room for the third: the others are its head
        desk.save("xx")
        desk.end_jobs()
        desk.assert_cache(disk="aa xx")

    def test_what_is_being_loaded_stays_in_its_tier(self, make_desk):
        """Otherwise the load would find it gone."""
        desk = make_desk(slots=8, caps=[1])
        desk.save("aa")
        desk.end_jobs()
        desk.store.clear(lower_tiers=False)
        located = desk.lookup("aa")
        desk.save("xx")  # finds no room below
        desk.end_jobs()
        desk.assert_cache(ram="aa xx", disk="aa")
        desk.release(located)

    def test_a_chunk_larger_than_the_tier_evicts_nothing(self, make_desk):
        """Nobody leaves in vain there either."""
        desk = make_desk(slots=8, caps=[1])
        desk.save("a")
        desk.end_jobs()
        desk.books[0].residents.capacity_bytes = 8000
        desk.save("xx")
        desk.end_jobs()
        desk.assert_cache(ram="a xx", disk="a")
