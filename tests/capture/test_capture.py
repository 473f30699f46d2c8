"""From rows of a fake model to queries read back by token ids: a real store, a real ring, every element compared."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkvault.capture.adapter import QRingBufferAdapter, query_layout, query_space
from qkvault.capture.features import (
    FEATURE_REGISTRY,
    Dispatcher,
    EngineContext,
    QTensorFeature,
    init_dispatcher,
)
from qkvault.capture.plan import RequestStep
from qkvault.capture.recorder import QRingBufferCapture
from qkvault.capture.ring import QRingBuffer
from qkvault.capture.rows import Reason
from qkvault.config import Config
from qkvault.embedded import EmbeddedStore
from qkvault.errors import LayoutMismatch, Unavailable
from qkvault.keys import KeySpace, RequestIdentity
from qkvault.layout import ChunkLayout
from qkvault.link import Link
from qkvault.metrics import DROP_REASONS
from qkvault.paged import PagedConnector
from qkvault.prefix import Prefix, load_items
from qkvault.reports import spaces_of
from qkvault.sdk.context import Context
from qkvault.sdk.geometry import choose
from qkvault.testing.fake_engine import FakeEngine
from qkvault.transfer import Transfer
from qkvault.types import TRANSFER_QUERY, CacheKind
from qkvault.wire.messages import Instance

BLOCK, CHUNK, KV_BLOCKS, LAYERS = 16, 32, 48, 3
KV = ChunkLayout(
    kind=CacheKind.KV, num_layers=LAYERS, num_heads=2, head_size=4, num_parts=2, dtype="bfloat16", block_size=BLOCK,
    chunk_size=CHUNK, order="LBHNPD",
)  # fmt: skip
SPACE = KeySpace(model_name="m", model_fingerprint="w", dtype="bfloat16", chunk_size=CHUNK, tensors=KV.logical)


class LateDevice(PagedConnector):
    """Copies at once, and says so when it is told to: the event is the connector itself."""

    is_done = True

    def batched_from_gpu(self, runs):
        super().batched_from_gpu(runs)
        return self

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True


class Model:
    """A fake model, its scheduler, and its capture into a store of its own."""

    def __init__(self, new_scheduler, seed=1, *, num_ring_blocks=64, is_late=False, where="cpu") -> None:
        self.where = where
        self.store = EmbeddedStore(Config(ram_bytes=4 << 20, prefault=False))
        self.kv = FakeEngine(KV, KV_BLOCKS)
        self.scheduler = new_scheduler(KV_BLOCKS, BLOCK, CHUNK, seed)
        self.kv_paged = PagedConnector(self.kv.tensors, KV)
        self.layout = query_layout(KV, num_layers=LAYERS, num_heads=6, head_size=4, dtype="bfloat16")
        self.queries = FakeEngine(self.layout, KV_BLOCKS, seed=9)
        self.space = query_space(SPACE, self.layout)
        self.connect_error: Exception | None = None
        ring = QRingBuffer(LAYERS, num_ring_blocks, BLOCK, 24, torch.bfloat16, device=where)
        self.device = (LateDevice if is_late else PagedConnector)(list(ring.tensors.values()), self.layout)
        self.adapter = QRingBufferAdapter(
            ring, self.layout, self.space, Link(self.connect), num_engine_blocks=KV_BLOCKS, paged=self.device
        )
        self.names = [f"layers.{at}.attn" for at in range(LAYERS)]
        self.capture = QRingBufferCapture(self.adapter, self.names, num_slots=KV_BLOCKS * BLOCK)
        self.holes = []
        take_holes = self.adapter.collector.take_holes
        self.adapter.collector.take_holes = lambda: self.holes.extend(found := take_holes()) or found
        self.client = self.store.connect("reader")
        self.prefixes: dict[str, Prefix] = {}

    def connect(self):
        if self.connect_error is not None:
            raise self.connect_error
        return self.store.connect("capture")

    def link_for(self, description):
        """A link as an engine opens it for a feature."""
        instance = Instance(instance_id="e", role="query", model_name="m", world_size=1, spaces=(description.encode(),))
        return Link(self.connect, instance)

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self.capture.shutdown()
        assert self.adapter.ring.num_free_blocks() == self.adapter.ring.num_blocks
        self.adapter.check()
        self.client.close()
        self.store.driver.check()
        self.store.close()

    def add(self, name, tokens, num_cached=0):
        self.prefixes[name] = Prefix(SPACE, RequestIdentity(), tokens)
        request = self.scheduler.add(name, tokens, num_cached)
        request.num_items = num_cached // CHUNK
        return request

    def schedule(self, request, count):
        tokens = request.tokens
        end = len(tokens) // CHUNK * CHUNK
        table = [0] * (len(tokens) // BLOCK)
        items = self.prefixes[request.request_id].save_items(0, end, table, BLOCK)
        return self.scheduler.schedule(request, count, items)

    def rows_of(self, steps):
        """Rows of a step, the query of each in each layer, and the slot mapping."""
        rows = self.scheduler.rows(steps)
        wanted = {name: self.queries.expected(request.tokens)[0] for name, request in self.scheduler.requests.items()}
        noise = np.zeros((LAYERS, 6, 4), np.int16)
        picked = [wanted[name][:, at] if name else noise for name, at in rows]
        bits = np.stack(picked, axis=1) if picked else np.zeros((LAYERS, 0, 6, 4), np.int16)
        queries, mapping = torch.from_numpy(bits).view(torch.bfloat16), self.scheduler.slot_mapping(rows)
        return queries.to(self.where), mapping.to(self.where)

    def run(self, steps, *, missing=(), submits=True) -> None:
        queries, mapping = self.rows_of(steps)
        self.capture.start_step(steps)
        for number, name in enumerate(self.names):
            if number not in missing:
                self.capture.save_q_layer(name, queries[number], mapping)
        if submits:
            self.capture.batched_submit_qstore_requests()
        self.adapter.check()

    def prefill(self, name, num_tokens, *, num_cached=0, first=0):
        request = self.add(name, list(range(first, first + num_tokens)), num_cached)
        self.run([self.schedule(request, num_tokens - num_cached)])
        return request

    def settle(self) -> None:
        """A GPU ends what it was given: rows are verified, copied and committed."""
        for _ in range(3 if self.where == "cuda" else 0):
            torch.cuda.synchronize()
            self.capture.reclaim()

    def stored(self, tokens) -> list[int]:
        """Whole chunks of ``tokens`` whose queries are in the store; each was read back and compared."""
        self.settle()
        prefix = Prefix(self.space, RequestIdentity(), tokens)
        transfer = Transfer(self.client, PagedConnector(self.queries.tensors, self.layout), self.space)
        table = self.queries.allocate(len(tokens))
        found, number = [], 0
        while number < len(tokens) // CHUNK:
            located = prefix.find(self.client, start_chunk=number)
            num_whole = located.ready.num_tokens // CHUNK
            if num_whole:
                start, stop = number * CHUNK, (number + num_whole) * CHUNK
                self.queries.scribble(table)
                items = load_items(
                    located.ready, 0, stop - start, table[start // BLOCK :], chunk_size=CHUNK, block_size=BLOCK
                )
                assert transfer.load(items) == set()
                self.queries.verify(tokens[:stop], table, start)
                found += range(number, number + num_whole)
            if located.lease_id:
                self.client.release(located.lease_id)
            number += num_whole or 1
        self.queries.free(table)
        return found


@pytest.fixture
def model(new_scheduler):
    with Model(new_scheduler) as model:
        yield model


@pytest.fixture
def model_there(new_scheduler, device):
    """A model on the CPU, and on a GPU where there is one."""
    with Model(new_scheduler, where=device) as model:
        yield model


@pytest.fixture
def late(new_scheduler):
    """A model on a device whose copies end when they are told to."""
    with Model(new_scheduler, is_late=True, num_ring_blocks=4) as model:
        yield model


def test_queries_are_read_back_by_token_ids(model_there):
    """B64, B82, B92, B95: every element of every layer, in the space of queries; the keys differ in the space alone."""
    request = model_there.prefill("a", 100)
    assert model_there.stored(request.tokens) == [0, 1, 2]
    assert model_there.adapter.counters.num_stored == 3
    assert model_there.space.kind is CacheKind.QUERY
    assert model_there.space.space_id != SPACE.space_id


def test_queries_and_kv_of_a_prompt_do_not_mix(model):
    """B95: a lookup of one kind never finds the other, and storing one does not keep the other out."""
    tokens = model.prefill("a", 64).tokens
    kv = Transfer(model.client, model.kv_paged, SPACE)
    prefix = model.prefixes["a"]
    assert prefix.find(model.client).ready.num_tokens == 0
    (report,) = kv.save(prefix.save_items(0, 64, model.kv.prefill(tokens), BLOCK))
    assert [outcome.value for outcome in report.outcomes] == ["reserved"] * 2
    located = prefix.find(model.client)
    table = model.kv.allocate(64)
    assert kv.load(load_items(located.ready, 0, 64, table, chunk_size=CHUNK, block_size=BLOCK)) == set()
    model.kv.verify(tokens, table)
    model.client.release(located.lease_id)
    assert model.stored(tokens) == [0, 1]


@pytest.mark.parametrize("size", [1, 7, 33])
def test_pieces_of_any_size_lose_nothing(model_there, size):
    """B85: chunked prefill, and decoding a token at a time."""
    request = model_there.add("a", list(range(96)))
    while request.num_computed < 96:
        model_there.run([model_there.schedule(request, min(size, 96 - request.num_computed))])
    assert model_there.stored(request.tokens) == [0, 1, 2]


def test_a_prefix_that_was_cached_is_a_hole(model_there):
    """B85: what comes after it is stored and found behind it; the hole is told, and is nothing, not zeros."""
    request = model_there.prefill("a", 128, num_cached=48)
    assert model_there.holes == [("a", 0, Reason.NOT_COMPUTED), ("a", 1, Reason.NOT_COMPUTED)]
    assert model_there.stored(request.tokens) == [2, 3]


def test_chunks_that_are_there_are_not_copied_again(model_there):
    """B101: two requests of one prompt store it once."""
    model_there.prefill("a", 64)
    model_there.settle()
    model_there.prefill("b", 64)
    model_there.settle()
    assert (model_there.adapter.counters.num_stored, model_there.adapter.counters.num_present) == (2, 2)


def test_what_is_captured_counts_to_the_share_of_queries(model):
    """B310."""
    model.prefill("a", 64)
    (ram,) = model.client.status().media
    assert ram.query_used_bytes == ram.used_bytes > 0


def test_the_chunks_of_a_step_go_together(model, monkeypatch):
    """B84, B92: the adapter makes one reserve for all requests of a step."""
    model.prefill("x", 32, first=900)  # opens the session
    calls = []
    transfer = model.adapter._transfer
    reserve = transfer.client.reserve
    monkeypatch.setattr(transfer.client, "reserve", lambda *args: calls.append(len(args[0])) or reserve(*args))
    requests = [model.add(name, list(range(at, at + 64))) for at, name in ((1000, "a"), (2000, "b"))]
    model.run([model.schedule(request, 64) for request in requests])
    assert calls == [4]


def test_the_tail_of_a_request_that_ends_is_stored_if_asked(model):
    """B90: whole blocks of it."""
    request = model.prefill("a", 55)
    tail = model.prefixes["a"].save_items(32, 48, [0] * 3, BLOCK)
    model.run([RequestStep("a", 55, 55, (), 1, tuple(tail), is_last=True)])
    assert model.adapter.counters.num_stored == 2
    located = Prefix(model.space, RequestIdentity(), request.tokens).find(model.client)
    assert located.ready.num_tokens == 48
    model.client.release(located.lease_id)


def test_holes_are_kept_for_no_longer_than_a_step(model, caplog):
    """B411: an engine whose prompts are mostly hits runs for months; each hole is told at the level of debug."""
    with caplog.at_level("DEBUG", "qkvault.capture"):
        for number in range(20):
            model.prefill(f"{number}", 128, num_cached=96, first=200 * number)
            assert model.adapter.collector._holes == []
            model.scheduler.end(model.scheduler.requests[f"{number}"])
    assert len(model.holes) == 60
    assert caplog.text.count("query_hole") == 60
    assert "query_hole request=19 chunk=2 reason=not_computed" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


# What goes wrong


def test_a_layer_without_a_query_voids_the_step(model_there):
    """B83, B115: nothing of a step that lacks a layer is stored; the next one is."""
    a, b = (model_there.add(name, list(range(at, at + 64))) for at, name in ((0, "a"), (500, "b")))
    model_there.run([model_there.schedule(a, 64)], missing=[1])
    model_there.run([model_there.schedule(b, 64)])
    assert (model_there.stored(a.tokens), model_there.stored(b.tokens)) == ([], [0, 1])
    assert model_there.adapter.counters.dropped[Reason.LAYER_MISSING] == 2


@pytest.mark.parametrize("spoil", ["no query", "no mapping", "width", "twice", "rows"])
def test_a_layer_that_is_not_as_it_should_be_voids_the_step(model, spoil):
    """B81, B115: missing inputs are skipped, wrong ones are a fault; neither reaches the engine."""
    request = model.add("a", list(range(64)))
    steps = [model.schedule(request, 64)]
    queries, mapping = model.rows_of(steps)
    model.capture.start_step(steps)
    query = {"no query": None, "width": queries[2][:, :5], "rows": queries[2][:-9]}.get(spoil, queries[2])
    for number in (0, 1, 0) if spoil == "twice" else (0, 1):
        model.capture.save_q_layer(model.names[number], queries[number], mapping)
    model.capture.save_q_layer(model.names[2], query, None if spoil == "no mapping" else mapping)
    model.capture.batched_submit_qstore_requests()
    assert model.stored(request.tokens) == []
    assert model.capture.num_faults == (spoil in ("width", "twice"))


def test_padded_rows_and_short_mappings_are_no_matter(model_there):
    """B91: rows behind the slot mapping are dropped."""
    request = model_there.add("a", list(range(64)))
    steps = [model_there.schedule(request, 64)]
    queries, mapping = model_there.rows_of(steps)
    model_there.capture.start_step(steps)
    for number, name in enumerate(model_there.names):
        padded = torch.cat([queries[number], torch.ones(5, 6, 4, dtype=torch.bfloat16, device=queries.device)])
        model_there.capture.save_q_layer(name, padded, mapping)
    model_there.capture.batched_submit_qstore_requests()
    assert model_there.stored(request.tokens) == [0, 1]


def test_other_layers_and_idle_steps_are_no_work(model):
    """B77, B118: a layer that is not captured, and a step in which nothing is, touch nothing."""
    assert not model.capture.is_capturing
    model.capture.save_q_layer("layers.0.attn", torch.ones(1, 6, 4), torch.zeros(1, dtype=torch.int64))
    model.capture.start_step([])
    assert not model.capture.is_capturing
    request = model.add("a", list(range(32)))
    steps = [model.schedule(request, 32)]
    model.capture.start_step(steps)
    assert model.capture.is_capturing
    model.capture.save_q_layer("draft.attn", torch.ones(1), torch.zeros(1))
    assert model.capture.num_faults == 0


def test_chunks_that_are_skipped_are_told_with_a_warning(model, caplog):
    """B89, B412: also where nobody looks at metrics; what the minute holds back is told at the end."""
    for number in range(3):
        model.run(
            [model.schedule(model.add(f"{number}", list(range(100 * number, 100 * number + 64))), 64)], missing=[1]
        )
    model.capture.shutdown()
    told = [record.getMessage() for record in caplog.records if "query_chunks_dropped" in record.getMessage()]
    assert [" ".join(line.split()[:3]) for line in told] == [
        "query_chunks_dropped reason=layer_missing chunks=2",
        "query_chunks_dropped reason=layer_missing chunks=4",
    ]
    assert all("todo=" in line for line in told)


def test_an_engine_that_shows_nothing_is_told_once(model, caplog):
    """B413: five steps in a row that should have shown a query, and never again; a step that shows one begins anew."""

    def run(count, missing):
        for _ in range(count):
            name = f"{len(model.prefixes)}"
            request = model.add(name, list(range(1000 * len(model.prefixes), 1000 * len(model.prefixes) + 32)))
            model.run([model.schedule(request, 32)], missing=missing)
            model.scheduler.end(request)

    run(4, [0, 1, 2])
    run(1, [1, 2])
    run(4, [0, 1, 2])
    assert "queries_not_seen" not in caplog.text
    run(12, [0, 1, 2])
    run(1, [])
    run(12, [0, 1, 2])
    assert caplog.text.count("queries_not_seen steps=5") == 1


def test_a_step_that_was_never_submitted_is_void(model):
    """The engine failed in the middle of it."""
    a, b = (model.add(name, list(range(at, at + 64))) for at, name in ((0, "a"), (500, "b")))
    model.run([model.schedule(a, 64)], submits=False)
    model.run([model.schedule(b, 64)])
    assert (model.stored(a.tokens), model.stored(b.tokens)) == ([], [0, 1])
    assert model.adapter.counters.dropped[Reason.LAYER_MISSING] == 2
    assert model.adapter.ring.num_free_blocks() == 64


def test_a_step_that_cannot_be_taken_voids_what_was_begun(model):
    """A fault in a plan costs the chunks that are on their way; the next step is captured."""
    a, b = (model.add(name, list(range(at, at + 64))) for at, name in ((0, "a"), (500, "b")))
    model.run([model.schedule(a, 40)])
    model.run([model.schedule(a, 1)._replace(block_ids=None)])
    assert model.capture.num_faults == 1
    assert model.adapter.ring.num_free_blocks() == 64
    model.run([model.schedule(b, 64)])
    assert (model.stored(a.tokens), model.stored(b.tokens)) == ([0], [0, 1])


def test_a_store_that_is_away_costs_its_chunks_only(new_scheduler):
    """B10, B96: blocks come back, and when the store does, chunks are stored again."""
    with Model(new_scheduler) as model:
        model.connect_error = Unavailable("not there")
        model.adapter.register()
        model.prefill("a", 64)
        assert model.adapter.counters.dropped[Reason.NOT_STORED] == 2
        assert model.adapter.ring.num_free_blocks() == 64
        model.connect_error = None
        model.adapter._link._try()
        request = model.prefill("b", 64, first=100)
        assert model.stored(request.tokens) == [0, 1]


def test_a_store_that_goes_away_is_found_again(model):
    """B97: with a session that has died a new one begins; nothing is lost but what was on its way."""
    model.prefill("a", 64)
    model.adapter._transfer.client.close()
    model.prefill("b", 64, first=100)
    model.adapter.reregister()
    assert model.adapter.counters.dropped[Reason.NOT_STORED] == 2
    model.adapter._link._try()
    request = model.prefill("c", 64, first=200)
    assert model.stored(request.tokens) == [0, 1]


def test_a_copy_that_fails_gives_its_blocks_back(model, monkeypatch):
    """B96: nothing is stored, nothing raises, nothing is kept."""
    monkeypatch.setattr(model.device, "batched_from_gpu", lambda runs: 1 / 0)
    request = model.prefill("a", 64)
    assert model.adapter.ring.num_free_blocks() == 64
    assert model.adapter.counters.dropped[Reason.NOT_STORED] == 2
    assert model.stored(request.tokens) == []


@pytest.mark.parametrize("error", [RuntimeError("no copy"), Unavailable("gone")], ids=["copy", "store"])
@pytest.mark.parametrize("is_late", [False, True], ids=["host", "device"])
def test_a_part_that_fails_leaves_those_before_it(new_scheduler, error, is_late):
    """B410: of four chunks in parts two were on their way when the third failed: each is counted once."""
    with Model(new_scheduler, is_late=is_late) as model:
        model.prefill("x", 32, first=900)  # opens the session
        model.adapter._transfer._num_in_part = 1
        copy, copies = model.device.batched_from_gpu, []

        def fail_at_the_third(runs):
            copies.append(len(runs))
            if len(copies) == 3:
                raise error
            return copy(runs)

        model.device.batched_from_gpu = fail_at_the_third
        request, counters = model.prefill("a", 128), model.adapter.counters
        model.capture.reclaim()
        is_lost = is_late and isinstance(error, Unavailable)  # with the session goes what a device has not finished
        num_stored = len(model.stored(request.tokens))
        assert num_stored == (0 if is_lost else 2)
        assert (counters.num_stored, counters.dropped[Reason.NOT_STORED]) == (1 + num_stored, 4 - num_stored)
        assert counters.num_captured == 5


def test_blocks_are_not_given_away_while_a_copy_reads_them(late):
    """B96: until a device has copied them they are nobody else's; what finds none is dropped (B117)."""
    late.device.is_done = False
    first = late.prefill("a", 64)
    assert late.adapter.ring.num_free_blocks() == 0
    late.prefill("b", 64, first=500)
    assert late.adapter.counters.dropped[Reason.RING_FULL] == 2
    assert late.adapter.counters.num_stored == 0
    late.device.is_done = True
    third = late.prefill("c", 64, first=900)
    late.capture.reclaim()
    assert late.adapter.counters.num_stored == 4
    assert (late.stored(first.tokens), late.stored(third.tokens)) == ([0, 1], [0, 1])


def test_a_session_that_ends_during_a_copy_waits_for_it(late):
    """B96: its blocks are free when the device has ended, and its chunks are counted as not stored."""
    late.device.is_done = False
    late.prefill("a", 64)
    late.adapter._lost(Unavailable("gone"))
    assert late.adapter.ring.num_free_blocks() == 4
    assert late.adapter.counters.dropped[Reason.NOT_STORED] == 2


def test_shutdown_commits_what_is_being_copied(late):
    """B98: and a second one is nothing."""
    late.device.is_done = False
    request = late.prefill("a", 64)
    late.capture.shutdown()
    late.capture.shutdown()
    assert late.stored(request.tokens) == [0, 1]


def test_rings_of_other_kinds_or_geometries_are_refused(model):
    """B63, B66, B78: at start."""
    ring = model.adapter.ring
    link = Link(model.connect)
    with pytest.raises(LayoutMismatch):
        QRingBufferAdapter(ring, KV, SPACE, link, num_engine_blocks=4)
    with pytest.raises(ValueError):
        QRingBufferCapture(model.adapter, model.names[:2], num_slots=4)


def test_some_layers_are_a_space_of_their_own(model):
    """Layers 0 and 2 are not layers 0 and 1, however alike."""
    spaces = {query_space(SPACE, model.layout, layers).space_id for layers in (None, (0, 1), (0, 2))}
    assert len(spaces) == 3


@given(seed=st.integers(0, 2**32), num_ring_blocks=st.integers(2, 40), is_late=st.booleans())
@settings(max_examples=15)
def test_whatever_is_stored_is_right(new_scheduler, seed, num_ring_blocks, is_late):
    """B64, B85-91: batches of prompts that share prefixes, in pieces and permuted, with holes and a small ring."""
    rng = random.Random(seed)
    with Model(new_scheduler, seed, num_ring_blocks=num_ring_blocks, is_late=is_late) as model:
        prompts = []
        for number in range(4):
            shared = rng.choice(prompts)[: rng.choice([16, 32, 40])] if prompts and rng.random() < 0.5 else []
            tokens = shared + [1000 * number + at for at in range(rng.randrange(20, 110))]
            prompts.append(tokens)
            model.add(f"r{number}", tokens, rng.choice([0, 0, 16, 32]) if len(tokens) > 40 else 0)
        live = list(model.scheduler.requests.values())
        while live:
            batch = rng.sample(live, rng.randrange(1, len(live) + 1))
            steps = []
            for request in batch:
                left = len(request.tokens) - request.num_computed
                steps.append(model.schedule(request, min(left, rng.choice([1, 5, 16, 31, 64]))))
            model.device.is_done = rng.random() < 0.5
            model.run(steps, missing=[1] if rng.random() < 0.1 else ())
            for request in [each for each in batch if each.num_computed == len(each.tokens)]:
                live.remove(request)
        model.device.is_done = True
        model.capture.reclaim()
        holes = {(int(hole.request_id[1:]), hole.chunk) for hole in model.holes}
        stored = {(at, chunk) for at, tokens in enumerate(prompts) for chunk in model.stored(tokens)}
        whole = {(at, chunk) for at, tokens in enumerate(prompts) for chunk in range(len(tokens) // CHUNK)}
        assert whole - holes <= stored


# Features


def context(model, **options) -> EngineContext:
    defaults = {
        "kv": model.kv_paged, "layout": model.layout, "space": model.space, "connect": model.link_for,
        "layer_names": model.names, "num_ring_blocks": 16,
    }  # fmt: skip
    return EngineContext(**{**defaults, **options})


def test_the_registry_has_queries():
    """B112: features are found by name, and a connector knows the dispatcher only."""
    assert FEATURE_REGISTRY[TRANSFER_QUERY] is QTensorFeature
    assert init_dispatcher([], []).features == {}
    assert list(init_dispatcher([TRANSFER_QUERY], [TRANSFER_QUERY]).features) == [TRANSFER_QUERY]


def test_a_feature_that_the_server_lacks_is_an_error_at_start():
    """B113: with the words of the reference."""
    with pytest.raises(ValueError, match=r"^Connector enables transfer_query but server does not\.$"):
        init_dispatcher([TRANSFER_QUERY], ["other"])
    with pytest.raises(ValueError, match="unknown feature 'other'"):
        init_dispatcher(["other"], ["other"])


def test_queries_register_after_kv(model):
    """B93, B114: the order is checked."""
    with pytest.raises(RuntimeError, match=r"register_kv_caches\(\) first"):
        init_dispatcher([TRANSFER_QUERY], [TRANSFER_QUERY]).register(context(model, kv=None))


@pytest.mark.parametrize("name", ["q", "query"])
def test_a_feature_captures_what_an_engine_passes(model, name):
    """B62, B75, B80, B81, B93, B99: register, capture, store, reclaim, close."""
    dispatcher = init_dispatcher([TRANSFER_QUERY], [TRANSFER_QUERY])
    dispatcher.register(context(model))
    request = model.add("a", list(range(64)))
    steps = [model.schedule(request, 64)]
    queries, mapping = model.rows_of(steps)
    dispatcher.start_step(steps, ["unknown"])
    for number, layer in enumerate(model.names):
        dispatcher.save_kv_layer(layer, {"other": mapping, name: queries[number]}, mapping)
    dispatcher.wait_for_save()
    dispatcher.reclaim()
    dispatcher.reregister([TRANSFER_QUERY])
    dispatcher.shutdown()
    assert model.stored(request.tokens) == [0, 1]
    assert not dispatcher.num_faults


def test_the_sdk_reads_what_a_feature_has_captured(model):
    """B62, B93: the ring's geometry is in the store's register, and rows that were not computed are holes."""
    dispatcher = init_dispatcher([TRANSFER_QUERY], [TRANSFER_QUERY])
    dispatcher.register(context(model))
    request = model.add("a", list(range(128)), 48)
    steps = [model.schedule(request, 80)]
    queries, mapping = model.rows_of(steps)
    dispatcher.start_step(steps)
    for number, layer in enumerate(model.names):
        dispatcher.save_kv_layer(layer, {"q": queries[number]}, mapping)
    dispatcher.wait_for_save()
    geometry = choose(spaces_of(model.client.status()), CacheKind.QUERY, "m", None)
    reader = Context(model.store.connect("sdk"), geometry)
    found = reader.retrieve(request.tokens)
    assert found.positions.tolist() == list(range(64, 128))
    wanted = torch.from_numpy(model.queries.expected(request.tokens)[0][:, 64:])
    assert torch.equal(found.q.view(torch.int16), wanted)
    reader.close()
    dispatcher.shutdown()


def test_without_queries_nothing_is_captured_and_nothing_raises(model):
    """B81, B115: an engine that passes none; and a rank that does not store has no ring."""
    for options in ({}, {"can_save": False}):
        dispatcher = init_dispatcher([TRANSFER_QUERY], [TRANSFER_QUERY])
        dispatcher.register(context(model, **options))
        dispatcher.start_step([model.schedule(model.add("a", list(range(64))), 64)])
        for layer in model.names:
            dispatcher.save_kv_layer(layer, {}, None)
        dispatcher.wait_for_save()
        dispatcher.reclaim()
        dispatcher.reregister([])
        dispatcher.shutdown()
        assert not dispatcher.num_faults
    assert model.stored(list(range(64))) == []


def test_a_fault_of_a_feature_is_counted_and_reaches_nobody():
    """B112: each feature's hooks run, whatever another one does."""
    reached = []
    hooks = {
        "start_step": ([],), "save_kv_layer": ("l", {}, None), "wait_for_save": (), "reclaim": (), "reregister": ([],),
        "shutdown": (),
    }  # fmt: skip
    bad = SimpleNamespace()
    good = SimpleNamespace(**{hook: lambda *args, hook=hook, **options: reached.append(hook) for hook in hooks})
    dispatcher = Dispatcher({"bad": bad, "good": good})
    for hook, args in hooks.items():
        getattr(dispatcher, hook)(*args)
    assert reached == list(hooks)
    assert dispatcher.num_faults == {f"bad.{hook}": 1 for hook in hooks}


def test_every_reason_is_one_that_metrics_know():
    """What is dropped is counted by reason, and each reason is there from the first scrape."""
    assert sorted(DROP_REASONS) == sorted(reason.value for reason in Reason)
