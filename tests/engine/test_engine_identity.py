"""Who shares with whom: layouts of the same tensors do, through conversion; whatever else differs never does."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from qkvault.errors import ConfigError, LayoutMismatch
from qkvault.keys import MediaSpan, RequestIdentity
from qkvault.layout import ChunkLayout
from qkvault.tiers.disk import DiskTier
from qkvault.types import CacheKind

CHUNK, BLOCK = 64, 16  # tokens
PHYSICAL = {
    "pages of heads": {"order": "LBHNPD", "block_size": 16},
    "pages of tokens": {"order": "LBNHPD", "block_size": 32},
    "blocks first": {"order": "BLHNPD", "block_size": 64},
    "K and V apart": {"order": "LPBNHD", "block_size": 16},
    "K turned": {"order": "LBHPND", "block_size": 32, "key_transposed": True},
}


def variant(layout: ChunkLayout, **changes: object) -> ChunkLayout:
    return msgspec.structs.replace(layout, **changes)


# Layouts


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(PHYSICAL, 2)))
def test_engines_of_other_layouts_share(cache, make_site, make_tokens, layout, *, one, other):
    """What one engine stored, an engine with other pages loads, each element in its place, to its own last block."""
    writer = make_site(cache, variant(layout, **PHYSICAL[one]))
    reader = make_site(cache, variant(layout, **PHYSICAL[other]))
    tokens = make_tokens(2 * CHUNK + 48)
    stored = writer.store(tokens).stored_tokens
    size = reader.metadata.layout.block_size
    assert reader.engine.lookup(tokens) == stored // size * size
    assert reader.retrieve(tokens) == stored // size * size
    mask = [False] * CHUNK + [True] * (CHUNK + 48)
    assert reader.retrieve(tokens, mask) == stored // size * size
    forked = tokens[: CHUNK + 40] + make_tokens(CHUNK)
    assert reader.retrieve(forked) == (CHUNK + 40) // size * size


def test_chunks_of_several_layouts_make_one_prompt(cache, make_site, make_tokens, layout):
    """A prompt that two engines stored in turns is loaded in one call."""
    one = make_site(cache, variant(layout, **PHYSICAL["pages of heads"]))
    other = make_site(cache, variant(layout, **PHYSICAL["pages of tokens"]))
    tokens = make_tokens(4 * CHUNK)
    for stop, site in zip(range(CHUNK, 5 * CHUNK, CHUNK), [one, other, one, other], strict=False):
        assert site.store(tokens[:stop]).stored_tokens == CHUNK
    assert one.retrieve(tokens) == 4 * CHUNK
    assert other.retrieve(tokens) == 4 * CHUNK


def test_another_layout_is_read_from_a_directory_that_was_written_with_the_first(
    make_cache, make_site, make_tokens, layout, tmp_path
):
    """A persistent directory survives a change of layout: same tensors convert, other tensors are not found."""

    def run(use):
        cache = make_cache(DiskTier(tmp_path, 64 << 20, workers=1))
        cache.drain()
        use(cache)
        cache.drain()
        cache.driver.close()

    tokens = make_tokens(2 * CHUNK)
    run(lambda cache: make_site(cache).store(tokens))

    def reread(cache) -> None:
        assert make_site(cache, variant(layout, order="BLNHPD", block_size=32)).retrieve(tokens) == 2 * CHUNK
        assert make_site(cache, variant(layout, num_heads=4, head_size=2)).retrieve(tokens) == 0

    run(reread)


def test_pages_that_cannot_be_seen_into_are_copied_or_missed(cache, make_site, make_tokens, layout):
    """An engine that packs its pages loads what an equal one stored; of others nothing, and without an error."""
    packed = variant(layout, opaque=True)
    tokens = make_tokens(2 * CHUNK)
    make_site(cache, packed).store(tokens)
    assert make_site(cache, packed).retrieve(tokens) == 2 * CHUNK
    plain = make_site(cache)
    assert plain.retrieve(tokens) == 0
    assert plain.engine.stats.snapshot().failed_tokens == 2 * CHUNK


# Keys


def other_identities() -> dict[str, RequestIdentity]:
    return {
        "adapter": RequestIdentity(adapter="x"),
        "salt": RequestIdentity(cache_salt="x"),
        "tag": RequestIdentity(tags=(("x", "x"),)),
        "media": RequestIdentity(media=(MediaSpan(b"x", 0, 5),)),
        "other media": RequestIdentity(media=(MediaSpan(b"y", 0, 5),)),
    }


def test_requests_that_differ_in_more_than_tokens_never_share(site, make_tokens):
    """What is stored for one adapter, salt, tag or picture is found by the same only, and by no plain request."""
    tokens = make_tokens(2 * CHUNK + BLOCK)
    identities = other_identities()
    for name, identity in identities.items():
        assert site.store(tokens, identity=identity).stored_tokens == len(tokens)
        assert (site.engine.lookup(tokens), site.retrieve(tokens)) == (0, 0)
        for stranger in identities.keys() - {name}:
            assert site.engine.lookup(tokens, identity=identities[stranger]) == 0
            assert site.retrieve(tokens, identity=identities[stranger]) == 0
        assert site.retrieve(tokens, identity=identity) == len(tokens)
        site.engine.clear()


@pytest.mark.parametrize(
    "changes",
    [
        {"metadata": {"model_name": "n"}},
        {"metadata": {"model_fingerprint": "v"}},
        {"metadata": {"world_size": 2}},
        {"metadata": {"world_size": 2, "worker_id": 1}},
        {"model_revision": "2"},
        {"hash_algorithm": "blake3"},
        {"dtype": "float16"},
        {"kind": CacheKind.QUERY},
        {"num_heads": 4, "head_size": 2},
        {"num_layers": 1, "num_heads": 4},
        {"chunk_size": 128},
    ],
    ids=str,
)
def test_engines_that_differ_in_their_tensors_never_share(cache, make_site, make_tokens, layout, *, changes):
    """Another model, weights, rank, dtype of equal size, kind, geometry or chunk size finds nothing, and no error."""
    tokens = make_tokens(2 * CHUNK)
    own = {name: value for name, value in changes.items() if name in ChunkLayout.__struct_fields__}
    other = {name: value for name, value in changes.items() if name not in own}
    one, stranger = make_site(cache), make_site(cache, variant(layout, **own), **other)
    for writer, reader in [(one, stranger), (stranger, one)]:
        assert writer.store(tokens).stored_tokens == len(tokens)
        assert (reader.engine.lookup(tokens), reader.retrieve(tokens)) == (0, 0)
        assert writer.retrieve(tokens) == len(tokens)
        writer.engine.clear()


def test_fingerprint_and_revision_do_not_run_together(cache, make_site, make_tokens):
    """Weights "ab" of revision "c" are not weights "a" of revision "bc"."""
    pairs = [("ab", "c"), ("a", "bc"), ("abc", ""), ("a@b", "c"), ("a", "b@c"), ("ab@c", "")]
    spaces = set()
    for fingerprint, revision in pairs:
        site = make_site(cache, metadata={"model_fingerprint": fingerprint}, model_revision=revision)
        spaces.add(site.metadata.space(site.config).space_id)
    assert len(spaces) == len(pairs)


def test_two_ranks_of_one_model_hold_a_share_each(cache, make_site, make_tokens):
    """Where one rank lost a chunk, its answer is the shorter one: the least over the ranks is what all of them have."""
    ranks = [make_site(cache, metadata={"world_size": 2, "worker_id": rank}, seed=rank) for rank in range(2)]
    tokens = make_tokens(3 * CHUNK)
    ranks[0].store(tokens)
    ranks[1].store(tokens[: 2 * CHUNK])
    assert min(rank.engine.lookup(tokens) for rank in ranks) == 2 * CHUNK
    assert [rank.retrieve(tokens) for rank in ranks] == [3 * CHUNK, 2 * CHUNK]


# What does not fit is refused at start


def test_settings_that_do_not_fit_the_layout_are_refused(cache, make_site, monkeypatch):
    """ConfigError for another chunk size and for a hash that differs per process; nothing waits for the first store."""
    with pytest.raises(ConfigError, match="chunk_size=128"):
        make_site(cache, chunk_size=128)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
        make_site(cache, hash_algorithm="builtin", disk_path="/nowhere")


def test_the_builtin_hash_serves_a_cache_of_one_process(cache, make_site, make_tokens, monkeypatch):
    """Without a disk or a server no other process reads the keys, so no seed is asked for."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    site = make_site(cache, hash_algorithm="builtin")
    tokens = make_tokens(CHUNK + BLOCK)
    site.store(tokens)
    assert site.retrieve(tokens) == len(tokens)


def test_tensors_of_another_layout_are_refused(cache, make_site, layout):
    """LayoutMismatch when the engine's tensors are not what its layout says."""

    def with_other_tensors(tensors, layout):
        from qkvault.paged import PagedConnector

        return PagedConnector(tensors[:1], layout)

    with pytest.raises(LayoutMismatch):
        make_site(cache, make_paged=with_other_tensors)
