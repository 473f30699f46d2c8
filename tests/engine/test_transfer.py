"""Transfer: chunks between pages and slots, devices that finish later, slots that are not what they should be."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from qkvault.errors import LayoutMismatch, ProtocolError, Unavailable
from qkvault.image import Header, key_in, read_header, wipe_header, write_header
from qkvault.keys import RequestIdentity
from qkvault.paged import PagedConnector
from qkvault.prefix import Prefix, load_items
from qkvault.transfer import SaveItem, Transfer
from qkvault.types import ChunkState, Outcome

CHUNK, BLOCK = 64, 16  # tokens


class Device(PagedConnector):
    """Copies at once, and says that it is done only when ``is_done``: the event is the connector itself."""

    is_done = False

    def batched_from_gpu(self, runs):
        super().batched_from_gpu(runs)
        return self

    def batched_to_gpu(self, runs, source=None):
        super().batched_to_gpu(runs, source)
        return self

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True


class Bench:
    """A transfer, the memory that it copies from and to, and prompts of its space."""

    def __init__(self, site, paged=None) -> None:
        self.site = site
        self.fake = site.fake
        self.space = site.metadata.space(site.config)
        self.transfer = Transfer(site.client, paged or site.paged, self.space)

    def prefix(self, tokens) -> Prefix:
        return Prefix(self.space, RequestIdentity(), tokens)

    def save(self, tokens):
        table = self.fake.prefill(tokens)
        items = self.prefix(tokens).save_items(0, len(tokens) // BLOCK * BLOCK, table, BLOCK)
        (report,) = self.transfer.save(items)
        self.fake.free(table)
        return report

    def find(self, tokens):
        """What is there of ``tokens``, leased."""
        return self.prefix(tokens).find(self.site.client)

    def items(self, located, tokens, start=0, stop=None):
        """Items that load ``[start, stop)`` into the blocks of a new table."""
        table = self.fake.allocate(len(tokens))
        self.fake.free(table)
        stop = len(tokens) // BLOCK * BLOCK if stop is None else stop
        return table, load_items(located.ready, start, stop, table, chunk_size=CHUNK, block_size=BLOCK)


@pytest.fixture
def bench(site):
    """A transfer over ``site``."""
    return Bench(site)


@pytest.fixture
def device(cache, make_site):
    """A transfer over a device that finishes when it is told to."""
    return Bench(make_site(cache, make_paged=Device))


# Saving and loading


@pytest.mark.parametrize("order", ["LBHNPD", "BLNHPD"])
def test_any_range_of_blocks_is_loaded_and_no_other(cache, make_site, make_tokens, layout, order):
    """Wherever the engine's own hit ends, blocks below it and behind the hit are untouched, the rest is right."""
    site = make_site(cache, msgspec.structs.replace(layout, order=order))
    bench = Bench(site)
    for stored in range(BLOCK, 2 * CHUNK + BLOCK, 3 * BLOCK):
        tokens = make_tokens(stored)
        bench.save(tokens)
        located = bench.find(tokens)
        for start, stop in itertools.combinations(range(0, stored + 1, BLOCK), 2):
            before = bench.fake.snapshot()
            table, items = bench.items(located, tokens, start, stop)
            assert bench.transfer.load(items) == set()
            bench.fake.verify(tokens[:stop], table, start)
            others = sorted(set(range(bench.fake.num_blocks)) - set(table[start // BLOCK : stop // BLOCK]))
            assert (bench.fake.snapshot()[others] == before[others]).all()
            bench.fake.scribble(table)
        site.client.release(located.lease_id)
        site.client.clear()


def test_blocks_of_several_kernel_pages_are_counted_as_blocks(cache, make_site, make_tokens, layout):
    """An engine that cuts each block of 32 tokens into two for its kernels stores and loads its own blocks."""
    site = make_site(
        cache, make_paged=lambda tensors, layout: PagedConnector(tensors, layout, kernel_blocks_per_block=2)
    )
    fake = site.fake
    tokens = make_tokens(2 * CHUNK + 32)
    blocks = [9, 4, 12, 30, 7]  # of 32 tokens
    pages = [page for block in blocks for page in (2 * block, 2 * block + 1)]
    fake.compute(tokens, pages)
    assert site.engine.store(tokens, block_ids=blocks).stored_tokens == len(tokens)
    fake.scribble(pages)
    asked = tokens[: CHUNK + 40]
    mask = [False] * CHUNK + [True] * 40
    assert site.engine.retrieve(asked, mask, block_ids=blocks).tolist() == [False] * CHUNK + [True] * 32 + [False] * 8
    assert fake.holds(tokens, pages) == [CHUNK <= at < CHUNK + 32 for at in range(len(tokens))]
    assert make_site(cache).retrieve(tokens) == len(tokens)
    located = Bench(site).find(tokens)
    fake.scribble(pages)
    items = load_items(located.ready, 32, CHUNK, blocks, chunk_size=CHUNK, block_size=32)
    assert Transfer(site.client, site.paged, site.metadata.space(site.config)).load(items) == set()
    assert fake.holds(tokens, pages) == [32 <= at < CHUNK for at in range(len(tokens))]
    site.client.release(located.lease_id)


def test_a_chunk_that_is_not_whole_blocks_of_the_engine_is_refused(cache, make_site, layout):
    """LayoutMismatch at start for blocks of 128 tokens and chunks of 64."""
    with pytest.raises(LayoutMismatch, match="chunks of 64 tokens are not blocks of 128"):
        make_site(cache, make_paged=lambda tensors, layout: PagedConnector(tensors, layout, kernel_blocks_per_block=8))


def test_blocks_that_are_not_those_of_the_tokens_are_refused(bench, make_tokens, cache):
    """B102: ValueError before any room is taken: what would be left of the payload is another chunk's bytes."""
    (item,) = bench.prefix(make_tokens(CHUNK)).save_items(0, CHUNK, [0, 1, 2, 3], BLOCK)
    for wrong in ([0, 1, 2], [0, 1, 2, 3, 4]):
        with pytest.raises(ValueError, match="fill its blocks"):
            list(bench.transfer.save([item._replace(block_ids=wrong)]))
    assert cache.status.counters["reserve.reserved"] == 0


def test_nothing_to_do_asks_nothing(bench):
    """No items, no message, no copy."""
    bench.site.client.close()
    assert list(bench.transfer.save([])) == []
    assert bench.transfer.load([]) == set()
    assert bench.transfer.settle()


def test_an_impossible_key_is_an_error_that_leaves_no_lease(bench, cache):
    """A key of the wrong length is the caller's bug: the store takes no such chunk."""
    with pytest.raises(ProtocolError, match="malformed"):
        list(bench.transfer.save([SaveItem(b"short", b"shorter", bytes(4 * BLOCK), [0])]))
    assert (len(cache.manager.leases), cache.ram.used_bytes) == (0, 0)


def test_a_slot_does_not_carry_its_key_before_its_bytes(cache, make_site, make_tokens, hooked):
    """A reader with an old right on the slot cannot take what is half written for the chunk that it was."""
    site = make_site(cache, make_paged=hooked)
    seen = []

    def look() -> None:
        being_written = [entry for entry in cache.manager.index if entry.state is ChunkState.WRITING]
        seen.extend(key_in(cache.manager.room.image(entry)) == entry.key for entry in being_written)

    site.paged.midway = look
    site.store(make_tokens(4 * CHUNK))
    assert seen == [False] * 4


# Devices


def test_what_a_device_has_not_finished_cannot_be_read(device, make_tokens):
    """A save is committed when its copy is done, and not before; settle does not wait, wait does."""
    tokens = make_tokens(2 * CHUNK)
    report = device.save(tokens)
    assert report.outcomes == (Outcome.RESERVED, Outcome.RESERVED)
    assert not device.transfer.settle()
    assert device.find(tokens).lease_id == 0
    device.site.paged.is_done = True
    assert device.transfer.settle()
    assert device.transfer.num_published == 2
    located = device.find(tokens)
    device.site.paged.is_done = False
    table, items = device.items(located, tokens)
    assert device.transfer.load(items) == set()
    assert not device.transfer.settle()
    device.transfer.wait()
    assert device.transfer.settle()
    device.fake.verify(tokens, table)
    device.site.client.release(located.lease_id)


def test_a_device_that_finishes_after_the_lease_publishes_nothing(device, make_tokens, cache):
    """The slots stay out of use until the late writer is through; then they are free, and nothing is readable."""
    tokens = make_tokens(CHUNK)
    device.save(tokens)
    cache.pass_time(1000.0)
    assert cache.ram.used_bytes > 0
    device.transfer.wait()
    assert (device.transfer.num_published, cache.ram.used_bytes) == (0, 0)
    assert device.find(tokens).lease_id == 0


def test_a_store_that_goes_before_the_device_is_done(device, make_tokens):
    """settle raises Unavailable once for the save that is lost, and is then through with it."""
    device.save(make_tokens(CHUNK))
    device.site.client.close()
    device.site.paged.is_done = True
    with pytest.raises(Unavailable):
        device.transfer.settle()
    assert device.transfer.settle()


def test_an_engine_over_a_device_waits(device, make_tokens):
    """CacheEngine's store and retrieve return when the device is through, with everything counted."""
    site = device.site
    tokens = make_tokens(2 * CHUNK + BLOCK)
    assert site.store(tokens).stored_tokens == len(tokens)
    site.paged.is_done = False
    assert site.retrieve(tokens) == len(tokens)
    stages = site.engine.stats.snapshot().stages
    num_bytes = len(tokens) * site.metadata.layout.token_bytes
    assert (stages["from_gpu"].bytes, stages["put"].bytes, stages["to_gpu"].bytes) == (num_bytes,) * 3


# Slots that are not what they should be


def spoil_space(image) -> None:
    header = read_header(image)
    write_header(image, msgspec.structs.replace(header, space=b"\xc1" * len(header.space)))


def spoil_layout(image) -> None:
    header = read_header(image)
    write_header(image, msgspec.structs.replace(header, space=header.space.replace(b"\xa6LBHNPD", b"\xa6LBHNPX")))


def shorten_payload(image) -> None:
    header = read_header(image)
    write_header(image, msgspec.structs.replace(header, payload_bytes=header.payload_bytes - 1))


def shorten_tokens(image) -> None:
    header = read_header(image)
    write_header(image, msgspec.structs.replace(header, tokens=header.tokens[: 4 * BLOCK]))


def change_key(image) -> None:
    header = read_header(image)
    write_header(image, msgspec.structs.replace(header, key=bytes(48)))


@pytest.mark.parametrize("spoil", [wipe_header, spoil_space, spoil_layout, shorten_payload, shorten_tokens, change_key])
def test_an_image_that_cannot_be_read_is_a_failed_item(bench, make_tokens, cache, spoil):
    """Whatever a slot holds, load says which items failed, fills the others, and raises nothing."""
    tokens = make_tokens(3 * CHUNK)
    bench.save(tokens)
    located = bench.find(tokens)
    spoil(cache.manager.room.pool.view(located.ready[1].offset, located.ready[1].image_bytes))
    table, items = bench.items(located, tokens)
    before = bench.fake.snapshot()
    assert bench.transfer.load(items) == {1}
    untouched = list(items[1].block_ids)
    assert (bench.fake.snapshot()[untouched] == before[untouched]).all()
    bench.fake.verify(tokens, table, 0, CHUNK)
    bench.fake.verify(tokens, table, 2 * CHUNK)
    bench.site.client.release(located.lease_id)
    bench.site.client.clear()


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_slot_of_another_size_over_an_old_one_shows_no_old_header(
    make_cache, make_site, make_tokens, image_bytes, *, num_before
):
    """A reader whose lease ran out sees that its slot has gone, also where the new one begins before it."""
    cache = make_cache(pool_bytes=2 * image_bytes())
    bench = Bench(make_site(cache))
    tokens = make_tokens(2 * CHUNK)
    bench.save(tokens)
    located = bench.find(tokens)
    _, items = bench.items(located, tokens)
    cache.pass_time(1000.0)
    assert bench.transfer.stale(items) == set()
    bench.site.client.clear()
    pool = cache.manager.room.pool
    slot = pool.allocate((2 - num_before) * image_bytes())
    assert bench.transfer.stale(items) == {0, 1}
    before = bench.fake.snapshot()
    assert bench.transfer.load(items) == {0, 1}
    assert (bench.fake.snapshot() == before).all()
    pool.free(slot)


def test_a_lease_that_ran_out_holds_nothing(bench, make_tokens, cache):
    """lost names every item of a lease that has ended or lost a chunk, though its slot still looks right."""
    tokens = make_tokens(2 * CHUNK)
    bench.save(tokens)
    located = bench.find(tokens)
    _, items = bench.items(located, tokens)
    assert bench.transfer.lost(items, located.lease_id) == set()
    cache.pass_time(1000.0)
    assert bench.transfer.stale(items) == set()
    assert bench.transfer.lost(items, located.lease_id) == {0, 1}


def test_headers_tell_whose_chunk_it_is(bench, make_tokens, cache):
    """An image names its key, its parent, its tokens, its space and its layout."""
    tokens = make_tokens(2 * CHUNK)
    bench.save(tokens)
    located = bench.find(tokens)
    ref = located.ready[1]
    header = read_header(cache.manager.room.pool.view(ref.offset, ref.image_bytes))
    described = msgspec.msgpack.decode(header.space)
    assert isinstance(header, Header)
    assert (header.key, header.parent) == (ref.key, located.ready[0].key)
    assert header.tokens == b"".join(token.to_bytes(4, "little") for token in tokens[CHUNK:])
    assert described["space"]["model_name"] == "m"
    assert described["layout"]["order"] == "LBHNPD"
    bench.site.client.release(located.lease_id)
