"""What of a vLLM request, besides its tokens, decides the bytes of its KV: or why the request must not be cached."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from qkvault.integrations.vllm.compat import UNKNOWN_FIELDS
from qkvault.integrations.vllm.fingerprint import Adapters
from qkvault.keys import TAG_PREFIXES, MediaSpan, RequestIdentity
from qkvault.units import parse_bool

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

_PREFIX: Final = "qkvault."
_SKIP: Final = "qkvault.skip"
QUERIES: Final = "qkvault.queries"  # whether its queries are captured
_SWITCHES: Final = (_SKIP, QUERIES)
_NOBODY: Final = RequestIdentity()
_NUMBERED: Final = re.compile(r"(^|:)renderer\d+-mm-\d+-")  # what vLLM calls a medium that it has not hashed


def vllm_hashes_media(vllm_config: VllmConfig) -> bool:
    """Whether vLLM names media by what they hold; else it numbers them, from 1 in each process."""
    media = vllm_config.model_config.multimodal_config
    return media is None or media.mm_processor_cache_gb != 0 or bool(vllm_config.cache_config.enable_prefix_caching)


def identity_of(
    request: Request, adapters: Adapters, *, hashes_media: bool = True
) -> tuple[RequestIdentity, str | None]:
    """The request's identity, and the reason not to cache it (None: cache it).

    A request that carries something which changes its KV and which we cannot name is refused, never guessed at.
    Without ``hashes_media`` no medium has a name: a number, hashed with the request's own settings, looks like one.
    """
    for name, default in UNKNOWN_FIELDS.items():
        if not _is_untouched(request, name, default):
            return _NOBODY, f"it has a {name!r}, and this QKVault does not know whether that changes its KV"
    if request.prompt_embeds is not None:
        return _NOBODY, "its prompt has embeddings instead of tokens"
    if request.pooling_params is not None:
        return _NOBODY, "it is a pooling request"
    if request.resumable:
        return _NOBODY, "its prompt is streamed"
    if any(not hashes_media or _NUMBERED.search(feature.identifier or "") for feature in request.mm_features):
        return _NOBODY, (
            "vLLM numbers its media and does not hash them: start vLLM with --enable-prefix-caching, or with "
            "--mm-processor-cache-gb above 0"
        )
    params = request.kv_transfer_params or {}
    if (reason := _refusal(params)) is not None:
        return _NOBODY, reason
    try:
        identity = RequestIdentity(
            cache_salt=request.cache_salt or "",
            adapter=adapters.name_of(request.lora_request) if request.lora_request is not None else "",
            media=tuple(
                MediaSpan(
                    digest=feature.identifier or b"",
                    start=feature.mm_position.offset,
                    length=feature.mm_position.length,
                    kind=feature.modality,
                )
                for feature in request.mm_features
            ),
        ).with_request_configs(params)
    except (OSError, ValueError) as error:  # an adapter that cannot be told, a span of no tokens, a tag of two values
        return _NOBODY, str(error)
    return identity, identity.uncacheable_reason


def _is_untouched(request: Request, name: str, default: object) -> bool:
    # Only of plain values ``==`` is a plain answer. What is kept under another name cannot be told, and counts.
    value = getattr(request, name, _NOBODY)
    is_plain = type(value) is type(default) and isinstance(value, (bool, int, float, str))
    return value is default or (is_plain and value == default)


def _refusal(params: Mapping[str, object]) -> str | None:
    for name in _SWITCHES:
        try:
            is_on = parse_bool(params.get(name, False))
        except ValueError as error:
            return f"{name}: {error}"
        if is_on and name == _SKIP:
            return "it asks not to be cached"
    for name in params:
        if name.startswith(_PREFIX) and name not in _SWITCHES and not name.startswith(TAG_PREFIXES):
            return f"unknown parameter {name!r}"
    return None
