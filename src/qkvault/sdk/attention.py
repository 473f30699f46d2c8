"""Attention from stored queries and keys, and what it says of each token's importance.

In blocks of queries: the whole matrix is never there. Heads are those of the model, after the rotary embedding; several
query heads share one of K (GQA). Knows tensors, no store.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch

from qkvault.sdk.tensors import CacheTensors

_BLOCK_ELEMENTS: Final = 1 << 24  # of one block of weights: 64 MB


class Block(NamedTuple):
    """Weights of some queries over all keys up to the last of them."""

    positions: torch.Tensor  # int64 [queries]: which tokens ask
    weights: torch.Tensor  # float32 [heads, queries, keys], each row sums to 1


class Attention:
    """Causal softmax attention of one prompt. Immutable; any thread.

    A query whose keys are not all there has no weights: it is left out of ``queries``.
    """

    def __init__(
        self,
        queries: CacheTensors,
        keys: CacheTensors,
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
        block_elements: int = _BLOCK_ELEMENTS,
    ) -> None:
        """``scale`` is by default head_size**-0.5. A token sees itself and those before it, ``sliding_window`` in all.

        Raises ValueError if these are not queries and keys of the same layers, or heads do not divide.
        """
        q, k = queries.q, keys.k
        if q is None or k is None or queries.layers != keys.layers:
            got = f"{queries.kind.value} of {queries.layers}, {keys.kind.value} of {keys.layers}"
            msg = f"queries and keys of the same layers are wanted, not {got}"
            raise ValueError(msg)
        if q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
            msg = f"{q.shape[2]} query heads of {q.shape[3]} do not share {k.shape[2]} key heads of {k.shape[3]}"
            raise ValueError(msg)
        if sliding_window is not None and sliding_window < 1:
            msg = f"a window of {sliding_window} tokens"
            raise ValueError(msg)
        self._q, self._k, self._tensors = q, k, queries
        self._scale = q.shape[3] ** -0.5 if scale is None else scale
        self._block_elements = block_elements
        self.layers = queries.layers
        self.num_heads = q.shape[2]
        self.keys = keys.positions  # int64 [keys]
        reach = sys.maxsize >> 1 if sliding_window is None else sliding_window
        self._reach = reach  # tokens that a query sees at most
        self._first = (queries.positions + 1 - reach).clamp(min=0)  # int64 [queries]: the first token that each sees
        ends = torch.searchsorted(self.keys, queries.positions, right=True)
        starts = torch.searchsorted(self.keys, self._first)
        is_whole = ends - starts == queries.positions - self._first + 1
        self._rows = torch.nonzero(is_whole).flatten()
        self.queries = queries.positions[self._rows]  # int64 [queries]: tokens whose attention can be had

    def weights(
        self, layer: int, *, heads: Sequence[int] | None = None, span: tuple[int, int] | None = None
    ) -> Iterator[Block]:
        """Blocks of the queries of ``span`` (None: all), in order, for ``heads`` (None: all) of ``layer``.

        The last axis of a block's weights are the first of ``keys``. Raises ValueError for a layer or head that is not
        there.
        """
        at = self._tensors.layer_row(layer)
        chosen = list(range(self.num_heads) if heads is None else heads)
        if any(not 0 <= head < self.num_heads for head in chosen) or not chosen:
            msg = f"heads are numbered from 0 to {self.num_heads - 1}, not {chosen}"
            raise ValueError(msg)
        rows = self._rows
        if span is not None:
            rows = rows[(self.queries >= span[0]) & (self.queries < span[1])]
        group = self.num_heads // self._k.shape[2]
        k = self._k[at].float().permute(1, 2, 0)  # [kv_heads, head_size, keys]
        step = max(1, self._block_elements // (len(chosen) * max(1, len(self.keys))))
        for block in rows.split(step) if len(rows) else ():
            positions, first = self._tensors.positions[block], self._first[block]
            num_keys = int(torch.searchsorted(self.keys, positions[-1], right=True))
            q = self._q[at, block].float()  # [queries, heads, head_size]
            scores = torch.stack([q[:, head] @ k[head // group, :, :num_keys] for head in chosen]).mul_(self._scale)
            seen = self.keys[:num_keys]
            is_hidden = (seen > positions[:, None]) | (seen < first[:, None])
            yield Block(positions, torch.softmax(scores.masked_fill_(is_hidden, -math.inf), dim=-1))

    @property
    def num_seeing(self) -> torch.Tensor:
        """int64 ``[keys]``: by how many of ``queries`` each key is seen."""
        ends = torch.searchsorted(self.queries, self.keys + self._reach)
        return ends - torch.searchsorted(self.queries, self.keys)

    def received(
        self, layer: int, *, heads: Sequence[int] | None = None, span: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """float32 ``[heads, keys]``: the weights that each key gets from the queries of ``span``, summed."""
        num_heads = self.num_heads if heads is None else len(heads)
        total = torch.zeros(num_heads, len(self.keys))
        for block in self.weights(layer, heads=heads, span=span):
            total[:, : block.weights.shape[2]] += block.weights.sum(1)
        return total


def attention_mass(attention: Attention, *, layers: Sequence[int] | None = None) -> torch.Tensor:
    """float32 ``[layers, heads, keys]``: the mean weight that a token gets from the queries that see it.

    The mean, unlike the sum, does not favour tokens only for being early. A token that no query sees has 0.
    """
    chosen = attention.layers if layers is None else layers
    sums = torch.stack([attention.received(layer) for layer in chosen])
    return sums / attention.num_seeing.clamp(min=1)


def heavy_hitters(attention: Attention, *, layers: Sequence[int] | None = None) -> torch.Tensor:
    """float32 ``[layers, heads, keys]``: accumulated attention, the score of H2O.

    Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", 2023,
    arXiv:2306.14048. Its policy keeps the best half of a budget by this score and the most recent tokens for the other
    half: ``best(scores, count, recent=count // 2)``.
    """
    return torch.stack([attention.received(layer) for layer in (attention.layers if layers is None else layers)])


def last_window(
    attention: Attention, *, window: int = 32, kernel: int = 7, layers: Sequence[int] | None = None
) -> torch.Tensor:
    """float32 ``[layers, heads, keys]``: what the last ``window`` queries look at, smoothed: the score of SnapKV.

    Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024, arXiv:2404.14469. Weights of the
    observation window over the tokens before it are summed and pooled (the maximum of ``kernel`` neighbours), so that
    what surrounds a token that is looked at stays with it. Tokens of the window itself, which are always kept, have an
    infinite score. Raises ValueError for an even ``kernel`` or no window.
    """
    if window < 1 or kernel < 1 or kernel % 2 == 0:
        msg = f"a window of {window} tokens and an odd kernel are wanted, not {kernel}"
        raise ValueError(msg)
    observers = attention.queries[-window:]
    if not len(observers):
        msg = "no query has all of its keys"
        raise ValueError(msg)
    first, end = int(observers[0]), int(observers[-1]) + 1
    chosen = attention.layers if layers is None else layers
    sums = torch.stack([attention.received(layer, span=(first, end)) for layer in chosen])
    num_before = int(torch.searchsorted(attention.keys, first))
    scores = torch.full_like(sums, math.inf)
    if num_before:
        pooled = torch.nn.functional.max_pool1d(sums[..., :num_before], kernel, stride=1, padding=kernel // 2)
        scores[..., :num_before] = pooled
    return scores


def best(scores: torch.Tensor, count: int, *, sinks: int = 0, recent: int = 0) -> list[int]:
    """Which ``count`` of the tokens to keep: columns of ``scores [..., keys]``, whose other axes are averaged. Rising.

    The first ``sinks`` and the last ``recent`` are always kept. Raises ValueError if that is more than ``count``.
    """
    num_keys = scores.shape[-1]
    if not 0 <= sinks + recent <= count:
        msg = f"{sinks} first and {recent} last tokens are more than {count}"
        raise ValueError(msg)
    mean = scores.reshape(-1, num_keys).mean(0)
    mean[:sinks] = math.inf
    mean[max(0, num_keys - recent) :] = math.inf
    return sorted(mean.topk(min(count, num_keys)).indices.tolist())
