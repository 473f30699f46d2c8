"""Collector: whatever a scheduler does, a chunk that is whole has the rows of its own tokens, and no block is lost."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkvault.capture.plan import RequestStep, SlotTable
from qkvault.capture.ring import QRingBuffer
from qkvault.capture.rows import CaptureCounters, Collector, Reason

BLOCK, CHUNK, KV_BLOCKS = 4, 8, 64


class Rig:
    """A ring of one layer whose rows say which token of which request they are, and a collector over it."""

    def __init__(self, scheduler, num_blocks=16, *, match=None) -> None:
        self.scheduler = scheduler
        self.ring = QRingBuffer(1, num_blocks, BLOCK, 2, torch.int64)
        self.counters = CaptureCounters()
        self.numbers: dict[str, int] = {}
        self.reclaimable: list[int] = []
        self.collector = Collector(
            self.ring, chunk_size=CHUNK, num_engine_blocks=KV_BLOCKS, counters=self.counters, reclaim=self.reclaim
        )
        self.table = SlotTable(KV_BLOCKS * BLOCK)
        self.match = match
        self.rejects_drafts = False  # rows behind the tokens that count are of other tokens
        self.pending = []  # steps that ran and are not verified

    def reclaim(self) -> None:
        self.ring.free(self.reclaimable)
        self.reclaimable = []

    def run(self, steps, *, rows=None, verifies=True) -> None:
        """A step of the engine: each row's query is (request, position)."""
        capture = self.collector.begin(steps)
        assert len(set(capture.wanted.ring_slots)) == len(capture.wanted.ring_slots)
        rows = self.scheduler.rows(steps) if rows is None else rows
        mapping = self.scheduler.slot_mapping(rows)
        matched = self.table.match(mapping, capture.wanted)
        if self.match is not None:
            ring_slots, is_found = self.match(mapping, capture.wanted)
            assert torch.equal(ring_slots, matched.ring_slots)
            assert torch.equal(is_found, matched.is_found)
        ends = {name: request.num_computed for name, request in self.scheduler.requests.items()}
        query = torch.tensor(
            [[self.number(name), -at if self.rejects_drafts and at >= ends.get(name, 0) else at] for name, at in rows],
            dtype=torch.int64,
        )
        self.ring.scatter(0, query.view(-1, 2), matched.ring_slots)
        self.pending.append((capture, matched.is_found.tolist()))
        while self.pending and verifies:
            self.collector.verify(*self.pending.pop(0))

    def number(self, request_id: str) -> int:
        return self.numbers.setdefault(request_id, len(self.numbers))

    def take(self):
        """Chunks that are whole, each verified row by row; their blocks are reclaimed later."""
        taken = self.collector.take_whole()
        for whole in taken:
            base = whole.chunk * CHUNK
            num_tokens = whole.item.num_tokens
            got = self.ring.tensors["qkvault_q_layer_0"][list(whole.ring_block_ids)].view(-1, 2)
            wanted = [[self.number(whole.request_id), base + at] for at in range(num_tokens)]
            assert got.tolist() == wanted
            self.reclaimable += whole.ring_block_ids
        return taken

    def end_last(self, steps, live) -> None:
        """Requests whose last step has run give their blocks back."""
        for step in steps:
            if step.is_last:
                self.scheduler.free += live.pop(step.request_id).table

    def check(self) -> None:
        self.ring.check()
        held = self.collector.num_blocks + len(self.reclaimable)
        assert self.ring.num_free_blocks() + held == self.ring.num_blocks


@pytest.fixture(scope="session")
def new_rig(new_scheduler, match_by_sorting):
    return lambda num_blocks=16, seed=1: Rig(
        new_scheduler(KV_BLOCKS, BLOCK, CHUNK, seed), num_blocks, match=match_by_sorting
    )


@pytest.fixture
def rig(new_rig):
    return new_rig()


def chunks_of(wholes):
    return [(whole.request_id, whole.chunk) for whole in wholes]


def test_a_chunk_must_be_whole_blocks(rig):
    """B90: else a block would be two chunks'."""
    with pytest.raises(ValueError):
        Collector(rig.ring, chunk_size=6, num_engine_blocks=9, counters=rig.counters, reclaim=rig.reclaim)


@pytest.mark.parametrize("size", [1, 3, 5, 8, 11, 40])
def test_a_prompt_that_is_computed_in_pieces_loses_nothing(rig, items_of, size):
    """B85: at any step size every whole chunk is captured, as is what is decoded a token at a time."""
    request = rig.scheduler.add("a", list(range(40)))
    items = items_of("a", 5, CHUNK)
    taken = []
    while request.num_computed < 40:
        rig.run([rig.scheduler.schedule(request, min(size, 40 - request.num_computed), items)])
        taken += rig.take()
        rig.reclaim()
    assert chunks_of(taken) == [("a", at) for at in range(5)]
    assert [whole.item for whole in taken] == items
    assert rig.collector.take_holes() == []
    rig.check()


@pytest.mark.parametrize("num_cached", [4, 8, 12, 16])
def test_what_was_not_computed_here_is_a_hole(rig, items_of, num_cached):
    """B85: tokens that come from a cache have no rows: their chunks, and only those, are reported and not stored."""
    request = rig.scheduler.add("a", list(range(40)), num_cached)
    rig.run([rig.scheduler.schedule(request, 40 - num_cached, items_of("a", 5, CHUNK))])
    first = -(-num_cached // CHUNK)
    assert [hole[:2] for hole in rig.collector.take_holes()] == [("a", at) for at in range(first)]
    assert chunks_of(rig.take()) == [("a", at) for at in range(first, 5)]
    assert rig.counters.dropped == Counter({Reason.NOT_COMPUTED: first})


def test_tokens_that_are_loaded_in_between_make_a_hole(rig, items_of):
    """A request that is ahead of its rows, for whatever reason, leaves a hole and goes on."""
    request = rig.scheduler.add("a", list(range(40)))
    items = items_of("a", 5, CHUNK)
    rig.run([rig.scheduler.schedule(request, 10, items)])
    rig.scheduler.schedule(request, 3)  # not told
    rig.run([rig.scheduler.schedule(request, 27, items)])
    assert chunks_of(rig.take()) == [("a", 0), ("a", 2), ("a", 3), ("a", 4)]
    assert rig.collector.take_holes() == [("a", 1, Reason.NOT_COMPUTED)]
    rig.check()


def test_rejected_drafts_are_written_again(rig, items_of):
    """Rows of drafts count when they are accepted: a chunk is whole when its tokens are known."""
    request = rig.scheduler.add("a", list(range(40)))
    items = items_of("a", 2, CHUNK)
    rig.run([rig.scheduler.schedule(request, 6, items, num_drafts=4)])  # 4 drafts, none is known
    assert rig.take() == []
    request.num_computed = 8  # 2 of them were accepted
    step = rig.scheduler.schedule(request, 1, items, num_drafts=3)
    rig.run([step])
    assert chunks_of(rig.take()) == [("a", 0)]
    rig.run([rig.scheduler.schedule(request, 7, items)])  # the 3 were rejected
    assert chunks_of(rig.take()) == [("a", 1)]
    assert rig.collector.take_holes() == []
    rig.check()


@pytest.mark.parametrize("spoil", ["one too few", "one too many", "unknown", "negative"])
def test_blocks_that_do_not_cover_the_tokens_capture_nothing(rig, items_of, spoil):
    """B89, B90: that request's chunks are dropped; the others of the step are captured."""
    bad, good = rig.scheduler.add("bad", []), rig.scheduler.add("good", [])
    steps = [rig.scheduler.schedule(each, 16, items_of(each.request_id, 2, CHUNK)) for each in (bad, good)]
    ids = steps[0].block_ids
    spoiled = {"one too few": ids[1:], "one too many": (*ids, 1), "unknown": (*ids[1:], KV_BLOCKS)}
    steps[0] = steps[0]._replace(block_ids=spoiled.get(spoil, (-1, *ids[1:])))
    rig.run(steps)
    assert chunks_of(rig.take()) == [("good", 0), ("good", 1)]
    assert rig.collector.take_holes() == [("bad", 0, Reason.BAD_BLOCKS), ("bad", 1, Reason.BAD_BLOCKS)]
    rig.check()


def test_a_token_without_a_row_drops_its_chunk_alone(rig, items_of):
    """B89: a chunk of which one row is missing is a hole, the others of that request and of that step are not."""
    requests = [rig.scheduler.add(name, []) for name in "ab"]
    steps = [rig.scheduler.schedule(each, 16, items_of(each.request_id, 2, CHUNK)) for each in requests]
    rows = [row for row in rig.scheduler.rows(steps) if row != ("a", 11)]
    rig.run(steps, rows=rows)
    assert sorted(chunks_of(rig.take())) == [("a", 0), ("b", 0), ("b", 1)]
    assert rig.collector.take_holes() == [("a", 1, Reason.ROW_MISSING)]
    rig.check()


def test_a_layer_that_is_missing_drops_what_the_step_touched(rig, items_of):
    """B25, B82, B83: a chunk has all layers or is not stored."""
    request = rig.scheduler.add("a", [])
    items = items_of("a", 3, CHUNK)
    rig.run([rig.scheduler.schedule(request, 12, items)])
    capture = rig.collector.begin([rig.scheduler.schedule(request, 1, items)])
    rig.collector.verify(capture, None)
    rig.run([rig.scheduler.schedule(request, 11, items)])
    assert chunks_of(rig.take()) == [("a", 0), ("a", 2)]
    assert rig.collector.take_holes() == [("a", 1, Reason.LAYER_MISSING)]
    rig.check()


def test_a_full_ring_drops_whole_chunks_and_goes_on(new_rig, items_of):
    """B117: what finds no block is counted; what is captured meanwhile is right."""
    rig = new_rig(num_blocks=4)
    request = rig.scheduler.add("a", [])
    items = items_of("a", 5, CHUNK)
    rig.run([rig.scheduler.schedule(request, 40, items)])
    assert chunks_of(rig.take()) == [("a", 0), ("a", 1)]
    assert rig.counters.dropped == Counter({Reason.RING_FULL: 3})
    rig.check()


def test_a_full_ring_takes_back_what_stores_have_done_with(new_rig, items_of):
    """B96, B117: before anything is dropped, finished stores give their blocks back."""
    rig = new_rig(num_blocks=4)
    request = rig.scheduler.add("a", [])
    items = items_of("a", 6, CHUNK)
    for _ in range(3):
        rig.run([rig.scheduler.schedule(request, 16, items)])
        rig.take()
    assert rig.counters.num_captured == 6
    assert not rig.counters.dropped


def test_the_tail_of_a_request_that_ends_can_be_kept(rig, items_of):
    """B90: the item of an ended request may be a part of a chunk, in whole blocks; without one its blocks are freed."""
    for name, tail in (("a", 4), ("b", 3), ("c", 0)):
        request = rig.scheduler.add(name, [])
        rig.run([rig.scheduler.schedule(request, 8 + 6, items_of(name, 1, CHUNK))])
        items = items_of(name, 1, tail) if tail else []
        rig.run([RequestStep(name, 14, 14, (), 1, tuple(items), is_last=True)])
    assert chunks_of(rig.take()) == [("a", 0), ("a", 1), ("b", 0), ("c", 0)]
    rig.reclaim()
    assert rig.ring.num_free_blocks() == rig.ring.num_blocks
    assert rig.counters.dropped == Counter({Reason.ENDED: 2})


def test_a_request_that_is_computed_anew_is_captured_anew(rig, items_of):
    """Preempted in the middle of a chunk, without the prefix being cached: nothing is lost, nothing is kept twice."""
    request = rig.scheduler.add("a", [])
    items = items_of("a", 3, CHUNK)
    rig.run([rig.scheduler.schedule(request, 13, items)])
    rig.collector.drop("a")
    rig.collector.drop("a")
    rig.check()
    request.num_computed = request.num_items = 0
    rig.run([rig.scheduler.schedule(request, 24, items)])
    assert chunks_of(rig.take()) == [("a", 0), ("a", 0), ("a", 1), ("a", 2)]


def test_chunks_may_be_known_before_they_are_computed(rig, items_of):
    """A prompt's chunks can all be told with its first step."""
    rig.scheduler.add("a", []).table = [1, 2, 3, 4]
    rig.run([RequestStep("a", 0, 3, (1,), 0, tuple(items_of("a", 2, CHUNK)))])
    assert rig.take() == []
    rig.run([RequestStep("a", 3, 16, (1, 2, 3, 4))])
    assert chunks_of(rig.take()) == [("a", 0), ("a", 1)]


def test_a_hole_that_is_computed_anew_is_none(rig, items_of):
    """A request that starts over has another chance, though nobody said that it was preempted."""
    request = rig.scheduler.add("a", [])
    items = items_of("a", 2, CHUNK)
    step = rig.scheduler.schedule(request, 16, items)
    rig.run([step], rows=[row for row in rig.scheduler.rows([step]) if row[1] != 3])
    assert chunks_of(rig.take()) == [("a", 1)]
    request.num_computed = request.num_items = 0
    rig.run([rig.scheduler.schedule(request, 16, items)])
    assert chunks_of(rig.take()) == [("a", 0)]
    rig.check()


def test_a_request_that_is_told_twice_is_taken_once(rig, items_of):
    """No ring slot is written by two rows of one step."""
    request = rig.scheduler.add("a", [])
    step = rig.scheduler.schedule(request, 16, items_of("a", 2, CHUNK))
    capture = rig.collector.begin([step, step._replace(num_before=8, block_ids=step.block_ids[2:])])
    assert len(set(capture.wanted.ring_slots)) == len(capture.wanted.ring_slots) == 16


def test_blocks_of_a_request_that_ends_are_not_written_by_others_in_its_last_step(rig, items_of):
    """Its last chunk is not stored, and its rows are on their way all the same: to nobody else's blocks."""
    ending, other = rig.scheduler.add("a", []), rig.scheduler.add("b", [])
    items = items_of("b", 2, CHUNK)
    rig.run([rig.scheduler.schedule(other, 8, items)])
    last = rig.scheduler.schedule(ending, 3)._replace(is_last=True)
    rig.run([last, rig.scheduler.schedule(other, 8, items)], rows=[("b", at) for at in range(8, 16)] + [("a", 2)])
    assert chunks_of(rig.take()) == [("b", 0), ("b", 1)]
    rig.reclaim()
    assert rig.ring.num_free_blocks() == rig.ring.num_blocks


def test_a_device_that_is_late_verifies_later(rig, items_of):
    """A chunk is whole when it is known that all its rows were there, though its request has ended meanwhile."""
    request = rig.scheduler.add("a", [])
    items = items_of("a", 2, CHUNK)
    rig.run([rig.scheduler.schedule(request, 10, items)], verifies=False)
    rig.run([rig.scheduler.schedule(request, 6, items)], verifies=False)
    rig.run([RequestStep("a", 16, 16, (), is_last=True)], verifies=False)
    assert rig.take() == []
    rig.check()
    rig.run([])
    assert chunks_of(rig.take()) == [("a", 0), ("a", 1)]
    rig.reclaim()
    assert rig.ring.num_free_blocks() == rig.ring.num_blocks


def test_clear_forgets_everything(rig, items_of):
    """Also what is whole, what is on its way and what has ended."""
    names = "abc"
    requests = [rig.scheduler.add(name, []) for name in names]
    rig.run([rig.scheduler.schedule(each, 9, items_of(each.request_id, 1, CHUNK)) for each in requests])
    rig.run([rig.scheduler.schedule(requests[0], 3)], verifies=False)
    rig.run([RequestStep("b", 9, 9, (), is_last=True)], verifies=False)
    rig.collector.clear()
    assert rig.ring.num_free_blocks() == rig.ring.num_blocks
    rig.run([])
    assert rig.take() == []
    rig.check()


@given(seed=st.integers(0, 2**32), num_blocks=st.integers(1, 24), is_late=st.booleans())
@settings(max_examples=60)
def test_any_traffic_is_attributed_right(new_rig, items_of, seed, num_blocks, is_late):
    """B82, B85-91: continuous batches, permuted rows, padding, pieces of any size, cached prefixes, drafts, preemption,
    abort and decoding: what is whole has the right rows, the table agrees with sorting, and at the end all is free."""
    rig = new_rig(num_blocks, seed)
    rig.rejects_drafts = True
    rng, live, count = random.Random(seed), {}, 0
    for _ in range(25):
        if len(live) < 3 and rng.random() < 0.5:
            name = f"r{count}"
            count += 1
            live[name] = rig.scheduler.add(name, [], rng.choice([0, 0, 4, 8, 12]))
        steps, lasts = [], []
        for name, request in list(live.items()):
            chance = rng.random()
            if chance < 0.08 or request.num_computed > 40:
                if rng.random() < 0.5:
                    rig.collector.drop(name)  # aborted
                else:
                    at = request.num_computed
                    lasts.append(RequestStep(name, at, at, (), is_last=True))
                rig.scheduler.free += live.pop(name).table
            elif chance < 0.16:  # preempted; some of it is found again
                rig.collector.drop(name)
                rig.scheduler.free += request.table
                request.table = []
                request.num_computed = min(rng.choice([0, 0, 4, 8]), request.num_computed)
                request.num_items = request.num_computed // CHUNK
            elif chance < 0.8:
                num_drafts = rng.choice([0, 0, 3])
                step = rig.scheduler.schedule(
                    request, rng.choice([1, 1, 2, 7, 8, 13]), items_of(name, 9, CHUNK), num_drafts
                )
                steps.append(step._replace(is_last=rng.random() < 0.1))
        rig.run(lasts, rows=[], verifies=not is_late)
        rig.run(steps, verifies=not is_late or rng.random() < 0.4)
        rig.end_last(steps, live)
        rig.take()
        if rng.random() < 0.7:
            rig.reclaim()
        rig.check()
    for name in live:
        rig.collector.drop(name)
    rig.run([])
    rig.take()
    rig.reclaim()
    rig.check()
    assert rig.ring.num_free_blocks() == rig.ring.num_blocks
