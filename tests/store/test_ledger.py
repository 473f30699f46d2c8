"""Events rebuild what is where, with the reason for each removal; counters tell what happened, and only that."""

from __future__ import annotations

import random

from qkvault.store.status import status_of
from qkvault.testing import StoreModel
from qkvault.tiers.base import JobKind
from qkvault.types import ChunkState, Medium, Outcome


def follow(desk, model):
    """The contents that the events tell are the real ones."""
    model.hear(desk.store.take_events())
    index = list(desk.store.index)
    assert model.contents["ram"].keys() == {entry.key for entry in index if entry.state is ChunkState.READY}
    for book in desk.books:
        assert model.contents[book.name].keys() == {entry.key for entry in index if entry.tiers & book.bit}


def reasons(desk):
    return {(desk.names[event.key], event.tier, event.reason) for event in desk.store.take_events() if not event.stored}


def test_events_rebuild_the_contents_of_every_tier(make_desk):
    """B57: whatever happens, in whatever order."""
    rng = random.Random(7)
    desk, model = make_desk(slots=5, caps=[4, 6]), StoreModel()
    held = []
    for _ in range(400):
        prompt = "".join(rng.choice("ab") for _ in range(rng.randint(1, 7)))
        act = rng.randrange(8)
        if act < 3:
            desk.save(prompt)
        elif act == 3:
            held.append(desk.find(prompt))
        elif act == 4 and held:
            desk.release(held.pop())
        elif act == 5:
            desk.end_jobs(fail={prompt: rng.choice(["absent", "corrupt", "unavailable"])})
        elif act == 6:
            desk.end_jobs()
        elif rng.random() < 0.1:
            desk.store.clear(lower_tiers=rng.random() < 0.5)
        follow(desk, model)
    desk.release(*held)


def test_who_listens_late_is_told_what_is_here(make_desk):
    """The first call tells of every chunk in every tier, and of none that is only being written."""
    desk, model = make_desk(caps=[4]), StoreModel()
    desk.save("aabb")
    desk.end_jobs()
    desk.store.clear(lower_tiers=False)
    desk.save("xx")
    desk.reserve("yy")
    follow(desk, model)
    assert len(model.contents["disk"]) == 2
    assert desk.store.take_events() == []


def test_an_event_tells_all_of_a_chunk(make_desk):
    """Key, parent, tokens, medium and tier."""
    desk = make_desk(caps=[4])
    desk.store.take_events()
    desk.save("aab")
    desk.end_jobs()
    events = desk.store.take_events()
    head, tail = desk.chunks("aab")
    assert [(event.key, event.parent, event.num_tokens) for event in events[:2]] == [
        (head.key, head.parent, 32),
        (tail.key, head.key, 16),
    ]
    assert [(event.medium, event.tier) for event in events] == [(Medium.RAM, "ram")] * 2 + [(Medium.DISK, "disk")] * 2


def test_every_removal_has_its_reason(make_desk):
    """B57: evicted, cooled, cleared, superseded, absent, corrupt: each cause once."""
    desk = make_desk(slots=3, caps=[3])
    desk.store.take_events()
    desk.save("aab")
    desk.end_jobs()
    desk.save("aabb")
    desk.end_jobs()
    assert reasons(desk) == {("aab", "ram", "superseded"), ("aab", "disk", "superseded")}
    desk.save("xxyyzz")
    desk.end_jobs()
    assert reasons(desk) == {(name, tier, "evicted") for name in ("aa", "aabb") for tier in ("ram", "disk")}
    desk.store.set_hot_cache(enabled=False)
    assert reasons(desk) == {(name, "ram", "cooled") for name in ("xx", "xxyy", "xxyyzz")}
    for name, reason in (("xx", "absent"), ("xxyy", "corrupt")):
        desk.lookup("xxyy")
        desk.end_jobs(fail={name: reason}, kind=JobKind.LOAD)
        desk.store.end_session(1)
        assert (name, "disk", reason) in reasons(desk)
        desk.files[0].pop(desk.chunks(name)[-1].key)
        desk.store.set_hot_cache(enabled=True)
        desk.save("xxyy")
        desk.end_jobs()
    desk.store.take_events()
    held = desk.lookup("xxyy")
    desk.store.clear()
    desk.release(held)
    desk.end_jobs()
    gone = {(name, tier, "cleared") for name in ("xx", "xxyy") for tier in ("ram", "disk")}
    assert reasons(desk) == {*gone, ("xxyyzz", "disk", "cleared")}


def test_without_a_listener_no_events_are_kept(desk):
    """Nobody who does not ask pays for them."""
    desk.save("aabb")
    assert len(desk.store.ledger.feed) == 0


def test_counters_are_exact(make_desk):
    """A scripted day, with every number known."""
    desk = make_desk(slots=4, caps=[8], lease_seconds=10.0)
    desk.save("aabbcc")  # three stored, twice
    desk.end_jobs()
    desk.release(desk.lookup("aabbccdd"))  # four asked, three found
    desk.reserve("aabbccddee")  # three present, one reserved, one without room
    desk.clock.advance(11.0)
    desk.store.expire(desk.clock())
    desk.store.end_session(1)
    desk.store.clear(lower_tiers=False)
    located = desk.lookup("aabb")  # two asked, two found, two promoted
    desk.end_jobs(fail={"aabb": "corrupt"})
    desk.release(desk.poll(located))
    status = status_of(desk.store, num_sessions=2, is_scanning=False)
    whole = {name: count for name, count in status.counters.items() if count}
    assert whole == {
        "lookups": 2,
        "chunks_asked": 6,
        "chunks_found": 5,
        "chunks_promoted": 2,
        "leases_expired": 1,
        "reserve.reserved": 4,
        "reserve.present": 3,
        "reserve.no_room": 1,
        "stored.ram": 4,
        "stored_bytes.ram": 4 * 8192,
        "stored.disk": 3,
        "stored_bytes.disk": 3 * 8192,
        "loaded.disk": 1,
        "loaded_bytes.disk": 8192,
        "removed.ram.cleared": 3,
        "removed.disk.corrupt": 1,
        "failed.disk.corrupt": 1,
    }
    assert {f"reserve.{outcome.value}" for outcome in Outcome} <= status.counters.keys()
    assert (status.num_leases, status.num_sessions, status.num_jobs) == (0, 2, 0)
    assert [(m.name, m.used_bytes, m.num_chunks, m.is_healthy) for m in status.media] == [
        ("ram", 8192, 1, True),
        ("disk", 2 * 8192, 2, True),
    ]
    desk.files[0].pop(desk.chunks("aabb")[-1].key)


def test_nothing_is_counted_while_nothing_happens(make_desk):
    """Two looks without traffic are equal; time alone changes nothing."""
    desk = make_desk(caps=[8])
    desk.save("aa")
    desk.end_jobs()
    before = status_of(desk.store, num_sessions=1, is_scanning=False)
    desk.clock.advance(1000.0)
    desk.store.expire(desk.clock())
    desk.store.check()
    assert status_of(desk.store, num_sessions=1, is_scanning=False) == before


def test_bytes_that_went_down_come_up_again(make_desk):
    """One round trip: as many bytes loaded as stored, and some."""
    desk = make_desk(caps=[8])
    desk.save("aabbc")
    desk.end_jobs()
    desk.store.clear(lower_tiers=False)
    assert desk.found("aabbc") == 80
    counters = desk.counters
    assert counters.loaded_bytes["disk"] == counters.stored_bytes[Medium.DISK] == 2 * 8192 + 6144
