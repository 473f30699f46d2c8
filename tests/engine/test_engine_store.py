"""CacheEngine.store: what is stored, what is skipped, and what is left when something goes wrong on the way."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from qkvault import engine
from qkvault.keys import MediaSpan, RequestIdentity
from qkvault.logs import RateLimited, get_logger
from qkvault.paged import PagedConnector
from qkvault.types import Outcome

CHUNK, BLOCK = 64, 16  # tokens


def mask_of(num_masked: int, num_tokens: int) -> list[bool]:
    return [False] * num_masked + [True] * (num_tokens - num_masked)


# What is stored


def test_all_chunks_of_a_request_are_moved_by_one_reserve_one_copy_and_one_commit(site, make_tokens):
    """B1, B3, B4, B12: the engine holds no data; five chunks cost one copy and two messages."""
    result = site.store(make_tokens(5 * CHUNK))
    assert (result.stored_tokens, result.outcomes) == (5 * CHUNK, {Outcome.RESERVED: 5})
    stages = site.engine.stats.snapshot().stages
    assert (stages["from_gpu"].calls, stages["put"].calls) == (1, 2)


@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_a_chunk_holds_all_layers(cache, make_site, make_tokens, layout, num_layers):
    """B25: two chunks are two images, however many layers there are; a hit gives the right elements of each of them."""
    layout = msgspec.structs.replace(layout, num_layers=num_layers)
    site = make_site(cache, layout)
    tokens = make_tokens(2 * CHUNK)
    site.store(tokens)
    assert cache.ram.num_chunks == 2
    assert cache.ram.used_bytes >= 2 * layout.payload_bytes(CHUNK)
    assert site.retrieve(tokens) == 2 * CHUNK


def test_the_token_database_names_what_the_engine_stores(site, make_tokens, cache):
    """B2: store, lookup and retrieve use the keys that process_tokens yields, in that order."""
    from qkvault.tokens import ChunkedTokenDatabase

    tokens = make_tokens(2 * CHUNK + BLOCK)
    site.store(tokens)
    database = ChunkedTokenDatabase(site.metadata.space(site.config))
    keys = [key.chunk_key for _, _, key in database.process_tokens(tokens)]
    known = {entry.key for entry in cache.manager.index if entry.is_somewhere}
    assert known == set(keys)


@pytest.mark.parametrize("num_tokens", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, 2 * CHUNK + 40])
def test_whole_blocks_are_stored_and_come_back(site, make_tokens, num_tokens):
    """B14: the tail is stored too, up to its last whole block."""
    tokens = make_tokens(num_tokens)
    assert site.store(tokens).stored_tokens == num_tokens // BLOCK * BLOCK
    assert site.engine.lookup(tokens) == num_tokens // BLOCK * BLOCK
    assert site.retrieve(tokens) == num_tokens // BLOCK * BLOCK


def test_without_partial_chunks_a_tail_is_not_stored(cache, make_site, make_tokens):
    """B14: save_partial_chunks=False stores whole chunks only."""
    site = make_site(cache, save_partial_chunks=False)
    tokens = make_tokens(2 * CHUNK + 40)
    assert site.store(tokens).stored_tokens == 2 * CHUNK
    assert site.engine.lookup(tokens) == 2 * CHUNK


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor])
def test_tokens_may_come_in_any_form(site, make_tokens, form):
    """The same tokens are the same prompt, as list, tuple, array or tensor."""
    tokens = make_tokens(CHUNK)
    site.store(tokens)
    assert site.engine.lookup(form(tokens)) == CHUNK


def test_what_is_there_is_neither_given_room_nor_copied_again(site, make_tokens, cache):
    """B44: a second store of the same prompt moves no byte."""
    tokens = make_tokens(3 * CHUNK + BLOCK)
    site.store(tokens)
    before, used_bytes = site.engine.stats.snapshot(), cache.ram.used_bytes
    result = site.store(tokens)
    after = site.engine.stats.snapshot()
    assert (result.stored_tokens, result.present_tokens) == (0, 3 * CHUNK + BLOCK)
    assert result.outcomes == {Outcome.PRESENT: 4}
    assert after.stages["from_gpu"] == before.stages["from_gpu"]
    assert after.stored_bytes == before.stored_bytes
    assert cache.ram.used_bytes == used_bytes


def test_masked_chunks_are_hashed_and_not_stored(site, make_tokens):
    """B15: what the mask leaves out is missing, and what follows has the keys of the whole prompt."""
    tokens = make_tokens(4 * CHUNK)
    assert site.store(tokens, mask_of(2 * CHUNK, len(tokens))).stored_tokens == 2 * CHUNK
    assert site.engine.lookup(tokens) == 0
    result = site.store(tokens)
    assert (result.stored_tokens, result.present_tokens) == (2 * CHUNK, 2 * CHUNK)
    assert site.retrieve(tokens) == 4 * CHUNK


def test_a_chunk_some_of_which_is_not_masked_is_stored(site, make_tokens):
    """B15: a mask ends at any block; what is stored begins with the chunk that it ends in."""
    tokens = make_tokens(4 * CHUNK)
    assert site.store(tokens, mask_of(2 * CHUNK + BLOCK, len(tokens))).stored_tokens == 2 * CHUNK
    assert site.store(tokens[: 3 * CHUNK], mask_of(3 * CHUNK, 3 * CHUNK)).stored_tokens == 0
    assert site.store(tokens).present_tokens == 2 * CHUNK


@pytest.mark.parametrize("mask", [mask_of(BLOCK - 1, 128), mask_of(63, 128), [True] + [False] * 127, [True] * 127])
@pytest.mark.parametrize("method", ["store", "retrieve"])
def test_a_mask_that_is_not_whole_blocks_of_falses_first_is_refused(site, make_tokens, cache, method, mask):
    """B16: ValueError, and nothing is stored, counted or leased."""
    table = site.fake.allocate(128)
    with pytest.raises(ValueError, match=r"mask|Falses"):
        getattr(site.engine, method)(make_tokens(128), mask, block_ids=table)
    assert cache.ram.used_bytes == 0
    assert site.engine.stats.snapshot().operations[method].requests == 0


@pytest.mark.parametrize("method", ["store", "retrieve"])
def test_too_few_blocks_are_refused(site, make_tokens, cache, method):
    """A block table that is shorter than the tokens is ValueError, whatever is cached."""
    tokens = make_tokens(2 * CHUNK)
    table = site.fake.allocate(2 * CHUNK - BLOCK)
    with pytest.raises(ValueError, match="7 blocks of 16 tokens do not hold 128"):
        getattr(site.engine, method)(tokens, block_ids=table)
    assert len(cache.manager.leases) == 0


def test_a_block_that_the_engine_does_not_have_is_refused(site, make_tokens, cache):
    """ValueError before anything is copied; the room is free again and the request is counted as ended."""
    tokens = make_tokens(CHUNK)
    with pytest.raises(ValueError, match="block ids"):
        site.engine.store(tokens, block_ids=[0, 1, 2, 64])
    site.store(tokens)
    with pytest.raises(ValueError, match="block ids"):
        site.engine.retrieve(tokens, block_ids=[0, 1, 2, 64])
    assert cache.ram.num_chunks == 1
    operations = site.engine.stats.snapshot().operations
    assert all(operation.requests == operation.finished for operation in operations.values())


def test_a_request_that_cannot_be_named_is_not_cached(site, make_tokens):
    """B452: a picture without a digest: nothing is stored, found or loaded, nothing is raised, and it is said why."""
    tokens = make_tokens(CHUNK)
    nameless = RequestIdentity(media=(MediaSpan(b"", 3, 5),))
    result = site.store(tokens, identity=nameless)
    assert (result.stored_tokens, result.uncacheable_reason) == (0, "image at token 3 has no digest")
    assert site.engine.lookup(tokens, identity=nameless) == 0
    assert site.retrieve(tokens, identity=nameless) == 0
    site.engine.async_lookup_and_prefetch("id", tokens, identity=nameless)
    assert site.engine.prefetched("id") == (0, True)
    assert site.store(tokens).uncacheable_reason is None


@pytest.mark.parametrize("first", ["store", "lookup", "retrieve"])
def test_why_a_request_is_not_cached_is_said_once(site, make_tokens, first, caplog, monkeypatch):
    """B452: whichever call it comes by, one line in the log and not one a call."""
    monkeypatch.setattr(engine, "_log", RateLimited(get_logger("engine")))
    tokens = make_tokens(CHUNK)
    nameless = RequestIdentity(media=(MediaSpan(b"", 3, 5),))
    calls = {"store": site.store, "lookup": site.engine.lookup, "retrieve": site.retrieve}
    with caplog.at_level("WARNING", "qkvault"):
        for name in (first, *calls):
            calls[name](tokens, identity=nameless)
    lines = [line for line in caplog.messages if "request_not_cached" in line]
    assert len(lines) == 1
    assert "image at token 3 has no digest" in lines[0]


# Tails and turns


def test_a_longer_tail_takes_the_place_of_a_shorter_one(site, make_tokens, cache):
    """The tail of a prompt that has grown is stored whole, and the old one goes."""
    tokens = make_tokens(CHUNK + 3 * BLOCK)
    site.store(tokens[: CHUNK + BLOCK])
    assert site.store(tokens).stored_tokens == 3 * BLOCK
    assert cache.ram.num_chunks == 2
    assert site.retrieve(tokens) == CHUNK + 3 * BLOCK
    assert site.retrieve(tokens[: CHUNK + BLOCK]) == CHUNK + BLOCK


def test_a_shorter_tail_is_present_in_a_longer_one(site, make_tokens, cache):
    """Storing the beginning of what is stored copies nothing."""
    tokens = make_tokens(2 * CHUNK)
    site.store(tokens)
    assert site.store(tokens[: CHUNK + 2 * BLOCK]).present_tokens == CHUNK + 2 * BLOCK
    assert cache.ram.num_chunks == 2


def test_a_conversation_is_stored_turn_by_turn(site, make_tokens, cache, rng):
    """Each turn finds all blocks of the turns before it, and keeps no tail but its own."""
    tokens: list[int] = []
    for _ in range(12):
        known = len(tokens) // BLOCK * BLOCK
        tokens = tokens + make_tokens(rng.randint(1, 90))
        assert site.engine.lookup(tokens) == known
        assert site.retrieve(tokens) == known
        result = site.store(tokens)
        stop = len(tokens) // BLOCK * BLOCK
        assert result.stored_tokens + result.present_tokens == stop
        assert cache.ram.num_chunks == -(-stop // CHUNK)
    assert site.retrieve(tokens) == len(tokens) // BLOCK * BLOCK


def test_two_continuations_of_one_conversation_keep_a_tail_each(site, make_tokens, cache):
    """Tails that share a beginning and part are both kept, and both are found whole."""
    start = make_tokens(CHUNK + BLOCK)
    one, other = start + make_tokens(2 * BLOCK), start + make_tokens(2 * BLOCK)
    site.store(one)
    site.store(other)
    assert cache.ram.num_chunks == 3
    assert site.retrieve(one) == len(one)
    assert site.retrieve(other) == len(other)


# Room


def test_when_room_runs_out_the_chunks_before_are_stored(make_cache, make_site, make_tokens, image_bytes):
    """B11: no room is no error and no wait: the head of the prompt is stored, the rest is not."""
    cache = make_cache(pool_bytes=3 * image_bytes())
    site = make_site(cache)
    tokens = make_tokens(5 * CHUNK)
    result = site.store(tokens)
    assert result.outcomes == {Outcome.RESERVED: 3, Outcome.NO_ROOM: 2}
    assert (result.stored_tokens, result.failed_tokens) == (3 * CHUNK, 0)
    assert site.retrieve(tokens) == 3 * CHUNK


def test_with_no_room_at_all_nothing_is_copied(make_cache, make_site, make_tokens, image_bytes):
    """B12: nothing allocated, nothing moved."""
    cache = make_cache(pool_bytes=2 * image_bytes())
    site = make_site(cache)
    held = make_tokens(2 * CHUNK)
    site.store(held)
    site.engine.lookup(held, pin=True, lookup_id="held")
    result = site.store(make_tokens(2 * CHUNK))
    assert result.outcomes == {Outcome.NO_ROOM: 2}
    assert site.engine.stats.snapshot().stages["from_gpu"].calls == 1
    site.engine.lookup_unpin("held")
    assert site.retrieve(held) == 2 * CHUNK


def test_old_chunks_make_room_for_new_ones(make_cache, make_site, make_tokens, image_bytes):
    """A short prompt stored over and over in a pool of three chunks is right, or a miss, and never an error."""
    cache = make_cache(pool_bytes=3 * image_bytes())
    site = make_site(cache)
    for _ in range(6):
        tokens = make_tokens(2 * CHUNK)
        assert site.store(tokens).stored_tokens == 2 * CHUNK
        assert site.retrieve(tokens) == 2 * CHUNK


# What goes wrong on the way


def test_a_copy_that_fails_midway_leaves_nothing(cache, make_site, make_tokens, hooked):
    """B25: the error is the caller's; nothing of the chunks is found, their room is free, and the next store works."""
    site = make_site(cache, make_paged=hooked)
    tokens = make_tokens(4 * CHUNK)

    def fail() -> None:
        raise RuntimeError

    site.paged.midway = fail
    table = site.fake.prefill(tokens)
    with pytest.raises(RuntimeError):
        site.engine.store(tokens, block_ids=table)
    assert (cache.ram.used_bytes, site.engine.lookup(tokens)) == (0, 0)
    stats = site.engine.stats.snapshot()
    assert (stats.chunks["failed"], stats.stages["from_gpu"].failures, stats.stored_bytes) == (4, 1, 0)
    del site.paged.midway
    assert site.engine.store(tokens, block_ids=table).stored_tokens == 4 * CHUNK
    assert site.retrieve(tokens) == 4 * CHUNK


def test_a_lease_that_runs_out_during_the_copy_is_told(cache, make_site, make_tokens, hooked):
    """What the store gave up in between is neither readable nor called stored, and its room comes back."""
    site = make_site(cache, make_paged=hooked)
    site.paged.midway = lambda: cache.pass_time(1000.0)
    tokens = make_tokens(4 * CHUNK)
    result = site.store(tokens)
    assert (result.stored_tokens, result.failed_tokens) == (0, 4 * CHUNK)
    assert (site.engine.lookup(tokens), cache.ram.used_bytes) == (0, 0)
    assert site.engine.stats.snapshot().chunks["failed"] == 4


def test_what_is_cleared_while_it_is_written_never_appears(cache, make_site, make_tokens, hooked):
    """A store that began before a clear is not found after it."""
    site = make_site(cache, make_paged=hooked)
    site.paged.midway = site.engine.clear
    tokens = make_tokens(2 * CHUNK)
    assert site.store(tokens).stored_tokens == 0
    assert site.engine.lookup(tokens) == 0


def test_two_engines_that_store_one_prompt_at_once_store_it_once(cache, make_site, make_tokens, hooked):
    """Chunks that another is just writing are present; nobody reads them before they are whole."""
    site, other = make_site(cache, make_paged=hooked), make_site(cache)
    tokens = make_tokens(2 * CHUNK)
    seen = []
    site.paged.midway = lambda: seen.append((other.store(tokens).present_tokens, other.engine.lookup(tokens)))
    assert site.store(tokens).stored_tokens == 2 * CHUNK
    assert seen == [(2 * CHUNK, 0)]
    assert other.retrieve(tokens) == 2 * CHUNK


def test_the_device_path_stores_and_loads_the_same(cache, make_site, make_tokens):
    """Bytes that one path stored are what the other loads, tail included."""

    def on_device(tensors, layout):
        return PagedConnector(tensors, layout, force_device_path=True)

    host, device = make_site(cache), make_site(cache, make_paged=on_device)
    for writer, reader in [(host, device), (device, host), (device, device)]:
        tokens = make_tokens(3 * CHUNK + 2 * BLOCK)
        assert writer.store(tokens).stored_tokens == len(tokens)
        assert reader.retrieve(tokens) == len(tokens)
        mask = mask_of(2 * CHUNK, len(tokens))
        assert reader.retrieve(tokens, mask) == len(tokens)
