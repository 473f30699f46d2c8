"""Forgetting a prompt: its chunks from one on, and all that hangs on them."""

from __future__ import annotations

from itertools import permutations

import pytest

from qkvault.image import seal
from qkvault.testing.store_model import ROOT, keys_of
from qkvault.tiers.base import Found, JobKind
from qkvault.types import Outcome


def forget(desk, prompt, start=0):
    """Forget ``prompt`` from chunk ``start`` on, its tail included."""
    made = desk.chunks(prompt)
    whole = [chunk for chunk in made if chunk.num_tokens == made[0].num_tokens] if len(prompt) > 1 else []
    parent = whole[start - 1].key if start else ROOT
    tail = made[-1].tokens if len(whole) < len(made) else b""
    count = desk.store.forget(parent, keys_of(whole[start:]), tail)
    desk.settle()
    return count


def test_a_prompt_is_forgotten_from_a_chunk_on(desk):
    """B290."""
    desk.save("aabbcc")
    assert forget(desk, "aabbcc", start=1) == 2
    assert desk.found("aabbcc") == 32
    assert desk.save("aabbcc") == 2


def test_what_hangs_on_it_goes_too(desk):
    """B290: other prompts that begin with it, and only those."""
    desk.save("aabbcc")
    desk.save("aaxx")
    desk.save("yy")
    assert forget(desk, "aabb", start=1) == 2
    desk.assert_cache(ram="aa aaxx yy", pins="")
    assert forget(desk, "aa") == 2
    desk.assert_cache(ram="yy", pins="")


def test_a_tail_goes_with_what_begins_it_and_what_it_begins(desk):
    """B290, B524: a longer chunk holds all of it, and would be found in its place."""
    desk.save("aab")
    desk.save("aaxx")
    desk.save("aayy")
    assert forget(desk, "aax", start=1) == 1
    assert forget(desk, "aab", start=1) == 1
    desk.assert_cache(ram="aa aayy", pins="")


def test_chunks_behind_a_hole_are_forgotten(desk):
    """B290: a chunk need not be reached from the first one."""
    desk.save("aabbcc", start=2)
    assert forget(desk, "aabbcc") == 1
    assert len(desk.store.index) == 0


def test_tiers_forget_it_too(make_desk):
    """B290."""
    desk = make_desk(caps=(8,))
    desk.save("aabb")
    desk.end_jobs()
    assert len(desk.files[0]) == 2
    assert forget(desk, "aabb") == 2
    desk.end_jobs(kind=JobKind.DELETE)
    assert desk.files == [{}]


def test_what_is_read_goes_when_its_readers_are_done(desk):
    """B290: nobody finds it meanwhile, nor can store it anew."""
    desk.save("aa")
    located = desk.lookup("aa")
    assert forget(desk, "aa") == 1
    assert forget(desk, "aa") == 0
    assert desk.read(located) == [("aa", 32)]
    assert not desk.lookup("aa").lease_id
    assert desk.reserve("aa").outcomes == (Outcome.BUSY,)
    desk.release(located)
    assert desk.save("aa") == 1


def test_what_a_longer_one_replaced_while_it_was_read_goes_too(desk):
    """B290: it is not kept in place of the longer one, which has gone as well."""
    desk.save("aab")
    held = desk.find("aab")
    desk.save("aabb", start=1)
    assert forget(desk, "aabb") == 3
    desk.release(held)
    desk.settle()
    assert len(desk.store.index) == 0


def test_what_is_written_never_appears(desk):
    """B290."""
    reserved = desk.reserve("aabb")
    assert forget(desk, "aabb", start=1) == 1
    assert desk.store.commit(1, reserved.lease_id) == 1
    desk.assert_cache(ram="aa", pins="")


class TestWhileScanning:
    """Chunks of an earlier run that a scan finds after, or before, something was forgotten."""

    @staticmethod
    def put(desk, *prompts):
        """A file for the last chunk of each."""
        for prompt in prompts:
            chunk = desk.chunks(prompt)[-1]
            image = memoryview(bytearray(chunk.new().image_bytes))
            chunk.write(image)
            seal(image)
            desk.files[0][chunk.key] = bytes(image)

    @staticmethod
    def scan(desk, *prompts):
        """The scan comes to the last chunk of each, in this order."""
        found = [desk.chunks(prompt)[-1].new() for prompt in prompts]
        desk.store.adopt(
            desk.books[0],
            [Found(new.key, new.parent, new.sketch, new.num_tokens, new.image_bytes, new.image_bytes) for new in found],
        )
        desk.settle()

    @pytest.mark.parametrize("order", list(permutations(["aa", "aabb", "aabbcc", "aabbccd"])))
    @pytest.mark.parametrize("num_before", range(5))
    def test_what_hangs_on_it_does_not_come_back(self, make_desk, order, num_before):
        """B332: whatever the scan had found before, and in whichever order."""
        desk = make_desk(caps=(8,))
        self.put(desk, *order, "xx", "aaxx")
        self.scan(desk, *order[:num_before])
        forget(desk, "aabb", start=1)
        self.scan(desk, *order[num_before:], "xx", "aaxx")
        desk.end_jobs()
        desk.assert_cache(ram="", disk="aa aaxx xx", pins="")

    def test_a_tail_that_is_found_later_goes_too(self, make_desk):
        """B332: with its beginnings, and what is longer."""
        desk = make_desk(caps=(8,))
        self.put(desk, "aa", "aab", "aabb", "aac")
        assert desk.store.forget(desk.chunks("aa")[0].key, b"", desk.chunks("aab")[1].tokens) == 0
        self.scan(desk, "aa", "aab", "aabb", "aac")
        desk.end_jobs()
        desk.assert_cache(disk="aa aac")

    def test_what_is_stored_since_stays(self, make_desk):
        """B332: the new bytes are found, in RAM and in the tier; of the old ones nothing is."""
        desk = make_desk(caps=(8,))
        self.put(desk, "aa", "aabb", "aacc", "aaccdd")
        self.scan(desk, "aaccdd")  # without its parents
        assert forget(desk, "aabb") == 0
        assert desk.save("aabb", version=1) == 2
        assert desk.save("aaccdd", version=1) == 3 - 1
        self.scan(desk, "aa", "aabb", "aacc", "aaccdd")
        desk.end_jobs()
        desk.assert_cache(ram="aa aabb aacc aaccdd", disk="aa aabb aacc aaccdd", pins="")
        for prompt in ("aabb", "aaccdd"):
            located = desk.lookup(prompt)
            assert len(desk.read(located, version=1)) == len(prompt) / 2
            desk.release(located)

    def test_what_is_stored_since_in_ram_only_loses_its_old_file(self, make_desk):
        """B332: while the tier takes nothing."""
        desk = make_desk(caps=(8,))
        self.put(desk, "aa", "aabb")
        forget(desk, "aa")
        desk.books[0].is_healthy = False
        desk.save("aabb", version=1)
        self.scan(desk, "aabb", "aa")
        desk.end_jobs()
        desk.assert_cache(ram="aa aabb", disk="", pins="")

    @pytest.mark.parametrize("is_all", [False, True])
    def test_of_very_much_that_is_forgotten_all_of_the_space_is(self, make_desk, monkeypatch, is_all):
        """B332: what is remembered meanwhile is bounded; other spaces lose nothing, unless there are very many."""
        monkeypatch.setattr("qkvault.store.forgotten._MAX_BYTES", 10 * 128)
        monkeypatch.setattr("qkvault.store.forgotten._MAX_SPACES", 0 if is_all else 10)
        desk = make_desk(caps=(8,))
        self.put(desk, "aa")
        desk.store.forget(ROOT, b"".join(bytes(47) + bytes([n]) for n in range(11)))
        self.scan(desk, "aa")
        desk.end_jobs()
        desk.assert_cache(disk="" if is_all else "aa")
        desk.store.forget(ROOT, b"".join(ROOT[:-1] + bytes([n]) for n in range(1, 12)))
        self.put(desk, "bb")
        self.scan(desk, "bb")
        desk.end_jobs()
        desk.assert_cache(disk="" if is_all else "aa")

    def test_of_very_long_tails_too(self, make_desk, monkeypatch):
        """B332."""
        monkeypatch.setattr("qkvault.store.forgotten._MAX_BYTES", 1000)
        desk = make_desk(caps=(8,))
        self.put(desk, "aa", "bbb")
        self.scan(desk, "aa")
        for _ in range(10):  # of the same as little as of one
            desk.store.forget(ROOT, b"", bytes(64))
        self.scan(desk, "bbb")
        desk.end_jobs()
        desk.assert_cache(disk="aa bbb")
        desk.store.forget(ROOT, b"", bytes(64 * 300))
        self.put(desk, "cc")
        self.scan(desk, "cc")
        desk.end_jobs()
        desk.assert_cache(disk="aa bbb")

    def test_when_all_is_scanned_nothing_is_remembered(self, make_desk):
        """B332."""
        desk = make_desk(caps=(8,))
        forget(desk, "aa")
        desk.store.forgotten.end()
        forget(desk, "bb")
        self.put(desk, "aa", "bb")
        self.scan(desk, "aa", "bb")
        desk.end_jobs()
        desk.assert_cache(disk="aa bb")


@pytest.mark.parametrize("prompt", ["", "a", "aabb"])
def test_what_is_not_there_is_forgotten_already(desk, prompt):
    desk.save("xx")
    assert (desk.store.forget(ROOT, b"") if not prompt else forget(desk, prompt)) == 0
    desk.assert_cache(ram="xx", pins="")
