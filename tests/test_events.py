"""Events of a store in vLLM's form: what a router can make of them."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from qkvault.events import (
    RESTART,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    StoreEvent,
    Translator,
    block_hash_of,
)
from qkvault.image import FIRST, PLAIN
from qkvault.testing.spaces import described
from qkvault.tokens import token_bytes
from qkvault.types import CacheKind, Medium

DESCRIBED = described(dtype="float16", block_size=4, chunk_size=4)
SPACE = DESCRIBED.space
HEAD, TAIL = (SPACE.chunk_key(bytes([n]) * 32) for n in (1, 0xFE))


def stored(key=HEAD, space=SPACE, **changes):
    event = StoreEvent(
        stored=True,
        medium=Medium.RAM,
        key=key,
        parent=SPACE.chunk_key(bytes(32)),
        num_tokens=4,
        tokens=token_bytes([1, 2, 3, 2**32 - 1]),
        space=replace(DESCRIBED, space=space).encode(),
        flags=FIRST | PLAIN,
    )
    return replace(event, **changes)


def removed(key=HEAD, **changes):
    return replace(StoreEvent(False, Medium.RAM, key, b"", 4, "evicted"), **changes)


def told(*events):
    return [event for _, event in Translator().translate(events)]


@pytest.mark.vllm
def test_vllm_reads_what_we_write():
    """B230: its own classes decode each event, with the same values; signed or not, a hash fits 64 bits."""
    from vllm.distributed import kv_events

    ours = told(stored(), stored(TAIL, parent=HEAD, flags=PLAIN), removed(), RESTART)
    batch = msgspec.msgpack.decode(
        msgspec.msgpack.encode(EventBatch(12.5, tuple(ours), 3)), type=kv_events.KVEventBatch
    )
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 3)
    head, tail, gone, cleared = batch.events
    assert head == kv_events.BlockStored([block_hash_of(HEAD)], None, [1, 2, 3, 2**32 - 1], 4, None, "CPU", None)
    assert (tail.block_hashes, tail.parent_block_hash) == ([block_hash_of(TAIL)], block_hash_of(HEAD))
    assert gone == kv_events.BlockRemoved(head.block_hashes, "CPU")
    assert cleared == kv_events.AllBlocksCleared()
    assert all(0 <= block_hash_of(key) < 2**64 for key in (HEAD, TAIL))


def test_a_batch_is_an_array_of_maps():
    """B230: the wire's form, field by field."""
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(EventBatch(1.0, tuple(told(stored(), RESTART)))))
    assert plain == [
        1.0,
        [
            {
                "type": "BlockStored",
                "block_hashes": [block_hash_of(HEAD)],
                "parent_block_hash": None,
                "token_ids": [1, 2, 3, 2**32 - 1],
                "block_size": 4,
                "medium": "CPU",
                "lora_id": None,
                "lora_name": None,
            },
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]


def test_equal_tokens_of_two_models_are_two_blocks():
    other = replace(SPACE, model_name="other")
    assert block_hash_of(HEAD) != block_hash_of(other.chunk_key(HEAD[16:]))


@pytest.mark.parametrize("changes", [{"flags": FIRST}, {"tokens": b""}, {"flags": 0, "tokens": b""}])
def test_tokens_that_are_not_plain_are_not_told(changes):
    """B232: of a salt's, an adapter's or a picture's chunk only the hash."""
    assert told(stored(**changes)) == [BlockStored((block_hash_of(HEAD),), None, (), 0, "CPU")]


def test_only_the_first_rank_tells():
    """B232: the K and V of worker 0; what cannot be read, or is another space's, is not told either."""
    strangers = [
        replace(SPACE, worker_id=1, world_size=2),
        replace(SPACE, layer_group=1),
        SPACE.with_kind(CacheKind.QUERY),
    ]
    for space in strangers:
        key = space.chunk_key(HEAD[16:])
        assert told(stored(key, space), removed(key)) == []
    assert told(stored(space=replace(SPACE, model_name="a lie"))) == []
    assert told(stored(space=b"\xc1"), removed()) == []
    assert told(removed()) == []


def test_names_of_models_come_with_the_events():
    other = replace(SPACE, model_name="other")
    events = Translator().translate([stored(), stored(other.chunk_key(bytes(32)), other), removed(), RESTART])
    assert [model for model, _ in events] == ["m", "other", "m", ""]


def test_media_are_those_that_routers_count():
    """B231: all below RAM is STORAGE, in it with its first tier and out of it with its last."""
    below = [
        stored(medium=Medium.DISK, num_tiers=1),
        stored(medium=Medium.REMOTE, num_tiers=2),
        removed(medium=Medium.DISK, num_tiers=1),
        removed(num_tiers=1),
        removed(medium=Medium.REMOTE, num_tiers=0),
    ]
    hashes = (block_hash_of(HEAD),)
    first, in_ram, last = told(*below)
    assert (first.block_hashes, first.medium) == (hashes, "STORAGE")
    assert (in_ram, last) == (BlockRemoved(hashes, "CPU"), BlockRemoved(hashes, "STORAGE"))


def test_a_reader_that_was_late_is_told_to_forget():
    assert told(RESTART) == [AllBlocksCleared()]
