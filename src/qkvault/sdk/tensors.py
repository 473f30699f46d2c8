"""Tensors of a prompt with the tokens that they belong to, and what became of some that were to be stored.

Rows are tokens that are there: what is absent has no row. Knows no store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from qkvault.types import CacheKind


class Span(NamedTuple):
    """Tokens ``[start, stop)`` of a prompt."""

    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class CacheTensors:
    """Parts of a prompt's cache, all ranks in one. Immutable; the tensors are the holder's own."""

    kind: CacheKind
    parts: tuple[torch.Tensor, ...]  # K and V, or Q, or a latent: each [layers, tokens, heads, head_size]
    positions: torch.Tensor  # int64 [tokens], rising: which token of the prompt each row is
    layers: tuple[int, ...]  # the model's number of each layer
    start: int = 0  # the first token that was asked for

    @classmethod
    def of(cls, kind: CacheKind | str, parts: Sequence[torch.Tensor], *, start: int = 0) -> CacheTensors:
        """All layers of the tokens from ``start`` on, without holes. Raises ValueError for a wrong kind or parts."""
        if not parts or any(part.ndim != 4 or part.shape[:2] != parts[0].shape[:2] for part in parts):  # noqa: PLR2004  # [layers, tokens, heads, head_size]
            msg = f"parts must be [layers, tokens, heads, head_size] alike, not {[tuple(part.shape) for part in parts]}"
            raise ValueError(msg)
        num_layers, num_tokens = parts[0].shape[:2]
        return cls(
            CacheKind(kind), tuple(parts), torch.arange(start, start + num_tokens), tuple(range(num_layers)), start
        )

    @property
    def q(self) -> torch.Tensor | None:
        """Queries ``[layers, tokens, q_heads, head_size]``, after the rotary embedding; None for another kind."""
        return self.parts[0] if self.kind is CacheKind.QUERY else None

    @property
    def k(self) -> torch.Tensor | None:
        """Keys ``[layers, tokens, kv_heads, head_size]``, after the rotary embedding; None for another kind."""
        return self.parts[0] if self.kind is CacheKind.KV and len(self.parts) > 1 else None

    @property
    def v(self) -> torch.Tensor | None:
        """Values ``[layers, tokens, kv_heads, head_size]``; None for another kind."""
        return self.parts[1] if self.kind is CacheKind.KV and len(self.parts) > 1 else None

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    @property
    def span(self) -> Span:
        """From the first token that was asked for to behind the last one that is there."""
        return Span(self.start, int(self.positions[-1]) + 1 if self.num_tokens else self.start)

    @property
    def holes(self) -> tuple[Span, ...]:
        """Tokens inside the span that are not there."""
        before = torch.cat((torch.tensor([self.start - 1]), self.positions[:-1]))
        gaps = torch.nonzero(self.positions - before > 1).flatten().tolist() if self.num_tokens else []
        return tuple(Span(int(before[at]) + 1, int(self.positions[at])) for at in gaps)

    def layer_row(self, layer: int) -> int:
        """Where the model's ``layer`` is in the tensors. Raises ValueError if it is not."""
        if layer not in self.layers:
            msg = f"layer {layer} is not among {self.layers}"
            raise ValueError(msg)
        return self.layers.index(layer)

    def flat(self) -> torch.Tensor:
        """``[parts, layers, tokens, heads * head_size]``, the form that users of LMCache know (row 109)."""
        return torch.stack([part.flatten(2) for part in self.parts])

    def rows(self, positions: torch.Tensor | Sequence[int]) -> CacheTensors:
        """The tokens at ``positions`` (rising) only. Raises ValueError if one is not there."""
        wanted = torch.as_tensor(positions, dtype=torch.int64)
        at = torch.searchsorted(self.positions, wanted)
        is_here = at < self.num_tokens
        is_here &= self.positions[at.clamp(max=max(self.num_tokens - 1, 0))] == wanted if self.num_tokens else is_here
        if not bool(is_here.all()) or not bool((wanted.diff() > 0).all()):
            msg = f"positions must rise and be there; {wanted[~is_here].tolist()[:8]} are not"
            raise ValueError(msg)
        return replace(self, parts=tuple(part[:, at] for part in self.parts), positions=wanted)


class Written(NamedTuple):
    """What a store did, in tokens of the tensors. All of them are in one of the three."""

    written_tokens: int
    present_tokens: int  # were there already, and stay as they were
    rejected_tokens: dict[str, int]  # by reason: see ``Context.store``
