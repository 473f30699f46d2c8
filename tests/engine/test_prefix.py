"""Prefix: a request's chunks, what is compared of them, and which blocks they are."""

from __future__ import annotations

import itertools

import pytest

from qkvault.keys import MediaSpan, RequestIdentity
from qkvault.prefix import Prefix, load_items
from qkvault.testing import DictTier
from qkvault.types import ChunkRef

CHUNK, BLOCK = 64, 16  # tokens
PLAIN = RequestIdentity()


def with_media(*spans: MediaSpan) -> RequestIdentity:
    return RequestIdentity(media=spans)


@pytest.fixture
def make_prefix(site):
    """A prefix in the space of ``site``."""

    def make(tokens, identity=PLAIN):
        return Prefix(site.metadata.space(site.config), identity, tokens)

    return make


# Tokens


def test_a_prefix_that_grows_is_one_that_was_given_whole(make_prefix, make_tokens, rng):
    """Each token is hashed once; what is there already is not appended again."""
    tokens = make_tokens(5 * CHUNK + 9)
    grown, whole = make_prefix([]), make_prefix(tokens)
    while grown.num_tokens < len(tokens):
        grown.update_to(tokens[: grown.num_tokens + rng.randint(0, 50)])
        grown.update_to(tokens[: grown.num_tokens // 2])
    table = list(range(50))
    stop = len(tokens) // BLOCK * BLOCK
    assert grown.save_items(0, stop, table, BLOCK) == whole.save_items(0, stop, table, BLOCK)


def test_a_prefix_agrees_with_its_beginnings_and_its_continuations(make_prefix, make_tokens):
    """The shorter of the two decides, and the identity must be the same."""
    tokens = make_tokens(2 * CHUNK + 5)
    prefix = make_prefix(tokens)
    for num_tokens in (0, 1, CHUNK, CHUNK + 1, len(tokens)):
        assert prefix.agrees_with(tokens[:num_tokens], PLAIN)
    assert prefix.agrees_with(tokens + make_tokens(100), PLAIN)
    assert not prefix.agrees_with(tokens, RequestIdentity(adapter="x"))
    for at in (0, CHUNK, len(tokens) - 1):
        assert not prefix.agrees_with([*tokens[:at], 10**6, *tokens[at + 1 :]], PLAIN)
    assert make_prefix([]).agrees_with(tokens, PLAIN)


# Chunks and blocks


def test_chunks_to_be_stored_form_a_chain_with_their_blocks(make_prefix, make_tokens):
    """Each item hangs on the one before it and the first on the request's root; each has its own blocks."""
    tokens = make_tokens(2 * CHUNK + 3 * BLOCK + 5)
    table = [7, 3, 9, 1, 0, 2, 8, 4, 6, 5, 11, 10]
    items = make_prefix(tokens).save_items(0, 2 * CHUNK + 3 * BLOCK, table, BLOCK)
    assert [item.num_tokens for item in items] == [CHUNK, CHUNK, 3 * BLOCK]
    assert [item.parent for item in items[1:]] == [item.key for item in items[:-1]]
    assert [list(item.block_ids) for item in items] == [table[0:4], table[4:8], table[8:11]]
    later = make_prefix(tokens).save_items(CHUNK, 2 * CHUNK + 3 * BLOCK, table, BLOCK)
    assert later == items[1:]
    assert make_prefix(tokens, RequestIdentity(adapter="x")).save_items(0, CHUNK, table, BLOCK)[0].parent not in {
        item.parent for item in items
    }


@pytest.mark.parametrize(
    ("start", "end", "num_blocks"), [(BLOCK, 2 * CHUNK, 8), (0, 2 * CHUNK - 1, 8), (0, 2 * CHUNK, 7)]
)
def test_what_is_not_whole_chunks_and_blocks_cannot_be_stored(make_prefix, make_tokens, start, end, num_blocks):
    """ValueError for a start inside a chunk, an end inside a block, and too few blocks."""
    with pytest.raises(ValueError, match="whole blocks"):
        make_prefix(make_tokens(2 * CHUNK)).save_items(start, end, list(range(num_blocks)), BLOCK)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_what_is_loaded_are_the_blocks_of_the_range_in_order(block_size):
    """For every range of blocks of every hit: each block once, from the right place of the right chunk."""
    table = list(range(100, 100 + 3 * CHUNK // block_size))
    for hit in range(0, 3 * CHUNK + 1, block_size):
        sizes = [min(CHUNK, hit - at) for at in range(0, hit, CHUNK)]
        ready = [ChunkRef(bytes([number]), number, 0, size) for number, size in enumerate(sizes)]
        places = range(0, 3 * CHUNK + 1, block_size)
        for start, stop in itertools.combinations_with_replacement(places, 2):
            items = load_items(ready, start, stop, table, chunk_size=CHUNK, block_size=block_size)
            expected = table[start // block_size : min(stop, hit) // block_size] if start < hit else []
            assert [block for item in items for block in item.block_ids] == expected
            at = start
            for item in items:
                assert (item.start_token, item.ref.offset) == (at, at // CHUNK)
                at += len(item.block_ids) * block_size


def test_a_block_table_that_is_too_short_cannot_be_filled():
    """ValueError, rather than chunks of which some blocks are silently left out."""
    with pytest.raises(ValueError, match="do not hold 64"):
        load_items([ChunkRef(b"", 0, 0, CHUNK)], 0, CHUNK, [1, 2, 3], chunk_size=CHUNK, block_size=BLOCK)


# Media


A, B = b"a picture", b"another"


@pytest.mark.parametrize(
    ("stored", "asked", "hit"),
    [
        (with_media(MediaSpan(A, 100, 30)), with_media(MediaSpan(A, 100, 30)), 4 * CHUNK),
        (with_media(MediaSpan(A, 100, 30)), with_media(MediaSpan(B, 100, 30)), 96),
        (with_media(MediaSpan(A, 100, 30)), PLAIN, 96),
        (PLAIN, with_media(MediaSpan(A, 100, 30)), 96),
        (with_media(MediaSpan(A, 100, 30)), with_media(MediaSpan(A, 101, 30)), 96),
        (with_media(MediaSpan(A, 100, 30)), with_media(MediaSpan(A, 100, 31)), 96),
        (with_media(MediaSpan(A, 100, 30)), with_media(MediaSpan(A, 100, 30, kind="audio")), 96),
        (with_media(MediaSpan(A, 0, 1)), with_media(MediaSpan(B, 0, 1)), 0),
        (with_media(MediaSpan(A, 5, 2), MediaSpan(A, 150, 9)), with_media(MediaSpan(A, 5, 2)), 144),
        (with_media(MediaSpan(A, 60, 8)), with_media(MediaSpan(B, 60, 8)), 48),
        (with_media(MediaSpan(A, 10, 240)), with_media(MediaSpan(B, 10, 240)), 0),
    ],
)
def test_a_match_ends_before_media_that_are_others(site, make_tokens, stored, asked, hit):
    """Equal tokens with another picture under them share what lies before it, to the block, and nothing after it."""
    tokens = make_tokens(4 * CHUNK)
    site.store(tokens, identity=stored)
    assert site.engine.lookup(tokens, identity=asked) == hit
    assert site.retrieve(tokens, identity=asked) == hit
    assert site.store(tokens, identity=asked).stored_tokens == 4 * CHUNK - hit // CHUNK * CHUNK
    for identity in (stored, asked):
        assert site.retrieve(tokens, identity=identity) == 4 * CHUNK


def test_a_match_ends_at_tokens_that_differ_beside_a_picture(site, make_tokens):
    """The same picture over other tokens is another block, whether the tokens are under it or beside it."""
    tokens = make_tokens(4 * CHUNK)
    identity = with_media(MediaSpan(A, 100, 4))
    site.store(tokens, identity=identity)
    for at in (97, 101, 110):
        asked = [*tokens[:at], *make_tokens(4 * CHUNK - at)]
        assert site.retrieve(asked, identity=identity) == 96
    assert site.retrieve([*tokens[:112], *make_tokens(CHUNK)], identity=identity) == 112


def test_a_hundred_pictures_under_the_same_tokens_are_never_mixed_up(site, make_tokens):
    """A hundred digests over one tail give a hundred chunks, each found by its own digest only."""
    tokens = make_tokens(BLOCK)
    identities = [with_media(MediaSpan(number.to_bytes(2, "big"), 3, 1)) for number in range(100)]
    for identity in identities:
        assert site.engine.lookup(tokens, identity=identity) == 0
        assert site.store(tokens, identity=identity).stored_tokens == BLOCK
    assert all(site.engine.lookup(tokens, identity=identity) == BLOCK for identity in identities)
    assert site.engine.lookup(tokens) == 0


def test_pictures_are_told_apart_in_a_tier_and_after_a_restart(make_cache, make_site, make_tokens):
    """What is compared lies in the chunk itself: a store that learns of it by a scan keeps pictures apart, too."""
    tier = DictTier()
    first = make_cache(tier)
    tokens = make_tokens(2 * CHUNK + 2 * BLOCK)
    stored, asked = with_media(MediaSpan(A, 150, 3)), with_media(MediaSpan(B, 150, 3))
    make_site(first).store(tokens, identity=stored)
    first.drain()
    second = make_cache(_Reopened(tier))
    second.drain()
    site = make_site(second)
    assert site.retrieve(tokens, identity=asked) == 2 * CHUNK + BLOCK
    assert site.retrieve(tokens, identity=stored) == len(tokens)


class _Reopened(DictTier):
    """A tier that begins with what another holds."""

    def __init__(self, tier: DictTier) -> None:
        super().__init__()
        self.images = dict(tier.images)


@pytest.mark.parametrize("num_more", [0, 3])
def test_a_chunk_under_media_is_the_same_however_the_prompt_goes_on(make_prefix, make_tokens, num_more):
    """What is compared of a tail depends on its own tokens and media only, so that it is one chunk and no collision."""
    tokens = make_tokens(CHUNK + BLOCK + 8)
    media = with_media(MediaSpan(A, CHUNK + BLOCK + 2, 40))
    items = make_prefix(tokens, media).save_items(0, CHUNK + BLOCK + 8, list(range(20)), 8)
    longer = make_prefix(tokens + make_tokens(num_more), media).save_items(0, CHUNK + BLOCK + 8, list(range(20)), 8)
    assert items == longer
    assert items[1].tokens != make_prefix(tokens).save_items(0, CHUNK + BLOCK + 8, list(range(20)), 8)[1].tokens
