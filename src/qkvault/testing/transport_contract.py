"""What every transport promises, as tests: the same answers as in process, whatever lies between.

class Mine:
    @contextmanager
    def serve(self, driver, folder):
        with closing(MyServer(driver)) as server:
            yield lambda: MyTransport(server.address)

class TestMyTransport(Mine, TransportContract): ...
class TestMyBytes(Mine, TransportBytesContract): ...  # of transport_bytes
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Final

import pytest

from qkvault.client import StoreClient
from qkvault.errors import InvariantError, ProtocolError, Unavailable, UnknownMedium
from qkvault.policies.lru import LruPolicy
from qkvault.pool import Pool
from qkvault.store.book import TierBook
from qkvault.store.driver import StoreDriver, Traits
from qkvault.store.manager import StorageManager
from qkvault.store.residents import Residents
from qkvault.testing.dict_tier import DictTier
from qkvault.testing.store_model import ROOT, ModelChunk, checks_of, chunks_of, keys_of, tokens_of
from qkvault.testing.wrappers import FaultyTier
from qkvault.tiers.base import Tier
from qkvault.types import ChunkRefs, Medium, Outcome
from qkvault.wire.inproc import InprocTransport
from qkvault.wire.messages import Located, Reserved
from qkvault.wire.transport import Transport

WAIT_SECONDS: Final = 20.0
CHUNK_SIZE: Final = 32
POOL_BYTES: Final = 1 << 20
Connect = Callable[[], StoreClient]


def make_driver(
    *tiers: Tier,
    pool_bytes: int = POOL_BYTES,
    lease_seconds: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
    traits: Traits | None = None,
) -> StoreDriver:
    """A running store that other processes may attach to. The caller closes it."""
    books = [
        TierBook(number, tier.name, tier.medium, tier.stored_bytes, Residents(LruPolicy, tier.capacity_bytes))
        for number, tier in enumerate(tiers)
    ]
    pool = Pool(pool_bytes, name="qkvault-test", prefault=False)
    manager = StorageManager(pool, Residents(LruPolicy, pool.capacity_bytes), books, lease_seconds=lease_seconds)
    return StoreDriver(manager, tiers, clock=clock, traits=traits or Traits())


def connect(driver: StoreDriver, client: str = "test") -> StoreClient:
    """A client in the driver's process. The caller closes it."""
    return StoreClient(InprocTransport(driver, driver.pool, driver.wait_change, client))


def until(holds: Callable[[], object]) -> None:
    """Wait for that, as long as nothing is wrong."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.001)


def prompt(word: str) -> list[ModelChunk]:
    """A word as chunks: 16 tokens a letter, two letters a chunk."""
    return chunks_of(tokens_of(1000 * ord(letter) + n for letter in word for n in range(16)), CHUNK_SIZE)


def reserve(client: StoreClient, word: str) -> Reserved:
    """Reserve the chunks of ``word`` and write those that got a slot."""
    chunks = prompt(word)
    reserved = client.reserve([chunk.new() for chunk in chunks])
    for chunk, offset in zip(chunks, reserved.offsets, strict=True):
        if offset >= 0:
            chunk.write(client.pool.view(offset, chunk.new().image_bytes))
    return reserved


def save(client: StoreClient, word: str) -> int:
    """Store ``word``; returns how many chunks were published."""
    return client.commit(reserve(client, word).lease_id)


def find(client: StoreClient, word: str, *, search_range: Sequence[str] | None = None) -> Located:
    """Look ``word`` up."""
    chunks = prompt(word)
    whole = [chunk for chunk in chunks if chunk.num_tokens == CHUNK_SIZE]
    keys, checks = keys_of(whole), checks_of(whole)
    return client.find(
        ROOT, keys, checks, lambda at: chunks[at].tokens if at < len(chunks) else b"", search_range=search_range
    )


def read(client: StoreClient, located: Located, word: str) -> int:
    """How many leading tokens of ``word`` the lease gives; their chunks are compared byte by byte."""
    client.fetch(list(located.ready))
    for ref, chunk in zip(located.ready, prompt(word), strict=False):
        image = client.pool.view(ref.offset, ref.image_bytes)
        assert ref.key != chunk.key or chunk.is_in(image)
    return located.ready.num_tokens


class Served:
    """A store that is reached through a transport. Subclasses say how it is served."""

    def serve(self, driver: StoreDriver, folder: Path) -> AbstractContextManager[Callable[[], Transport]]:
        """A context in which transports to ``driver`` can be made. ``folder`` is empty."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self) -> FaultyTier:
        return FaultyTier(DictTier())

    @pytest.fixture
    def driver(self, tier: FaultyTier) -> Iterator[StoreDriver]:
        """The store at the other end. What must hold in it is checked afterwards."""
        with closing(make_driver(tier)) as driver:
            yield driver
            tier.release()
            assert driver.drain(WAIT_SECONDS)
            driver.check()

    @pytest.fixture
    def connect(self, driver: StoreDriver, tmp_path: Path) -> Iterator[Connect]:
        """Makes clients; they are closed afterwards."""
        with self.serve(driver, tmp_path) as make, ExitStack() as stack:
            yield lambda: stack.enter_context(closing(StoreClient(make())))

    @pytest.fixture
    def client(self, connect: Connect) -> StoreClient:
        return connect()


class TransportContract(Served):
    """Requests and their answers."""

    def test_what_one_client_stored_another_reads(self, connect: Connect) -> None:
        """Both see the same memory: bytes written through one's pool are read through the other's."""
        one, other = connect(), connect()
        assert save(one, "aabbc") == 3
        assert read(other, find(other, "aabbc"), "aabbc") == 80
        assert read(other, find(other, "aabbx"), "aabbc") == 64
        assert one.pool.capacity_bytes == other.pool.capacity_bytes == POOL_BYTES

    def test_answers_are_those_of_the_store(self, client: StoreClient, driver: StoreDriver) -> None:
        """A script of requests, each with the one right answer."""
        assert find(client, "aabb") == Located(0, ChunkRefs(), 0)
        reserved = client.reserve([chunk.new() for chunk in prompt("aab")])
        assert reserved.outcomes == (Outcome.RESERVED, Outcome.RESERVED)
        assert len(set(reserved.offsets)) == 2
        client.abort(reserved.lease_id)
        assert client.commit(reserved.lease_id) == 0
        assert save(client, "aab") == 2
        assert client.reserve([chunk.new() for chunk in prompt("aab")]) == Reserved(0, (Outcome.PRESENT,) * 2, (-1, -1))
        assert driver.drain(WAIT_SECONDS)
        located = find(client, "aab", search_range=["ram"])
        assert client.poll(located.lease_id) == located
        client.release(located.lease_id)
        client.release()
        assert client.poll(located.lease_id) == Located(0, ChunkRefs(), 0)
        assert client.clear(lower_tiers=False) == 2
        assert find(client, "aab", search_range=["ram"]).lease_id == 0
        with pytest.raises(UnknownMedium, match="the media of this store are ram"):
            find(client, "aab", search_range=["ram", "tape"])
        assert client.clear() == 2
        client.check()

    def test_status_and_switches(self, client: StoreClient) -> None:
        """A switch that is not named stays as it is."""
        assert save(client, "aa") == 1
        status = client.switch(frozen=True)
        assert (status.is_frozen, status.hot_cache, status.num_sessions) == (True, True, 1)
        assert client.reserve([prompt("xx")[0].new()]).outcomes == (Outcome.FROZEN,)
        status = client.switch(frozen=False, hot_cache=False)
        assert (status.is_frozen, status.hot_cache) == (False, False)
        assert client.status().counters["reserve.frozen"] == 1

    def test_what_is_on_its_way_is_waited_for(self, client: StoreClient, driver: StoreDriver, tier: FaultyTier) -> None:
        """A lookup begins the load, and ``wait`` ends with it; where it came from is told."""
        save(client, "aabb")
        assert driver.drain(WAIT_SECONDS)
        client.clear(lower_tiers=False)
        tier.is_mute = True
        located = find(client, "aabb")
        assert (located.ready, located.num_pending, located.pending_tokens) == (ChunkRefs(), 2, {Medium.DISK: 64})
        timer = threading.Timer(0.02, tier.release)
        timer.start()
        located = client.wait(located, WAIT_SECONDS, time.monotonic)
        timer.join()
        assert read(client, located, "aabb") == 64
        assert [ref.medium for ref in located.ready] == [Medium.DISK, Medium.DISK]

    def test_a_wait_has_a_deadline(self, client: StoreClient, driver: StoreDriver, tier: FaultyTier) -> None:
        """What has not come by then is still pending."""
        save(client, "aa")
        assert driver.drain(WAIT_SECONDS)
        client.clear(lower_tiers=False)
        tier.is_mute = True
        assert client.wait(find(client, "aa"), 0.02, time.monotonic).num_pending == 1

    def test_a_load_that_fails_makes_the_answer_shorter(
        self, client: StoreClient, driver: StoreDriver, tier: FaultyTier
    ) -> None:
        """Nothing raises; the next lookup does not promise it again."""
        save(client, "aabbcc")
        assert driver.drain(WAIT_SECONDS)
        client.clear(lower_tiers=False)
        tier.fail_every_load, tier.fail_reason = 2, "absent"
        assert read(client, client.wait(find(client, "aabbcc"), WAIT_SECONDS, time.monotonic), "aabbcc") == 32
        tier.fail_every_load = 0
        assert read(client, find(client, "aabbcc"), "aabbcc") == 32

    def test_a_client_that_goes_leaves_nothing(self, connect: Connect) -> None:
        """Its writes are aborted, its reads released, and nobody ever sees what it wrote."""
        one, other = connect(), connect()
        save(one, "aa")
        reserve(one, "xx")
        find(one, "aa")
        assert other.status().num_leases == 2
        one.close()
        one.close()
        until(lambda: other.status().num_sessions == 1)
        assert other.status().num_leases == 0
        assert find(other, "xx").lease_id == 0
        assert save(other, "xx") == 1

    def test_leases_belong_to_their_session(self, connect: Connect) -> None:
        """Nobody commits, polls or releases another's."""
        one, other = connect(), connect()
        save(one, "aa")
        reserved, located = reserve(one, "xx"), find(one, "aa")
        other.release(located.lease_id)
        other.abort(reserved.lease_id)
        assert (other.commit(reserved.lease_id), other.poll(located.lease_id).lease_id) == (0, 0)
        assert one.poll(located.lease_id).ready == located.ready
        assert one.commit(reserved.lease_id) == 1

    def test_a_closed_session_is_unavailable(self, connect: Connect) -> None:
        """Every call says so at once."""
        client = connect()
        client.close()
        for ask in (client.status, client.check, lambda: client.poll(1), lambda: find(client, "aa")):
            with pytest.raises(Unavailable):
                ask()

    def test_a_store_that_has_closed_is_unavailable(self, connect: Connect, driver: StoreDriver) -> None:
        """Nothing hangs, and closing the client afterwards is fine."""
        client = connect()
        driver.close()
        with pytest.raises(Unavailable):
            client.status()

    def test_what_makes_no_sense_is_refused_and_the_session_goes_on(self, client: StoreClient) -> None:
        """A malformed chunk is a ProtocolError of its own request."""
        bad = prompt("aa")[0]._replace(key=b"short").new()
        with pytest.raises(ProtocolError, match="malformed"):
            client.reserve([bad])
        assert save(client, "aa") == 1

    def test_a_broken_invariant_is_told(self, client: StoreClient, driver: StoreDriver) -> None:
        """``check`` raises for what must never be, and others are still answered."""
        save(client, "aa")
        (entry,) = (entry for entry in driver.manager.index if entry.num_tokens)
        entry.pins += 1
        with pytest.raises(InvariantError, match="pins"):
            client.check()
        entry.pins -= 1
        client.check()

    def test_threads_may_share_a_session(self, client: StoreClient) -> None:
        """Each gets the answers to its own questions."""
        words = [letter * 2 for letter in "abcdefgh"]
        for word in words:
            save(client, word)
        wrong: list[str] = []

        def ask(word: str) -> None:
            for _ in range(50):
                located = find(client, word)
                if [ref.key for ref in located.ready] != [chunk.key for chunk in prompt(word)]:
                    wrong.append(word)
                client.release(located.lease_id)

        threads = [threading.Thread(target=ask, args=(word,)) for word in words]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        assert wrong == []

    def test_long_messages_pass(self, client: StoreClient) -> None:
        """A lookup of a context of millions of tokens."""
        (chunk,) = prompt("aa")
        located = client.find(ROOT, chunk.key * 20_000, chunk.check * 20_000, lambda _: b"")
        assert located.lease_id == 0
        assert client.status().counters["chunks_asked"] == 20_000
