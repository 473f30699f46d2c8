"""What an engine counts: every number of a scripted day, exactly."""

from __future__ import annotations

from qkvault.keys import RequestIdentity
from qkvault.testing import DictTier, FaultyTier

CHUNK, BLOCK = 64, 16  # tokens


def test_every_number_of_a_scripted_day(make_cache, make_site, make_tokens, layout, image_bytes):
    """B56: requests, tokens and bytes by outcome and by medium, and calls and bytes of each stage."""
    tier = FaultyTier(DictTier())
    cache = make_cache(tier)
    site = make_site(cache)
    one, other = make_tokens(3 * CHUNK + BLOCK), make_tokens(2 * CHUNK)
    token_bytes = layout.token_bytes

    site.store(one)  # 4 chunks, 208 tokens
    site.store(one[: 2 * CHUNK] + other)  # 2 present, 2 stored
    site.engine.lookup(one)  # 208 in RAM
    site.engine.lookup(make_tokens(CHUNK))  # none
    site.retrieve(one)  # 208
    site.retrieve(make_tokens(CHUNK))  # none: neither loaded nor failed
    cache.empty_ram()
    site.engine.lookup(one)  # 208 in the tier
    cache.drain()
    cache.empty_ram()
    tier.fail_every_load = 7  # after the four above
    site.retrieve(one)  # 2 chunks of 4; the third fails, the fourth lies behind it
    stats = site.engine.stats.snapshot()

    names = ("requests", "finished", "tokens")
    operations = {
        kind: tuple(getattr(operation, name) for name in names) for kind, operation in stats.operations.items()
    }
    assert operations == {
        "lookup": (3, 3, 208 + CHUNK + 208),
        "store": (2, 2, 208 + 4 * CHUNK),
        "retrieve": (3, 3, 208 + CHUNK + 208),
    }
    assert stats.found_tokens == {"ram": 208, "disk": 208, "remote": 0}
    assert (stats.loaded_tokens, stats.loaded_bytes) == (208 + 128, (208 + 128) * token_bytes)
    assert (stats.failed_tokens, stats.voided_tokens, stats.failed_loads) == (80, 0, 1)
    assert (stats.stored_tokens, stats.stored_bytes) == (208 + 128, (208 + 128) * token_bytes)
    assert {name: n for name, n in stats.chunks.items() if n} == {"stored": 6, "present": 2}
    assert stats.rejected_updates == 0

    stages = {name: (stage.calls, stage.failures, stage.tokens, stage.bytes) for name, stage in stats.stages.items()}
    asked = 208 + 4 * CHUNK + 208 + CHUNK + 208 + CHUNK + 208 + 208
    assert stages["process_tokens"] == (8, 0, asked, 0)
    assert stages["lookup"] == (6, 0, asked - 208 - 4 * CHUNK, 0)
    assert stages["from_gpu"] == (2, 0, 336, 336 * token_bytes)
    assert stages["put"] == (4, 0, 336, 336 * token_bytes)
    assert stages["to_gpu"] == (2, 0, 336, 336 * token_bytes)
    calls, failures, num_tokens, num_bytes = stages["get"]
    assert (calls, failures, num_tokens) == (2, 0, 336)
    assert num_bytes == sum(ref.image_bytes for ref in refs_of(site, one[: 2 * CHUNK]))
    assert all(stats.stages[name].gb_per_second > 0 for name in ("from_gpu", "put", "get", "to_gpu"))


def refs_of(site, tokens):
    located = site.engine._find(tokens, RequestIdentity(), None).located
    site.client.release(located.lease_id)
    return located.ready


def test_as_many_bytes_come_back_as_went_in(site, make_tokens):
    """Both directions are counted, in bytes of payload."""
    tokens = make_tokens(3 * CHUNK + BLOCK)
    site.store(tokens)
    site.retrieve(tokens)
    stats = site.engine.stats.snapshot()
    assert stats.stored_bytes == stats.loaded_bytes == len(tokens) * site.metadata.layout.token_bytes


def test_two_engines_count_apart(cache, make_site, make_tokens):
    """One engine's numbers tell nothing of another over the same store."""
    busy, idle = make_site(cache), make_site(cache)
    busy.store(make_tokens(CHUNK))
    assert idle.engine.stats.snapshot().operations["store"].requests == 0


def test_a_failed_load_is_no_hit(make_cache, make_site, make_tokens):
    """A read error leaves the loaded tokens as they were, and is counted as one failed load."""
    tier = FaultyTier(DictTier(), fail_every_load=1)
    cache = make_cache(tier)
    site = make_site(cache)
    tokens = make_tokens(CHUNK)
    site.store(tokens)
    cache.empty_ram()
    assert site.retrieve(tokens) == 0
    stats = site.engine.stats.snapshot()
    assert (stats.loaded_tokens, stats.loaded_bytes, stats.failed_loads, stats.failed_tokens) == (0, 0, 1, CHUNK)
    assert cache.counters["failed.dict.unavailable"] == 1
