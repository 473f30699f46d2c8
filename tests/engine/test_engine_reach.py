"""An engine whose store is out of reach: results that say so, and never an exception in a request."""

from __future__ import annotations

from contextlib import closing

import pytest

from qkvault.client import StoreClient
from qkvault.config import Config
from qkvault.embedded import EmbeddedStore
from qkvault.errors import Unavailable
from qkvault.wire.sockets import SocketTransport
from qkvault.wire.transport import Transport

CHUNK, BLOCK = 64, 16  # tokens


class Severed(Transport):
    """A session that is cut before its n-th request from now on; None: not at all."""

    def __init__(self, client: StoreClient) -> None:
        self._inner = client._transport
        self.pool = self._inner.pool
        self.num_left: int | None = None

    def call(self, request, timeout_seconds=None):
        if self.num_left is not None:
            self.num_left -= 1
            if self.num_left < 0:
                self._inner.close()  # a store ends what a session holds when it is gone
        return self._inner.call(request)

    def wait_change(self, timeout_seconds):
        self._inner.wait_change(timeout_seconds)

    def close(self):
        self._inner.close()


def cut_after(site, num_requests: int) -> None:
    site.client._transport.num_left = num_requests


@pytest.fixture
def severed(cache, make_site):
    """An engine over a session that ``cut_after`` cuts."""
    return make_site(cache, client=StoreClient(Severed(cache.connect())))


def test_a_store_that_is_gone_holds_nothing(site, make_tokens):
    """B10, B20, B26: store tells what it could not store, lookup is 0, retrieve marks nothing."""
    tokens = make_tokens(2 * CHUNK)
    site.store(tokens)
    site.engine.lookup(tokens, pin=True, lookup_id="a")
    assert site.engine.is_healthy
    site.engine.close()
    result = site.store(tokens)
    assert (result.stored_tokens, result.present_tokens, result.failed_tokens) == (0, 0, 2 * CHUNK)
    assert not site.engine.is_healthy
    assert (site.engine.lookup(tokens), site.retrieve(tokens), site.retrieve(tokens, lookup_id="a")) == (0, 0, 0)
    site.engine.async_lookup_and_prefetch("b", tokens)
    assert site.engine.prefetched("b") == (0, True)
    site.engine.lookup_unpin("b")
    site.engine.close()
    stats = site.engine.stats.snapshot()
    assert all(operation.requests == operation.finished for operation in stats.operations.values())
    assert (stats.chunks["failed"], stats.stages["lookup"].failures) == (2, 4)


ORDERS = {
    "freeze": lambda engine: engine.freeze(enabled=True),
    "is_frozen": lambda engine: engine.is_frozen,
    "set_hot_cache": lambda engine: engine.set_hot_cache(enabled=False),
    "clear": lambda engine: engine.clear(),
}


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_that_is_not_heard_is_an_error(site, order):
    """Who clears or freezes a store must know that it did not happen."""
    site.engine.close()
    with pytest.raises(Unavailable):
        ORDERS[order](site.engine)


@pytest.mark.parametrize("num_requests", range(3))
def test_a_store_that_goes_during_a_store(severed, make_tokens, num_requests):
    """Cut before the reserve or before the commit, nothing is stored; cut after it, all is."""
    cut_after(severed, num_requests)
    result = severed.store(make_tokens(2 * CHUNK))
    whole = 2 * CHUNK * (num_requests == 2)
    assert (result.stored_tokens, result.failed_tokens) == (whole, 2 * CHUNK - whole)


@pytest.mark.parametrize("num_requests", range(4))
@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_store_that_goes_during_a_retrieve(severed, make_tokens, num_requests, is_pinned):
    """Cut anywhere, what is marked is right; only what the store has confirmed after the copy is marked."""
    tokens = make_tokens(2 * CHUNK + BLOCK)
    severed.store(tokens)
    severed.engine.lookup(tokens, pin=is_pinned, lookup_id="a")
    cut_after(severed, num_requests)
    # Poll or lookup, which finds the tail too, then the poll after the copy.
    assert severed.retrieve(tokens, lookup_id="a") == len(tokens) * (num_requests >= 2)


@pytest.mark.parametrize("num_requests", range(2))
def test_a_store_that_goes_during_a_lookup(severed, make_tokens, num_requests):
    """Cut before the answer, nothing is found; cut before the release, the answer stands."""
    tokens = make_tokens(2 * CHUNK + BLOCK)
    severed.store(tokens)
    cut_after(severed, num_requests)
    assert severed.engine.lookup(tokens) == len(tokens) * (num_requests == 1)


def test_a_copy_that_fails_over_a_store_that_is_gone_tells_of_the_copy(cache, make_site, make_tokens, hooked):
    """The caller sees his own error, not that the abort did not reach the store."""
    site = make_site(cache, make_paged=hooked)

    def fail() -> None:
        site.client.close()
        raise RuntimeError

    site.paged.midway = fail
    with pytest.raises(RuntimeError):
        site.store(make_tokens(2 * CHUNK))


def test_a_store_that_goes_between_two_parts_of_a_save_has_the_first(severed, make_tokens):
    """B410: what was stored counts as stored, in the result and in the numbers; the rest has failed."""
    severed.engine._transfer._num_in_part = 1
    cut_after(severed, 4)  # reserve and commit of two chunks
    result = severed.store(make_tokens(4 * CHUNK))
    assert (result.stored_tokens, result.failed_tokens) == (2 * CHUNK, 2 * CHUNK)
    assert {name: n for name, n in severed.engine.stats.snapshot().chunks.items() if n} == {"stored": 2, "failed": 2}


def test_a_copy_that_fails_in_a_later_part_leaves_the_first(cache, make_site, make_tokens, hooked):
    """B410: the error is passed on, and the numbers tell of what was stored before it."""
    site = make_site(cache, make_paged=hooked)
    site.engine._transfer._num_in_part = 1
    copies = []

    def fail() -> None:
        copies.append(1)
        if len(copies) == 3:
            raise RuntimeError

    site.paged.midway = fail
    with pytest.raises(RuntimeError):
        site.store(make_tokens(4 * CHUNK))
    stats = site.engine.stats.snapshot()
    assert {name: n for name, n in stats.chunks.items() if n} == {"stored": 2, "failed": 2}
    assert stats.stored_tokens == 2 * CHUNK


def test_an_engine_over_a_socket_does_the_same(cache, make_site, make_tokens, tmp_path):
    """Another process's store serves an engine like one of this process; when it stops, everything is a miss."""
    address = f"unix://{tmp_path}/store.sock"
    store = EmbeddedStore(Config(ram_bytes=4 << 20, disk_path=str(tmp_path / "disk")), shared=True)
    store.serve(address)
    site = make_site(cache, client=StoreClient(SocketTransport(address, "test", timeout_seconds=20.0)))
    tokens = make_tokens(3 * CHUNK + BLOCK)
    with closing(site.engine), closing(store):
        assert site.store(tokens).stored_tokens == len(tokens)
        assert site.retrieve(tokens[: 2 * CHUNK + 5]) == 2 * CHUNK
        store.driver.drain(30.0)
        site.client.clear(lower_tiers=False)
        site.engine.async_lookup_and_prefetch("a", tokens)
        assert site.retrieve(tokens, lookup_id="a") == len(tokens)
        store.driver.check()
        store.close()
        assert site.store(tokens).failed_tokens == len(tokens)
        assert (site.engine.lookup(tokens), site.retrieve(tokens)) == (0, 0)
