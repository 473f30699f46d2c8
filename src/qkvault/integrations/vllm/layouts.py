"""vLLM's geometry as ours, and what of it we do not support, said at start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from qkvault.config import Config
from qkvault.errors import ConfigError
from qkvault.integrations.vllm.fingerprint import model_fingerprint
from qkvault.keys import KeySpace
from qkvault.layout import ChunkLayout
from qkvault.types import GRAIN_TOKENS, CacheKind

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

_TRANSPOSING_ISAS: Final = frozenset({"vec"})  # CPU kernels whose pages we have compared with a reference
_PLAIN_QUANTIZATION: Final = frozenset({"NONE", "FP8_PER_TENSOR"})


def require_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> AttentionSpec:
    """The one attention spec of the engine. Raises ConfigError, saying what to change, for what is not supported."""
    from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec  # only under vLLM

    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    refusals = {
        "tensor parallelism": parallel.tensor_parallel_size > 1,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "a draft model": speculative is not None and speculative.method != "ngram",
    }
    for what, is_used in refusals.items():
        if is_used:
            msg = f"QKVault does not support {what} yet: start vLLM without it, or without the connector"
            raise ConfigError(msg)
    groups = kv_cache_config.kv_cache_groups
    spec = groups[0].kv_cache_spec if groups else None
    if len(groups) != 1 or not isinstance(spec, FullAttentionSpec) or not isinstance(spec, AttentionSpec):
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups) or "none"
        msg = f"QKVault supports models with one group of full attention layers; this model has: {kinds}"
        raise ConfigError(msg)
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        msg = "QKVault does not support sliding-window or chunked attention yet"
        raise ConfigError(msg)
    if spec.kv_quant_mode.name not in _PLAIN_QUANTIZATION:
        msg = f"QKVault does not support KV quantised as {spec.kv_quant_mode.name}: use another --kv-cache-dtype"
        raise ConfigError(msg)
    return spec


def key_space(vllm_config: VllmConfig, layout: ChunkLayout, config: Config) -> KeySpace:
    """The space of this engine's keys: the same on the scheduler's side and on the worker's."""
    name = vllm_config.model_config.model
    cache_dtype = vllm_config.cache_config.cache_dtype
    return KeySpace(
        model_name=Path(name).name if Path(name).exists() else name,
        model_fingerprint=f"{model_fingerprint(vllm_config, config.model_revision)}-{cache_dtype}",
        dtype=layout.dtype,
        chunk_size=config.chunk_size,
        tensors=layout.logical,
        hash_algorithm=config.hash_algorithm,
    )


def chunk_layout(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, spec: AttentionSpec, config: Config, isa: str | None = None
) -> ChunkLayout:
    """How the engine lays out its pages. ``isa`` is that of its CPU kernels, None elsewhere.

    Raises ConfigError if the chunk size does not fit the block size.
    """
    from vllm.v1.kv_cache_interface import MLAAttentionSpec  # only under vLLM

    block_size = spec.block_size
    if config.chunk_size % block_size or block_size % GRAIN_TOKENS:
        msg = f"qkvault.chunk_size {config.chunk_size} must be a multiple of vLLM's block size {block_size}, that of 16"
        raise ConfigError(msg)
    is_mla = isinstance(spec, MLAAttentionSpec)
    order = vllm_config.cache_config.get_resolved_kv_cache_layout().name.replace("C", "PD")
    return ChunkLayout(
        kind=CacheKind.KV,
        num_layers=len(kv_cache_config.kv_cache_groups[0].layer_names),
        num_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        num_parts=1 if is_mla else 2,
        dtype=str(spec.dtype).removeprefix("torch."),
        block_size=block_size,
        chunk_size=config.chunk_size,
        order=order if isa is None else "LBHPND",
        key_transposed=isa in _TRANSPOSING_ISAS,
        opaque=isa is not None and isa not in _TRANSPOSING_ISAS,
    )
