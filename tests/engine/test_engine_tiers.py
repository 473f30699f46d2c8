"""CacheEngine over lower tiers: promotion, prefetching, switches, and tiers that fail in every way."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from qkvault.testing import DictTier, FaultyTier
from qkvault.tiers.disk import DiskTier
from qkvault.types import Outcome

CHUNK, BLOCK = 64, 16  # tokens
SHORT_SECONDS = 0.05  # a deadline that a test waits for


@pytest.fixture
def tier() -> FaultyTier:
    """A tier that fails when told to."""
    return FaultyTier(DictTier())


@pytest.fixture
def lower(make_cache, tier):
    """A cache over ``tier``."""
    return make_cache(tier)


@pytest.fixture
def make_disk_cache(make_cache, tmp_path):
    """A cache over the directory ``tmp_path``; a second one is a restart, after the first is closed."""

    def make(**options):
        cache = make_cache(DiskTier(tmp_path / "disk", 64 << 20, workers=2, probe_seconds=0.05), **options)
        cache.drain()
        return cache

    return make


def files_of(tmp_path):
    return sorted((tmp_path / "disk").rglob("*.qkv"))


# Promotion


def test_chunks_of_two_models_go_to_disk_and_back_together(make_disk_cache, make_site, make_tokens, layout, tmp_path):
    """KEY-20: of two shapes and dtypes, written and read in one go; each comes back as it was."""
    cache = make_disk_cache()
    other_layout = replace(layout, num_layers=layout.num_layers + 1, num_heads=3, dtype="float64")
    one, other = make_site(cache), make_site(cache, other_layout)
    prompts = [make_tokens(3 * CHUNK + BLOCK) for _ in range(3)]
    for tokens in prompts:
        for site in (one, other):
            assert site.store(tokens).stored_tokens == len(tokens)
    cache.empty_ram()
    sizes = [path.stat().st_size for path in files_of(tmp_path)]
    assert (len(sizes), len(set(sizes))) == (24, 3)  # whole chunks of two sizes, and tails
    for number, tokens in enumerate(prompts):
        for site in (one, other):
            site.engine.async_lookup_and_prefetch(str(number), tokens)
    for number, tokens in enumerate(prompts):
        assert [site.retrieve(tokens, lookup_id=str(number)) for site in (one, other)] == [len(tokens)] * 2


def test_what_comes_up_from_a_tier_stays_in_ram(lower, make_site, make_tokens):
    """B50: a retrieve from below leaves the chunks in RAM, and the next one does not ask the tier."""
    site = make_site(lower)
    tokens = make_tokens(3 * CHUNK + BLOCK)
    site.store(tokens)
    lower.empty_ram()
    assert site.retrieve(tokens) == len(tokens)
    assert (lower.ram.num_chunks, lower.counters["loaded.dict"]) == (4, 4)
    assert site.retrieve(tokens) == len(tokens)
    assert lower.counters["loaded.dict"] == 4


def test_a_lookup_brings_up_what_it_found(lower, make_site, make_tokens):
    """What lies below begins to come up at the lookup, and is in RAM when it is retrieved."""
    site = make_site(lower)
    tokens = make_tokens(2 * CHUNK)
    site.store(tokens)
    lower.empty_ram()
    assert site.engine.lookup(tokens) == 2 * CHUNK
    lower.drain()
    assert lower.ram.num_chunks == 2
    assert site.retrieve(tokens) == 2 * CHUNK


def test_a_prompt_in_ram_and_below_comes_whole(lower, make_site, make_tokens):
    """B58: The head of a prompt in RAM and its rest in a tier are one hit."""
    site = make_site(lower)
    tokens = make_tokens(4 * CHUNK + 2 * BLOCK)
    site.store(tokens)
    lower.empty_ram()
    assert site.retrieve(tokens[: 2 * CHUNK]) == 2 * CHUNK
    assert site.retrieve(tokens + make_tokens(CHUNK)) == len(tokens)


def test_chunks_outlive_the_process(make_disk_cache, make_site, make_tokens):
    """What is on disk is found by a store that starts anew over the same directory, forks included."""
    first = make_disk_cache()
    tokens = make_tokens(3 * CHUNK + 2 * BLOCK)
    make_site(first).store(tokens)
    first.drain()
    first.driver.close()
    site = make_site(make_disk_cache())
    assert site.engine.lookup(tokens) == len(tokens)
    assert site.retrieve(tokens) == len(tokens)
    forked = tokens[: 2 * CHUNK + BLOCK] + make_tokens(CHUNK)
    assert site.retrieve(forked) == 2 * CHUNK + BLOCK


def test_a_disk_keeps_its_cap_over_restarts(make_cache, make_site, make_tokens, tmp_path, image_bytes):
    """Three times what fits, again after a restart: the files stay under the cap, and the last prompt is whole."""
    capacity_bytes = 6 * image_bytes()
    for _ in range(2):
        cache = make_cache(DiskTier(tmp_path / "disk", capacity_bytes, workers=2))
        cache.drain()
        site = make_site(cache)
        for _ in range(9):
            tokens = make_tokens(2 * CHUNK)
            site.store(tokens)
            cache.drain()
            assert sum(path.stat().st_size for path in files_of(tmp_path)) <= capacity_bytes
        cache.empty_ram()
        assert site.retrieve(tokens) == 2 * CHUNK
        cache.drain()
        cache.driver.close()


# Switches


def test_frozen_ram_serves_and_nothing_else_happens(lower, make_site, make_tokens):
    """B10, B51: stores are skipped, tiers are not asked, nothing is evicted; unfrozen, all is as before."""
    site = make_site(lower)
    below, above = make_tokens(2 * CHUNK), make_tokens(2 * CHUNK)
    site.store(below)
    lower.empty_ram()
    site.store(above)
    site.engine.freeze(enabled=True)
    assert site.engine.is_frozen
    before = lower.ram
    result = site.store(make_tokens(2 * CHUNK))
    assert (result.outcomes, result.stored_tokens) == ({Outcome.FROZEN: 2}, 0)
    assert (site.retrieve(above), site.retrieve(below)) == (2 * CHUNK, 0)
    assert lower.ram == before
    site.engine.freeze(enabled=False)
    assert not site.engine.is_frozen
    assert (site.retrieve(above), site.retrieve(below)) == (2 * CHUNK, 2 * CHUNK)


def test_a_load_that_finds_all_of_ram_pinned_is_a_miss(make_cache, make_site, make_tokens, tier, image_bytes):
    """B52: also without the hot cache, where RAM is only a way through: nothing waits, and later it is found."""
    cache = make_cache(tier, hot_cache=False, pool_bytes=2 * image_bytes())
    site = make_site(cache)
    held, other = make_tokens(2 * CHUNK), make_tokens(2 * CHUNK)
    for tokens in (held, other):
        assert site.store(tokens).stored_tokens == 2 * CHUNK
        cache.drain()
    assert site.engine.lookup(held, pin=True, lookup_id="held") == 2 * CHUNK
    cache.drain()
    assert cache.ram.num_chunks == 2
    before = cache.counters["loaded.dict"]
    assert (site.engine.lookup(other), site.retrieve(other)) == (0, 0)
    assert site.store(make_tokens(CHUNK)).outcomes == {Outcome.NO_ROOM: 1}
    assert cache.counters["loaded.dict"] == before
    assert site.retrieve(held, lookup_id="held") == 2 * CHUNK
    assert site.retrieve(other) == 2 * CHUNK
    cache.drain()
    assert cache.ram.num_chunks == 0


def test_without_the_hot_cache_ram_keeps_nothing(lower, make_site, make_tokens):
    """B52: switching it off empties RAM; what is below is still found, and does not stay."""
    site = make_site(lower)
    tokens = make_tokens(2 * CHUNK)
    site.store(tokens)
    lower.drain()
    site.engine.set_hot_cache(enabled=False)
    assert lower.ram.num_chunks == 0
    assert site.retrieve(tokens) == 2 * CHUNK
    lower.drain()
    assert lower.ram.num_chunks == 0
    site.engine.set_hot_cache(enabled=True)
    assert site.retrieve(tokens) == 2 * CHUNK
    assert lower.ram.num_chunks == 2


def test_a_clear_reaches_every_tier(make_disk_cache, make_site, make_tokens, tmp_path):
    """Nothing is found afterwards, and no file is left."""
    cache = make_disk_cache()
    site = make_site(cache)
    tokens = make_tokens(2 * CHUNK)
    site.store(tokens)
    cache.drain()
    assert len(files_of(tmp_path)) == 2
    assert site.engine.clear() == 2
    assert (site.engine.lookup(tokens), site.retrieve(tokens)) == (0, 0)
    cache.drain()
    assert files_of(tmp_path) == []


# The third way in


def test_a_prefetch_returns_at_once_and_is_taken_later(lower, tier, make_site, make_tokens):
    """B53, B54: lookup and load run in the store; how far they are is told, and retrieve takes what came."""
    site = make_site(lower)
    tokens = make_tokens(3 * CHUNK + BLOCK)
    site.store(tokens)
    lower.empty_ram()
    tier.is_mute = True
    site.engine.async_lookup_and_prefetch("a", tokens)
    assert site.engine.prefetched("a") == (0, False)
    tier.release()
    lower.drain()
    assert site.engine.prefetched("a") == (len(tokens), True)
    num_lookups = lower.counters["lookups"]
    assert site.retrieve(tokens, lookup_id="a") == len(tokens)
    assert lower.counters["lookups"] == num_lookups
    assert site.engine.prefetched("a") == (0, True)


def test_a_prefetch_waits_for_its_chunks_when_it_is_taken(lower, tier, make_site, make_tokens):
    """B54: a retrieve that comes before the bytes waits for them."""
    site = make_site(lower)
    tokens = make_tokens(2 * CHUNK)
    site.store(tokens)
    lower.empty_ram()
    tier.is_mute = True
    site.engine.async_lookup_and_prefetch("a", tokens)
    tier.release()
    assert site.retrieve(tokens, lookup_id="a") == 2 * CHUNK


def test_a_prefetch_is_trimmed_at_the_first_chunk_that_fails(lower, tier, make_site, make_tokens):
    """B54, B30: what lies behind it is let go, and the rest is served."""
    site = make_site(lower)
    tokens = make_tokens(5 * CHUNK)
    site.store(tokens)
    lower.empty_ram()
    tier.fail_every_load = 3
    site.engine.async_lookup_and_prefetch("a", tokens)
    lower.drain()
    assert site.engine.prefetched("a") == (2 * CHUNK, True)
    assert site.retrieve(tokens, lookup_id="a") == 2 * CHUNK
    assert site.engine.stats.snapshot().failed_tokens == 3 * CHUNK


def test_an_aborted_prefetch_gives_everything_back(lower, tier, make_site, make_tokens):
    """B55: before and after the bytes have come; the same id again replaces the first."""
    site = make_site(lower)
    tokens = make_tokens(2 * CHUNK)
    site.store(tokens)
    lower.empty_ram()
    tier.is_mute = True
    site.engine.async_lookup_and_prefetch("a", tokens)
    site.engine.async_lookup_and_prefetch("a", tokens)
    assert lower.status.num_leases == 1
    site.engine.lookup_unpin("a")
    assert lower.status.num_leases == 0
    assert site.engine.prefetched("a") == (0, True)
    tier.release()
    lower.drain()
    site.engine.async_lookup_and_prefetch("a", tokens)
    site.engine.lookup_unpin("a")
    assert lower.status.num_leases == 0


def test_a_prefetch_of_nothing_holds_nothing(lower, make_site, make_tokens):
    """B54: a miss is known at once."""
    site = make_site(lower)
    site.engine.async_lookup_and_prefetch("a", make_tokens(CHUNK))
    assert site.engine.prefetched("a") == (0, True)
    assert site.engine.prefetched("never") == (0, True)


# Tiers that fail


@pytest.mark.parametrize("harm", ["flip", "truncate", "delete"])
@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("has_ended", [False, True])
def test_a_file_that_is_spoiled_is_a_shorter_prefix(
    make_disk_cache, make_site, make_tokens, tmp_path, *, harm, bad, has_ended
):
    """B28, B29: the lookup promises it, the retrieve stops before it, and the next lookup does not promise it again."""
    cache = make_disk_cache()
    site = make_site(cache)
    tokens = make_tokens(4 * CHUNK)
    site.store(tokens[: bad * CHUNK])
    cache.drain()
    before = files_of(tmp_path)
    site.store(tokens[: (bad + 1) * CHUNK])
    cache.drain()
    (path,) = set(files_of(tmp_path)) - set(before)
    site.store(tokens)
    cache.empty_ram()
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    if harm == "delete":
        path.unlink()
    else:
        path.write_bytes(content if harm == "flip" else content[:-4096])
    assert site.engine.lookup(tokens, pin=True, lookup_id="a") == 4 * CHUNK
    if has_ended:
        cache.drain()
    assert site.retrieve(tokens, lookup_id="a") == bad * CHUNK
    assert site.engine.stats.snapshot().failed_tokens == (4 - bad) * CHUNK
    assert site.engine.lookup(tokens) == bad * CHUNK
    assert not path.exists()
    assert cache.counters["failed.disk." + ("absent" if harm == "delete" else "corrupt")] == 1


def test_a_tier_that_fails_every_third_time_gives_exact_prefixes(lower, tier, make_site, make_tokens):
    """B28: whatever fails, what is marked is there, and what was promised and is not there is counted."""
    site = make_site(lower)
    tokens = make_tokens(8 * CHUNK + BLOCK)
    site.store(tokens)
    tier.fail_every_load = 3
    loaded = failed = 0
    for _ in range(8):
        lower.empty_ram()
        there = site.retrieve(tokens)
        loaded, failed = loaded + there, failed + len(tokens) - there
        stats = site.engine.stats.snapshot()
        assert (stats.loaded_tokens, stats.failed_tokens) == (loaded, failed)
    assert failed > 0
    tier.fail_every_load = 0
    assert site.retrieve(tokens) == len(tokens)


def test_a_tier_that_lost_its_chunks_is_not_asked_for_them_again(lower, tier, make_site, make_tokens):
    """The index drops what a tier says is absent, and the chunk can be stored again."""
    site = make_site(lower)
    tokens = make_tokens(2 * CHUNK)
    site.store(tokens)
    lower.empty_ram()
    tier.inner.images.clear()
    assert site.retrieve(tokens) == 0
    assert site.engine.lookup(tokens) == 0
    assert site.store(tokens).stored_tokens == 2 * CHUNK
    lower.empty_ram()
    assert site.retrieve(tokens) == 2 * CHUNK


def test_a_mute_tier_costs_its_deadline_and_no_more(lower, tier, make_site, make_tokens):
    """Every wait ends: what is in RAM is served, the rest is a miss, and comes when the tier speaks again."""
    patient, site = make_site(lower), make_site(lower, load_deadline_seconds=SHORT_SECONDS)
    tokens = make_tokens(4 * CHUNK)
    site.store(tokens)
    lower.empty_ram()
    assert patient.retrieve(tokens[:CHUNK]) == CHUNK
    tier.is_mute = True
    assert site.retrieve(tokens) == CHUNK
    stats = site.engine.stats.snapshot()
    assert (stats.failed_loads, stats.failed_tokens) == (1, 3 * CHUNK)
    tier.release()
    lower.drain()
    assert patient.retrieve(tokens) == 4 * CHUNK


def test_a_tier_that_is_gone_is_a_miss(lower, tier, make_site, make_tokens):
    """An unhealthy tier promises nothing, and its chunks are back with it."""
    site = make_site(lower)
    tokens = make_tokens(2 * CHUNK)
    site.store(tokens)
    lower.empty_ram()
    tier.has_vanished = True
    lower.pass_time(0.0)
    assert (site.engine.lookup(tokens), site.retrieve(tokens)) == (0, 0)
    assert site.store(make_tokens(CHUNK)).stored_tokens == CHUNK
    tier.has_vanished = False
    lower.pass_time(0.0)
    assert site.retrieve(tokens) == 2 * CHUNK


def test_a_prompt_longer_than_ram_is_served_as_far_as_ram_goes(make_cache, make_site, make_tokens, image_bytes):
    """A chain in a tier that does not fit RAM comes up from its head, and is right as far as it came."""
    tier = DictTier()
    first = make_cache(tier)
    tokens = make_tokens(6 * CHUNK)
    make_site(first).store(tokens)
    first.drain()
    cache = make_cache(FaultyTier(tier), pool_bytes=4 * image_bytes())
    cache.drain()
    assert make_site(cache).retrieve(tokens) == 4 * CHUNK
