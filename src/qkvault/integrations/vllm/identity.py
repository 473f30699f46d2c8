"""What of a vLLM request, besides its tokens, decides the bytes of its KV: or why the request must not be cached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from qkvault.integrations.vllm.fingerprint import adapter_fingerprint
from qkvault.keys import TAG_PREFIXES, MediaSpan, RequestIdentity

if TYPE_CHECKING:
    from vllm.v1.request import Request

_PREFIX: Final = "qkvault."
_SKIP: Final = "qkvault.skip"


def identity_of(request: Request) -> tuple[RequestIdentity, str | None]:
    """The request's identity, and the reason not to cache it (None: cache it).

    A request that carries something which changes its KV and which we cannot name is refused, never guessed at.
    """
    empty = RequestIdentity()
    if request.prompt_embeds is not None:
        return empty, "its prompt has embeddings instead of tokens"
    if request.pooling_params is not None:
        return empty, "it is a pooling request"
    if request.resumable:
        return empty, "its prompt is streamed"
    params = request.kv_transfer_params or {}
    if params.get(_SKIP):
        return empty, "it asks not to be cached"
    if (unknown := _unknown_parameter(params)) is not None:
        return empty, f"unknown parameter {unknown!r}"
    media = []
    for feature in request.mm_features:
        digest = feature.identifier
        if not digest:
            return empty, f"its {feature.modality} has no digest"
        span = feature.mm_position
        media.append(MediaSpan(digest=digest, start=span.offset, length=span.length, kind=feature.modality))
    identity = RequestIdentity(
        cache_salt=request.cache_salt or "",
        adapter=_adapter_of(request),
        media=tuple(media),
    ).with_request_configs(params)
    return identity, identity.uncacheable_reason


def _adapter_of(request: Request) -> str:
    adapter = request.lora_request
    if adapter is None:
        return ""
    return f"{adapter.lora_name}:{adapter_fingerprint(adapter.lora_path)}"


def _unknown_parameter(params: Mapping[str, object]) -> str | None:
    for name in params:
        if name.startswith(_PREFIX) and name != _SKIP and not name.startswith(TAG_PREFIXES):
            return name
    return None
