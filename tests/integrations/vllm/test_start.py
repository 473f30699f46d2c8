"""What is refused at start, with a line that says what to change; and which vLLM we run under."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from qkvault.errors import ConfigError

pytestmark = pytest.mark.vllm


@pytest.fixture
def refusal(toy, tiny_model):
    """The message with which an engine of this configuration, or with these KV groups, is refused."""
    from qkvault.integrations.vllm import layouts

    def make(*, specs=None, parallel=None, speculative=None, **spec):
        fields = {"block_size": 16, "num_kv_heads": 1, "head_size": 32, "dtype": toy.torch.float32, **spec}
        specs = specs if specs is not None else [toy.FullAttentionSpec(**fields)]
        groups = [toy.KVCacheGroupSpec([f"layer{at}"], one) for at, one in enumerate(specs)]
        sizes = dict.fromkeys(
            ["tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size",
             "prefill_context_parallel_size"], 1,
        )  # fmt: skip
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(**sizes | (parallel or {})),
            speculative_config=SimpleNamespace(method=speculative) if speculative else None,
        )
        with pytest.raises(ConfigError) as raised:
            layouts.require_supported(config, SimpleNamespace(kv_cache_groups=groups))
        return str(raised.value)

    return make


@pytest.mark.parametrize(
    ("parallel", "word"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"prefill_context_parallel_size": 2}, "context parallelism"),
    ],
)
def test_several_ranks_are_refused(refusal, parallel, word):
    assert word in refusal(parallel=parallel)


@pytest.mark.parametrize("method", ["eagle", "draft_model", "mtp", "ngram_gpu"])
def test_drafts_of_a_model_are_refused(refusal, method):
    assert "speculative decoding other than ngram" in refusal(speculative=method)


def test_models_of_other_attention_are_refused(refusal, toy):
    """B130: Several groups, sliding windows, states and whatever else is not one group of full attention."""
    from vllm.v1.kv_cache_interface import RSWASpec, SlidingWindowSpec

    fields = {"block_size": 16, "num_kv_heads": 1, "head_size": 32, "dtype": toy.torch.float32}
    full, window = toy.FullAttentionSpec(**fields), SlidingWindowSpec(**fields, sliding_window=64)
    assert "FullAttentionSpec, SlidingWindowSpec" in refusal(specs=[full, window])
    assert "SlidingWindowSpec" in refusal(specs=[window])
    assert "RSWASpec" in refusal(specs=[RSWASpec(**fields, rswa_window=32)])
    assert "this model has: none" in refusal(specs=[])
    assert "sliding-window" in refusal(sliding_window=64)
    assert "chunked attention" in refusal(attention_chunk_size=64)


@pytest.mark.parametrize("mode", ["INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD", "NVFP4", "TURBOQUANT_4BIT_NC"])
def test_kv_with_scales_of_its_own_is_refused(refusal, mode):
    from vllm.v1.kv_cache_interface import KVQuantMode

    assert mode in refusal(kv_quant_mode=KVQuantMode[mode])


def test_backends_that_pack_pages_are_refused(refusal):
    assert "packs K and V" in refusal(num_head_slots=4)
    assert "packs K and V" in refusal(state_content_bytes=24)
    assert "packs K and V" in refusal(tokens_per_state=4)


def test_fp8_per_tensor_latents_and_unequal_widths_are_supported(toy, tiny_model):
    """MLA's latent, and V of another width than K, are one part as wide as both; scales for a whole tensor are fine."""
    from vllm.v1.kv_cache_interface import KVQuantMode, MLAAttentionSpec

    from qkvault import config as configuration
    from qkvault.integrations.vllm import layouts

    engine = toy.engine_config(tiny_model, {})
    plain = {"block_size": 16, "num_kv_heads": 1}
    specs = {
        (2, 32, "float32"): toy.FullAttentionSpec(**plain, head_size=32, dtype=toy.torch.float32),
        (1, 48, "float32"): toy.FullAttentionSpec(**plain, head_size=32, head_size_v=16, dtype=toy.torch.float32),
        (1, 576, "bfloat16"): MLAAttentionSpec(**plain, head_size=576, dtype=toy.torch.bfloat16),
        (2, 32, "uint8"): toy.FullAttentionSpec(
            **plain, head_size=32, dtype=toy.torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR
        ),
    }
    for wanted, spec in specs.items():
        groups = SimpleNamespace(kv_cache_groups=[toy.KVCacheGroupSpec(["layer"], spec)])
        assert layouts.require_supported(engine, groups) is spec
        layout = layouts.chunk_layout(engine, groups, spec, configuration.load(env={}).config)
        assert (layout.num_parts, layout.head_size, layout.dtype) == wanted


def test_kernels_that_pack_pages_their_own_way_have_keys_of_their_own(toy, tiny_model, monkeypatch):
    """Pages of CPU kernels that nobody else can read are found by engines with the same kernels only."""
    from qkvault import config as configuration
    from qkvault.integrations.vllm import layouts

    engine, settings = toy.engine_config(tiny_model, {}), configuration.load(env={}).config
    spec = toy.FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=toy.torch.float32)
    groups = SimpleNamespace(kv_cache_groups=[toy.KVCacheGroupSpec(["layer"], spec)])
    spaces = {}
    for isa in ("vec", None, "amx", "neon"):
        monkeypatch.setattr(layouts, "_cpu_isa", lambda *_, isa=isa: isa)
        layout = layouts.chunk_layout(engine, groups, spec, settings)
        spaces[isa] = layouts.key_spaces(engine, spec, layout, settings)[0].space_id
    assert spaces["vec"] == spaces[None]
    assert len(set(spaces.values())) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"qkvault.chunk_size": 80}, r"chunk_size 80 must be a multiple of vLLM's block size 32"),
        ({"qkvault.chunk_sise": 64}, r"unknown setting 'qkvault.chunk_sise' .* did you mean 'qkvault.chunk_size'"),
        ({"qkvault.max_local_cpu_size": 5}, r"is called qkvault.ram_bytes here"),
        ({"qkvault.save_decode": "maybe"}, r"qkvault.save_decode='maybe'"),
        ({"qkvault.hash_algorithm": "builtin", "qkvault.disk_path": "/nowhere"}, r"PYTHONHASHSEED"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_are_wrong_stop_the_start(toy_engine, settings, message, monkeypatch):
    """An unknown name, an impossible value and a chunk that is not whole blocks are said at once, and what is right."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match=message):
        toy_engine(block_size=32, settings=settings)


def test_settings_of_others_are_left_alone(toy_engine, prompts):
    """Keys without our prefix are somebody else's."""
    engine = toy_engine(settings={"lmcache.chunk_size": 1, "discard_partial_chunks": True})
    engine.ask(prompts(30))
    engine.assert_clean()


def test_a_start_that_fails_leaves_nothing(toy_engine, tmp_path, monkeypatch):
    """A store whose socket cannot be made is closed again."""
    from qkvault import embedded

    monkeypatch.setattr(embedded, "socket_address", lambda instance_id: f"unix://{tmp_path}")
    with pytest.raises(ConfigError, match="is not a socket"):
        toy_engine()
    assert embedded._stores == {}


def test_the_connector_is_known_by_name_and_by_module(tiny_model):
    """Both doors lead to one class, and registering it again is harmless."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from qkvault.integrations.vllm import register
    from qkvault.integrations.vllm.connector import QKVaultConnector

    for _ in range(2):
        register()
    by_name = KVTransferConfig(kv_connector="QKVaultConnector", kv_role="kv_both")
    by_module = KVTransferConfig(
        kv_connector="QKVaultConnector", kv_role="kv_both",
        kv_connector_module_path="qkvault.integrations.vllm.connector",
    )  # fmt: skip
    for config in (by_name, by_module):
        assert KVConnectorFactory.get_connector_class(config) is QKVaultConnector
        assert KVConnectorFactory.supports_hma_config(config)


def run_under(folder, code):
    """Run ``code`` where vLLM is an empty package in ``folder``."""
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text("")
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


class TestVersions:
    """vLLM's interface is checked when it is imported."""

    def test_the_installed_interface_fits(self):
        from qkvault.integrations.vllm import compat

        compat.require_interface(compat.KVConnectorBase_V1)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"request_finished": lambda self, request: None}, "request_finished takes request"),
            ({"start_load_kv": lambda self, forward_context, layers, **kwargs: None}, "takes forward_context, layers"),
            ({"get_finished": lambda self: None}, "get_finished takes nothing"),
            ({"build_prom_metrics": classmethod(lambda cls, config: None)}, "build_prom_metrics takes config"),
            ({"update_connector_output": None}, "has no update_connector_output"),
            ({"__init__": lambda self, vllm_config, role: None}, "__init__ takes vllm_config, role"),
        ],
    )
    def test_another_interface_is_refused_in_one_line(self, change, reason):
        """Methods that are gone, or called with other arguments, are named beside the versions that we support."""
        from qkvault.integrations.vllm import compat

        stub = type("Stub", (compat.KVConnectorBase_V1,), change)
        with pytest.raises(ImportError) as raised:
            compat.require_interface(stub)
        message = str(raised.value)
        assert reason in message
        assert f"supports vLLM {compat.SUPPORTED}" in message
        assert "\n" not in message

    def test_a_new_duty_is_refused(self):
        """A method that vLLM demands and that we do not have is named."""
        import abc

        from qkvault.integrations.vllm import compat

        duty = abc.abstractmethod(lambda self: None)
        stub = abc.ABCMeta("Stub", (compat.KVConnectorBase_V1,), {"offload_everything": duty})
        with pytest.raises(ImportError, match="Stub demands offload_everything"):
            compat.require_interface(stub)

    def test_another_vllm_is_refused_in_one_line(self, tmp_path):
        """Where vLLM lacks the modules that we build on, the import says which versions have them."""
        done = run_under(tmp_path, "import qkvault.integrations.vllm.connector")
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("ImportError: this QKVault supports vLLM 0.32, ")

    def test_a_vllm_without_a_registry_is_left_alone(self, tmp_path):
        """The plugin runs in each process of any vLLM, and must not break one that we do not support."""
        done = run_under(tmp_path, "from qkvault.integrations.vllm import register; register()")
        assert (done.returncode, done.stdout) == (0, "")
