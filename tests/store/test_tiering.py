"""RAM and the tiers below: promotion, loads that fail, the hot cache, resets, and what a tier held from before."""

from __future__ import annotations

import msgspec
import pytest

from qkvault.image import read_header, seal, sketch_of
from qkvault.tiers.base import Found, JobKind, JobResult
from qkvault.types import SPACE_BYTES, Outcome


def found_of(chunk, **changes):
    new = chunk.new()
    found = Found(new.key, new.parent, new.sketch, new.num_tokens, new.image_bytes, new.image_bytes)
    return msgspec.structs.replace(found, **changes)


@pytest.fixture
def on_disk(make_desk):
    """Desks with a prompt in the tier and not in RAM."""

    def make(prompt, slots=8, caps=(8,), **kwargs):
        desk = make_desk(slots=slots, caps=list(caps), **kwargs)
        desk.save(prompt)
        desk.end_jobs()
        desk.store.clear(lower_tiers=False)
        desk.assert_cache(ram="")
        return desk

    return make


class TestPromotion:
    def test_what_was_loaded_stays_in_ram(self, on_disk):
        """B50: after a load from a tier the next lookup is served by RAM."""
        desk = on_disk("aabb")
        assert desk.found("aabb") == 64
        desk.assert_cache(ram="aa aabb", disk="aa aabb", pins="")
        assert desk.lookup("aabb").num_pending == 0
        assert desk.jobs == []  # and it is not written again

    def test_a_load_that_fails_in_part_keeps_what_it_loaded(self, on_disk):
        """B50: each chunk is kept by itself, wherever the failed one stood."""
        desk = on_disk("aabbcc")
        desk.release(desk.lookup("aabbcc"))
        desk.end_jobs(fail={"aabb": "unavailable"})
        desk.assert_cache(ram="aa aabbcc")

    def test_a_chunk_on_its_way_is_loaded_once(self, on_disk):
        """A second lookup waits for the same load."""
        desk = on_disk("aa")
        first, second = desk.lookup("aa"), desk.lookup("aa", session=2)
        assert len(desk.jobs) == 1
        desk.end_jobs()
        assert desk.read(desk.poll(first)) == desk.read(desk.poll(second, session=2)) == [("aa", 32)]
        assert desk.counters.chunks_promoted == 1

    def test_a_load_goes_on_when_nobody_waits_any_more(self, on_disk):
        """Releasing a pending lease is no harm; the slot is not given away meanwhile."""
        desk = on_disk("aabb", slots=2)
        desk.release(desk.lookup("aabb"))
        assert desk.reserve("xx").outcomes == (Outcome.NO_ROOM,)
        desk.end_jobs()
        desk.assert_cache(ram="aa aabb", pins="")
        assert desk.save("xx") == 1

    def test_the_nearest_healthy_tier_is_asked(self, on_disk):
        """A tier that is down is passed by."""
        desk = on_disk("aa", caps=[8, 8])
        desk.books[0].is_healthy = False
        located = desk.lookup("aa")
        assert [number for number, _ in desk.jobs] == [1]
        desk.end_jobs()
        assert [ref.medium.value for ref in desk.poll(located).ready] == ["remote"]


class TestFailedLoads:
    @pytest.mark.parametrize("reason", ["absent", "corrupt"])
    def test_what_is_gone_is_not_promised_again(self, on_disk, reason):
        """B28: the run ends before it, and the index forgets it; the next lookup is shorter from the start."""
        desk = on_disk("aabbcc")
        located = desk.lookup("aabbcc")
        assert located.num_pending == 3
        desk.end_jobs(fail={"aabb": reason})
        assert desk.read(desk.poll(located)) == [("aa", 32)]
        desk.release(located)
        assert desk.counters.removed[("disk", reason)] == 1
        again = desk.lookup("aabbcc")
        assert (len(again.ready), again.num_pending) == (1, 0)

    def test_what_cannot_be_reached_now_is_promised_later(self, on_disk):
        """A tier that is down for a moment has lost nothing."""
        desk = on_disk("aabb")
        located = desk.lookup("aabb")
        desk.end_jobs(fail={"aabb": "unavailable"})
        assert desk.read(desk.poll(located)) == [("aa", 32)]
        desk.release(located)
        assert desk.found("aabb") == 64

    @pytest.mark.parametrize("at", range(5))
    def test_everything_after_a_failed_chunk_is_let_go(self, on_disk, at):
        """B29, B30: the lease is cut before it, and each chunk behind is released once."""
        desk = on_disk("aabbccddee")
        located = desk.lookup("aabbccddee")
        name = "aabbccddee"[: 2 * at + 2]
        desk.end_jobs(fail={name: "corrupt"})
        assert len(desk.poll(located).ready) == at
        desk.assert_cache(pins=" ".join("aabbccddee"[: 2 * n + 2] for n in range(at)))
        assert desk.poll(located).num_pending == 0

    def test_nothing_pending_is_counted_as_loaded_before_it_is(self, on_disk):
        """Counters of loads rise with bytes that arrived, those of failures with the others."""
        desk = on_disk("aabb")
        desk.lookup("aabb")
        assert desk.counters.loaded == {}
        desk.end_jobs(fail={"aa": "corrupt"})
        assert desk.counters.loaded == {"disk": 1}
        assert desk.counters.failed == {("disk", "corrupt"): 1}

    def test_a_failed_load_is_never_readable_or_stored(self, on_disk):
        """Garbage in its slot neither is published nor reaches another tier."""
        desk = on_disk("aa", caps=[8, 8])
        desk.end_jobs()
        desk.store.take_events()
        located = desk.lookup("aa")
        desk.pool.view(desk.store.index.get(desk.chunks("aa")[0].key).offset, 8192)[:] = b"\xa5" * 8192
        desk.end_jobs(fail={"aa": "unavailable"})
        assert (desk.store.take_events(), desk.jobs) == ([], [])
        assert len(desk.poll(located).ready) == 0

    def test_a_failed_load_may_be_stored_anew_while_it_is_still_leased(self, on_disk):
        """The chunk's next life is that of its writer."""
        desk = on_disk("aa")
        located = desk.lookup("aa")
        desk.end_jobs(fail={"aa": "absent"})
        assert desk.save("aa", session=2) == 1
        assert desk.read(desk.poll(located)) == [("aa", 32)]

    def test_a_tier_that_forgets_a_chunk_has_failed_on_it(self, on_disk):
        """A result that does not tell of every key pins nothing for ever; one that comes twice changes nothing."""
        desk = on_disk("aabb")
        located = desk.lookup("aabb")
        ((_, job),) = desk.jobs
        desk.jobs = []
        for _ in range(2):
            desk.store.on_job_done(JobResult(job.job_id, (), ()))
        desk.store.on_job_done(JobResult(999, (b"?",), ((b"!", "absent"),)))
        assert desk.poll(located).lease_id == 0
        assert desk.counters.failed == {("disk", "unavailable"): 2}
        assert desk.found("aabb") == 64


class TestStores:
    def test_a_store_that_fails_leaves_the_chunk_in_ram(self, make_desk):
        """It takes no bytes of the tier, and is stored there another time."""
        desk = make_desk(caps=[8])
        desk.save("aa")
        desk.end_jobs(fail={"aa": "unavailable"})
        desk.assert_cache(ram="aa", disk="", pins="")
        assert desk.books[0].residents.used_bytes == 0

    def test_what_no_tier_can_keep_leaves_ram_too(self, make_desk):
        """A slot that holds no image is not served either."""
        desk = make_desk(caps=[8])
        desk.save("aabb")
        desk.end_jobs(fail={"aabb": "corrupt"})
        desk.assert_cache(ram="aa", disk="aa")
        assert desk.counters.removed[("ram", "corrupt")] == 1

    def test_while_it_is_being_stored_a_chunk_is_not_evicted(self, make_desk):
        """The tier reads its slot; afterwards it may go."""
        desk = make_desk(slots=1, caps=[8])
        desk.save("aa")
        desk.assert_cache(pins="aa")
        assert desk.reserve("xx").outcomes == (Outcome.NO_ROOM,)
        desk.end_jobs()
        assert desk.save("xx") == 1

    def test_a_tier_that_is_down_is_given_nothing(self, make_desk):
        """Its share of the work is skipped, not queued."""
        desk = make_desk(caps=[8, 8])
        desk.books[0].is_healthy = False
        desk.save("aa")
        assert [number for number, _ in desk.jobs] == [1]


class TestHotCache:
    def test_switching_it_off_empties_ram(self, make_desk):
        """B52: what nobody reads goes at once, what is being read when its reader is done."""
        desk = make_desk(caps=[8])
        desk.save("aabb")
        desk.save("xx")
        desk.end_jobs()
        located = desk.lookup("aa")
        desk.store.set_hot_cache(enabled=False)
        desk.assert_cache(ram="aa", pins="aa")
        desk.release(located)
        desk.assert_cache(ram="", disk="aa aabb xx")
        assert desk.counters.removed["ram", "cooled"] == 3

    def test_without_it_ram_is_only_a_way_through(self, make_desk):
        """B52: chunks stay as long as a tier writes them or a reader reads them."""
        desk = make_desk(caps=[8], hot=False)
        desk.save("aa")
        desk.assert_cache(ram="aa")
        desk.end_jobs()
        desk.assert_cache(ram="", disk="aa")
        located = desk.lookup("aa")
        desk.end_jobs()
        assert desk.read(desk.poll(located)) == [("aa", 32)]
        desk.release(located)
        desk.assert_cache(ram="")

    def test_switching_it_on_again_keeps_what_comes(self, make_desk):
        """B52: it works in both directions."""
        desk = make_desk(caps=[8], hot=False)
        desk.save("aa")
        desk.end_jobs()
        desk.store.set_hot_cache(enabled=True)
        assert desk.found("aa") == 32
        desk.assert_cache(ram="aa")


class TestReset:
    def test_after_a_clear_nothing_is_found(self, make_desk):
        """Neither in RAM nor in any tier."""
        desk = make_desk(caps=[8, 8])
        desk.save("aabb")
        desk.end_jobs()
        desk.save("xx")
        assert desk.store.clear() == 3
        desk.settle()
        assert desk.found("aabb") == desk.found("xx") == 0
        desk.end_jobs()
        desk.assert_cache(ram="", disk="")
        assert desk.files == [{}, {}]

    def test_a_store_begun_before_a_clear_does_not_appear_after_it(self, make_desk):
        """Its commit publishes nothing."""
        desk = make_desk(caps=[8])
        reserved = desk.reserve("aabb")
        desk.store.clear()
        assert desk.store.commit(1, reserved.lease_id) == 0
        desk.settle()
        desk.end_jobs()
        assert desk.found("aabb") == 0
        desk.assert_cache(ram="", disk="")

    def test_a_tier_that_is_still_writing_does_not_bring_it_back(self, make_desk):
        """What a job finishes after a clear is removed at once."""
        desk = make_desk(caps=[8])
        desk.save("aa")
        desk.store.clear()
        assert desk.save("aa", version=1) == 0  # the old one is still in its slot
        assert desk.reserve("aa").outcomes == (Outcome.BUSY,)
        desk.end_jobs()
        desk.assert_cache(ram="", disk="")

    def test_who_reads_may_go_on_and_nobody_else_begins(self, on_disk):
        """A lease outlives a clear, also for a chunk that is on its way."""
        desk = on_disk("aabb")
        desk.use("aa")
        desk.end_jobs()
        located = desk.lookup("aabb")
        desk.store.clear()
        assert desk.lookup("aabb", session=2).lease_id == 0
        desk.end_jobs(kind=JobKind.LOAD)
        assert desk.read(desk.poll(located)) == [("aa", 32), ("aabb", 32)]
        desk.release(located)
        desk.end_jobs()
        desk.assert_cache(ram="", disk="")

    def test_what_is_stored_after_a_clear_reaches_the_tier_although_the_old_is_being_removed(self, on_disk):
        """The new one is written when the removal is done, and is the one that is read."""
        desk = on_disk("aa")
        desk.store.clear()
        assert desk.save("aa", version=1) == 1
        assert [job.kind for _, job in desk.jobs] == [JobKind.DELETE]
        desk.end_jobs()
        desk.assert_cache(ram="aa", disk="aa")
        desk.store.clear(lower_tiers=False)
        located = desk.lookup("aa")
        desk.end_jobs()
        assert desk.read(desk.poll(located), version=1) == [("aa", 32)]

    def test_ram_alone_can_be_cleared(self, make_desk):
        """What lies idle goes, the tiers keep theirs."""
        desk = make_desk(caps=[8])
        desk.save("aabb")
        desk.end_jobs()
        held = desk.lookup("aa")
        assert desk.store.clear(lower_tiers=False) == 1
        desk.assert_cache(ram="aa", disk="aa aabb")
        desk.release(held)
        assert desk.found("aabb") == 64

    def test_one_space_can_be_cleared(self, make_desk):
        """B 271: what other models have stored stays, also what a scan has yet to find of them."""
        desk = make_desk(caps=[8])
        desk.save("aabb")
        other = bytes(SPACE_BYTES)
        (chunk,) = desk.chunks("xx")
        moved = chunk._replace(key=other + chunk.key[SPACE_BYTES:], parent=other + chunk.parent[SPACE_BYTES:])
        desk.names[moved.key] = "xx"
        reserved = desk.store.reserve(1, [moved.new()], desk.clock())
        moved.write(desk.pool.view(reserved.offsets[0], moved.new().image_bytes))
        assert desk.store.commit(1, reserved.lease_id) == 1
        desk.settle()
        desk.end_jobs()
        assert desk.store.clear(spaces=[chunk.key[:SPACE_BYTES]]) == 2
        desk.settle()
        desk.end_jobs()
        desk.assert_cache(ram="xx", disk="xx")
        desk.store.adopt(desk.books[0], [found_of(desk.chunks("aa")[0])])
        desk.settle()
        desk.end_jobs()
        desk.assert_cache(ram="xx", disk="xx")


class TestAdoption:
    def adopt(self, desk, *found):
        for chunk in found:
            image = bytearray(chunk.image_bytes)
            desk.files[0].setdefault(chunk.key, bytes(image))
        desk.store.adopt(desk.books[0], found)
        desk.settle()

    def put(self, desk, prompt, at=-1):
        """A file of an earlier run."""
        chunk = desk.chunks(prompt)[at]
        image = memoryview(bytearray(chunk.new().image_bytes))
        chunk.write(image)
        seal(image)
        desk.files[0][chunk.key] = bytes(image)
        return found_of(chunk)

    def test_what_a_scan_found_is_served(self, make_desk):
        """In whatever order it was found, the tree is whole."""
        desk = make_desk(caps=[8])
        self.adopt(desk, *(self.put(desk, "aabbcc", at) for at in (2, 0, 1)))
        assert desk.found("aabbcc") == 96
        assert desk.found("aabbcx") == 80

    def test_a_scan_does_not_pass_the_cap(self, make_desk):
        """B125: the oldest use leaves for the newer; what was used last stays."""
        desk = make_desk(caps=[2])
        self.adopt(desk, *(self.put(desk, letter * 2) for letter in "abcd"))
        desk.end_jobs()
        desk.assert_cache(disk="cc dd")

    def test_what_does_not_fit_beside_what_is_held_is_removed(self, make_desk):
        """A chunk that is being loaded does not leave for one that was found."""
        desk = make_desk(caps=[1])
        self.adopt(desk, self.put(desk, "aa"))
        located = desk.lookup("aa")
        self.adopt(desk, self.put(desk, "bb"))
        desk.end_jobs()
        desk.assert_cache(ram="aa", disk="aa")
        assert desk.read(desk.poll(located)) == [("aa", 32)]

    def test_what_is_there_already_is_not_entered_twice(self, make_desk):
        """Stored, being stored and being removed are all known."""
        desk = make_desk(caps=[2])
        desk.save("aa")
        self.adopt(desk, found_of(desk.chunks("aa")[0]))
        assert desk.books[0].residents.used_bytes == 8192
        desk.end_jobs()
        self.adopt(desk, found_of(desk.chunks("aa")[0]))
        assert desk.books[0].residents.used_bytes == 8192
        desk.save("bbcc")
        assert [key in desk.books[0].deleting for key in desk.files[0]] == [True]
        self.adopt(desk, found_of(desk.chunks("aa")[0]))
        desk.end_jobs()
        desk.assert_cache(disk="bb bbcc")

    @pytest.mark.parametrize("changes", [{"image_bytes": 12288}, {"sketch": sketch_of(bytes(128))}, {"num_tokens": 31}])
    def test_what_differs_from_a_chunk_of_that_key_is_removed(self, make_desk, changes):
        """The chunk in RAM keeps its size and its tokens."""
        desk = make_desk(caps=[8])
        desk.books[0].is_healthy = False
        desk.save("aa")
        desk.books[0].is_healthy = True
        self.adopt(desk, found_of(desk.chunks("aa")[0], **changes))
        assert [job.kind for _, job in desk.jobs] == [JobKind.DELETE]
        desk.end_jobs()
        desk.assert_cache(ram="aa", disk="")
        assert desk.found("aa") == 32

    def test_what_is_malformed_is_removed(self, make_desk):
        """A sketch is as long as its tokens want it: chunks of as many tokens are looked at all at once."""
        desk = make_desk(caps=[8])
        self.adopt(desk, found_of(desk.chunks("aa")[0], sketch=b"short"))
        assert [job.kind for _, job in desk.jobs] == [JobKind.DELETE]

    def test_what_a_scan_finds_after_a_clear_is_removed(self, make_desk):
        """A reset that comes while tiers are still being scanned covers what was not found yet."""
        desk = make_desk(caps=[8])
        desk.store.clear()
        self.adopt(desk, self.put(desk, "aa"))
        assert desk.found("aa") == 0
        desk.end_jobs()
        desk.assert_cache(disk="")

    def test_what_is_being_written_may_be_found_too(self, make_desk):
        """Commit and abort both leave the tier's copy."""
        for end in ("commit", "abort"):
            desk = make_desk(caps=[8])
            reserved = desk.reserve("aa")
            self.adopt(desk, self.put(desk, "aa"))
            getattr(desk.store, end)(1, reserved.lease_id)
            desk.settle()
            assert desk.found("aa") == 32
            desk.assert_cache(disk="aa")

    def test_a_found_chunk_is_verified_by_its_load(self, make_desk):
        """A scan reads headers only; what is wrong inside is found out when it is wanted."""
        desk = make_desk(caps=[8])
        found = self.put(desk, "aa")
        image = bytearray(desk.files[0][found.key])
        assert read_header(memoryview(image)).key == found.key
        self.adopt(desk, found)
        located = desk.lookup("aa")
        desk.end_jobs(fail={"aa": "corrupt"})
        desk.files[0].clear()
        assert desk.poll(located).lease_id == 0
        desk.assert_cache(ram="", disk="")
