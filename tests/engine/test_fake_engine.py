"""FakeEngine: what it writes is what it reads, in any layout, and nothing else passes for it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from qkvault.logical import write_logical
from qkvault.paged import PagedConnector, PageRun
from qkvault.testing.fake_engine import FakeEngine

ORDERS = "LBHNPD LBNHPD LHBNPD BLHNPD BLNHPD BHLNPD LPBNHD LPBHND LBPNHD LBPHND LBHPND".split()
CHUNK, BLOCK = 64, 16  # tokens


def some_layouts(layout):
    changes = [{"order": order} for order in ORDERS]
    changes += [{"order": "LBHPND", "key_transposed": True}, {"num_parts": 1, "num_heads": 1, "head_size": 24}]
    changes += [{"dtype": dtype} for dtype in ("float32", "uint8", "float8_e4m3fn", "float64")]
    return [msgspec.structs.replace(layout, **change) for change in changes]


def test_a_request_is_read_as_it_was_computed_in_every_layout(layout, make_tokens):
    """Every element of every part is at its place, as the cache's own views see it too."""
    for each in some_layouts(layout):
        fake = FakeEngine(each, 8)
        tokens = make_tokens(CHUNK + 7)
        table = fake.prefill(tokens)
        fake.verify(tokens, table)
        assert all(fake.holds(tokens, table))
        payload = bytearray(5 * each.block_bytes)
        PagedConnector(fake.tensors, each).batched_from_gpu([PageRun(memoryview(payload), 5, 0, table)])
        other = bytearray(5 * each.block_bytes)
        parts = FakeEngine(each, 5)
        straight = list(range(5))
        parts.compute(tokens, straight)
        write_logical(memoryview(other), each, _tensors(parts, straight, len(tokens)))
        whole = CHUNK // BLOCK
        pages = (each.num_planes, 5, -1)
        one, two = (np.frombuffer(data, np.uint8).reshape(pages)[:, :whole] for data in (payload, other))
        assert (one == two).all()


def _tensors(fake, table, num_tokens):
    import torch

    dtype = getattr(torch, fake.layout.dtype)
    return [torch.from_numpy(part.copy()).view(dtype) for part in fake.read(table, num_tokens)]


def test_contents_depend_on_all_tokens_before_and_on_the_weights(layout, make_tokens):
    """Another token changes its position and all after it, and none before; other weights change all."""
    tokens = make_tokens(3 * BLOCK)
    fake, stranger = FakeEngine(layout, 8), FakeEngine(layout, 8, seed=1)
    table = fake.prefill(tokens)
    changed = [*tokens[:20], 99_999, *tokens[21:]]
    assert fake.holds(changed, table) == [at < 20 for at in range(len(tokens))]
    assert FakeEngine(layout, 3).expected(tokens)[0].tolist() == fake.expected(tokens)[0].tolist()
    stranger.memory[:] = fake.memory
    assert not any(stranger.holds(tokens, table))
    parts = np.array(fake.expected(tokens))
    assert len(np.unique(parts)) > parts.size * 0.9


def test_a_wrong_element_is_named(layout, make_tokens):
    """verify tells part, layer, token, head and element of the first difference, in the range that it is asked for."""
    fake = FakeEngine(layout, 8)
    tokens = make_tokens(2 * BLOCK)
    table = fake.prefill(tokens)
    fake.memory[1] ^= 1  # layer 1
    with pytest.raises(AssertionError, match="part 0, layer 1, token 5, head 0, element 0"):
        fake.verify(tokens, table, 5)
    fake.compute(tokens, table, 5)
    fake.verify(tokens, table, 5)
    assert fake.holds(tokens, table) == [at >= 5 for at in range(len(tokens))]


def test_blocks_are_given_once_and_come_back(layout, make_tokens):
    """Tables grow, blocks belong to one request, and what is not there is ValueError."""
    fake = FakeEngine(layout, 6)
    table = fake.allocate(BLOCK + 1)
    longer = fake.allocate(4 * BLOCK, table)
    assert (longer[:2], len(set(longer)), fake.num_free_blocks) == (table, 4, 2)
    with pytest.raises(ValueError, match="3 blocks wanted, 2 are free"):
        fake.allocate(3 * BLOCK)
    fake.free(longer)
    assert fake.num_free_blocks == 6
    with pytest.raises(ValueError, match="freed twice"):
        fake.free(longer[:1])
    with pytest.raises(ValueError, match="freed twice"):
        fake.free([0, 0])


def test_scribbling_changes_its_blocks_only(layout, make_tokens):
    """Noise goes into the named blocks, whole, and into no other."""
    for each in some_layouts(layout):
        fake = FakeEngine(each, 4)
        before = fake.snapshot()
        fake.scribble([1, 3])
        after = fake.snapshot()
        assert (after[[0, 2]] == before[[0, 2]]).all()
        assert (after[[1, 3]] != before[[1, 3]]).mean() > 0.9
