"""The feed: bounded, and whoever was late learns everything anew."""

from __future__ import annotations

import random

import pytest

from qkvault.events import RESTART
from qkvault.testing import StoreModel
from qkvault.tiers.base import Found
from qkvault.types import ChunkState


def assert_follows(desk, model):
    index = list(desk.store.index)
    assert model.contents["ram"].keys() == {entry.key for entry in index if entry.state is ChunkState.READY}
    for book in desk.books:
        assert model.contents[book.name].keys() == {entry.key for entry in index if entry.tiers & book.bit}


def act(desk, rng, held):
    prompt = "".join(rng.choice("ab") for _ in range(rng.randint(1, 9)))
    what = rng.randrange(8)
    if what < 3:
        desk.save(prompt)
    elif what == 3:
        held.append(desk.find(prompt))
    elif what == 4 and held:
        desk.release(held.pop())
    elif what == 5:
        desk.end_jobs(fail={prompt: rng.choice(["absent", "corrupt", "unavailable"])})
    elif what == 6:
        desk.end_jobs()
    elif rng.random() < 0.1:
        desk.store.clear(lower_tiers=rng.random() < 0.5)


@pytest.mark.parametrize("seed", range(5))
def test_a_late_reader_learns_everything_anew(make_desk, seed):
    """B233: however few events may wait, and however few it takes at a time, it is right when nothing is left."""
    rng = random.Random(seed)
    desk, model, held, num_restarts = make_desk(slots=6, caps=[5, 8]), StoreModel(), [], 0
    feed = desk.store.ledger.feed
    feed.max_waiting = 24
    for _ in range(300):
        for _ in range(rng.randint(0, 6)):
            act(desk, rng, held)
        longest_line = 10  # what is told of a chunk and its ancestors comes at once
        assert len(feed) <= feed.max_waiting + longest_line
        if rng.random() < 0.3:
            while events := desk.store.take_events(rng.randint(1, 5), start_over=rng.random() < 0.01):
                num_restarts += sum(event is RESTART for event in events)
                model.hear(events)
                if rng.random() < 0.7:
                    act(desk, rng, held)  # while it is still being told
            assert_follows(desk, model)
    assert num_restarts > 3
    desk.release(*held)


def test_nothing_waits_for_a_reader_that_has_gone(make_desk):
    """B233: neither events nor keys."""
    desk = make_desk(slots=8)
    desk.store.take_events()
    feed = desk.store.ledger.feed
    feed.max_waiting = 3
    for prompt in ("aa", "bb", "cc", "dd"):
        desk.save(prompt)
    assert (len(feed), len(feed._untold), len(feed._told)) == (0, 0, 0)
    events = desk.store.take_events()
    assert events[0] is RESTART
    assert {desk.names[event.key] for event in events[1:]} == {"aa", "bb", "cc", "dd"}


def test_a_parent_is_told_of_before_its_children(make_desk):
    """B233: also where a scan has found the child first."""
    desk = make_desk(caps=[8])
    made = desk.chunks("aabbcc")
    for chunk in reversed(made):
        new = chunk.new()
        size = new.image_bytes
        desk.files[0][chunk.key] = b""
        desk.store.adopt(
            desk.books[0], [Found(new.key, new.parent, new.sketch, new.num_tokens, size, size, space=b"s")]
        )
    assert [event.key for event in desk.store.take_events()] == [chunk.key for chunk in made]


def test_what_a_scan_has_read_is_told(make_desk):
    """Tokens come along if they may be told; in any case the space."""
    desk = make_desk(caps=[8])
    desk.store.take_events()
    for prompt, flags in (("aa", 2), ("bb", 0)):
        new = desk.chunks(prompt)[0].new()
        desk.files[0][new.key] = b""
        size = new.image_bytes
        found = Found(new.key, new.parent, new.sketch, new.num_tokens, size, size, b"secret", b"space", flags)
        desk.store.adopt(desk.books[0], [found])
    told = [(event.tokens, event.space, event.flags) for event in desk.store.take_events()]
    assert told == [(b"secret", b"space", 2), (b"", b"space", 0)]
