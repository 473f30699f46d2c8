"""vLLM's geometry as ours, and what of it we do not support, said at start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from qkvault.config import Config
from qkvault.errors import ConfigError, LayoutMismatch
from qkvault.integrations.vllm.fingerprint import model_fingerprint
from qkvault.keys import KeySpace
from qkvault.layout import ChunkLayout
from qkvault.paged import PagedConnector
from qkvault.types import GRAIN_TOKENS, CacheKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

_TRANSPOSING_ISAS: Final = frozenset({"vec", "vec16"})  # CPU kernels whose pages we have compared with a reference
_PLAIN_QUANTIZATION: Final = frozenset({"NONE", "FP8_PER_TENSOR"})


def require_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> AttentionSpec:
    """The one attention spec of the engine. Raises ConfigError, saying what to change, for what is not supported."""
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    refusals = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "speculative decoding other than ngram": speculative is not None and speculative.method != "ngram",
    }
    for what, is_used in refusals.items():
        if is_used:
            msg = f"QKVault does not support {what} yet: start vLLM without it, or without the connector"
            raise ConfigError(msg)
    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if kinds not in (["FullAttentionSpec"], ["MLAAttentionSpec"]):
        found = ", ".join(kinds) or "none"
        msg = f"QKVault supports models with one group of full attention layers; this model has: {found}"
        raise ConfigError(msg)
    spec: AttentionSpec = groups[0].kv_cache_spec
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        msg = "QKVault does not support sliding-window or chunked attention yet"
        raise ConfigError(msg)
    width_bytes = (spec.head_size + spec.head_size_v) * spec.dtype.itemsize
    is_plain = spec.num_heads == spec.num_kv_heads and spec.tokens_per_state == 1
    if spec.kv_quant_mode.name not in _PLAIN_QUANTIZATION:
        msg = f"QKVault does not support KV quantised as {spec.kv_quant_mode.name}: use another --kv-cache-dtype"
        raise ConfigError(msg)
    if not is_plain or spec.state_content_size_bytes != width_bytes:
        msg = "QKVault does not support an attention backend that packs K and V: use another --attention-backend"
        raise ConfigError(msg)
    return spec


def key_spaces(
    vllm_config: VllmConfig, spec: AttentionSpec, layout: ChunkLayout, config: Config
) -> tuple[KeySpace, ...]:
    """The space of each rank's keys: the same on the scheduler's side and on every worker's.

    The latent of MLA is the same on every rank: then all have one space, and the first one stores for all.
    """
    name = vllm_config.model_config.model
    cache_dtype = vllm_config.cache_config.cache_dtype
    fingerprint = f"{model_fingerprint(vllm_config, config.model_revision)}-{cache_dtype}"
    if layout.opaque:  # only the kernels that wrote such pages can read them
        fingerprint += f"-{_cpu_isa(vllm_config, spec)}"
    world_size = vllm_config.parallel_config.tensor_parallel_size
    spaces = tuple(
        KeySpace(
            model_name=Path(name).name if Path(name).exists() else name,
            model_fingerprint=fingerprint,
            world_size=world_size,
            worker_id=worker_id,
            dtype=layout.dtype,
            chunk_size=config.chunk_size,
            tensors=layout.logical,
            hash_algorithm=config.hash_algorithm,
        )
        for worker_id in range(world_size)
    )
    return tuple(space.folded() for space in spaces) if type(spec).__name__ == "MLAAttentionSpec" else spaces


def chunk_layout(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, spec: AttentionSpec, config: Config
) -> ChunkLayout:
    """How the engine lays out its blocks. Raises ConfigError if the chunk size does not fit the block size."""
    block_size = spec.block_size
    if config.chunk_size % block_size or block_size % GRAIN_TOKENS:
        msg = f"qkvault.chunk_size {config.chunk_size} must be a multiple of vLLM's block size {block_size}, that of 16"
        raise ConfigError(msg)
    has_parts = spec.head_size == spec.head_size_v  # else K and V, or the latent of MLA, are one part
    isa = _cpu_isa(vllm_config, spec)
    order = vllm_config.cache_config.get_resolved_kv_cache_layout().name.replace("C", "PD")
    return ChunkLayout(
        kind=CacheKind.KV,
        num_layers=len(kv_cache_config.kv_cache_groups[0].layer_names),
        num_heads=spec.num_kv_heads,
        head_size=spec.head_size if has_parts else spec.head_size + spec.head_size_v,
        num_parts=2 if has_parts else 1,
        dtype=str(spec.dtype).removeprefix("torch."),
        block_size=block_size,
        chunk_size=config.chunk_size,
        order=order if isa is None else "LBHPND",
        key_transposed=isa in _TRANSPOSING_ISAS,
        opaque=isa is not None and isa not in _TRANSPOSING_ISAS,
    )


def paged_connector(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    layout: ChunkLayout,
    kv_caches: Mapping[str, torch.Tensor],
) -> PagedConnector:
    """Over the pages that vLLM registered. Its kernels may cut each block into several.

    Raises LayoutMismatch unless the pages lie as ``layout`` says.
    """
    names = kv_cache_config.kv_cache_groups[0].layer_names
    if missing := sorted(set(names) - kv_caches.keys()):
        msg = f"vLLM registered no pages for {', '.join(missing)}"
        raise LayoutMismatch(msg)
    layer = vllm_config.compilation_config.static_forward_context.get(names[0])
    isa, expected = getattr(layer, "isa", None), _cpu_isa(vllm_config, kv_cache_config.kv_cache_groups[0].kv_cache_spec)
    if isa is not None and isa != expected:
        msg = f"vLLM's CPU kernels use {isa}, expected was {expected}"
        raise LayoutMismatch(msg)
    tensors = [kv_caches[name] for name in names]
    ratio, rest = divmod(tensors[0].shape[0], kv_cache_config.num_blocks)
    if rest or not ratio or layout.block_size % ratio:
        msg = f"{tensors[0].shape[0]} pages for {kv_cache_config.num_blocks} blocks of {layout.block_size} tokens"
        raise LayoutMismatch(msg)
    return PagedConnector(
        tensors, replace(layout, block_size=layout.block_size // ratio), kernel_blocks_per_block=ratio
    )


def _cpu_isa(vllm_config: VllmConfig, spec: AttentionSpec) -> str | None:
    """What decides how vLLM's CPU kernels lay out a page; None where others run."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or type(spec).__name__ != "FullAttentionSpec":
        return None
    from vllm.v1.attention.backends.cpu_attn import (
        _get_attn_isa,
    )  # there is no public way to ask on the scheduler's side

    model_dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    return str(_get_attn_isa(model_dtype, spec.block_size, spec.head_size, cache_dtype))
