"""Tensors in and out of a store by token ids, over every way to reach one."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from qkvault import embedded, sdk
from qkvault.config import Config
from qkvault.engine import CacheEngine, EngineMetadata
from qkvault.errors import ConfigError, LayoutMismatch
from qkvault.keys import MediaSpan, RequestIdentity
from qkvault.sdk import CacheTensors, Written, connect, kvcache, qcache
from qkvault.testing.fake_engine import FakeEngine
from qkvault.types import CacheKind

TOKENS = list(range(1000, 1200))  # three chunks of 64 tokens, and 8 more


def equal(found, parts, rows=slice(None), layers=slice(None)):
    return all(torch.equal(one, other[layers, rows]) for one, other in zip(found.parts, parts, strict=True))


class TestRoundTrip:
    def test_what_is_stored_is_retrieved(self, place, open_context, make_spaces, make_parts):
        """B108, B109, B110, B291: over a socket, over TCP and in process; whole blocks of it."""
        context = open_context(place, spaces=make_spaces())
        parts = make_parts(200)
        assert context.store(parts, TOKENS) == Written(192, 0, {"block": 8})
        assert context.lookup(TOKENS) == 192
        found = context.retrieve(TOKENS)
        assert found.span == (0, 192)
        assert found.holes == ()
        assert found.k.shape == found.v.shape == (2, 192, 2, 8)
        assert found.q is None
        assert equal(found, parts, slice(192))

    def test_one_that_comes_later_needs_no_engine(self, place, open_context, make_spaces, make_parts):
        """B292: the store knows the geometry of models whose engines have gone."""
        parts = make_parts(192)
        with connect(place, spaces=make_spaces()) as first:
            first.store(parts, TOKENS[:192])
        assert equal(open_context(place).retrieve(TOKENS), parts)

    def test_a_kind_can_be_given_by_its_name(self, here, open_context, make_spaces, make_parts):
        """B421: as can that of tensors; one that there is not is refused with those that there are."""
        with connect(here, kind="query", spaces=make_spaces(kind=CacheKind.QUERY, heads=6)) as q:
            assert q.kind is sdk.CacheKind.QUERY
            q.store(CacheTensors.of("query", make_parts(64, heads=6, parts=1)), TOKENS[:64])
            assert q.retrieve(TOKENS).num_tokens == 64
        for refused in (lambda: connect(here, kind="queries"), lambda: CacheTensors.of("queries", make_parts(64))):
            with pytest.raises(ValueError, match="'queries' is no kind of tensor: one of kv, query"):
                refused()

    def test_queries_are_a_kind_of_their_own(self, here, open_context, make_spaces, make_parts):
        """B106, B108, B109, B310: under the same tokens, under the name that users of LMCache know, and in a share."""
        kv = open_context(here, spaces=make_spaces())
        q = qcache.connect(here, spaces=make_spaces(kind=CacheKind.QUERY, heads=6), model="m##query")
        with q, kvcache.connect(here, model="m") as again:
            parts = make_parts(64, heads=6, parts=1)
            assert q.store(parts, TOKENS[:64]).written_tokens == 64
            (ram,) = q._client.status().media
            assert ram.query_used_bytes == ram.used_bytes > 0
            assert kv.retrieve(TOKENS) is None
            assert again.retrieve(TOKENS) is None
            found = q.retrieve(TOKENS)
            assert found.q.shape == (2, 64, 6, 8)
            assert found.k is None
            assert found.v is None
            assert equal(found, parts)

    def test_the_flat_form_goes_both_ways(self, here, open_context, make_spaces, make_parts):
        """B109: [2, layers, tokens, heads * head_size]."""
        context = open_context(here, spaces=make_spaces())
        flat = torch.stack([part.flatten(2) for part in make_parts(128)])
        context.store(flat, TOKENS[:128])
        assert torch.equal(context.retrieve(TOKENS).flat(), flat)

    @pytest.mark.parametrize("span", [(0, 64), (70, 100), (64, 150), (5, 192), (100, 500)])
    def test_a_span_of_some_layers(self, here, open_context, make_spaces, make_parts, span):
        """B291: only what is asked for is read."""
        context = open_context(here, spaces=make_spaces(layers=4))
        parts = make_parts(192, layers=4)
        context.store(parts, TOKENS)
        found = context.retrieve(TOKENS, layers=[3, 1], span=span)
        assert found.span == (span[0], min(span[1], 192))
        assert found.layers == (3, 1)
        assert equal(found, parts, slice(*span), [3, 1])
        assert found.layer_row(1) == 1
        with pytest.raises(ValueError, match="layer 0 is not among"):
            found.layer_row(0)

    @pytest.mark.parametrize("order", ["LBNHPD", "LPBNHD", "BLHNPD"])
    def test_heads_of_all_ranks_are_one_tensor(self, place, open_context, make_spaces, make_parts, order):
        """B293: rank after rank, whatever the order of the bytes."""
        context = open_context(place, spaces=make_spaces(ranks=3, order=order))
        parts = make_parts(192, heads=6)
        assert context.store(parts, TOKENS).written_tokens == 192
        assert context.retrieve(TOKENS).k.shape == (2, 192, 6, 8)
        assert equal(context.retrieve(TOKENS), parts)

    def test_a_chunk_that_one_rank_lacks_is_missing(self, here, open_context, make_spaces, make_parts):
        """B293."""
        context = open_context(here, spaces=make_spaces(ranks=2))
        parts = make_parts(192, heads=4)
        context.store(parts, TOKENS)
        second = context.geometry.spaces[1]
        context._prefix(TOKENS, RequestIdentity()).forget(context._client, [second], start_chunk=1)
        assert context.lookup(TOKENS) == 64
        assert equal(context.retrieve(TOKENS), parts, slice(64))

    def test_it_reads_what_an_engine_stored(self, here, open_context, make_spaces):
        """B108: pages of an engine, element by element."""
        (described,) = make_spaces(dtype="bfloat16")
        fake = FakeEngine(described.layout, 16)
        store = embedded.find(here.instance_id)
        metadata = EngineMetadata(model_name="m", model_fingerprint="f", layout=described.layout)
        engine = CacheEngine(Config(chunk_size=64), metadata, fake.tensors, store.connect("engine"))
        engine.store(TOKENS[:192], block_ids=(table := fake.prefill(TOKENS[:192])))
        context = open_context(here, spaces=[described])
        found = context.retrieve(TOKENS)
        assert found.num_tokens == 192
        again = [part.clone() for part in found.parts]
        fake.scribble(table)
        context.delete(TOKENS)
        assert context.store(again, TOKENS[:192]).written_tokens == 192
        marked = engine.retrieve(TOKENS[:192], block_ids=table)
        fake.verify(TOKENS, table, 0, int(marked.sum()))
        assert int(marked.sum()) == 192
        engine.close()

    def test_what_lies_on_disk_is_loaded(self, disk, open_context, make_spaces, make_parts):
        """B291: within the deadline; what takes longer is missing."""
        context = open_context(disk, spaces=make_spaces())
        parts = make_parts(192)
        context.store(parts, TOKENS)
        store = embedded.find(disk.instance_id)
        assert store.driver.drain(30.0)
        context._client.clear(lower_tiers=False)
        context.timeout_seconds = 0.0
        early = context.retrieve(TOKENS)
        context.timeout_seconds = 30.0
        assert early is None or early.num_tokens < 192 or equal(early, parts)
        assert equal(context.retrieve(TOKENS), parts)

    def test_who_asks_is_part_of_the_name(self, here, open_context, make_spaces, make_parts):
        """B294: salts, adapters and media keep prompts apart."""
        context = open_context(here, spaces=make_spaces())
        people = [
            RequestIdentity(),
            RequestIdentity(cache_salt="s"),
            RequestIdentity(adapter="a"),
            RequestIdentity(media=(MediaSpan(b"digest", 3, 10),)),
        ]
        each = [make_parts(192) for _ in people]
        for identity, parts in zip(people, each, strict=True):
            assert context.lookup(TOKENS, identity=identity) == 0
            assert context.store(parts, TOKENS, identity=identity).written_tokens == 192
        for identity, parts in zip(people, each, strict=True):
            assert equal(context.retrieve(TOKENS, identity=identity), parts)
        context.delete(TOKENS, identity=people[3])
        assert [context.lookup(TOKENS, identity=identity) for identity in people] == [192, 192, 192, 0]


class TestHoles:
    @pytest.fixture
    def queries(self, here, open_context, make_spaces):
        return open_context(here, kind=CacheKind.QUERY, spaces=make_spaces(kind=CacheKind.QUERY))

    def test_queries_go_on_behind_a_hole(self, queries, make_parts):
        """B295: an engine that has hit a prefix stores no queries of it; each chunk is found by itself."""
        tokens = list(range(64 * 6 + 30))
        parts = make_parts(len(tokens), parts=1)
        given = CacheTensors.of(CacheKind.QUERY, parts)
        there = [*range(64, 128), *range(192, 320), *range(384, 400)]
        assert queries.store(given.rows(there), tokens) == Written(64 + 128 + 16, 0, {})
        assert queries.lookup(tokens) == 0
        found = queries.retrieve(tokens)
        assert found.positions.tolist() == there
        assert found.span == (0, 400)
        assert found.holes == ((0, 64), (128, 192), (320, 384))
        assert equal(found, parts, there)
        part = queries.retrieve(tokens, span=(70, 200))
        assert part.positions.tolist() == [*range(70, 128), *range(192, 200)]
        assert part.holes == ((128, 192),)

    def test_a_hole_that_is_filled_later_is_none(self, queries, make_parts):
        """B295."""
        parts = make_parts(192, parts=1)
        given = CacheTensors.of(CacheKind.QUERY, parts)
        for there in (range(128, 192), range(64, 128), range(64)):
            queries.store(given.rows(there), TOKENS)
        assert queries.retrieve(TOKENS).holes == ()
        assert equal(queries.retrieve(TOKENS), parts)

    def test_keys_end_at_the_first_hole(self, here, open_context, make_spaces, make_parts):
        """B109: a shorter span, unless one asks for more; never zeros."""
        context = open_context(here, spaces=make_spaces())
        parts = make_parts(192)
        there = [*range(64), *range(128, 192)]
        context.store(CacheTensors.of(CacheKind.KV, parts).rows(there), TOKENS)
        assert equal(context.retrieve(TOKENS), parts, slice(64))
        assert context.retrieve(TOKENS, span=(64, 192)) is None
        assert equal(context.retrieve(TOKENS, past_holes=True), parts, there)
        assert context.retrieve(TOKENS, span=(64, 192), past_holes=True).holes == ((64, 128),)

    def test_what_is_behind_a_hole_inside_a_chunk_is_rejected(self, queries, make_parts):
        """B110: with the reason."""
        given = CacheTensors.of(CacheKind.QUERY, make_parts(192, parts=1))
        there = [*range(40), *range(50, 64), *range(70, 192)]
        assert queries.store(given.rows(there), TOKENS) == Written(32 + 64, 0, {"hole": 14 + 58, "block": 8})

    def test_nothing_is_none(self, queries):
        """B109."""
        assert queries.retrieve(TOKENS) is None
        assert queries.retrieve([]) is None
        assert queries.retrieve(TOKENS, span=(50, 50)) is None


class TestStoring:
    @pytest.fixture
    def context(self, here, open_context, make_spaces):
        return open_context(here, spaces=make_spaces())

    def test_what_is_there_stays(self, context, make_parts):
        """B110: and is told apart from what was written."""
        parts = make_parts(192)
        context.store([part[:, :128] for part in parts], TOKENS)
        assert context.store(make_parts(192), TOKENS) == Written(64, 128, {})
        assert equal(context.retrieve(TOKENS, span=(0, 128)), parts, slice(128))

    def test_what_is_there_is_replaced_if_one_says_so(self, place, open_context, make_spaces, make_parts):
        """B110, B296: with all that hangs on it, which was computed from the old."""
        context = open_context(place, spaces=make_spaces(ranks=2))
        context.store(make_parts(192, heads=4), TOKENS)
        parts = make_parts(128, heads=4)
        assert context.store(parts, TOKENS, overwrite=True) == Written(128, 0, {})
        assert equal(context.retrieve(TOKENS), parts)

    def test_a_reader_keeps_what_he_reads(self, here, context, make_parts):
        """B296: replacing waits for him, and says so if that takes too long."""
        parts = make_parts(64)
        context.store(parts, TOKENS)
        reader = embedded.find(here.instance_id).connect("reader")
        (held,) = context._prefix(TOKENS, RequestIdentity()).find_each(reader, context.geometry.spaces)
        context.timeout_seconds = 0.05
        assert context.store(make_parts(64), TOKENS, overwrite=True) == Written(0, 0, {"busy": 64})
        reader.release(held.lease_id)
        reader.close()
        assert context.store(parts, TOKENS) == Written(64, 0, {})

    def test_what_has_no_room_is_rejected(self, context, make_parts):
        """B110."""
        context._client.switch(frozen=True)
        assert context.store(make_parts(64), TOKENS) == Written(0, 0, {"frozen": 64})

    def test_other_tensors_than_the_models_are_refused(self, context, make_parts):
        """B297: another shape, dtype or kind, some layers, or more tokens than there are."""
        for wrong in (
            make_parts(64, heads=3),
            make_parts(64, layers=1),
            make_parts(64, parts=1),
            make_parts(64, dtype=torch.bfloat16),
            make_parts(201),
            CacheTensors.of(CacheKind.QUERY, make_parts(64)),
        ):
            with pytest.raises(ValueError, match=r"wanted, got|the tensors go to token"):
                context.store(wrong, TOKENS)
        for shape in ((2, 2, 64, 15), (2, 2, 64, 0), (16,), ()):
            with pytest.raises(ValueError, match=r"\[parts, layers, tokens, 16\] wanted, got \["):
                context.store(torch.zeros(shape), TOKENS)
        with pytest.raises(ValueError, match=r"layers \[2\] are wanted, there are \[0, 1\]"):
            context.retrieve(TOKENS, layers=[2])
        with pytest.raises(ValueError, match="alike"):
            context.store([torch.zeros(1), torch.zeros(1)], TOKENS)

    def test_layers_have_the_models_numbers(self, here, open_context, make_spaces, make_parts):
        """B355: of a space of layers 1 and 3 those are asked for, told and stored, and no row is taken for a number."""
        (spaces,) = make_spaces(kind=CacheKind.QUERY)
        spaces = replace(spaces, space=replace(spaces.space, tensors=spaces.space.tensors + ":1,3"))
        context = open_context(here, kind=CacheKind.QUERY, spaces=[spaces])
        parts = make_parts(64, parts=1)
        assert context.store(parts, TOKENS).written_tokens == 64
        found = context.retrieve(TOKENS)
        assert found.layers == (1, 3)
        assert context.store(found, TOKENS).present_tokens == 64
        assert torch.equal(context.retrieve(TOKENS, layers=[3]).q[0], parts[0][1])
        assert torch.equal(found.q[found.layer_row(1)], parts[0][0])
        with pytest.raises(ValueError, match=r"layers \[0\] are wanted, there are \[1, 3\]"):
            context.retrieve(TOKENS, layers=[0])
        with pytest.raises(ValueError, match=r"of layers \[1, 3\] wanted, got .* of \[0, 1\]"):
            context.store(CacheTensors.of(CacheKind.QUERY, parts), TOKENS)

    def test_a_prompt_is_deleted_from_a_token_on(self, place, open_context, make_spaces, make_parts):
        """B290: in all ranks."""
        context = open_context(place, spaces=make_spaces(ranks=2))
        context.store(make_parts(192, heads=4), TOKENS)
        assert context.delete(TOKENS, start=100) == 4
        assert context.lookup(TOKENS) == 64
        assert context.delete(TOKENS) == 2
        assert context.retrieve(TOKENS) is None
        assert context.delete(TOKENS) == 0

    @pytest.mark.parametrize("num_before", [64, 48])
    def test_a_prompt_that_ends_within_a_chunk_is_replaced_and_deleted(
        self, place, open_context, make_spaces, make_parts, num_before
    ):
        """B524: what goes on from there goes too, and is not taken for it."""
        context = open_context(place, spaces=make_spaces())
        context.store(make_parts(num_before), TOKENS[:num_before])
        new = make_parts(32)
        assert context.store(new, TOKENS[:32], overwrite=True).written_tokens == 32
        assert torch.equal(context.retrieve(TOKENS[:32]).k, new[0])
        context.store(make_parts(num_before), TOKENS[:num_before])
        assert context.delete(TOKENS[:32]) >= 1
        assert context.lookup(TOKENS[:32]) == 0

    def test_rows_that_are_not_there_are_refused(self, make_parts):
        given = CacheTensors.of(CacheKind.KV, make_parts(8), start=4)
        for wrong in ([3], [12], [5, 5], [6, 5]):
            with pytest.raises(ValueError, match="must rise and be there"):
                given.rows(wrong)
        assert given.rows([]).span == (4, 4)
        with pytest.raises(ValueError, match="are not"):
            given.rows([]).rows([4])


class TestChoice:
    def test_no_model_is_an_error_that_says_what_there_is(self, place, make_spaces):
        """B298."""
        with pytest.raises(ConfigError, match=r"no models fit kv of any model.*The store knows nothing"):
            connect(place)
        with (
            connect(place, spaces=make_spaces(model="a")),
            pytest.raises(ConfigError, match=r"no models fit query of a: .*The store knows a \(model_fingerprint f"),
        ):
            connect(place, kind=CacheKind.QUERY, model="a")

    def test_several_are_told_apart_by_name_or_field(self, here, make_spaces, open_context):
        """B298."""
        open_context(here, spaces=make_spaces(model="a"))
        open_context(here, spaces=make_spaces(model="b"), model="b")
        with pytest.raises(ConfigError, match="2 models fit kv of any model: choose by model= or fields="):
            connect(here)
        assert open_context(here, model="a").geometry.spaces[0].model_name == "a"
        open_context(here, spaces=make_spaces(model="b", dtype="bfloat16"), model="b", fields={"dtype": "bfloat16"})
        with pytest.raises(ConfigError, match="2 models fit kv of b"):
            connect(here, model="b")

    def test_a_field_that_was_misspelt_was_told_as_an_engine_that_had_not_connected(self, here, make_spaces):
        """B298: it is told with the one that was meant."""
        with pytest.raises(ValueError, match="a KeySpace has no 'dtyp': did you mean 'dtype'"):
            connect(here, spaces=make_spaces(), fields={"dtyp": "float32"})

    def test_a_rank_that_is_not_known_is_an_error(self, here, make_spaces):
        """B298."""
        with pytest.raises(ConfigError, match=r"ranks \[1\] of 2 of m "):
            connect(here, spaces=make_spaces(ranks=2)[:1])

    def test_a_world_of_any_size_is_an_error_in_no_time(self, here, make_spaces):
        """B298, B333: whoever describes a space may say any number."""
        (described,) = make_spaces()
        described = replace(described, space=replace(described.space, world_size=(1 << 32) - 1))
        with pytest.raises(ConfigError, match=r"ranks \[1, 2, 3, .*, 16\] of 4294967295"):
            connect(here, spaces=[described])

    def test_pages_that_cannot_be_seen_into_are_refused(self, here, make_spaces):
        """B298."""
        (described,) = make_spaces()
        with pytest.raises(LayoutMismatch):
            connect(here, spaces=[replace(described, layout=replace(described.layout, opaque=True))])

    def test_many_ranks_are_described_in_several_messages(self, place, open_context, make_spaces, make_parts):
        """B293: one message takes 16."""
        context = open_context(place, spaces=make_spaces(ranks=18, heads=1))
        parts = make_parts(64, heads=18)
        context.store(parts, TOKENS)
        assert equal(context.retrieve(TOKENS), parts)

    def test_keys_of_this_process_only_are_for_a_store_of_this_process(self, here, place, open_context, make_spaces):
        """B298: the builtin hash is refused where others could not follow."""
        (described,) = make_spaces()
        described = replace(described, space=replace(described.space, hash_algorithm="builtin"))
        context = open_context(place, spaces=[described])
        if isinstance(place, Config) and place.address is None:
            assert context.lookup(TOKENS) == 0
        else:
            with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
                context.lookup(TOKENS)
