"""A real store of tests with engines over it: its clock is the test's, its tiers are those that the test gives."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest

from qkvault.client import StoreClient
from qkvault.config import Config
from qkvault.engine import CacheEngine, EngineMetadata
from qkvault.image import header_bytes_for
from qkvault.layout import ChunkLayout
from qkvault.paged import PagedConnector
from qkvault.policies import POLICIES
from qkvault.pool import Pool
from qkvault.store.book import TierBook
from qkvault.store.driver import StoreDriver
from qkvault.store.manager import StorageManager
from qkvault.store.residents import Residents
from qkvault.testing.fake_engine import FakeEngine
from qkvault.tiers.base import Tier
from qkvault.types import CacheKind
from qkvault.wire.inproc import InprocTransport

DRAIN_SECONDS = 30.0


def nothing() -> None:
    """What a HookedConnector does half-way, unless told otherwise."""


LAYOUT = ChunkLayout(
    kind=CacheKind.KV, num_layers=2, num_heads=2, head_size=4, num_parts=2, dtype="bfloat16", block_size=16,
    chunk_size=64, order="LBHNPD",
)  # fmt: skip


class Cache:
    """A store and the engines over it. ``seconds`` is its clock, which stands still."""

    def __init__(
        self, tiers: Sequence[Tier] = (), *, pool_bytes: int = 4 << 20, hot_cache: bool = True, policy: str = "lru"
    ) -> None:
        self.seconds = 0.0
        new_policy = POLICIES.load(policy)
        books = [
            TierBook(number, tier.name, tier.medium, tier.stored_bytes, Residents(new_policy, tier.capacity_bytes))
            for number, tier in enumerate(tiers)
        ]
        pool = Pool(pool_bytes, prefault=False)
        residents = Residents(new_policy, pool.capacity_bytes)
        self.manager = StorageManager(pool, residents, books, lease_seconds=60.0, hot_cache=hot_cache)
        self.driver = StoreDriver(self.manager, tiers, clock=lambda: self.seconds)

    def connect(self) -> StoreClient:
        return StoreClient(InprocTransport(self.driver, self.driver.pool, self.driver.wait_change, "test"))

    def pass_time(self, seconds: float) -> None:
        """Let leases run out."""
        self.seconds += seconds
        self.driver._step()

    def drain(self) -> None:
        """Wait until everything that was stored is in the tiers."""
        assert self.driver.drain(DRAIN_SECONDS)

    def empty_ram(self) -> None:
        """Leave chunks in the tiers only."""
        self.drain()
        self.manager.clear(lower_tiers=False)
        assert self.ram.num_chunks == 0

    @property
    def status(self):
        client = self.connect()
        try:
            return client.status()
        finally:
            client.close()

    @property
    def ram(self):
        return self.status.media[0]

    @property
    def counters(self) -> dict[str, int]:
        return self.status.counters


class HookedConnector(PagedConnector):
    """Calls ``midway`` when the first half of the chunks of a copy is done."""

    midway: Callable[[], None] = staticmethod(nothing)

    def batched_from_gpu(self, runs):
        return self._halves(super().batched_from_gpu, runs)

    def batched_to_gpu(self, runs, source=None):
        return self._halves(lambda half: super(HookedConnector, self).batched_to_gpu(half, source), runs)

    def _halves(self, copy, runs):
        copy(runs[: len(runs) // 2])
        self.midway()
        return copy(runs[len(runs) // 2 :])


class Site:
    """One fake engine and a CacheEngine over its memory."""

    def __init__(
        self,
        cache: Cache,
        layout: ChunkLayout = LAYOUT,
        *,
        num_blocks: int = 64,
        seed: int = 0,
        metadata: dict[str, object] | None = None,
        make_paged: Callable[..., PagedConnector] = PagedConnector,
        client: StoreClient | None = None,
        **settings: object,
    ) -> None:
        self.fake = FakeEngine(layout, num_blocks, seed=seed)
        self.config = Config(**{"chunk_size": layout.chunk_size, "load_deadline_seconds": 5.0, **settings})
        self.metadata = EngineMetadata(
            **{"model_name": "m", "model_fingerprint": "w", "layout": layout, **(metadata or {})}
        )
        self.client = client or cache.connect()
        self.paged = make_paged(self.fake.tensors, layout)
        self.engine = CacheEngine(self.config, self.metadata, self.paged, self.client)

    def store(self, tokens, mask=None, **options):
        """Compute ``tokens``, store them, and give their blocks to others."""
        table = self.fake.prefill(tokens)
        result = self.engine.store(tokens, mask, block_ids=table, **options)
        self.fake.scribble(table)
        self.fake.free(table)
        return result

    def retrieve(self, tokens, mask=None, **options) -> int:
        """Retrieve ``tokens`` and verify every element; returns how many tokens are there, those masked included."""
        table = self.fake.allocate(len(tokens))
        num_masked = 0 if mask is None else list(mask).count(False)
        self.fake.compute(tokens, table, 0, num_masked)
        before = self.fake.snapshot()
        marked = self.engine.retrieve(tokens, mask, block_ids=table, **options).tolist()
        end = num_masked + sum(marked)
        assert marked == [num_masked <= at < end for at in range(len(tokens))]
        self.fake.verify(tokens, table, 0, end)
        others = sorted(set(range(self.fake.num_blocks)) - set(table[num_masked // self.fake.layout.block_size :]))
        assert (self.fake.snapshot()[others] == before[others]).all()
        self.fake.free(table)
        return end


@pytest.fixture
def make_cache() -> Iterator[Callable[..., Cache]]:
    """Caches whose state is checked, and which hold no lease, when the test is over."""
    made: list[Cache] = []

    def make(*tiers: Tier, **options: object) -> Cache:
        made.append(Cache(tiers, **options))
        return made[-1]

    yield make
    for cache in made:
        try:
            cache.driver.check()
            assert len(cache.manager.leases) == 0, "a lease was not given back"
        finally:
            cache.driver.close()


@pytest.fixture
def cache(make_cache) -> Cache:
    """A cache in RAM only."""
    return make_cache()


@pytest.fixture
def site(cache) -> Site:
    """An engine over ``cache``."""
    return Site(cache)


@pytest.fixture
def make_site() -> type[Site]:
    return Site


@pytest.fixture
def hooked() -> type[PagedConnector]:
    """A connector for ``make_site(make_paged=...)`` with a hook in the middle of each copy."""
    return HookedConnector


@pytest.fixture
def make_tokens() -> Callable[[int], list[int]]:
    """Prompts of any length; no two share a token."""
    numbers = itertools.count()

    def make(num_tokens: int) -> list[int]:
        return [next(numbers) for _ in range(num_tokens)]

    return make


@pytest.fixture
def image_bytes() -> Callable[..., int]:
    """What the image of a chunk takes in a pool."""

    def size(num_tokens: int = LAYOUT.chunk_size, layout: ChunkLayout = LAYOUT) -> int:
        description = msgspec.msgpack.encode(layout)
        return header_bytes_for(layout.chunk_size, len(description) + 512) + layout.payload_bytes(num_tokens)

    return size


@pytest.fixture
def rng() -> random.Random:
    return random.Random(7)


@pytest.fixture
def layout() -> ChunkLayout:
    return LAYOUT
