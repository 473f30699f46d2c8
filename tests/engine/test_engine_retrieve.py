"""CacheEngine.retrieve: what is marked is there and right, what is not asked for is left alone, whatever fails."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch

from qkvault.image import wipe_header
from qkvault.keys import RequestIdentity

CHUNK, BLOCK = 64, 16  # tokens


def mask_of(num_masked: int, num_tokens: int) -> list[bool]:
    return [False] * num_masked + [True] * (num_tokens - num_masked)


def wipe_chunk(cache, site, tokens, number: int) -> None:
    """Make one chunk of ``tokens`` unreadable in its slot, as a new owner of the slot would."""
    keys = site.engine._prefix(tokens, RequestIdentity())
    entry = cache.manager.index.get(site.engine._space.chunk_key(keys._hasher.hashes[number]))
    wipe_header(cache.manager.room.image(entry))


def restore(cache, site, tokens) -> None:
    """Forget what a test has spoiled, so that the store's state is whole at the end."""
    site.engine.clear()
    site.store(tokens)


# What is marked


def test_the_result_is_a_mask_of_bools_on_the_cpu(site, make_tokens):
    """B26: one bool a token, True for what is there now."""
    tokens = make_tokens(100)
    site.store(tokens)
    marked = site.engine.retrieve(tokens, block_ids=site.fake.allocate(100))
    assert (marked.dtype, marked.device.type, marked.shape) == (torch.bool, "cpu", (100,))
    assert marked.tolist() == [True] * 96 + [False] * 4


def test_a_miss_copies_nothing(site, make_tokens):
    """B47: with nothing found, or nothing beyond the mask, no copy begins and no byte of the engine changes."""
    tokens = make_tokens(2 * CHUNK)
    assert site.retrieve(tokens) == 0
    site.store(tokens[:CHUNK])
    before = site.fake.snapshot()
    table = site.fake.allocate(len(tokens))
    assert not site.engine.retrieve(tokens, mask_of(CHUNK, len(tokens)), block_ids=table).any()
    assert (site.fake.snapshot() == before).all()
    stages = site.engine.stats.snapshot().stages
    assert (stages["to_gpu"].calls, stages["get"].calls) == (0, 0)


@pytest.mark.parametrize(("block_size", "chunk_size"), [(16, 16), (16, 32), (16, 64), (32, 32), (32, 64)])
def test_only_blocks_between_the_mask_and_the_hit_are_written(
    make_cache, make_site, make_tokens, layout, *, block_size, chunk_size
):
    """B27, B31: for every local hit and every stored length, what is in range is right and the rest is untouched."""
    layout = msgspec.structs.replace(layout, block_size=block_size, chunk_size=chunk_size)
    site = make_site(make_cache(), layout)
    length = 3 * chunk_size
    local_hits = range(0, length + 1, block_size)
    for local_hit, stored in itertools.product(local_hits, range(0, length + 1, block_size)):
        tokens = make_tokens(length + 5)
        site.store(tokens[:stored])
        assert site.retrieve(tokens, mask_of(local_hit, len(tokens))) == max(local_hit, stored)


def test_no_more_is_loaded_than_was_asked_for(site, make_tokens):
    """B31: a stored chunk of which the prompt has two blocks gives two blocks."""
    tokens = make_tokens(4 * CHUNK)
    site.store(tokens)
    assert site.retrieve(tokens[: CHUNK + 2 * BLOCK + 3]) == CHUNK + 2 * BLOCK
    assert site.engine.stats.snapshot().loaded_tokens == CHUNK + 2 * BLOCK


def test_what_was_retrieved_is_the_engines_own(site, make_tokens):
    """The cache keeps what it has, whatever the engine writes into the blocks that it was loaded into."""
    tokens = make_tokens(CHUNK)
    site.store(tokens)
    table = site.fake.allocate(CHUNK)
    site.engine.retrieve(tokens, block_ids=table)
    site.fake.scribble(table)
    assert site.retrieve(tokens) == CHUNK


# What fails


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_it_stops_at_the_first_chunk_that_is_not_there(site, make_tokens, cache, bad):
    """B28, B29, B30: the index promised four chunks, one is gone: what is before it counts, nothing after it does."""
    tokens = make_tokens(4 * CHUNK)
    site.store(tokens)
    wipe_chunk(cache, site, tokens, bad)
    before = site.fake.snapshot()
    table = site.fake.allocate(len(tokens))
    marked = site.engine.retrieve(tokens, block_ids=table)
    assert marked.tolist() == [at < bad * CHUNK for at in range(len(tokens))]
    site.fake.verify(tokens, table, 0, bad * CHUNK)
    behind = table[bad * CHUNK // BLOCK :]
    assert (site.fake.snapshot()[behind] == before[behind]).all()
    assert cache.status.num_leases == 0
    stats = site.engine.stats.snapshot()
    assert (stats.loaded_tokens, stats.failed_tokens, stats.failed_loads) == (bad * CHUNK, (4 - bad) * CHUNK, 1)
    restore(cache, site, tokens)


def test_a_chunk_that_goes_during_the_copy_is_void_with_all_after_it(cache, make_site, make_tokens, hooked):
    """B29: chunks that were copied well behind one that failed are counted as void, not as loaded."""
    site = make_site(cache, make_paged=hooked)
    tokens = make_tokens(4 * CHUNK)
    site.store(tokens)
    site.paged.midway = lambda: wipe_chunk(cache, site, tokens, 1)
    table = site.fake.allocate(len(tokens))
    marked = site.engine.retrieve(tokens, block_ids=table)
    assert marked.tolist() == [at < CHUNK for at in range(len(tokens))]
    stats = site.engine.stats.snapshot()
    assert (stats.loaded_tokens, stats.failed_tokens, stats.voided_tokens) == (CHUNK, CHUNK, 2 * CHUNK)
    assert stats.loaded_bytes == CHUNK * site.metadata.layout.token_bytes
    del site.paged.midway
    restore(cache, site, tokens)


def test_a_copy_that_fails_holds_nothing(cache, make_site, make_tokens, hooked):
    """B30: the error is the caller's; the lease is given back and the request is counted as ended."""
    site = make_site(cache, make_paged=hooked)
    tokens = make_tokens(2 * CHUNK)
    site.store(tokens)

    def fail() -> None:
        raise RuntimeError

    site.paged.midway = fail
    table = site.fake.allocate(len(tokens))
    with pytest.raises(RuntimeError):
        site.engine.retrieve(tokens, block_ids=table)
    assert cache.status.num_leases == 0
    assert site.engine.stats.snapshot().operations["retrieve"].finished == 1
    del site.paged.midway
    assert site.retrieve(tokens) == 2 * CHUNK


def test_a_short_request_twice_in_a_tiny_pool_is_right_or_a_miss(make_cache, make_site, make_tokens, image_bytes):
    """An entry that has gone is a miss, in whatever order pins and evictions come."""
    site = make_site(make_cache(pool_bytes=image_bytes()))
    one, other = make_tokens(CHUNK), make_tokens(CHUNK)
    for tokens in (one, one, other, one, other, other):
        assert site.retrieve(tokens) in {0, CHUNK}
        site.store(tokens)
        assert site.retrieve(tokens) == CHUNK


# What an earlier lookup holds


def test_a_retrieve_takes_what_the_lookup_holds(site, make_tokens, cache):
    """B24, B27: with lookup_id nothing is looked up again, and the pins are gone afterwards."""
    tokens = make_tokens(3 * CHUNK)
    site.store(tokens)
    site.engine.lookup(tokens, pin=True, lookup_id="a")
    num_lookups = cache.counters["lookups"]
    assert site.retrieve(tokens, lookup_id="a") == 3 * CHUNK
    assert cache.counters["lookups"] == num_lookups
    assert cache.status.num_leases == 0
    assert site.retrieve(tokens, lookup_id="a") == 3 * CHUNK
    assert site.retrieve(tokens, lookup_id="never") == 3 * CHUNK


def test_an_id_of_other_tokens_gives_none_of_theirs(site, make_tokens, cache):
    """A lookup_id used for another prompt, or another identity, loads what is cached of that one."""
    one, other = make_tokens(2 * CHUNK), make_tokens(2 * CHUNK)
    site.store(one)
    site.store(other[:CHUNK])
    site.engine.lookup(one, pin=True, lookup_id="a")
    assert site.retrieve(other, lookup_id="a") == CHUNK
    site.engine.lookup(one, pin=True, lookup_id="a")
    assert site.retrieve(one[:CHUNK] + other, lookup_id="a") == CHUNK
    site.engine.lookup(one, pin=True, lookup_id="a")
    assert site.retrieve(one, lookup_id="a", identity=RequestIdentity(adapter="x")) == 0
    assert cache.status.num_leases == 0


def test_a_request_may_grow_or_shrink_after_its_lookup(site, make_tokens):
    """What the lookup holds of the tokens is used, as far as they agree."""
    tokens = make_tokens(3 * CHUNK)
    site.store(tokens)
    site.engine.lookup(tokens[: 2 * CHUNK + 5], pin=True, lookup_id="a")
    assert site.retrieve(tokens + make_tokens(9), lookup_id="a") == 2 * CHUNK
    site.engine.lookup(tokens, pin=True, lookup_id="a")
    assert site.retrieve(tokens[: CHUNK + 2 * BLOCK + 1], lookup_id="a") == CHUNK + 2 * BLOCK


def test_a_lease_that_ran_out_before_the_retrieve_is_no_right(make_cache, make_site, make_tokens, image_bytes):
    """Slots that have other owners by now give a miss, slots that have not give what is in them."""
    cache = make_cache(pool_bytes=4 * image_bytes())
    site = make_site(cache)
    tokens = make_tokens(4 * CHUNK)
    site.store(tokens)
    site.engine.lookup(tokens, pin=True, lookup_id="a")
    cache.pass_time(1000.0)
    assert site.retrieve(tokens, lookup_id="a") == 4 * CHUNK
    site.engine.lookup(tokens, pin=True, lookup_id="a")
    cache.pass_time(1000.0)
    site.store(make_tokens(2 * CHUNK))
    assert site.retrieve(tokens, lookup_id="a") == 2 * CHUNK
    assert site.engine.stats.snapshot().failed_tokens == 2 * CHUNK


@pytest.mark.parametrize("num_tails", [0, 6])
def test_a_lease_that_runs_out_during_the_copy_gives_no_foreign_bytes(
    make_cache, make_site, make_tokens, image_bytes, hooked, *, num_tails
):
    """Slots that get another owner, of equal or other size, before the copy is over: nothing of theirs is marked."""
    cache = make_cache(pool_bytes=4 * image_bytes())
    site, other = make_site(cache, make_paged=hooked), make_site(cache)
    tokens = make_tokens(4 * CHUNK)
    site.store(tokens)

    def take_slots() -> None:
        cache.pass_time(1000.0)
        for _ in range(num_tails):
            other.store(make_tokens(BLOCK))
        other.store(make_tokens(4 * CHUNK))

    site.paged.midway = take_slots
    assert site.retrieve(tokens) == 0
    stats = site.engine.stats.snapshot()
    assert (stats.loaded_tokens, stats.failed_tokens + stats.voided_tokens) == (0, 4 * CHUNK)
