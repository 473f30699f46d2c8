"""Two engines of unlike layouts over one small store, at random and for long: always right, or a miss."""

from __future__ import annotations

import msgspec
import pytest

from qkvault.testing import DictTier, FaultyTier
from qkvault.tiers.disk import DiskTier

CHUNK = 64  # tokens
NUM_STEPS = 2000


class Prompts:
    """Prompts that share beginnings, as conversations and their forks do."""

    def __init__(self, rng, make_tokens) -> None:
        self._rng = rng
        self._make_tokens = make_tokens
        self._known = [make_tokens(rng.randint(1, 5 * CHUNK)) for _ in range(4)]

    def take(self) -> list[int]:
        base = self._rng.choice(self._known)
        tokens = base[: self._rng.randint(0, len(base))] + self._make_tokens(self._rng.choice([0, 7, 40, 2 * CHUNK]))
        tokens = self._rng.choice([base, tokens])[: 5 * CHUNK]
        self._known[self._rng.randrange(len(self._known))] = tokens
        return tokens


def one_step(rng, site, prompts) -> None:
    """Some call of the engine; what it says is checked where it can be known."""
    tokens = prompts.take()
    lookup_id = rng.choice("ab")
    chance = rng.random()
    if chance < 0.35:
        result = site.store(tokens)
        assert result.failed_tokens == 0
    elif chance < 0.65:
        num_masked = rng.randint(0, len(tokens) // CHUNK) * CHUNK if tokens else 0
        site.retrieve(tokens, [at >= num_masked for at in range(len(tokens))])
    elif chance < 0.75:
        site.engine.lookup(tokens, pin=True, lookup_id=lookup_id)
    elif chance < 0.85:
        site.engine.async_lookup_and_prefetch(lookup_id, tokens)
    elif chance < 0.95:
        site.retrieve(tokens, lookup_id=lookup_id)
    else:
        site.engine.lookup_unpin(lookup_id)


@pytest.mark.parametrize("kind", ["disk", "faulty"])
def test_two_thousand_random_steps(make_cache, make_site, make_tokens, layout, rng, *, kind, tmp_path, image_bytes):
    """A pool of eight chunks, a tier of twenty, forks, tails, pins and failures: no wrong byte, no leak, no error."""
    capacity_bytes = 20 * image_bytes()
    tier = (
        DiskTier(tmp_path, capacity_bytes, workers=2, direct_io=False)
        if kind == "disk"
        else FaultyTier(DictTier(capacity_bytes), fail_every_load=5, fail_reason="corrupt")
    )
    cache = make_cache(tier, pool_bytes=8 * image_bytes())
    other_layout = msgspec.structs.replace(layout, order="LBNHPD", block_size=32)
    sites = [make_site(cache), make_site(cache, other_layout)]
    prompts = Prompts(rng, make_tokens)
    for step in range(NUM_STEPS):
        one_step(rng, rng.choice(sites), prompts)
        if step % 100 == 0:
            cache.driver.check()
            cache.pass_time(25.0)  # some leases run out, some do not
    for site in sites:
        for lookup_id in "ab":
            site.engine.lookup_unpin(lookup_id)
        stats = site.engine.stats.snapshot()
        assert stats.rejected_updates == 0
        assert stats.loaded_tokens > 0
    cache.drain()
    assert cache.counters["loaded." + tier.name] > 0
    assert cache.status.num_leases == 0
    cache.manager.clear()
    assert cache.ram.used_bytes == 0
