"""Forgetting a prompt: its chunks from one on, and all that hangs on them."""

from __future__ import annotations

import pytest

from qkvault.testing.store_model import ROOT, keys_of
from qkvault.tiers.base import JobKind
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


def test_a_tail_and_its_beginnings_are_forgotten_and_nothing_longer(desk):
    """B290."""
    desk.save("aab")
    desk.save("aaxx")
    assert forget(desk, "aax", start=1) == 0
    assert forget(desk, "aab", start=1) == 1
    desk.assert_cache(ram="aa aaxx", pins="")


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


def test_what_is_written_never_appears(desk):
    """B290."""
    reserved = desk.reserve("aabb")
    assert forget(desk, "aabb", start=1) == 1
    assert desk.store.commit(1, reserved.lease_id) == 1
    desk.assert_cache(ram="aa", pins="")


@pytest.mark.parametrize("prompt", ["", "a", "aabb"])
def test_what_is_not_there_is_forgotten_already(desk, prompt):
    desk.save("xx")
    assert (desk.store.forget(ROOT, b"") if not prompt else forget(desk, prompt)) == 0
    desk.assert_cache(ram="xx", pins="")
