"""A reference of its own: q, k, v and attention weights of a prompt, as transformers computes them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def load_model(path: Path | str) -> Any:
    """The model at ``path`` in float32, with attention that shows its weights."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def run_model(model: Any, tokens: list[int], positions: Sequence[int] | None = None) -> SimpleNamespace:
    """One forward pass: q, k, v ``[layers, tokens, heads, head_size]`` after the rotary embedding, and the weights."""
    from transformers import DynamicCache

    queries = []
    module = sys.modules[type(model).__module__]
    original = module.apply_rotary_pos_emb

    def record(q, k, cos, sin, *args, **kwargs):
        rotated = original(q, k, cos, sin, *args, **kwargs)
        queries.append(rotated[0][0].transpose(0, 1).clone())
        return rotated

    module.apply_rotary_pos_emb = record
    try:
        with torch.no_grad():
            ids = torch.tensor([tokens])
            position_ids = None if positions is None else torch.tensor([positions])
            cache = DynamicCache()  # without the model's settings it keeps all keys, whatever the window
            done = model(ids, position_ids=position_ids, output_attentions=True, past_key_values=cache)
    finally:
        module.apply_rotary_pos_emb = original
    layers = done.past_key_values.layers
    k, v = (torch.stack([getattr(layer, name)[0].transpose(0, 1) for layer in layers]) for name in ("keys", "values"))
    weights = torch.stack([each[0] for each in done.attentions])  # [layers, heads, queries, keys]
    return SimpleNamespace(tokens=tokens, q=torch.stack(queries), k=k, v=v, weights=weights, logits=done.logits[0])
