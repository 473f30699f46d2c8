"""Edits of what is stored: tokens dropped, keys moved to the positions that the rest then has, stored anew.

Keys are stored after the rotary embedding: one that moves is turned by the difference. How a model turns them is read
from its ``config.json``; what is not understood is refused by name. Knows no engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, NoReturn

import torch

from qkvault.keys import RequestIdentity
from qkvault.sdk.context import Context
from qkvault.sdk.tensors import CacheTensors, Written
from qkvault.tokens import Tokens
from qkvault.types import CacheKind

_NOBODY: Final = RequestIdentity()
# Models that turn the two halves of a head against each other, in every layer alike.
_MODEL_TYPES: Final = frozenset(
    "gemma gemma2 granite llama mistral mixtral olmo2 phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe starcoder2".split()
)
_ROPE_TYPES: Final = ("default", "linear", "llama3")
_ROPE_FIELDS: Final = frozenset(
    "factor high_freq_factor low_freq_factor original_max_position_embeddings partial_rotary_factor rope_theta "
    "rope_type type".split()
)
# What the class of a model takes otherwise than most where its config says nothing.
_PECULIAR: Final = "gemma head_dim gemma2 head_dim mixtral rope_theta phi partial_rotary_factor qwen3 head_dim".split()
_OTHERWISE: Final = dict(zip(_PECULIAR[::2], _PECULIAR[1::2], strict=True))
_STRANGE: Final = ("no_rope_layers", "no_rope_layer_interval", "rope_interleave", "rope_local_base_freq")


@dataclass(frozen=True, eq=False)
class Rope:
    """How a model turns its keys by position. Immutable."""

    frequencies: torch.Tensor  # float32 [rotary_size / 2], radians a token, rounded as the model rounds them
    head_size: int | None = None  # None: a head is turned as a whole

    @classmethod
    def of(cls, config: Mapping[str, object]) -> Rope:
        """That of a model's ``config.json``: default, linear or llama3. Raises ValueError for what is not understood.

        Both spellings are read: ``rope_scaling`` with ``rope_theta`` beside it, and ``rope_parameters``. What a config
        leaves out is what most classes of models take then; for a model whose class takes another, it is refused.
        """
        scaling = _scaling_of(config)
        values = {**config, **{name: value for name, value in scaling.items() if value is not None}}
        if values.get(name := _OTHERWISE.get(str(config["model_type"]), "model_type")) is None:
            _refuse(f"a {config['model_type']} without {name}")
        if values.get("head_dim") is None:
            values["head_dim"] = _number(values, "hidden_size") // _number(values, "num_attention_heads")
        head_size = int(_number(values, "head_dim"))
        size = int(head_size * _number(values, "partial_rotary_factor", 1.0))
        exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
        frequencies = 1.0 / (_number(values, "rope_theta", 10_000.0) ** exponents)
        if scaling["rope_type"] == "linear":
            frequencies = frequencies / _number(values, "factor")
        elif scaling["rope_type"] == "llama3":
            frequencies = _llama3(frequencies, values)
        return cls(frequencies, head_size)

    def shift(self, k: torch.Tensor, old: Iterable[int], new: Iterable[int]) -> torch.Tensor:
        """``k [..., tokens, heads, head_size]``, turned from positions ``old`` to ``new``, in its own dtype.

        What the model itself computes at ``new`` for the same hidden states, but for the rounding of a turn in float32.
        Raises ValueError if there are other than one of each for a token, or heads are not of the model's size.
        """
        before, after = (torch.as_tensor(list(each), dtype=torch.int64) for each in (old, new))
        half = len(self.frequencies)
        head_size = 2 * half if self.head_size is None else self.head_size
        if not k.shape[-3] == len(before) == len(after) or k.shape[-1] != head_size or head_size < 2 * half:
            msg = f"{len(before)} old and {len(after)} new, K {list(k.shape)}, heads of {head_size}, {2 * half} turned"
            raise ValueError(msg)
        # Each angle rounded as in the model, so that the old turn is undone exactly.
        angles = [(each.float()[:, None] * self.frequencies).double() for each in (before, after)]
        turn = (angles[1] - angles[0])[:, None]  # [tokens, 1, half]
        cos, sin = turn.cos().float(), turn.sin().float()
        first, second = k[..., :half].float(), k[..., half : 2 * half].float()
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(k.dtype)
        return torch.cat((turned, k[..., 2 * half :]), dim=-1)


class Edited(NamedTuple):
    """A prompt that was edited and stored."""

    tokens: list[int]  # of the new prompt, those that are not stored included
    num_cached_tokens: int  # its first ones, whose tensors were handed to the store
    written: Written


Modify = Callable[[CacheTensors, list[int]], tuple[CacheTensors, Sequence[int]]]


def modify(
    context: Context,
    tokens: Tokens,
    edit: Modify,
    *,
    overwrite: bool = False,
    identity: RequestIdentity = _NOBODY,
    into: RequestIdentity | None = None,
) -> Edited | None:
    """Retrieve, have ``edit(tensors, their tokens)`` make new tensors and tokens, store those. None: nothing is stored.

    What follows the tokens that are stored is left as it is, behind the new ones. Under the same tokens an edit needs
    ``overwrite``, or ``into``: another identity, under whose salt the edited prompt harms nobody. Raises as
    ``Context.store`` does.
    """
    found = context.retrieve(tokens, identity=identity)
    if found is None:
        return None
    ids = [int(token) for token in tokens]
    tensors, kept = edit(found, ids[: found.span.stop])
    new = [*kept, *ids[found.span.stop :]]
    written = context.store(tensors, list(kept), overwrite=overwrite, identity=identity if into is None else into)
    return Edited(new, tensors.num_tokens, written)


def drop_tokens(
    context: Context,
    tokens: Tokens,
    keep: Iterable[int],
    rope: Rope,
    *,
    overwrite: bool = False,
    identity: RequestIdentity = _NOBODY,
    into: RequestIdentity | None = None,
) -> Edited | None:
    """Store ``tokens`` anew with only those at the positions ``keep``; what is not cached of them stays, all of it.

    The rest moves up, and K with it. The values are those that were computed when the dropped tokens were there: that
    is the point. None if nothing is stored of ``tokens``. Raises ValueError if ``context`` is not one of K and V.
    """
    wanted = sorted(set(keep))

    def edit(tensors: CacheTensors, ids: list[int]) -> tuple[CacheTensors, Sequence[int]]:
        kept = [at for at in wanted if at < len(ids)]
        return moved_up(tensors.rows(kept), rope), [ids[at] for at in kept]

    return modify(context, tokens, edit, overwrite=overwrite, identity=identity, into=into)


def moved_up(tensors: CacheTensors, rope: Rope) -> CacheTensors:
    """K and V at the positions from ``start`` on, without holes. Raises ValueError if these are not K and V."""
    if tensors.kind is not CacheKind.KV or tensors.k is None or tensors.v is None:
        msg = f"tokens are dropped from K and V, not from {tensors.kind.value} of {len(tensors.parts)} parts"
        raise ValueError(msg)
    positions = torch.arange(tensors.start, tensors.start + tensors.num_tokens)
    k = rope.shift(tensors.k, tensors.positions.tolist(), positions.tolist())
    return replace(tensors, parts=(k, tensors.v), positions=positions)


def _scaling_of(config: Mapping[str, object]) -> Mapping[str, object]:
    """What a config says of the rotary embedding, in either spelling. Raises ValueError for what is not understood."""
    if (model_type := config.get("model_type")) not in _MODEL_TYPES:
        _refuse(f"model_type {model_type!r}")
    for name in _STRANGE:
        if config.get(name):
            _refuse(name)
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        _refuse(f"rope parameters {scaling!r}")
    for name in scaling:
        if name not in _ROPE_FIELDS:
            _refuse(f"the rope parameter {name!r}")
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in _ROPE_TYPES:
        _refuse(f"rope_type {rope_type!r}")
    return {**scaling, "rope_type": rope_type}


def _llama3(frequencies: torch.Tensor, values: Mapping[str, object]) -> torch.Tensor:
    # Long waves are slowed down by the factor, short ones not at all, those between in part.
    factor, context = _number(values, "factor"), _number(values, "original_max_position_embeddings")
    low, high = _number(values, "low_freq_factor"), _number(values, "high_freq_factor")
    lengths = 2 * math.pi / frequencies
    slowed = torch.where(lengths > context / low, frequencies / factor, frequencies)
    share = (context / lengths - low) / (high - low)
    between = (1 - share) * slowed / factor + share * slowed
    is_between = ~(lengths < context / high) & ~(lengths > context / low)
    return torch.where(is_between, between, slowed)


def _number(values: Mapping[str, object], name: str, otherwise: float | None = None) -> float:
    value = values.get(name)
    value = otherwise if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        _refuse(f"{name} {value!r}")
    return value


def _refuse(what: str) -> NoReturn:
    msg = f"{what} is not understood: keys of this model cannot be moved"
    raise ValueError(msg)
