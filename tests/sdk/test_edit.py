"""Tokens dropped and keys moved: against what transformers computes at the new positions."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace

import pytest
import torch

from qkvault.keys import RequestIdentity
from qkvault.sdk import CacheTensors
from qkvault.sdk import edit as editing
from qkvault.sdk.edit import Rope, drop_tokens, modify, moved_up
from qkvault.types import CacheKind

PLAIN = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
SCALINGS = {
    "default": {"rope_theta": 10_000.0},
    "theta": {"rope_theta": 500_000.0},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 10_000.0},
    "linear, new": {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 20_000.0}},
    "llama3": {"rope_scaling": LLAMA3, "rope_theta": 500_000.0},
    "llama3, new": {"rope_parameters": {**LLAMA3, "rope_theta": 500_000.0}},
    "wide heads": {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
}


@pytest.fixture(params=SCALINGS)
def model(request):
    """A small model with random weights, and its config."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, attn_implementation="eager", **SCALINGS[request.param],
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval(), {**PLAIN, **SCALINGS[request.param]}


def test_a_moved_key_is_the_one_computed_there(model, run):
    """B301: for the default, linear and llama3 scalings, in both spellings; the same hidden state, in float32."""
    tokens, old = list(range(40)), list(range(900, 940))
    new = [*range(20), *range(1500, 1520)]
    before, after = run(model[0], tokens, old), run(model[0], tokens, new)
    moved = Rope.of(model[1]).shift(before.k, old, new)
    assert (before.k - after.k).abs().max() > 0.01
    assert (moved - after.k).abs().max() < 1e-6 * after.k.abs().max() * 4
    assert torch.equal(Rope.of(json.loads(model[0].config.to_json_string())).frequencies, Rope.of(model[1]).frequencies)
    rotary = model[0].model.rotary_emb.inv_freq
    assert torch.equal(Rope.of(model[1]).frequencies, rotary)


def test_keys_of_the_real_model_move(smollm, run):
    """B301: the first layer's hidden states do not depend on the position, so its keys can be compared."""
    tokens = list(range(500, 600))
    rope = Rope.of(json.loads(smollm.config.to_json_string()))
    old, new = list(range(300, 400)), list(range(100))
    before, after = run(smollm, tokens, old), run(smollm, tokens, new)
    moved = rope.shift(before.k[0], old, new)
    assert (moved - after.k[0]).abs().max() < 1e-5 * after.k[0].abs().max()


def test_only_the_part_that_is_turned_moves():
    """B301: of models that turn a part of each head; and a move to the same place changes nothing."""
    rope = Rope.of({**PLAIN, "model_type": "phi", "partial_rotary_factor": 0.5})
    k = torch.randn(2, 5, 3, 16)
    moved = rope.shift(k, range(5), range(10, 15))
    assert torch.equal(moved[..., 8:], k[..., 8:])
    assert not torch.equal(moved[..., :8], k[..., :8])
    assert torch.equal(rope.shift(k, range(5), range(5)), k)
    assert rope.shift(k.bfloat16(), range(5), range(5)).dtype == torch.bfloat16
    for wrong in ((range(4), range(5)), (range(5), range(4))):
        with pytest.raises(ValueError, match="old and"):
            rope.shift(k, *wrong)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "'mrope_section'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "'full_attention'"),
        ({"rope_parameters": {"rope_type": "default", "attention_factor": 2.0}}, "'attention_factor'"),
        ({"rope_scaling": {"type": "linear"}}, "factor None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "original_max_position_embeddings None"),
        ({"rope_scaling": "linear"}, "rope parameters 'linear'"),
        ({"model_type": "gptj"}, "model_type 'gptj'"),
        ({"model_type": None}, "model_type None"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"hidden_size": None}, "hidden_size None"),
        ({"rope_theta": -1}, "rope_theta -1"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(config, named):
    """B302."""
    with pytest.raises(ValueError, match=f"{named}.* is not understood|{named} is not understood"):
        Rope.of({**PLAIN, **config})


FIELDS = {"head_dim": 16, "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}


@pytest.mark.parametrize("left_out", FIELDS)
@pytest.mark.parametrize("model_type", sorted(editing._MODEL_TYPES))
def test_what_a_config_leaves_out_is_what_the_models_class_takes(model_type, left_out):
    """B420: or it is refused by name; never a number that others take."""
    transformers = pytest.importorskip("transformers")
    said = {name: value for name, value in FIELDS.items() if name != left_out}
    config = transformers.AutoConfig.for_model(model_type, hidden_size=64, num_attention_heads=4, **said)
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    (rotary,) = [value for name, value in vars(module).items() if name.endswith("RotaryEmbedding")]
    true = rotary(config).inv_freq
    told = {**PLAIN, "model_type": model_type, **said}
    if left_out == editing._OTHERWISE.get(model_type):
        with pytest.raises(ValueError, match=f"a {model_type} without {left_out} is not understood"):
            Rope.of(told)
    else:
        assert torch.equal(Rope.of(told).frequencies, true)


def test_keys_of_other_heads_are_refused():
    """B420: what is turned covers the head, unless the config says that a part is."""
    rope = Rope.of(PLAIN)
    for size in (8, 32):
        with pytest.raises(ValueError, match="heads of 16, 16 turned"):
            rope.shift(torch.zeros(1, 5, 2, size), range(5), range(5))
    part = Rope.of({**PLAIN, "partial_rotary_factor": 0.5})
    with pytest.raises(ValueError, match="heads of 16, 8 turned"):
        part.shift(torch.zeros(1, 5, 2, 32), range(5), range(5))
    assert part.shift(torch.zeros(1, 5, 2, 16), range(5), range(5)).shape[-1] == 16
    for bare in (Rope(torch.ones(4)), Rope(torch.ones(4), 6)):
        with pytest.raises(ValueError, match="8 turned"):
            bare.shift(torch.zeros(1, 5, 2, 6), range(5), range(5))


class TestEdits:
    @pytest.fixture
    def context(self, here, open_context, make_spaces, prompt):
        layers, _, heads, head_size = prompt.k.shape
        context = open_context(here, spaces=make_spaces(layers=layers, heads=heads, head_size=head_size))
        context.store([prompt.k, prompt.v], prompt.tokens)
        return context

    @pytest.fixture
    def rope(self, smollm):
        return Rope.of(json.loads(smollm.config.to_json_string()))

    def test_tokens_are_dropped_and_the_rest_moves_up(self, context, rope, prompt):
        """B110, B303: stored under the tokens that are left, and found there by whoever asks for those."""
        keep = [*range(4), *range(50, 150, 2), *range(150, 160)]
        edited = drop_tokens(context, [*prompt.tokens, 7, 8], keep, rope)
        assert edited.tokens == [*(prompt.tokens[at] for at in keep), 7, 8]
        assert edited.num_cached_tokens == 64
        assert edited.written == (64, 0, {})
        found = context.retrieve(edited.tokens)
        assert found.span == (0, 64)
        assert torch.equal(found.v, prompt.v[:, keep])
        assert torch.equal(found.k, rope.shift(prompt.k[:, keep], keep, range(64)))
        assert torch.equal(context.retrieve(prompt.tokens).k, prompt.k)

    def test_an_edited_prefix_is_one_that_the_model_goes_on_from(self, context, rope, prompt, smollm, run):
        """B303: with a prefix dropped that nobody looks at, the model says what it would have said."""
        transformers = pytest.importorskip("transformers")
        edited = drop_tokens(context, prompt.tokens, range(160), rope, into=RequestIdentity(cache_salt="edit"))
        found = context.retrieve(edited.tokens, identity=RequestIdentity(cache_salt="edit"))
        cache = transformers.DynamicCache()
        for layer in found.layers:
            k, v = (part[layer, :150].transpose(0, 1)[None] for part in (found.k, found.v))
            cache.update(k, v, layer)
        with torch.no_grad():
            done = smollm(torch.tensor([prompt.tokens[150:]]), past_key_values=cache)
        assert (done.logits[0] - prompt.logits[150:]).abs().max() < 1e-3

    def test_any_other_edit(self, context, prompt):
        """B110, B304: under the same tokens it needs a word, under another salt it harms nobody."""

        def louder(tensors, tokens):
            return replace(tensors, parts=(tensors.k, tensors.v * 2)), tokens

        apart = RequestIdentity(cache_salt="edit")
        assert modify(context, prompt.tokens, louder).written == (0, 160, {})
        assert modify(context, prompt.tokens, louder, into=apart).written == (160, 0, {})
        assert torch.equal(context.retrieve(prompt.tokens).v, prompt.v)
        assert torch.equal(context.retrieve(prompt.tokens, identity=apart).v, prompt.v * 2)
        assert modify(context, prompt.tokens, louder, overwrite=True).written == (160, 0, {})
        assert torch.equal(context.retrieve(prompt.tokens).v, prompt.v * 2)

    def test_of_nothing_nothing_is_made(self, context, rope):
        """B304."""
        assert drop_tokens(context, [1, 2, 3], [0], rope) is None

    def test_only_keys_and_values_lose_tokens(self, rope):
        queries = CacheTensors.of(CacheKind.QUERY, [torch.zeros(1, 4, 2, 64)])
        with pytest.raises(ValueError, match="from K and V, not from query"):
            moved_up(queries, rope)
