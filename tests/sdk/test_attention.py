"""Attention from stored tensors against the weights that transformers shows, and the scores made of it."""

from __future__ import annotations

import math

import pytest
import torch

from qkvault.sdk import CacheTensors
from qkvault.sdk.attention import Attention, attention_mass, best, heavy_hitters, last_window
from qkvault.types import CacheKind


def tensors_of(run, through=None):
    """Queries and keys of a run; ``through`` a store for each kind, if one is given."""
    given = [CacheTensors.of(CacheKind.QUERY, [run.q]), CacheTensors.of(CacheKind.KV, [run.k, run.v])]
    for at, context in enumerate(through or ()):
        context.store(given[at], run.tokens)
        given[at] = context.retrieve(run.tokens)
    return given


def matrix(attention, layer, **options):
    """All blocks as one matrix [heads, queries, keys]."""
    blocks = [block.weights for block in attention.weights(layer, **options)]
    size = max(block.shape[2] for block in blocks)
    return torch.cat([torch.nn.functional.pad(block, (0, size - block.shape[2])) for block in blocks], dim=1)


@pytest.fixture
def through(here, open_context, make_spaces, prompt):
    """A store's contexts for Q and KV of the small model."""
    (layers, _, q_heads, head_size), kv_heads = prompt.q.shape, prompt.k.shape[2]
    shape = {"layers": layers, "head_size": head_size}
    kinds = [
        (CacheKind.QUERY, make_spaces(kind=CacheKind.QUERY, heads=q_heads, **shape)),
        (CacheKind.KV, make_spaces(heads=kv_heads, **shape)),
    ]
    return [open_context(here, kind=kind, spaces=spaces) for kind, spaces in kinds]


def test_it_is_the_attention_of_the_model(prompt, through):
    """B299: of a real model, from a store, in every layer, head and row."""
    attention = Attention(*tensors_of(prompt, through), block_elements=50_000)
    assert attention.queries.tolist() == list(range(160))
    for layer in attention.layers:
        assert (matrix(attention, layer) - prompt.weights[layer]).abs().max() < 1e-5


@pytest.mark.parametrize("window", [None, 7, 500])
def test_groups_of_heads_and_a_sliding_window(run, window):
    """B299: of a model with 2 key heads for 6 query heads."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=200, hidden_size=96, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, sliding_window=window, attn_implementation="eager",
    )  # fmt: skip
    done = run(transformers.MistralForCausalLM(config).eval(), torch.randint(0, 200, (50,)).tolist())
    attention = Attention(*tensors_of(done), sliding_window=window, block_elements=6 * 50 * 8)
    for layer in attention.layers:
        assert (matrix(attention, layer) - done.weights[layer]).abs().max() < 1e-5
    seen = (done.weights[0, 0] > 0).sum(0)
    assert attention.num_seeing.tolist() == seen.tolist()
    assert torch.allclose(attention_mass(attention), done.weights.sum(2) / seen, atol=1e-5)


def test_some_heads_and_queries(prompt):
    """B299."""
    attention = Attention(*tensors_of(prompt))
    (block,) = attention.weights(3, heads=[8, 0], span=(100, 120))
    assert block.positions.tolist() == list(range(100, 120))
    assert (block.weights - prompt.weights[3][[8, 0], 100:120, :120]).abs().max() < 1e-5
    with pytest.raises(ValueError, match="heads are numbered from 0 to 8"):
        next(attention.weights(3, heads=[9]))
    with pytest.raises(ValueError, match="layer 30"):
        next(attention.weights(30))


def test_no_block_is_larger_than_it_may_be(prompt):
    """B299: the whole matrix is never there."""
    attention = Attention(*tensors_of(prompt), block_elements=9 * 160 * 10)
    assert [block.weights.numel() <= 9 * 160 * 10 for block in attention.weights(0)] == [True] * 16


def test_queries_with_holes_give_the_rows_that_are_there(prompt):
    """B295, B299: and those whose keys are not all there give none."""
    q, kv = tensors_of(prompt)
    there = [*range(10, 40), *range(90, 160)]
    attention = Attention(q.rows(there), kv.rows(range(120)))
    assert attention.queries.tolist() == [at for at in there if at < 120]
    assert (matrix(attention, 5) - prompt.weights[5][:, [*range(10, 40), *range(90, 120)], :120]).abs().max() < 1e-5
    near = Attention(q.rows(there), kv.rows(range(80, 160)), sliding_window=20)
    assert near.queries.tolist() == list(range(99, 160))
    assert list(Attention(q, kv.rows([5])).weights(0)) == []


def test_what_does_not_fit_is_refused(prompt):
    q, kv = tensors_of(prompt)
    for queries, keys in ((kv, kv), (q, q), (q, CacheTensors.of(CacheKind.KV, [kv.k[:2], kv.v[:2]]))):
        with pytest.raises(ValueError, match="of the same layers are wanted, not"):
            Attention(queries, keys)
    with pytest.raises(ValueError, match="9 query heads of 64 do not share 2 key heads"):
        Attention(q, CacheTensors.of(CacheKind.KV, [kv.k[:, :, :2], kv.v[:, :, :2]]))
    with pytest.raises(ValueError, match="a window of 0"):
        Attention(q, kv, sliding_window=0)


class TestScores:
    """B300: scores are sums over the weights that transformers shows."""

    @pytest.fixture
    def attention(self, prompt):
        return Attention(*tensors_of(prompt))

    def test_accumulated_attention(self, attention, prompt):
        """B300: as in H2O."""
        assert torch.allclose(heavy_hitters(attention), prompt.weights.sum(2), atol=1e-4)
        assert torch.allclose(heavy_hitters(attention, layers=[4])[0], prompt.weights[4].sum(1), atol=1e-4)

    def test_mean_attention_of_those_that_see_a_token(self, attention, prompt):
        """B300."""
        mean = prompt.weights.sum(2) / torch.arange(160, 0, -1)
        assert torch.allclose(attention_mass(attention), mean, atol=1e-5)

    def test_what_the_last_queries_look_at(self, attention, prompt):
        """B300: as in SnapKV, by a loop over neighbours."""
        scores = last_window(attention, window=16, kernel=5, layers=[2, 9])
        seen = prompt.weights[[2, 9], :, 144:, :144].sum(2)
        for at in range(144):
            around = seen[..., max(0, at - 2) : at + 3].amax(-1)
            assert torch.allclose(scores[..., at], around, atol=1e-5)
        assert bool((scores[..., 144:] == math.inf).all())
        assert bool((last_window(attention, window=500, layers=[0]) == math.inf).all())
        for wrong in ({"window": 0}, {"kernel": 4}):
            with pytest.raises(ValueError, match="odd kernel"):
                last_window(attention, **wrong)

    def test_the_best_are_kept_with_the_first_and_the_last(self):
        """B300."""
        scores = torch.tensor([[[0.0, 5, 1, 4, 0, 0]], [[0, 1, 9, 0, 0, 0]]])
        assert best(scores, 2) == [1, 2]
        assert best(scores, 4, sinks=1, recent=1) == [0, 1, 2, 5]
        assert best(scores, 9) == [0, 1, 2, 3, 4, 5]
        assert best(scores, 0) == []
        with pytest.raises(ValueError, match="are more than 1"):
            best(scores, 1, sinks=1, recent=1)
