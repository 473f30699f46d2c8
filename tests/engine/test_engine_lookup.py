"""CacheEngine.lookup: how much is cached, where it is asked for, and what a pin keeps."""

from __future__ import annotations

import msgspec
import pytest

from qkvault.testing import DictTier, FaultyTier

CHUNK, BLOCK = 64, 16  # tokens


def mask_of(num_masked: int, num_tokens: int) -> list[bool]:
    return [False] * num_masked + [True] * (num_tokens - num_masked)


def wide(layout, block_size: int = 16, chunk_size: int = 256):
    return msgspec.structs.replace(layout, block_size=block_size, chunk_size=chunk_size)


# How much


def test_a_lookup_counts_up_to_the_first_chunk_that_is_missing(site, make_tokens):
    """B20, B21: the longest contiguous run from the start; what is behind a hole is not counted."""
    tokens = make_tokens(4 * CHUNK)
    site.store(tokens[:CHUNK])
    site.store(tokens, mask_of(2 * CHUNK, len(tokens)))
    assert site.engine.lookup(tokens) == CHUNK
    assert site.retrieve(tokens) == CHUNK
    site.store(tokens[: 2 * CHUNK])
    assert site.engine.lookup(tokens) == 4 * CHUNK


def test_nothing_is_found_of_what_was_not_stored(site, make_tokens):
    """B20: 0 for an empty cache, an empty prompt and a prompt shorter than a block."""
    assert site.engine.lookup(make_tokens(200)) == 0
    tokens = make_tokens(200)
    site.store(tokens)
    assert site.engine.lookup([]) == 0
    assert site.engine.lookup(tokens[: BLOCK - 1]) == 0
    assert site.engine.lookup(make_tokens(200)) == 0


def test_a_prompt_that_is_a_beginning_of_what_is_stored_is_found_to_its_last_block(site, make_tokens):
    """A hit ends at the last whole block of the prompt, inside a stored chunk or not."""
    tokens = make_tokens(3 * CHUNK)
    site.store(tokens)
    for num_tokens in range(0, len(tokens) + 1, 7):
        assert site.engine.lookup(tokens[:num_tokens]) == num_tokens // BLOCK * BLOCK
        assert site.retrieve(tokens[:num_tokens]) == num_tokens // BLOCK * BLOCK


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("stored_block_size", [16, 32])
def test_a_prompt_that_shares_2790_tokens_hits_2784(
    cache, make_site, make_tokens, layout, *, block_size, stored_block_size
):
    """The hit ends at the last shared block, where whole chunks of 256 would give 2,560."""
    writer = make_site(cache, wide(layout, stored_block_size), num_blocks=512)
    reader = make_site(cache, wide(layout, block_size), num_blocks=512)
    shared = make_tokens(2790)
    writer.store(shared + make_tokens(500))
    asked = shared + make_tokens(500)
    assert reader.engine.lookup(asked) == 2784
    assert reader.retrieve(asked) == 2784
    assert reader.engine.lookup(shared) == 2784


@pytest.mark.parametrize("chunk_size", [64, 256])
@pytest.mark.parametrize("block_size", [16, 32])
def test_a_fork_anywhere_reuses_all_whole_blocks_before_it(
    cache, make_site, make_tokens, layout, rng, *, block_size, chunk_size
):
    """Whatever the token at which two prompts part, every block before it is found, and every element is right."""
    site = make_site(cache, wide(layout, block_size, chunk_size), num_blocks=256)
    trunk = make_tokens(3 * chunk_size + 50)
    stored = [trunk]
    site.store(trunk)
    for _ in range(25):
        base = rng.choice(stored)
        fork = rng.randint(0, len(base))
        asked = base[:fork] + make_tokens(rng.randint(1, 2 * chunk_size))
        stored_tokens = min(fork, len(base) // block_size * block_size)
        assert site.engine.lookup(asked) == stored_tokens // block_size * block_size
        assert site.retrieve(asked) == stored_tokens // block_size * block_size
        site.store(asked)
        stored.append(asked)


def test_lookups_change_nothing(site, make_tokens, cache):
    """However often it is asked, the answer is the same, and what is stored next begins where it should."""
    tokens = make_tokens(3 * CHUNK + BLOCK)
    site.store(tokens[: CHUNK + BLOCK])
    before = cache.ram
    assert [site.engine.lookup(tokens) for _ in range(5)] == [CHUNK + BLOCK] * 5
    assert cache.ram == before
    assert site.store(tokens).stored_tokens == 2 * CHUNK + BLOCK
    assert site.retrieve(tokens) == len(tokens)


def test_less_than_the_least_hit_is_not_used_and_not_stored_again(cache, make_site, make_tokens):
    """min_hit_tokens: 0 is reported, nothing is loaded, and the next store finds it there."""
    site = make_site(cache, min_hit_tokens=2 * CHUNK)
    tokens = make_tokens(2 * CHUNK)
    site.store(tokens[: 2 * CHUNK - BLOCK])
    assert (site.engine.lookup(tokens), site.retrieve(tokens)) == (0, 0)
    assert site.engine.lookup(tokens, pin=True, lookup_id="a") == 0
    stats = site.engine.stats.snapshot()
    assert (stats.failed_loads, stats.found_tokens["ram"], stats.stages["to_gpu"].calls) == (0, 0, 0)
    assert site.store(tokens[: 2 * CHUNK - BLOCK]).stored_tokens == 0
    site.store(tokens)
    assert (site.engine.lookup(tokens), site.retrieve(tokens)) == (2 * CHUNK, 2 * CHUNK)


def test_the_least_hit_counts_what_would_be_loaded(cache, make_site, make_tokens):
    """Tokens that the engine has already are no gain: masked ones do not count towards min_hit_tokens."""
    site = make_site(cache, min_hit_tokens=2 * CHUNK)
    tokens = make_tokens(3 * CHUNK)
    site.store(tokens)
    assert site.retrieve(tokens, mask_of(CHUNK, len(tokens))) == 3 * CHUNK
    assert site.retrieve(tokens, mask_of(2 * CHUNK, len(tokens))) == 2 * CHUNK
    assert site.engine.stats.snapshot().loaded_tokens == 2 * CHUNK


# Where


def test_only_the_named_media_are_asked(make_cache, make_site, make_tokens):
    """B22, B438: RAM alone, the tier alone, both, or none of those there are; RAM alone promotes nothing."""
    cache = make_cache(DictTier())
    site = make_site(cache)
    tokens = make_tokens(2 * CHUNK + BLOCK)
    site.store(tokens)
    cache.empty_ram()
    site.store(tokens[:CHUNK])
    ask = site.engine.lookup
    assert ask(tokens, search_range=["ram"]) == 0
    assert cache.counters["chunks_promoted"] == 0
    assert ask(tokens, search_range=["LocalCPUBackend"]) == 0  # what RAM is called elsewhere
    with pytest.raises(ValueError, match="names 'elsewhere': the media of this store are ram, dict"):
        ask(tokens, search_range=["ram", "elsewhere"])
    assert ask(tokens, search_range=[]) == 0
    assert ask(tokens, search_range=["dict"]) == len(tokens)
    cache.drain()
    assert ask(tokens, search_range=["ram"]) == len(tokens)
    assert ask(tokens, search_range=["ram", "dict"]) == len(tokens)
    assert ask(tokens) == len(tokens)


def test_what_is_on_its_way_is_promised_exactly(make_cache, make_site, make_tokens):
    """A tail of 48 tokens in a tier that does not answer yet is promised as 48 tokens, and counted where it is."""
    tier = FaultyTier(DictTier())
    cache = make_cache(tier)
    site = make_site(cache)
    tokens = make_tokens(CHUNK + 3 * BLOCK)
    site.store(tokens)
    cache.empty_ram()
    site.store(tokens[:CHUNK])
    tier.is_mute = True
    asked = tokens + make_tokens(100)
    assert site.engine.lookup(asked) == CHUNK + 3 * BLOCK
    assert site.engine.stats.snapshot().found_tokens == {"ram": 0, "disk": CHUNK + 3 * BLOCK, "remote": 0}
    tier.release()
    assert site.retrieve(asked) == CHUNK + 3 * BLOCK


def test_a_hit_in_two_media_is_counted_in_each(make_cache, make_site, make_tokens):
    """What a lookup promises is counted by where it lies, and the sum is the promise."""
    tier = FaultyTier(DictTier())
    cache = make_cache(tier)
    site = make_site(cache)
    tokens = make_tokens(3 * CHUNK)
    site.store(tokens)
    cache.empty_ram()
    assert site.retrieve(tokens[:CHUNK]) == CHUNK
    tier.is_mute = True
    assert site.engine.lookup(tokens[: 3 * CHUNK - 1]) == 3 * CHUNK - BLOCK
    assert site.engine.stats.snapshot().found_tokens == {"ram": CHUNK, "disk": 2 * CHUNK - BLOCK, "remote": 0}
    tier.release()


# Pins


def test_a_pin_needs_an_id(site, make_tokens):
    """B23: ValueError without a lookup_id."""
    with pytest.raises(ValueError, match="lookup_id"):
        site.engine.lookup(make_tokens(CHUNK), pin=True)


def test_what_is_pinned_stays_until_it_is_unpinned(make_cache, make_site, make_tokens, image_bytes):
    """B23, B24: pressure does not evict it; after lookup_unpin it does."""
    cache = make_cache(pool_bytes=4 * image_bytes())
    site = make_site(cache)
    pinned = make_tokens(2 * CHUNK)
    site.store(pinned)
    assert site.engine.lookup(pinned, pin=True, lookup_id="a") == 2 * CHUNK
    for _ in range(4):
        assert site.store(make_tokens(2 * CHUNK)).stored_tokens == 2 * CHUNK
    assert site.retrieve(pinned) == 2 * CHUNK
    site.engine.lookup_unpin("a")
    site.store(make_tokens(4 * CHUNK))
    assert site.engine.lookup(pinned) == 0


def test_the_same_id_again_gives_up_its_first_pins(cache, site, make_tokens):
    """B23: two lookups under one id hold what the second found, and leak nothing."""
    one, other = make_tokens(CHUNK), make_tokens(CHUNK)
    site.store(one)
    site.store(other)
    for tokens in (one, other, other, make_tokens(CHUNK), one):
        site.engine.lookup(tokens, pin=True, lookup_id="a")
        assert cache.status.num_leases <= 1
    site.engine.lookup_unpin("a")
    assert cache.status.num_leases == 0


def test_unpinning_an_unknown_id_is_nothing(site):
    """B24: ids that hold nothing, or nothing any more, are ignored."""
    site.engine.lookup_unpin("never")
    site.engine.lookup_unpin("never")


def test_a_lookup_without_a_pin_holds_nothing(site, make_tokens, cache):
    """A thousand lookups without a retrieve leave everything evictable."""
    tokens = make_tokens(CHUNK)
    site.store(tokens)
    for _ in range(1000):
        site.engine.lookup(tokens)
    assert cache.status.num_leases == 0


def test_pins_that_nobody_gives_up_run_out(site, make_tokens, cache):
    """A pin is a lease: it ends with its time, and with the engine."""
    tokens = make_tokens(CHUNK)
    site.store(tokens)
    for number in range(20):
        site.engine.lookup(tokens, pin=True, lookup_id=str(number))
    assert cache.status.num_leases == 20
    cache.pass_time(1000.0)
    assert cache.status.num_leases == 0
    site.engine.lookup(tokens, pin=True, lookup_id="last")
    site.engine.close()
    assert cache.status.num_leases == 0
