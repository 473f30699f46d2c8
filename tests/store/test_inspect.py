"""Inspecting: what a lookup would find, without the lookup."""

from __future__ import annotations

import time
from contextlib import closing

import pytest

from qkvault.testing import DictTier
from qkvault.testing.spaces import described
from qkvault.testing.store_model import ROOT, checks_of, keys_of
from qkvault.testing.transport_contract import (
    CHUNK_SIZE,
    WAIT_SECONDS,
    connect,
    find,
    make_driver,
    prompt,
    read,
    save,
)
from qkvault.types import Medium
from qkvault.wire.messages import Inspected, Instance


def describe(model_name):
    return described(model_name).encode()


@pytest.fixture
def driver():
    with closing(make_driver(DictTier())) as driver:
        yield driver


@pytest.fixture
def client(driver):
    return connect(driver)


def inspect(client, word, **more):
    chunks = prompt(word)
    whole = [chunk for chunk in chunks if chunk.num_tokens == CHUNK_SIZE]
    tokens = lambda at: chunks[at].tokens if at < len(chunks) else b""  # noqa: E731  # as clients pass it
    return client.inspect(ROOT, keys_of(whole), checks_of(whole), tokens, **more)


def test_it_tells_tokens_and_chunks_by_medium(client, driver):
    """B61, B210: what is asked stays where it is: nothing is leased, promoted or counted."""
    save(client, "aabbcc")
    assert driver.drain(WAIT_SECONDS)
    client.clear(lower_tiers=False)
    located = find(client, "aa")
    client.release(client.wait(located, WAIT_SECONDS, time.monotonic).lease_id)
    counters, before = client.status().counters, driver.manager.index.get(prompt("aabb")[1].key).state
    assert inspect(client, "aabbcc") == Inspected({Medium.RAM: 32, Medium.DISK: 64}, {Medium.RAM: 1, Medium.DISK: 2})
    assert inspect(client, "aabbcc", search_range=("ram",)).tokens == {Medium.RAM: 32}
    status = client.status()
    assert (status.counters, status.num_leases, status.num_jobs) == (counters, 0, 0)
    assert driver.manager.index.get(prompt("aabb")[1].key).state is before


@pytest.mark.parametrize(
    ("stored", "asked", "num_tokens"),
    [("aabb", "aabb", 64), ("aabb", "aabc", 48), ("aabb", "aa", 32), ("aab", "aab", 48), ("aab", "aabb", 48),
     ("aabbcc", "acbbcc", 16), ("aabb", "xabb", 0), ("aabb", "aab", 48), ("aabb", "", 0)],
)  # fmt: skip
def test_it_finds_what_a_lookup_finds(client, stored, asked, num_tokens):
    """B210: to the block, at a fork and in a tail too."""
    save(client, stored)
    assert sum(inspect(client, asked).tokens.values()) == num_tokens
    assert read(client, find(client, asked), asked) == num_tokens


def test_tokens_that_only_look_alike_do_not_count(client, driver):
    """B210: at a fork tokens are compared, as a lookup does."""
    save(client, "aabb")
    entry = driver.manager.index.get(prompt("aabb")[1].key)
    entry.sketch = prompt("aacc")[1].new().sketch
    assert inspect(client, "aac").tokens == {Medium.RAM: 32}
    entry.sketch = prompt("aabb")[1].new().sketch


def test_what_instances_describe_is_remembered(driver):
    """B211: a bounded number of spaces, the latest last, also after their instances have gone."""
    same = describe("same")
    for at in range(300):
        client = connect(driver)
        client.register(Instance("i", "worker", "m", spaces=(describe(str(at)), same, describe("x" * 5000))))
        client.close()
    status = connect(driver).status()
    assert status.instances == ()
    assert len(status.spaces) == 256
    assert status.spaces[-2:] == (describe("299"), same)


@pytest.mark.parametrize("nonsense", [b"", b"x", b"\x91" * 4000, b"\x81\xa1x" * 1000, b"\xff" * 100])
def test_what_describes_no_space_is_not_remembered(client, nonsense):
    """B333: of another version or none at all; nested without end too."""
    known = describe("known")
    client.register(Instance("i", "worker", "m", spaces=(nonsense, known, known[:-1])))
    assert client.status().spaces == (known,)
