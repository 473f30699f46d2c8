"""Who asks, and about what: all that changes KV besides tokens is part of the key, or the request is not cached."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from qkvault.integrations.vllm.fingerprint import adapter_fingerprint, files_digest, model_fingerprint

pytestmark = pytest.mark.vllm


@pytest.fixture
def identity():
    """The identity of a request of vLLM's own class, with these fields; or why it is not cached."""
    from vllm import PoolingParams, SamplingParams
    from vllm.v1.request import Request

    from qkvault.integrations.vllm.identity import identity_of

    def make(*, params=None, pooling=False, **fields):
        extra = {"extra_args": {"kv_transfer_params": params}} if params is not None else {}
        sampling = None if pooling else SamplingParams(max_tokens=1, **extra)
        fields = {"prompt_token_ids": [1, 2, 3], **fields}
        request = Request("r", fields.pop("prompt_token_ids"), sampling, PoolingParams() if pooling else None, **fields)
        return identity_of(request)

    return make


def picture(identifier, offset=0, length=2, modality="image"):
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    span = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(data=None, modality=modality, identifier=identifier, mm_position=span)


def lora(path, name="poet", number=1):
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, str(path))


@pytest.fixture
def adapter(tmp_path):
    """A directory with a small adapter, of these weights."""

    def make(name, weights=b"weights", rank=8):
        path = tmp_path / name
        path.mkdir(exist_ok=True)
        (path / "adapter_model.safetensors").write_bytes(weights)
        (path / "adapter_config.json").write_text(f'{{"r": {rank}}}')
        return path

    return make


def roots(*identities):
    return {found.root("sha256", 64) for found, reason in identities if reason is None}


def test_a_plain_request_is_nobody_in_particular(identity):
    """Without salt, adapter, media and tags a request has the empty identity, whoever sends it."""
    from qkvault.keys import RequestIdentity

    assert identity() == (RequestIdentity(), None)
    assert identity(params={"do_remote_decode": False}) == (RequestIdentity(), None)


def test_salts_adapters_and_tags_are_told_apart(identity, adapter):
    """B 35: each salt, adapter and tag, and none of them, is a root of its own."""
    found = roots(
        identity(),
        identity(cache_salt="a"),
        identity(cache_salt="b"),
        identity(lora_request=lora(adapter("one"))),
        identity(lora_request=lora(adapter("one"), name="prosaist")),
        identity(lora_request=lora(adapter("two", b"others"))),
        identity(lora_request=lora(adapter("three", rank=16))),
        identity(params={"qkvault.tag.team": "a"}),
        identity(params={"lmcache.tag.team": "b"}),
    )
    assert len(found) == 9


def test_an_adapter_is_known_by_what_it_holds(identity, adapter):
    """The same adapter elsewhere is the same, and another one put in its place is not."""
    one, copy = adapter("one"), adapter("copy")
    before = identity(lora_request=lora(one))
    assert roots(before, identity(lora_request=lora(copy))) == roots(before)
    (one / "adapter_model.safetensors").write_bytes(b"trained on")
    assert len(roots(before, identity(lora_request=lora(one)))) == 2


def test_media_enter_the_chunks_they_touch(identity):
    """Digest, place and kind of each medium decide the keys from its first token on, and none before it."""
    from qkvault.tokens import TokenHasher

    tokens = list(range(48))

    def hashes(*features):
        found, reason = identity(mm_features=list(features))
        assert reason is None
        hasher = TokenHasher(found, 16)
        hasher.extend(tokens)
        return hasher.hashes

    plain = hashes()
    variants = [
        hashes(picture("f00dcafe" * 8, 20)),
        hashes(picture("beefcafe" * 8, 20)),  # the same last digits
        hashes(picture("f00dcafe" * 8, 21)),
        hashes(picture("f00dcafe" * 8, 20, 3)),
        hashes(picture("f00dcafe" * 8, 20, modality="video")),
    ]
    assert {found[0] for found in [plain, *variants]} == {plain[0]}
    assert len({found[1] for found in [plain, *variants]}) == 6
    assert len({found[2] for found in [plain, *variants]}) == 6


REFUSED = {
    "embeddings": ({"prompt_token_ids": None, "embeds": True}, "embeddings"),
    "mixed embeddings": ({"embeds": True, "prompt_is_token_ids": [True, False, True]}, "embeddings"),
    "pooling": ({"pooling": True}, "pooling"),
    "streaming": ({"resumable": True}, "streamed"),
    "a picture without a name": ({"pictures": [("", 2)]}, "no digest"),
    "a picture of no tokens": ({"pictures": [("abc", 0)]}, "length"),
    "an unknown parameter": ({"params": {"qkvault.tga.x": "1"}}, "unknown parameter 'qkvault.tga.x'"),
    "skip": ({"params": {"qkvault.skip": True}}, "not to be cached"),
    "skip as text": ({"params": {"qkvault.skip": "true"}}, "not to be cached"),
    "a skip that is neither": ({"params": {"qkvault.skip": "perhaps"}}, "qkvault.skip"),
    "a tag of two values": ({"params": {"qkvault.tag.a": "1", "lmcache.tag.a": "2"}}, "two values"),
}


@pytest.mark.parametrize(("fields", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_named_is_not_cached(identity, fields, reason):
    """A request that carries what may change its KV and has no name, or asks not to be cached, is refused."""
    import torch

    fields = dict(fields)
    if fields.pop("embeds", False):
        fields["prompt_embeds"] = torch.zeros(3, 4)
    fields["mm_features"] = [picture(digest, 0, length) for digest, length in fields.pop("pictures", ())]
    found, told = identity(**fields)
    assert reason in told
    assert found.cache_salt == ""


def test_skip_can_be_switched_off_in_words(identity):
    """The text "false" is not true."""
    assert identity(params={"qkvault.skip": "false"})[1] is None


def test_an_adapter_whose_files_are_gone_is_told_by_its_name(identity, tmp_path):
    """An adapter that is not in a local folder is known by its path and name."""
    gone, other = identity(lora_request=lora("hub/one")), identity(lora_request=lora("hub/other"))
    assert len(roots(gone, other)) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": "a"}, {}),
        ({}, {"cache_salt": "a"}),
        ({"sampling": {"extra_args": {"kv_transfer_params": {"qkvault.tag.team": "a"}}}}, {}),
        ({"adapter": True}, {}),
        ({}, {"adapter": True}),
    ],
    ids=str,
)
def test_what_one_may_see_another_may_not(toy_engine, prompts, adapter, one, other):
    """A prompt stored by one identity is not found by another, and is found by the same again."""
    engine = toy_engine()
    prompt = prompts(200)

    def ask(fields):
        fields = dict(fields)
        if fields.pop("adapter", False):
            fields["lora_request"] = lora(adapter("one"))
        engine.ask(prompt, **fields)
        engine.forget_own_prefixes()
        return sum(len(op.block_ids) for op in engine.loads_of(f"ask-{len(engine.requests) - 1}"))

    assert [ask(one), ask(other), ask(one)] == [0, 0, 12]
    engine.assert_clean()


def test_a_request_that_is_refused_runs_and_leaves_nothing(toy_engine, prompts, log_lines):
    """It is neither looked up nor stored, once it is logged why, and it says what it should."""
    engine = toy_engine()
    prompt = prompts(200)
    skip = {"extra_args": {"kv_transfer_params": {"qkvault.skip": True}}}
    engine.ask(prompt, 100, sampling=skip)
    counters = engine.status().counters
    assert (counters["lookups"], counters["reserve.reserved"]) == (0, 0)
    assert len([line for line in log_lines if "request_not_cached" in line and "asks not to be cached" in line]) == 1
    engine.assert_clean()


class TestFingerprint:
    """Which weights are loaded is part of every key."""

    @pytest.fixture
    def fingerprint(self, toy, tiny_model):
        """The fingerprint of an engine over ``path``, with some of its configuration changed."""
        config = toy.engine_config(tiny_model, {})

        def make(path=tiny_model, revision="", **changes):
            model = SimpleNamespace(
                **{
                    **{name: getattr(config.model_config, name) for name in ("dtype", "quantization", "revision")},
                    "hf_config": config.model_config.hf_config,
                    "max_model_len": 2048,
                    "model": str(path),
                    **changes,
                }
            )
            return model_fingerprint(SimpleNamespace(model_config=model, load_config=config.load_config), revision)

        return make

    def test_the_same_files_elsewhere_are_the_same_model(self, fingerprint, tiny_model, tmp_path):
        """A copy of the directory under another name has the same fingerprint."""
        import shutil

        copy = tmp_path / "copy"
        shutil.copytree(tiny_model, copy)
        assert fingerprint(copy) == fingerprint(tiny_model)

    def test_other_weights_under_one_name_are_another_model(self, fingerprint, tiny_model, tmp_path):
        """B 32: one changed byte of the weights, in a file of the same size, is another fingerprint."""
        import shutil

        copy = tmp_path / "copy"
        shutil.copytree(tiny_model, copy)
        weights = bytearray((copy / "model.safetensors").read_bytes())
        weights[-3] ^= 1
        (copy / "model.safetensors").write_bytes(weights)
        assert fingerprint(copy) != fingerprint(tiny_model)

    def test_revision_dtype_quantisation_and_the_operators_word_count(self, fingerprint):
        """Each of them makes another fingerprint."""
        found = {
            fingerprint(),
            fingerprint(revision="after the update"),
            fingerprint(revision="", dtype="bfloat16"),
            fingerprint(quantization="awq"),
            fingerprint(path="hub/name", revision=""),
            fingerprint(path="hub/other"),
        }
        assert len(found) == 6
        model = {"path": "hub/name"}
        assert fingerprint(**model) != fingerprint(**model, revision="x")

    def test_a_context_length_counts_where_angles_depend_on_it(self, fingerprint):
        """With a dynamic rotary scaling the maximal length is part of the fingerprint, else it is not."""
        from transformers import LlamaConfig

        assert fingerprint(max_model_len=1024) == fingerprint()
        scaled = LlamaConfig(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
        lengths = {fingerprint(hf_config=scaled, max_model_len=length) for length in (1024, 2048)}
        assert len(lengths) == 2

    def test_where_a_model_lies_and_who_wrote_its_configuration_do_not_count(self, fingerprint):
        """Path and release of the library are not part of the configuration's digest."""
        from transformers import LlamaConfig

        one, other = LlamaConfig(), LlamaConfig()
        one._name_or_path, other._name_or_path = "/here", "/there"
        other.transformers_version = "99"
        assert fingerprint(hf_config=one) == fingerprint(hf_config=other)

    def test_the_kv_dtype_is_part_of_the_space(self, toy, tiny_model):
        """Engines that differ in the dtype of their KV have no key in common."""
        from qkvault import config as configuration
        from qkvault.integrations.vllm import layouts

        spaces = set()
        for dtype in ("auto", "fp8"):
            engine = toy.engine_config(tiny_model, {})
            engine.cache_config.cache_dtype = dtype
            spec = toy.FullAttentionSpec(
                block_size=16,
                num_kv_heads=1,
                head_size=32,
                dtype=toy.torch.uint8 if dtype == "fp8" else toy.torch.float32,
            )
            groups = SimpleNamespace(kv_cache_groups=[toy.KVCacheGroupSpec(["layer"], spec)])
            settings = configuration.load(env={}).config
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(layouts, "_cpu_isa", lambda *_: None)
                layout = layouts.chunk_layout(engine, groups, spec, settings)
                spaces.add(layouts.key_spaces(engine, spec, layout, settings)[0].space_id)
        assert len(spaces) == 2

    def test_large_files_are_sampled(self, tmp_path):
        """Files beyond the samples' size are read in places, the last bytes among them."""
        file = tmp_path / "model.safetensors"
        data = bytearray(8 << 20)
        file.write_bytes(data)
        before = files_digest(str(tmp_path))
        data[-1] = 1
        file.write_bytes(data)
        assert files_digest(str(tmp_path)) != before
        assert files_digest(str(file)) == files_digest(str(file))
        assert len(adapter_fingerprint(str(tmp_path))) == 16
