"""Layouts: which byte of a payload is which element of K and V, in every order of pages."""

from __future__ import annotations

import functools
import itertools
import os

import msgspec
import numpy as np
import pytest
import torch

from qkvault.errors import LayoutMismatch
from qkvault.layout import ELEMENT_BYTES, ChunkLayout
from qkvault.logical import TORCH_DTYPES, convert, logical_views, write_logical
from qkvault.types import CacheKind

ORDERS = "LBHNPD LBNHPD LHBNPD BLHNPD BLNHPD BHLNPD LPBNHD LPBHND LBPNHD LBPHND LBHPND".split()
# order, and whether K is transposed: a K can be where a page ends in ND
FORMS = [(order, False) for order in ORDERS] + [(order, True) for order in ORDERS if order.endswith("ND")]
GQA = {"num_layers": 2, "num_heads": 3, "head_size": 8, "num_parts": 2}
MLA = {"num_layers": 2, "num_heads": 1, "head_size": 576, "num_parts": 1}
INDEXER = {"num_layers": 2, "num_heads": 1, "head_size": 132, "num_parts": 1}
SIZES = {"gqa": GQA, "mla": MLA, "indexer": INDEXER}
BLOCK_SIZES = [16, 24, 32, 64]
DTYPES = ["bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8"]


def make_layout(**changes) -> ChunkLayout:
    fields = {
        **GQA,
        "kind": CacheKind.KV,
        "dtype": "bfloat16",
        "block_size": 16,
        "chunk_size": 256,
        "order": "LBHNPD",
    }
    return ChunkLayout(**{**fields, **changes})


def random_payload(layout: ChunkLayout, num_tokens: int) -> memoryview:
    return memoryview(bytearray(os.urandom(layout.payload_bytes(num_tokens))))


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The elements as they are in memory, NaNs included."""
    unsigned = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(unsigned).numpy()


@functools.cache
def element_at(layout: ChunkLayout, num_blocks: int) -> np.ndarray:
    """Position in the payload of each element ``[part, layer, token, head, dimension]``, counted out by hand."""
    sizes = {
        "L": layout.num_layers,
        "B": num_blocks,
        "N": layout.block_size,
        "H": layout.num_heads,
        "P": layout.num_parts,
        "D": layout.head_size,
    }
    strides, step = {}, 1
    for axis in reversed(layout.order):
        strides[axis] = step
        step *= sizes[axis]
    shape = (layout.num_parts, layout.num_layers, num_blocks * layout.block_size, layout.num_heads, layout.head_size)
    part, layer, token, head, dimension = np.indices(shape)
    block, in_block = token // layout.block_size, token % layout.block_size
    square = in_block * strides["N"] + dimension * strides["D"]
    if layout.key_transposed:
        square = np.where(part == 0, dimension * layout.block_size + in_block, square)
    return square + part * strides["P"] + layer * strides["L"] + block * strides["B"] + head * strides["H"]


def expected_parts(payload: memoryview, layout: ChunkLayout, num_tokens: int) -> np.ndarray:
    """Bits of ``[part, layer, token, head, dimension]``."""
    elements = np.frombuffer(payload, f"i{layout.element_bytes}" if layout.element_bytes > 1 else "u1")
    positions = element_at(msgspec.structs.replace(layout, dtype="uint8"), layout.num_blocks(num_tokens))
    return elements[positions[:, :, :num_tokens]]


# The descriptor


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_planes_times_pages_is_the_payload(order, sizes):
    layout = make_layout(order=order, **sizes)
    elements = np.prod([*sizes.values()])
    assert layout.token_bytes == elements * 2
    assert layout.num_planes * layout.page_bytes == layout.block_bytes == 16 * layout.token_bytes
    assert layout.payload_bytes(256) == layout.num_blocks(256) * layout.block_bytes == 256 * layout.token_bytes
    assert layout.payload_bytes(17) == layout.payload_bytes(32) == 2 * layout.block_bytes
    assert sorted(layout.shape(7)) == sorted([7, 16, *sizes.values()])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"order": "LBHND"}, "each of the axes"),
        ({"order": "LBHNPP"}, "each of the axes"),
        ({"order": "LBHNPDD"}, "each of the axes"),
        ({"dtype": "float4"}, "unknown dtype"),
        ({"num_heads": 0}, "positive"),
        ({"block_size": -16}, "positive"),
        ({"block_size": 48}, "multiple"),
        ({"key_transposed": True}, "end in ND"),
    ],
)
def test_an_impossible_geometry_is_refused(changes, reason):
    with pytest.raises(ValueError, match=reason):
        make_layout(**changes)


CHANGES = {
    "kind": CacheKind.QUERY,
    "num_layers": 3,
    "num_heads": 4,
    "head_size": 16,
    "num_parts": 1,
    "dtype": "float16",
    "block_size": 32,
    "chunk_size": 512,
    "order": "LBHPND",
    "opaque": True,
}


def test_the_fingerprint_differs_for_every_layout_and_is_the_same_everywhere():
    layouts = [make_layout(), make_layout(order="LBHPND", key_transposed=True)]
    layouts += [make_layout(**{field: value}) for field, value in CHANGES.items()]
    assert len({layout.fingerprint for layout in layouts}) == len(layouts)
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(layouts[0]), type=ChunkLayout)
    assert copy == layouts[0]
    assert copy.fingerprint == make_layout().fingerprint == "62e21aa420aeb480"


@pytest.mark.parametrize("field", CHANGES)
def test_pages_are_the_same_when_all_but_the_chunk_size_agrees(field):
    assert make_layout().has_same_pages(make_layout(**{field: CHANGES[field]})) == (field == "chunk_size")


@pytest.mark.parametrize("field", CHANGES)
def test_tensors_are_the_same_when_what_they_hold_agrees(field):
    is_physical = field in {"block_size", "chunk_size", "order", "opaque"}
    if is_physical:
        make_layout().require_same_tensors(make_layout(**{field: CHANGES[field]}))
    else:
        with pytest.raises(LayoutMismatch, match="is not"):
            make_layout().require_same_tensors(make_layout(**{field: CHANGES[field]}))


def test_every_dtype_is_one_of_torch():
    assert {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()} == ELEMENT_BYTES


# Logical views


@pytest.mark.parametrize(("order", "key_transposed"), FORMS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_every_element_is_seen_where_it_is(order, key_transposed, sizes):
    """Views and writing agree, element by element, with positions counted out by hand."""
    for block_size, dtype in itertools.product(BLOCK_SIZES, DTYPES):
        layout = make_layout(
            order=order, key_transposed=key_transposed, block_size=block_size, chunk_size=192, dtype=dtype, **sizes
        )
        num_tokens = block_size + 3
        payload = random_payload(layout, num_tokens)
        expected = expected_parts(payload, layout, num_tokens)

        views = logical_views(payload, layout, num_tokens)
        assert [view.dtype for view in views] == [TORCH_DTYPES[dtype]] * layout.num_parts
        np.testing.assert_array_equal(np.stack([bits(view) for view in views]), expected)

        written = random_payload(layout, num_tokens)
        write_logical(written, layout, views)
        filled = expected_parts(written, layout, 2 * block_size)
        np.testing.assert_array_equal(filled[:, :, :num_tokens], expected)
        assert not filled[:, :, num_tokens:].any()


@pytest.mark.parametrize(("order", "key_transposed"), FORMS)
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_a_view_shares_memory_where_the_docstring_says_so(order, key_transposed, num_blocks):
    layout = make_layout(order=order, key_transposed=key_transposed)
    payload = random_payload(layout, 16 * num_blocks)
    views = logical_views(payload, layout, 16 * num_blocks)
    payload[:] = bytes(len(payload))
    is_even = num_blocks == 1 or "BN" in order
    assert [not view.view(torch.int16).any() for view in views] == [is_even] * 2


def test_writing_to_a_view_of_a_read_only_payload_changes_nothing():
    layout = make_layout(order="LBNHPD")
    payload = memoryview(bytes(random_payload(layout, 16)))
    before = bytes(payload)
    for view in logical_views(payload, layout, 16):
        view.zero_()
    assert payload == before


def test_parts_may_be_slices_of_larger_tensors():
    """What lies around the slices is not written, nor what lies behind the blocks of a payload."""
    layout = make_layout(order="LBHPND", key_transposed=True, dtype="float32")
    payload = random_payload(layout, 20)
    whole = torch.zeros(2, 2, 50, 3, 8)
    whole[:, :, 7:27] = torch.stack(logical_views(payload, layout, 20))
    longer = memoryview(bytearray(b"\x55" * (len(payload) + 10)))
    write_logical(longer, layout, [part[:, 7:27] for part in whole])
    np.testing.assert_array_equal(expected_parts(longer[:-10], layout, 20), expected_parts(payload, layout, 20))
    assert longer[-10:] == b"\x55" * 10


GOOD = torch.zeros(2, 20, 3, 8, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [GOOD],
        [GOOD, GOOD, GOOD],
        [GOOD, GOOD[:, :19]],
        [GOOD, GOOD.float()],
        [GOOD.transpose(1, 2)] * 2,
        [GOOD[0]] * 2,
        [GOOD[:, :0]] * 2,
        [GOOD.repeat(1, 4, 1, 1)] * 2,
        [GOOD.to("meta")] * 2,
    ],
    ids=range(10),
)
def test_parts_that_do_not_fit_are_refused_and_nothing_is_written(parts):
    layout = make_layout()
    payload = memoryview(bytearray(b"\x55" * layout.payload_bytes(20)))
    with pytest.raises(ValueError, match=r"parts|bytes"):
        write_logical(payload, layout, parts)
    assert payload == b"\x55" * len(payload)


def test_a_read_only_or_short_payload_is_refused():
    layout = make_layout()
    payload = random_payload(layout, 20)
    with pytest.raises(ValueError, match="read-only"):
        write_logical(payload.toreadonly(), layout, [GOOD, GOOD])
    with pytest.raises(ValueError, match="20 tokens take"):
        logical_views(payload[:-1], layout, 20)
    with pytest.raises(ValueError, match="0 tokens take"):
        logical_views(payload, layout, 0)


def test_packed_pages_are_copied_but_never_viewed():
    layout = make_layout(opaque=True)
    payload = random_payload(layout, 20)
    for act in (
        lambda: logical_views(payload, layout, 20),
        lambda: write_logical(payload, layout, [GOOD, GOOD]),
    ):
        with pytest.raises(LayoutMismatch, match="copied, not viewed"):
            act()


# Converting


@pytest.mark.parametrize("source", FORMS)
def test_every_form_converts_to_every_other(source):
    """Also between block sizes that do not divide each other, and from the middle of a payload."""
    block_sizes = [(16, 16), (16, 48), (48, 16), (32, 24)]
    for target, (source_block, target_block) in itertools.product(FORMS, block_sizes):
        have = make_layout(order=source[0], key_transposed=source[1], block_size=source_block, chunk_size=96)
        want = make_layout(order=target[0], key_transposed=target[1], block_size=target_block, chunk_size=96)
        payload = random_payload(have, 96)
        out = random_payload(want, 48)
        stored_blocks = have.num_blocks(96)
        convert(payload, have, stored_blocks=stored_blocks, start=target_block, out=out, out_layout=want)
        expected = expected_parts(payload, have, 96)[:, :, target_block : target_block + 48]
        np.testing.assert_array_equal(expected_parts(out, want, 48), expected)


@pytest.mark.parametrize(
    "changes", [{"dtype": "float16"}, {"kind": CacheKind.QUERY}, {"num_heads": 4}, {"opaque": True}], ids=str
)
def test_other_tensors_are_not_converted(changes):
    have, want = make_layout(order="LBNHPD"), make_layout(**changes)
    payload, out = random_payload(have, 16), random_payload(want, 16)
    before = bytes(out)
    with pytest.raises(LayoutMismatch):
        convert(payload, have, stored_blocks=1, start=0, out=out, out_layout=want)
    assert out == before


def test_a_payload_that_ends_too_early_is_not_converted():
    have, want = make_layout(order="LBNHPD"), make_layout()
    payload, out = random_payload(have, 32), random_payload(want, 32)
    with pytest.raises(ValueError, match="tokens 16 to 48"):
        convert(payload, have, stored_blocks=2, start=16, out=out, out_layout=want)
