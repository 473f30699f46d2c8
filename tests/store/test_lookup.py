"""What a lookup promises: the longest run of chunks, in the media that may be asked, and never other tokens."""

from __future__ import annotations

import msgspec
import pytest

from qkvault.image import sketch_of
from qkvault.testing.store_model import ROOT, SPACE
from qkvault.types import HASH_BYTES, Medium, Outcome


def is_miss(located):
    return (located.lease_id, len(located.ready), located.num_pending) == (0, 0, 0)


def test_an_empty_store_finds_nothing(desk):
    """A miss is a value, and leaves no lease."""
    assert is_miss(desk.lookup("aabb"))
    assert is_miss(desk.lookup(""))
    assert len(desk.store.leases) == 0


def test_the_longest_run_from_the_first_chunk_is_found(desk):
    """B20: what is found are the leading chunks that exist."""
    desk.save("aabbcc")
    located = desk.lookup("aabbccddee")
    assert desk.read(located) == [("aa", 32), ("aabb", 32), ("aabbcc", 32)]
    assert located.num_pending == 0


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_the_run_stops_at_the_first_miss(desk, missing):
    """B21: a chunk after one that is missing is not found, wherever it is."""
    for at in {0, 1, 2} - {missing}:
        desk.save("aabbcc"[: 2 * at + 2], start=at)
    assert len(desk.lookup("aabbcc").ready) == missing


def test_the_next_tier_is_asked_for_the_rest_only(make_desk):
    """B21: a run may begin in RAM and go on in a lower tier; what was found there is pending."""
    desk = make_desk(caps=[8])
    desk.save("aabb")
    desk.end_jobs()
    desk.store.clear(lower_tiers=False)
    desk.save("aa")
    located = desk.lookup("aabb")
    assert located.num_pending == 2
    desk.end_jobs()
    assert desk.read(desk.poll(located)) == [("aa", 32), ("aabb", 32)]
    assert [ref.medium for ref in desk.poll(located).ready] == [Medium.DISK, Medium.DISK]


def test_a_run_tells_where_each_chunk_was(make_desk):
    """A chunk that was in RAM counts as RAM, one that was promoted as the tier it came from."""
    desk = make_desk(slots=2, caps=[8])
    desk.save("aabb")
    desk.end_jobs()
    desk.save("xx")  # takes the slot of the tail
    desk.end_jobs()
    located = desk.lookup("aabb")
    assert (len(located.ready), located.num_pending) == (1, 1)
    assert located.pending_tokens == {Medium.DISK: 32}
    desk.end_jobs()
    assert [ref.medium for ref in desk.poll(located).ready] == [Medium.RAM, Medium.DISK]


@pytest.mark.parametrize(
    ("media", "num_found"), [(None, 3), (("ram",), 1), (("disk",), 2), (("disk", "far"), 2), (("far",), 0), ((), 0)]
)
def test_only_the_media_that_are_named_are_asked(make_desk, media, num_found):
    """B22: `search_range` names RAM and tiers; a chunk elsewhere ends the run."""
    desk = make_desk(slots=4, caps=[2])
    desk.save("aabbcc")
    desk.end_jobs()  # the tier holds two
    desk.assert_cache(ram="aa aabb aabbcc", disk="aa aabb")
    desk.store.clear(lower_tiers=False)
    held = desk.reserve("aabbcc", start=2)
    desk.store.commit(1, held.lease_id)
    desk.settle()
    desk.use("aa")  # promoted, and kept
    desk.end_jobs()
    desk.assert_cache(ram="aa aabbcc", disk="aa aabb")
    located = desk.lookup("aabbcc", media=media)
    assert len(located.ready) + located.num_pending == num_found


def test_the_tail_too_is_looked_for_in_those_media_only(make_desk):
    """B22: a partial match promotes nothing from a tier that may not be asked."""
    desk = make_desk(caps=[8])
    desk.save("aabbc")
    desk.end_jobs()
    desk.store.clear(lower_tiers=False)
    desk.save("aa")
    assert is_miss(desk.find("aabbc", media=("ram",)))
    assert desk.jobs == []


def test_a_chunk_on_its_way_belongs_to_the_tier_it_comes_from(make_desk):
    """B22: while it is being promoted a chunk is not yet in RAM."""
    desk = make_desk(caps=[8])
    desk.save("aa")
    desk.end_jobs()
    desk.store.clear(lower_tiers=False)
    assert desk.lookup("aa").num_pending == 1
    assert is_miss(desk.lookup("aa", media=("ram",)))
    assert desk.lookup("aa", media=("disk",)).num_pending == 1


def test_what_is_being_written_is_not_found(desk):
    """B121: between reserve and commit a chunk is a miss."""
    reserved = desk.reserve("aabb")
    assert is_miss(desk.find("aabb"))
    desk.store.commit(1, reserved.lease_id)
    assert len(desk.find("aabb").ready) == 2


class TestMatch:
    def test_a_hit_ends_at_the_last_shared_grain(self, desk):
        """B119: a prompt that forks inside a chunk is served up to the fork."""
        desk.save("aabc")
        assert desk.read(desk.find("aabd")) == [("aa", 32), ("aabc", 16)]

    def test_a_tail_is_served_by_a_longer_chunk(self, desk):
        """B120: a partial chunk needs no copy of its own."""
        desk.save("aabb")
        assert desk.read(desk.find("aab")) == [("aa", 32), ("aabb", 16)]

    def test_a_stored_tail_serves_what_goes_on_after_it(self, desk):
        """The partial chunk of a shorter prompt is found by a longer one."""
        desk.save("aab")
        assert desk.read(desk.find("aabc")) == [("aa", 32), ("aab", 16)]

    def test_the_child_that_shares_most_is_chosen(self, desk):
        """Among many forks the one with the longest common run counts."""
        for prompt in ("xy", "ax", "ay", "bc", "ab"):
            desk.save(prompt)
        assert desk.read(desk.find("aby")) == [("ab", 32)]
        assert desk.found("az") == 16
        assert desk.found("zz") == 0

    def test_among_equals_one_in_ram_is_chosen(self, make_desk):
        """Nothing is promoted where RAM serves as well."""
        for first, second in (("ax", "ay"), ("ay", "ax")):
            desk = make_desk(slots=2, caps=[8])
            desk.save(first)
            desk.end_jobs()
            desk.store.clear(lower_tiers=False)
            desk.save(second)
            desk.end_jobs()
            assert desk.read(desk.find("az")) == [(second, 16)]

    @pytest.mark.parametrize("why", ["confined", "frozen", "down"])
    def test_what_may_not_be_promised_hides_nothing(self, make_desk, why):
        """B520: the child that shares most lies in a tier that may not be asked; another in RAM shares less."""
        desk = make_desk(slots=2, caps=[8])
        desk.save("ab")
        desk.end_jobs()
        desk.store.clear(lower_tiers=False)
        desk.save("ac")
        desk.end_jobs()
        desk.store.is_frozen = why == "frozen"
        desk.is_told(is_healthy=why != "down")
        located = desk.find("ab", media=["ram"] if why == "confined" else None)
        assert (desk.read(located), located.num_pending) == ([("ac", 16)], 0)

    @pytest.mark.parametrize(("asked", "read"), [("ab", [("aa", 16)]), ("bb", [])])
    def test_the_tokens_are_compared_and_not_only_their_sketch(self, desk, asked, read):
        """B119: a sketch that is equal by chance, or by design, does not make a hit."""
        (stored,) = desk.chunks("aa")
        liar = msgspec.structs.replace(stored.new(), sketch=sketch_of(desk.chunks(asked)[0].tokens))
        reserved = desk.store.reserve(1, [liar], 0.0)
        stored.write(desk.pool.view(reserved.offsets[0], stored.new().image_bytes))
        desk.store.commit(1, reserved.lease_id)
        assert desk.read(desk.match(0, asked, 0)) == read
        assert desk.counters.collisions == 1

    def test_the_tokens_of_a_promoted_chunk_are_compared_when_it_arrives(self, make_desk):
        """B119: until then the match is pending; then it is as long as the tokens agree."""
        desk = make_desk(caps=[8])
        desk.save("aabc")
        desk.end_jobs()
        desk.store.clear(lower_tiers=False)
        located = desk.find("aabd")
        assert located.num_pending == 2
        desk.end_jobs()
        assert desk.read(desk.poll(located)) == [("aa", 32), ("aabc", 16)]

    def test_a_lease_that_ran_out_is_not_extended(self, make_desk):
        """The tail of a prompt whose head was let go is not handed out in its place."""
        desk = make_desk(lease_seconds=10.0)
        desk.save("aabb")
        located = desk.lookup("aa")
        desk.clock.advance(11.0)
        desk.store.expire(desk.clock())
        assert is_miss(desk.match(located.lease_id, "aabb", 1))

    def test_a_lease_that_lost_its_last_chunk_is_not_extended(self, make_desk):
        """After a failed load nothing is appended behind the gap."""
        desk = make_desk(caps=[8])
        desk.save("aabbcc")
        desk.end_jobs()
        desk.store.clear(lower_tiers=False)
        desk.save("aabbccdd", start=3)
        located = desk.lookup("aabbcc")
        desk.end_jobs(fail={"aabbcc": "corrupt"})
        shorter = desk.poll(located)
        assert len(shorter.ready) == 2
        assert desk.match(located.lease_id, "aabbccdd", 3) == shorter

    def test_a_partial_match_is_not_extended(self, desk):
        """What hangs on a chunk of which only the head is shared is not shared."""
        desk.save("abcc")
        located = desk.find("ax")
        assert desk.read(located) == [("ab", 16)]
        assert desk.match(located.lease_id, "abcc", 1) == located

    def test_only_a_read_lease_of_ones_own_is_extended(self, desk):
        """Write leases, and those of others, are not touched."""
        desk.save("aabb")
        theirs = desk.lookup("aa", session=2)
        ours = desk.reserve("xx")
        for lease_id in (theirs.lease_id, ours.lease_id, 99):
            assert is_miss(desk.match(lease_id, "aabb", 1))
        assert desk.store.commit(1, ours.lease_id) == 1

    @pytest.mark.parametrize("tokens", [b"", b"\0\0\0\0", b"\0\0\0"])
    def test_fewer_tokens_than_a_grain_match_nothing(self, desk, tokens):
        """Malformed tokens neither."""
        desk.save("aa")
        assert is_miss(desk.store.match(1, 0, ROOT, tokens, 0.0))


class TestCollisions:
    @pytest.fixture(autouse=True)
    def constant_hash(self, monkeypatch):
        """All hashes are the same."""

        class Constant:
            def digest(self):
                return b"h" * HASH_BYTES

        monkeypatch.setattr("qkvault.testing.store_model.hashlib.sha256", lambda _: Constant())

    def test_the_second_prompt_misses(self, desk):
        """With a hash that is constant, only the tokens tell prompts apart."""
        assert desk.save("aa") == 1
        assert is_miss(desk.lookup("bb"))
        assert desk.reserve("bb").outcomes == (Outcome.COLLISION,)
        assert len(desk.lookup("aa").ready) == 1
        assert desk.counters.collisions == 2

    def test_the_same_tokens_elsewhere_in_a_prompt_miss(self, desk):
        """A chunk that hangs on another parent is another chunk."""
        desk.save("aa")
        assert len(desk.lookup("aaaa").ready) == 1
        assert desk.reserve("aaaa").outcomes == (Outcome.PRESENT, Outcome.COLLISION)

    def test_a_key_that_is_known_elsewhere_in_its_chain_is_no_hit(self, desk):
        """A chain that is shorter than the keys that lead to its last one: they are not its keys."""
        desk.save("aa")
        (chunk,) = desk.chunks("aa")
        unknown = SPACE + b"u" * HASH_BYTES
        for keys in (unknown + chunk.key, unknown * 2 + chunk.key, chunk.key * 2, unknown + chunk.key + unknown):
            located = desk.store.lookup(1, ROOT, keys, chunk.check * 3, 0.0)
            assert len(located.ready) == keys.startswith(chunk.key)

    def test_a_chunk_further_down_a_chain_is_no_hit(self, desk):
        """Its place is behind the chunks before it: asked for as the first of a prompt it is unknown."""
        chunk = desk.chunks("aa")[0]._replace(key=SPACE + b"c" * HASH_BYTES)
        child = desk.chunks("bb")[0]._replace(key=SPACE + b"d" * HASH_BYTES, parent=chunk.key)
        reserved = desk.store.reserve(1, [chunk.new(), child.new()], 0.0)
        for each, offset in zip((chunk, child), reserved.offsets, strict=True):
            each.write(desk.pool.view(offset, 8192))
        assert desk.store.commit(1, reserved.lease_id) == 2
        assert is_miss(desk.store.lookup(1, ROOT, child.key, child.check, 0.0))
        assert len(desk.store.lookup(1, ROOT, chunk.key + child.key, chunk.check + child.check, 0.0).ready) == 2
        desk.names.update({chunk.key: "c", child.key: "d"})

    def test_what_hangs_on_a_collision_is_not_stored(self, desk):
        """Nobody's chunk becomes the child of other tokens."""
        chunk, other = desk.chunks("aa")[0], desk.chunks("bb")[0]
        child = desk.chunks("cc")[0]._replace(key=SPACE + b"c" * HASH_BYTES, parent=chunk.key)
        desk.save("aa")
        reserved = desk.store.reserve(1, [other.new(), child.new()], 0.0)
        assert reserved == desk.store.reserve(1, [other.new(), child.new()], 0.0)
        assert reserved.outcomes == (Outcome.COLLISION, Outcome.COLLISION)


def test_a_check_that_is_too_short_is_a_miss(desk):
    """An empty check does not match everything."""
    desk.save("aa")
    (chunk,) = desk.chunks("aa")
    for check in (b"", chunk.check[1:], b"x" + chunk.check):
        assert is_miss(desk.store.lookup(1, ROOT, chunk.key, check, 0.0))
    assert is_miss(desk.store.lookup(1, chunk.key, chunk.key, chunk.check, 0.0))
    assert len(desk.store.lookup(1, ROOT, chunk.key * 2, chunk.check * 2, 0.0).ready) == 1


def test_a_hit_tells_whether_a_fork_may_share_more(desk):
    """`can_fork` spares the second question where there is nothing to find."""
    desk.save("aabb")
    assert desk.lookup("").can_fork
    assert desk.lookup("aa").can_fork
    assert not desk.lookup("aabb").can_fork
    assert not desk.lookup("xx").ready
