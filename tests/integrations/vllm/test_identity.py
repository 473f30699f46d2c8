"""Who asks, and about what: all that changes KV besides tokens is part of the key, or the request is not cached."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from qkvault.errors import ConfigError
from qkvault.integrations.vllm.fingerprint import files_digest, model_fingerprint

pytestmark = pytest.mark.vllm


@pytest.fixture
def identity():
    """The identity of a request of vLLM's own class, with these fields; or why it is not cached."""
    from vllm import PoolingParams, SamplingParams
    from vllm.v1.request import Request

    from qkvault.integrations.vllm.fingerprint import Adapters
    from qkvault.integrations.vllm.identity import identity_of

    adapters = Adapters()

    def make(*, params=None, pooling=False, hashes_media=True, **fields):
        extra = {"extra_args": {"kv_transfer_params": params}} if params is not None else {}
        sampling = None if pooling else SamplingParams(max_tokens=1, **extra)
        fields = {"prompt_token_ids": [1, 2, 3], **fields}
        request = Request("r", fields.pop("prompt_token_ids"), sampling, PoolingParams() if pooling else None, **fields)
        return identity_of(request, adapters, hashes_media=hashes_media)

    return make


def picture(identifier, offset=0, length=2, modality="image"):
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    span = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(data=None, modality=modality, identifier=identifier, mm_position=span)


def lora(path, name="poet", number=1, *, anew=False):
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, str(path), load_inplace=anew)


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
        identity(lora_request=lora(adapter("one"), name="prosaist", number=2)),
        identity(lora_request=lora(adapter("two", b"others"), number=3)),
        identity(lora_request=lora(adapter("three", rank=16), number=4)),
        identity(params={"qkvault.tag.team": "a"}),
        identity(params={"lmcache.tag.team": "b"}),
    )
    assert len(found) == 9


def retrain(path, weights=b"trained on"):
    """Put other weights in the place of those of an adapter, in one go and with the times of the old ones."""
    file = path / "adapter_model.safetensors"
    before = file.stat()
    new = path / "new"
    new.write_bytes(weights)
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
    new.replace(file)


class TestAdapters:
    """An adapter is named by the weights that the engine has of it, or the request is not cached."""

    def test_an_adapter_is_known_by_what_it_holds(self, identity, adapter):
        """The same adapter elsewhere is the same, and other weights under a number of their own are not."""
        one, copy = adapter("one"), adapter("copy")
        before = identity(lora_request=lora(one))
        assert roots(before, identity(lora_request=lora(copy, number=2))) == roots(before)
        retrain(one)
        assert len(roots(before, identity(lora_request=lora(one, number=3)))) == 2

    def test_its_name_in_keys_is_logged_once(self, identity, adapter, caplog):
        """B552: whoever asks from outside what is cached for it has to say that name."""
        caplog.set_level("INFO", "qkvault.vllm")
        one = adapter("one")
        names = {identity(lora_request=lora(one))[0].adapter for _ in range(3)}
        assert [record.getMessage() for record in caplog.records] == [f"adapter_named adapter={name}" for name in names]

    def test_files_replaced_while_the_engine_runs_the_old_ones(self, identity, adapter):
        """B450: which of the two it has cannot be told, so such requests are not cached, also when the old are back."""
        one = adapter("one")
        before = identity(lora_request=lora(one))
        retrain(one)
        assert "have changed since its first use" in identity(lora_request=lora(one))[1]
        retrain(one, b"weights")
        assert "have changed since its first use" in identity(lora_request=lora(one))[1]
        assert roots(identity(lora_request=lora(one, number=2))) == roots(before)

    def test_another_path_under_a_number_in_use(self, identity, adapter):
        """B450: the engine does not look at it, so the request is not cached unless the weights are the same."""
        before = identity(lora_request=lora(adapter("one")))
        assert identity(lora_request=lora(adapter("copy"))) == before
        assert identity(lora_request=lora(adapter("two", b"others")))[1] is not None

    def test_files_that_are_touched_are_the_same(self, identity, adapter):
        """B450: other times and the same bytes are no other adapter."""
        one = adapter("one")
        before = identity(lora_request=lora(one))
        os.utime(one / "adapter_model.safetensors", (1, 1))
        assert identity(lora_request=lora(one)) == before

    def test_an_adapter_that_is_loaded_anew_has_a_new_name(self, identity, adapter):
        """B450: ``load_inplace`` has the engine read the files, so those count from then on, for all requests."""
        one = adapter("one")
        before = identity(lora_request=lora(one))
        retrain(one)
        assert identity(lora_request=lora(one))[1] is not None
        after = identity(lora_request=lora(one, anew=True))
        assert len(roots(before, after)) == 2
        assert identity(lora_request=lora(one)) == after

    @pytest.mark.parametrize("left", [(), ("adapter_config.json",)], ids=["nothing", "no weights"])
    def test_an_adapter_without_files_is_not_cached(self, identity, adapter, left):
        """B451: a name alone says nothing of the weights behind it, whatever they are trained to next."""
        one = adapter("one")
        for file in one.iterdir():
            if file.name not in left:
                file.unlink()
        assert "no weights of the adapter 'poet'" in identity(lora_request=lora(one))[1]
        assert "no weights of the adapter 'poet'" in identity(lora_request=lora("/gone/one", number=2))[1]

    def test_the_home_folder_is_looked_into(self, identity, adapter, monkeypatch):
        """B451: ``~/one`` is what vLLM takes it for."""
        one = adapter("one")
        monkeypatch.setenv("HOME", str(one.parent))
        assert identity(lora_request=lora("~/one")) == identity(lora_request=lora(one, number=2))
        retrain(one)
        assert identity(lora_request=lora("~/one"))[1] is not None

    def test_a_name_of_the_hub_is_what_was_downloaded(self, identity, adapter, monkeypatch, tmp_path):
        """B451: its newest snapshot here is read, and another one under the same number is another adapter."""
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        repo = tmp_path / "hub" / "models--poets--one"
        commits = {"a" * 40: b"weights", "b" * 40: b"trained on"}
        for commit, weights in commits.items():
            shutil.copytree(adapter("one", weights), repo / "snapshots" / commit)
        (repo / "refs").mkdir()
        (repo / "refs/main").write_text("a" * 40)
        found = identity(lora_request=lora("poets/one"))
        assert found == identity(lora_request=lora(repo / "snapshots" / ("a" * 40), number=2))
        (repo / "refs/main").write_text("b" * 40)
        assert "have changed" in identity(lora_request=lora("poets/one"))[1]
        assert len(roots(found, identity(lora_request=lora("poets/one", number=3)))) == 2

    def test_a_name_of_the_hub_that_was_not_downloaded_is_not_cached(self, identity, monkeypatch, tmp_path):
        """B451: nothing is fetched to name a request, and no name is made of the path's text."""
        from huggingface_hub import constants
        from vllm import envs

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        assert identity(lora_request=lora("poets/other"))[1] is not None
        assert identity(lora_request=lora("no/name/at/all"))[1] is not None
        monkeypatch.setattr(envs, "VLLM_USE_MODELSCOPE", True, raising=False)
        assert "ModelScope" in identity(lora_request=lora("poets/other"))[1]

    def test_vllm_finds_adapters_where_we_look(self, adapter, monkeypatch):
        """B451: every kind of path that needs no network is the one that vLLM opens."""
        from vllm.lora.utils import get_adapter_absolute_path

        from qkvault.integrations.vllm.fingerprint import adapter_path

        one = adapter("one")
        monkeypatch.setenv("HOME", str(one.parent))
        monkeypatch.chdir(one.parent)
        for path in (str(one), "~/one", "one", "./one", "/gone/one", "~/gone", "~nobody-here/one"):
            assert str(Path.cwd() / adapter_path(path)) == str(Path.cwd() / get_adapter_absolute_path(path))

    def test_files_that_change_under_a_request_end_its_stores(self, toy_engine, prompts, adapter):
        """B450: keys are made when a request comes; what it computes once the files are others is not stored."""
        engine = toy_engine()
        one = adapter("one")
        engine.add("r", prompts(400), lora_request=lora(one, anew=True))
        engine.step()
        engine.step()
        retrain(one)
        engine.run()
        assert [bool(plan.saves) for plan in engine.plans[:3]] == [True, True, False]
        assert not any(plan.saves for plan in engine.plans[2:])
        assert not any(op.items for plan in engine.plans for op in plan.finals)
        assert len(engine.texts["r"]) == 4
        engine.assert_clean()


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


class TestNamesOfMedia:
    """What vLLM calls a medium: a digest of it, a name that its user gave, or a number."""

    @pytest.fixture
    def called(self):
        """What vLLM's own code calls the pictures of a request, with these settings of engine and request."""
        from vllm.config import MultiModalConfig
        from vllm.multimodal.parse import MultiModalDataParser
        from vllm.renderers.base import BaseRenderer
        from vllm.utils.counter import AtomicCounter

        class Processor:
            info = MultiModalDataParser()

            def apply(self, inputs, _):
                return inputs.get_mm_hashes("model", "blake3")["image"]

        def make(pixels, uuids=None, *, kwargs=None, cache_gb=4, prefix_caching=True):
            renderer = SimpleNamespace(
                api_process_rank=0,
                model_config=SimpleNamespace(multimodal_config=MultiModalConfig(mm_processor_cache_gb=cache_gb)),
                config=SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching)),
                get_mm_processor=Processor, update_mm_cache_stats=lambda: None,
                _mm_req_counter=AtomicCounter(), _mm_processor_cache=None, _mm_processor_only_cache=None,
                _mm_timing_registry={}, _validate_mm_uuids=lambda *_: None,
            )  # fmt: skip
            renderer._process_mm_uuids = lambda *args: BaseRenderer._process_mm_uuids(renderer, *args)
            return BaseRenderer._process_multimodal(renderer, [1], {"image": pixels}, uuids, kwargs)

        return make

    @pytest.fixture
    def pictures(self):
        from PIL import Image

        return [Image.new("RGB", (2, 2), color) for color in ("red", "blue")]

    def test_numbers_are_no_digests(self, identity, called, pictures):
        """B460: with both of vLLM's caches off other pictures are called the same after a restart: none is cached."""
        off = {"cache_gb": 0, "prefix_caching": False}
        red, blue = (called([each], **off) for each in pictures)
        assert red == blue
        assert "mm-processor-cache-gb" in identity(mm_features=[picture(red[0])])[1]
        assert identity(mm_features=[picture(f"poet:{red[0]}")])[1] is not None, "as an adapter of the encoder has it"
        red, blue = (called([each], kwargs={"crops": 2}, **off) for each in pictures)
        assert red == blue, "a number, hashed"
        assert "mm-processor-cache-gb" in identity(mm_features=[picture(red[0])], hashes_media=False)[1]
        assert identity(hashes_media=False)[1] is None, "text is text"

    @pytest.mark.parametrize("on", [{"cache_gb": 0}, {"prefix_caching": False}], ids=str)
    def test_one_cache_of_vllms_is_enough(self, identity, called, pictures, on):
        """B460: then each picture has a digest of its own, also with settings of the request."""
        names = [called([each], kwargs=kwargs, **on)[0] for each in pictures for kwargs in (None, {"crops": 2})]
        assert len(set(names)) == 4
        assert len(roots(*(identity(mm_features=[picture(name)]) for name in names))) == 1
        assert len({identity(mm_features=[picture(name)])[0].media for name in names}) == 4

    def test_a_name_that_the_user_gave_is_the_medium(self, identity, called, pictures):
        """B461: whatever it shows, so it has to mean the same for ever; settings of the request tell it apart."""
        red, blue = (called([each], {"image": ["logo"]}) for each in pictures)
        assert red == blue == ["logo"]
        assert identity(mm_features=[picture("logo")])[0].media[0].digest == b"logo"
        assert called(pictures[:1], {"image": ["logo"]}, kwargs={"crops": 2}) != red

    @pytest.mark.parametrize("case", [(0, False, False), (4, False, True), (0, True, True)])
    def test_the_engine_knows_from_its_configuration(self, toy, toy_engine, monkeypatch, case):
        """B460: the one that vLLM's own code looks at."""
        from vllm.config import MultiModalConfig

        make, (cache_gb, prefix_caching, is_cached) = toy.engine_config, case

        def with_media(*args, **options):
            config = make(*args, **options)
            config.model_config.multimodal_config = MultiModalConfig(mm_processor_cache_gb=cache_gb)
            return config

        monkeypatch.setattr(toy, "engine_config", with_media)
        engine = toy_engine(enable_prefix_caching=prefix_caching)
        request = engine.add("r", [1, 2, 3], mm_features=[picture("abc")])
        side = engine.connector._scheduler
        assert (side._track(request, 0) is not None) == is_cached
        side._tracked.clear()
        engine.abort("r")


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


class TestLaterVllm:
    """A vLLM whose requests are made of more than we know, behind the same connector interface."""

    @pytest.fixture
    def reason(self, monkeypatch):
        """Why a request with a field of this default, and this value, is not cached; None if it is."""
        import inspect

        from vllm import SamplingParams
        from vllm.v1.request import Request

        from qkvault.integrations.vllm import compat, identity
        from qkvault.integrations.vllm.fingerprint import Adapters

        class Later(Request):
            pass

        def told(default, *value, kept_as="steering"):
            known = inspect.signature(Request)
            steering = inspect.Parameter("steering", inspect.Parameter.KEYWORD_ONLY, default=default)
            Later.__signature__ = known.replace(parameters=[*known.parameters.values(), steering])
            monkeypatch.setattr(identity, "UNKNOWN_FIELDS", compat.unknown_fields(Later))
            request = Later("r", [1, 2, 3], SamplingParams(max_tokens=1), None)
            setattr(request, kept_as, value[0] if value else default)
            return identity.identity_of(request, Adapters())[1]

        return told

    def test_a_field_that_says_nothing_is_no_reason(self, reason):
        """B463: its default, the same object or an equal plain value, is what all requests were before."""
        assert reason(None) is None
        assert reason("plain", b"plain".decode()) is None
        assert reason(0, 0) is None
        assert reason(()) is None

    def test_a_field_that_says_something_is_a_reason(self, reason):
        """B463: whatever it is, it may change the request's KV."""
        import torch

        for default, value in (
            (None, 1),
            (None, torch.zeros(3)),
            ("plain", "fancy"),
            (0, False),
            (0.0, 0.1),
            (True, 1),
        ):
            assert "'steering'" in reason(default, value), (default, value)

    def test_a_field_that_cannot_be_told_is_a_reason(self, reason):
        """B463: one without a default, one that is kept elsewhere, one whose value is no plain one."""
        import inspect

        import torch

        assert "'steering'" in reason(inspect.Parameter.empty, "given")
        assert "'steering'" in reason(None, kept_as="_steering")
        assert "'steering'" in reason(torch.zeros(3), torch.zeros(3))

    def test_the_supported_vllm_has_none(self):
        """B463: so that nothing is looked at for each request."""
        from qkvault.integrations.vllm import compat

        assert compat.UNKNOWN_FIELDS == {}


def test_skip_can_be_switched_off_in_words(identity):
    """The text "false" is not true."""
    assert identity(params={"qkvault.skip": "false"})[1] is None


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

        def make(path=tiny_model, model_revision="", load_config=config.load_config, **changes):
            model = SimpleNamespace(
                **{
                    **{name: getattr(config.model_config, name) for name in ("dtype", "quantization", "revision")},
                    "hf_config": config.model_config.hf_config,
                    "max_model_len": 2048,
                    "multimodal_config": None,
                    "quantization_config": None,
                    "model_weights": "",
                    "model": str(path),
                    **changes,
                }
            )
            return model_fingerprint(SimpleNamespace(model_config=model, load_config=load_config), model_revision)

        return make

    @pytest.fixture
    def hub(self, fingerprint, tiny_model, tmp_path):
        """The fingerprint of ``org/name`` when ``main`` is a commit with these weights (None: none came here)."""
        from vllm.config import LoadConfig

        top = tmp_path / "cache" / "models--org--name"
        (top / "refs").mkdir(parents=True)

        def at(commit, weights=b"w", **changes):
            folder = top / "snapshots" / (commit * 40)
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(tiny_model) / "config.json", folder)
            if weights is not None:
                (folder / "model.safetensors").write_bytes(weights)
            (top / "refs" / "main").write_text(commit * 40)
            load_config = LoadConfig(download_dir=str(tmp_path / "cache"))
            return fingerprint(path="org/name", **{"load_config": load_config, **changes})

        return at

    def test_the_same_files_elsewhere_are_the_same_model(self, fingerprint, tiny_model, tmp_path):
        """A copy of the directory under another name has the same fingerprint."""
        copy = tmp_path / "copy"
        shutil.copytree(tiny_model, copy)
        assert fingerprint(copy) == fingerprint(tiny_model)

    def test_other_weights_under_one_name_are_another_model(self, fingerprint, tiny_model, tmp_path):
        """B 32: one changed byte of the weights, in a file of the same size, is another fingerprint."""
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
            fingerprint(model_revision="after the update"),
            fingerprint(revision="v2"),
            fingerprint(dtype="bfloat16"),
            fingerprint(quantization="awq"),
            fingerprint(path="hub/name", model_revision="a"),
            fingerprint(path="hub/other", model_revision="a"),
            fingerprint(path="hub/other", model_revision="b"),
        }
        assert len(found) == 8
        assert fingerprint(model_weights="s3://bucket/model") not in found

    def test_what_the_configuration_says_counts(self, fingerprint):
        """Each setting of the model's own, where its files came from, and how they are read."""
        from transformers import LlamaConfig
        from vllm.config import LoadConfig

        configs = [LlamaConfig(), LlamaConfig(rms_norm_eps=1e-5), LlamaConfig(rope_theta=5e5)]
        formats = [LoadConfig(load_format=name) for name in ("dummy", "bitsandbytes")]
        found = [fingerprint(hf_config=config) for config in configs]
        found += [fingerprint(load_config=load_config) for load_config in formats]
        assert len({fingerprint(), *found}) == 6

    def test_a_name_of_the_hub_got_other_weights_and_the_keys_of_the_old_ones(self, hub):
        """B567: what ``main`` is today is what counts, not the name; the same weights are the same model."""
        old = hub("1", b"old")
        assert hub("2", b"new") != old
        assert hub("3", b"old") == old

    def test_a_revision_that_vllm_was_told_is_what_it_has_loaded(self, hub):
        """B567: whatever ``main`` is by now."""
        old = hub("1", b"old", revision="1" * 40)
        assert hub("2", b"new", revision="1" * 40) == old

    def test_weights_that_nothing_tells_from_others_are_refused(self, hub, fingerprint):
        """B567: none came from the hub, or it is no name of it. An operator's word does; "dummy" has no weights."""
        from vllm.config import LoadConfig

        for ask in (lambda **told: hub("1", None, **told), lambda **told: fingerprint("org/other:Q4_K_M", **told)):
            with pytest.raises(ConfigError, match="set model_revision"):
                ask()
            assert ask(model_revision="a") != ask(model_revision="b")
            ask(load_config=LoadConfig(load_format="dummy"))

    def test_a_scheme_of_quantisation_counts(self, fingerprint):
        """B527: ``--quantization online`` says nothing of it; as it was written, or as vLLM has read it."""
        from vllm.config.quantization import QuantizationConfigArgs

        schemes = [{"linear": "fp8_per_tensor"}, {"linear": "mxfp8"}, {"linear": "mxfp8", "ignore": ["*q_proj*"]}]
        found = [fingerprint(quantization="online", quantization_config=scheme) for scheme in schemes]
        read = [QuantizationConfigArgs(**scheme) for scheme in schemes]
        found += [fingerprint(quantization="online", quantization_config=scheme) for scheme in read]
        assert len({*found, fingerprint(quantization="online")}) == 7
        again = QuantizationConfigArgs(**schemes[2])
        assert fingerprint(quantization="online", quantization_config=again) == found[5]

    def test_a_context_length_counts_where_angles_depend_on_it(self, fingerprint):
        """With a dynamic rotary scaling the maximal length is part of the fingerprint, else it is not."""
        from transformers import LlamaConfig

        assert fingerprint(max_model_len=1024) == fingerprint()
        scaled = LlamaConfig(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
        lengths = {fingerprint(hf_config=scaled, max_model_len=length) for length in (1024, 2048)}
        assert len(lengths) == 2

    def test_what_is_set_for_all_media_counts(self, fingerprint, tmp_path):
        """B462: no digest of a medium covers it. Limits, caches and kernels do not count, nor a path of scales."""
        from vllm.config import MultiModalConfig

        scales = [tmp_path / name for name in ("one.json", "copy.json", "other.scales")]
        for path, text in zip(scales, ("{}", "{}", '{"q": 2}'), strict=True):
            path.write_text(text)
        changes = [
            {},
            {"mm_processor_kwargs": {"num_crops": 4}},
            {"mm_processor_kwargs": {"num_crops": 16}},
            {"media_io_kwargs": {"video": {"num_frames": 40}}},
            {"mm_device_do_normalize": False},
            {"mm_encoder_attn_dtype": "fp8"},
            {"mm_encoder_attn_dtype": "fp8", "mm_encoder_fp8_scale_path": str(scales[0])},
            {"mm_encoder_attn_dtype": "fp8", "mm_encoder_fp8_scale_path": str(scales[2])},
            {"video_pruning_rate": 0.5},
            {"video_pruning_rate": 0.5, "video_pruning_method": "vidcom2"},
        ]
        found = [fingerprint(multimodal_config=MultiModalConfig(**change)) for change in changes]
        assert len({fingerprint(), *found}) == len(changes) + 1
        same = {"mm_encoder_attn_dtype": "fp8", "mm_encoder_fp8_scale_path": str(scales[1])}
        assert fingerprint(multimodal_config=MultiModalConfig(**same)) == found[6]
        without = {"mm_processor_cache_gb": 0, "limit_per_prompt": {"image": 3}, "mm_encoder_tp_mode": "data"}
        assert fingerprint(multimodal_config=MultiModalConfig(**without)) == found[0]

    def test_a_setting_of_media_that_we_do_not_know_counts(self, fingerprint):
        """B462: one of a later vLLM."""
        import dataclasses

        from vllm.config import MultiModalConfig

        @dataclasses.dataclass
        class Later(MultiModalConfig):
            mm_dithering: int = 0

        assert fingerprint(multimodal_config=Later()) != fingerprint(multimodal_config=Later(mm_dithering=1))

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

    @pytest.mark.parametrize("size", [3 << 20, 8 << 20])
    def test_large_files_are_sampled(self, tmp_path, size):
        """B567: a short file is read whole; whatever is replaced of a long one, if it is a MiB or more, is seen."""
        file = tmp_path / "model.safetensors"
        data = bytearray(size)
        file.write_bytes(data)
        before = files_digest(str(tmp_path))
        wide = 1 if size < 4 << 20 else 1 << 20
        for at in [*range(0, size - wide, 700_001), size - wide, size - 1]:
            data[at : at + wide] = b"x" * min(wide, size - at)
            file.write_bytes(data)
            assert files_digest(str(tmp_path)) != before
            data[:] = bytes(size)
        assert files_digest(str(file)) == files_digest(str(file))
