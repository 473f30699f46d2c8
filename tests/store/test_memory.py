"""Memory of a store that runs for long: what it has forgotten takes none."""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from contextlib import closing

import pytest

from qkvault.testing import DictTier
from qkvault.testing.transport_contract import WAIT_SECONDS, connect, find, make_driver, read, reserve, save

SLOT_BYTES = 8192
OPERATIONS = 10_000
GROWTH_BYTES = 30_000  # three bytes an operation; it is a thousand in all
LETTERS = [chr(code) for code in range(0x4E00, 0x4E00 + 4000)]  # each prompt of two is new


def work(driver, client, rng, num_operations):
    """Sessions that come and go, prompts that are new, found, lost to others, given up, cleared."""
    for number in range(num_operations):
        word = rng.choice(LETTERS) * 2 + rng.choice(LETTERS)
        match number % 5:
            case 0 | 1:
                save(client, word)
            case 2:
                located = client.wait(find(client, word), WAIT_SECONDS, time.monotonic)
                read(client, located, word)
                client.release(located.lease_id)
            case 3:
                client.abort(reserve(client, word).lease_id)
            case _:
                with closing(connect(driver)) as other:
                    reserve(other, word)
                    find(other, word)
        if number % 1000 == 0:
            client.clear()
    client.clear()
    assert driver.drain(WAIT_SECONDS)


@pytest.mark.slow
def test_traced_memory_is_flat_over_ten_thousand_operations():
    """B486: with a tier, of which chunks leave as well, and many more prompts than there is room for."""
    rng = random.Random(7)
    driver = make_driver(DictTier(capacity_bytes=32 * SLOT_BYTES), pool_bytes=16 * SLOT_BYTES)
    with closing(driver), closing(connect(driver)) as client:
        tracemalloc.start()
        try:
            work(driver, client, rng, OPERATIONS // 5)
            gc.collect()
            before, _ = tracemalloc.get_traced_memory()
            work(driver, client, rng, OPERATIONS)
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        driver.check()
        assert len(driver.manager.index) == 0
    assert after - before < GROWTH_BYTES
