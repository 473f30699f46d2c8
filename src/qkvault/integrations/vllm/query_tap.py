"""The only file that knows how to get at the queries of an unpatched vLLM: each attention layer's ``impl.forward``.

vLLM looks it up anew at every call, in Python also when the model is compiled or replays piecewise graphs, so that an
attribute of the instance is seen by all modes but full graphs. The queries it gets are those that attention uses: after
RoPE and norms, this rank's heads, ``[rows, heads, head_size]``, rows in the order of the batch, maybe with padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from qkvault.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionImpl, AttentionMetadata

# Gets a layer's name, and its queries when it asks for them.
Show: TypeAlias = "Callable[[str, Callable[[], torch.Tensor]], None]"
_FORWARD: Final = "forward"


class QueryTap:
    """Shows the queries of layers before their attention runs, until it is closed. For the model's thread."""

    def __init__(self, layers: Mapping[str, Attention], show: Show) -> None:
        """``show`` must not raise, but for what it asks."""
        self._show: Show | None = show  # None: closed
        self._ours: list[tuple[AttentionImpl, object, object]] = []  # with what is there now, and what was before
        for name, layer in layers.items():
            # As a rule nothing was there, since the class has the method; or somebody else's wrapper.
            before = vars(layer.impl).get(_FORWARD)
            setattr(layer.impl, _FORWARD, wrapper := self._wrapped(name, layer.impl.forward))
            self._ours.append((layer.impl, wrapper, before))

    def close(self) -> None:
        """Give vLLM its own methods back. Idempotent. A wrapper over ours is left there, and ours shows nothing."""
        self._show = None
        for impl, wrapper, before in self._ours:
            if vars(impl).get(_FORWARD) is not wrapper:
                continue
            if before is None:
                delattr(impl, _FORWARD)
            else:
                setattr(impl, _FORWARD, before)
        self._ours = []

    def _wrapped(self, name: str, forward: Callable[..., object]) -> Callable[..., object]:
        # seam: what vLLM hands over is not ours to know, but for the queries behind the layer
        def shown(*args: object, **kwargs: object) -> object:
            if self._show is not None:
                self._show(name, lambda: cast("torch.Tensor", args[1]))
            return forward(*args, **kwargs)

        return shown


def slot_mapping_of(layer_name: str, attn_metadata: AttentionMetadata | None = None) -> torch.Tensor | None:
    """Which KV slot each row of the running step writes, ``[rows]`` or fewer; None if vLLM does not say."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if is_forward_context_available():
        mappings = get_forward_context().slot_mapping
        if isinstance(mappings, dict) and layer_name in mappings:
            mapping: torch.Tensor = mappings[layer_name]
            return mapping
    return getattr(attn_metadata, "slot_mapping", None)


def attention_layers(
    vllm_config: VllmConfig, layer_names: Sequence[str], numbers: Sequence[int] | None
) -> dict[str, Attention]:
    """The layers to be captured, by name, in the model's order; ``numbers`` counts in ``layer_names`` (None: all).

    Raises ConfigError, saying what to change, for layers whose queries cannot be had or would not be the model's.
    """
    if numbers is not None and (unknown := [number for number in numbers if not 0 <= number < len(layer_names)]):
        msg = f"q_layers: there is no layer {unknown[0]} among {len(layer_names)}: they count from 0"
        raise ConfigError(msg)
    context = vllm_config.compilation_config.static_forward_context
    names = layer_names if numbers is None else [layer_names[number] for number in numbers]
    layers = {name: context.get(name) for name in names}
    for name, layer in layers.items():
        if problem := _problem(layer, is_eager=vllm_config.model_config.enforce_eager):
            msg = f"QKVault cannot capture the queries of {name}, {problem}; or set transfer_intermediate_tensors to no"
            raise ConfigError(msg)
    model = vllm_config.model_config
    wanted = (model.get_num_attention_heads(vllm_config.parallel_config), model.get_head_size())
    if others := {(layer.num_heads, layer.head_size) for layer in layers.values()} - {wanted}:
        msg = (
            f"QKVault captures queries of layers with the model's {wanted[0]} heads of {wanted[1]} elements only, some "
            f"have {sorted(others)}: name others in q_layers"
        )
        raise ConfigError(msg)
    return layers


def _problem(layer: object, *, is_eager: bool) -> str:
    from vllm.model_executor.layers.attention import Attention

    if not isinstance(layer, Attention):
        return f"a {type(layer).__name__}: of such layers (MLA, state spaces) none is captured yet"
    if layer.attn_type != "decoder":
        return f"an attention layer of kind {layer.attn_type}: name only decoder layers in q_layers"
    if layer.query_quant is not None:
        return "which quantises its queries with its KV: use another --kv-cache-dtype"
    if layer.use_direct_call and not is_eager:
        return "which this platform compiles into the model's graph: use --enforce-eager"
    return ""
