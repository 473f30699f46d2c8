"""PagedConnector: pages of an engine to payloads and back, byte for byte, whatever the order and wherever they lie."""

from __future__ import annotations

import itertools
import os
import random
import tracemalloc
import warnings

import numpy as np
import pytest
import torch

from qkvault.errors import LayoutMismatch
from qkvault.layout import ChunkLayout
from qkvault.logical import TORCH_DTYPES, convert, logical_views, write_logical
from qkvault.paged import PagedConnector, PageRun
from qkvault.types import CacheKind

ORDERS = "LBHNPD LBNHPD LHBNPD BLHNPD BLNHPD BHLNPD LPBNHD LPBHND LBPNHD LBPHND LBHPND".split()
MLA_ORDERS = ["LBHNPD", "BLNHPD"]
NUM_BLOCKS = 12  # of the engine

both_paths = pytest.mark.parametrize("on_device", [False, True], ids=["host", "device path"])


def make_layout(order: str = "LBHNPD", **changes) -> ChunkLayout:
    fields = {
        "kind": CacheKind.KV,
        "num_layers": 3,
        "num_heads": 2,
        "head_size": 8,
        "num_parts": 2,
        "dtype": "bfloat16",
        "block_size": 16,
        "chunk_size": 192,
        "order": order,
    }
    return ChunkLayout(**{**fields, **changes})


def random_bytes(num_bytes: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(os.urandom(num_bytes), np.uint8).copy())


class Engine:
    """Paged tensors as an engine registers them: of one order, each layer a view of one storage."""

    def __init__(self, layout: ChunkLayout, num_blocks: int = NUM_BLOCKS, device: str = "cpu") -> None:
        self.layout = layout
        self.memory = random_bytes(num_blocks * layout.block_bytes).to(device)
        elements = self.memory.view(TORCH_DTYPES[layout.dtype]).view(layout.shape(num_blocks))
        self.tensors = [self.registered(layer) for layer in elements.unbind(layout.order.index("L"))]

    def registered(self, layer: torch.Tensor) -> torch.Tensor:
        """One layer, its axes in the order in which engines name them."""
        order = self.layout.order.replace("L", "")
        if self.layout.num_parts == 1:
            wanted = "BNHPD"
        elif order == "BHPND":  # vLLM on a CPU names its pages as if K and V were fused by token
            return layer.view(layer.shape[0], layer.shape[1], layer.shape[3], 2 * layer.shape[4])
        else:
            wanted = {"PD": "BHNPD"}.get(order[-2:], "BPNHD" if order.startswith("BP") else "PBNHD")
        permuted = layer.permute([order.index(axis) for axis in wanted])
        if self.layout.num_parts == 1:
            return permuted.flatten(2)  # a latent: [blocks, tokens, width]
        return permuted.flatten(-2) if wanted.endswith("PD") else permuted

    def blocks(self) -> np.ndarray:
        """Its memory as bytes ``[planes, blocks, page_bytes]``."""
        return self.memory.cpu().numpy().reshape(self.layout.num_planes, -1, self.layout.page_bytes).copy()


def blocks_of(payload: memoryview, layout: ChunkLayout, stored_blocks: int) -> np.ndarray:
    """A payload as bytes ``[planes, blocks, page_bytes]``."""
    num_bytes = stored_blocks * layout.block_bytes
    return np.frombuffer(payload, np.uint8, num_bytes).reshape(layout.num_planes, stored_blocks, -1)


def random_run(layout: ChunkLayout, stored_blocks: int, first_block: int, block_ids, extra_bytes: int = 0) -> PageRun:
    payload = bytearray(os.urandom(stored_blocks * layout.block_bytes + extra_bytes))
    return PageRun(memoryview(payload), stored_blocks, first_block, block_ids)


def check_both_ways(engine: Engine, connector: PagedConnector, runs: list[PageRun]) -> None:
    """Store and retrieve move the blocks that the runs name, and no other byte of either side."""
    layout = engine.layout
    pages = engine.blocks()
    expected = [blocks_of(run.payload, layout, run.stored_blocks).copy() for run in runs]
    rest = [bytes(run.payload[run.stored_blocks * layout.block_bytes :]) for run in runs]
    for run, blocks in zip(runs, expected, strict=True):
        blocks[:, run.first_block : run.first_block + len(run.block_ids)] = pages[:, list(run.block_ids)]
    finish(connector.batched_from_gpu(runs))
    for run, blocks, end in zip(runs, expected, rest, strict=True):
        np.testing.assert_array_equal(blocks_of(run.payload, layout, run.stored_blocks), blocks)
        assert run.payload[run.stored_blocks * layout.block_bytes :] == end
    np.testing.assert_array_equal(engine.blocks(), pages)

    fresh = [random_run(layout, run.stored_blocks, run.first_block, run.block_ids) for run in runs]
    for run in fresh:
        wanted = blocks_of(run.payload, layout, run.stored_blocks)
        pages[:, list(run.block_ids)] = wanted[:, run.first_block : run.first_block + len(run.block_ids)]
    finish(connector.batched_to_gpu(fresh))
    np.testing.assert_array_equal(engine.blocks(), pages)


def finish(event: torch.Event | None) -> None:
    if event is not None:
        event.synchronize()


def some_runs(layout: ChunkLayout) -> list[PageRun]:
    """Random, consecutive, descending, mixed and no blocks; all, some and none of the payload's."""
    return [
        random_run(layout, 4, 0, [9, 2, 7, 0]),
        random_run(layout, 4, 0, range(3, 7), extra_bytes=100),
        random_run(layout, 5, 2, (11, 10)),
        random_run(layout, 3, 1, [1]),
        random_run(layout, 2, 1, []),
    ]


# Copying


@both_paths
@pytest.mark.parametrize("order", ORDERS)
def test_pages_of_every_order_go_to_payloads_and_back(order, on_device):
    """B 3, B 12: one call moves every chunk of a request, and touches nothing that the chunks do not name."""
    for dtype, block_size in [("bfloat16", 16), ("float32", 32), ("float8_e4m3fn", 64), ("uint8", 16)]:
        engine = Engine(make_layout(order, dtype=dtype, block_size=block_size))
        connector = PagedConnector(engine.tensors, engine.layout, force_device_path=on_device)
        assert connector.num_blocks == NUM_BLOCKS
        check_both_ways(engine, connector, some_runs(engine.layout))


@both_paths
@pytest.mark.parametrize("order", MLA_ORDERS)
@pytest.mark.parametrize(("width", "dtype"), [(576, "bfloat16"), (132, "uint8"), (656, "uint8"), (3, "uint8")])
def test_latents_of_any_width_go_to_payloads_and_back(order, width, dtype, on_device):
    layout = make_layout(order, num_heads=1, num_parts=1, head_size=width, dtype=dtype)
    engine = Engine(layout)
    check_both_ways(engine, PagedConnector(engine.tensors, layout, force_device_path=on_device), some_runs(layout))


@both_paths
@pytest.mark.parametrize("order", ["BLHNPD", "LBHNPD", "LPBNHD"])
def test_a_single_layer_head_or_block_is_no_special_case(order, on_device):
    for changes in ({"num_layers": 1}, {"num_heads": 1}, {"block_size": 1}, {"num_layers": 1, "num_heads": 1}):
        layout = make_layout(order, **changes)
        for num_blocks in (1, NUM_BLOCKS):
            engine = Engine(layout, num_blocks)
            connector = PagedConnector(engine.tensors, layout, force_device_path=on_device)
            check_both_ways(engine, connector, [random_run(layout, 2, 1, [num_blocks - 1])])


@both_paths
def test_layers_may_be_tensors_of_their_own(on_device):
    layout = make_layout("LBNHPD", num_heads=3)
    tensors = [random_bytes(7 * layout.page_bytes).view(torch.bfloat16).view(7, 16, 3, 16) for _ in range(3)]
    connector = PagedConnector([tensor.transpose(1, 2) for tensor in tensors], layout, force_device_path=on_device)
    run = random_run(layout, 3, 0, [6, 0, 1])
    connector.batched_from_gpu([run])
    expected = np.stack([tensor[[6, 0, 1]].view(torch.uint8).numpy().reshape(3, -1) for tensor in tensors])
    np.testing.assert_array_equal(blocks_of(run.payload, layout, 3), expected)
    for tensor in tensors:
        tensor.zero_()
    connector.batched_to_gpu([run])
    for tensor, pages in zip(tensors, expected, strict=True):
        np.testing.assert_array_equal(tensor[[6, 0, 1]].view(torch.uint8).numpy().reshape(3, -1), pages)
        assert not tensor[2:6].any()


@both_paths
@pytest.mark.parametrize("order_of_layers", [[0, 1, 2], [2, 1, 0], [1, 0, 2], [0, 1, 3], [0, 2, 3], [1, 3, 5]])
def test_layers_may_lie_anywhere_in_a_storage(order_of_layers, on_device):
    layout = make_layout()
    engine = Engine(make_layout(num_layers=6))
    tensors = [engine.tensors[at] for at in order_of_layers]
    run = random_run(layout, 2, 0, [5, 3])
    PagedConnector(tensors, layout, force_device_path=on_device).batched_from_gpu([run])
    np.testing.assert_array_equal(blocks_of(run.payload, layout, 2), engine.blocks()[order_of_layers][:, [5, 3]])


@both_paths
@pytest.mark.parametrize("padding", [1, 8, 40])
def test_pages_may_have_gaps_between_them(padding, on_device):
    """What lies in the gaps keeps its values."""
    layout = make_layout(num_layers=1, dtype="uint8")
    memory = random_bytes(9 * (layout.page_bytes + padding)).view(9, -1)
    before = memory.clone()
    tensor = memory[:, : layout.page_bytes].view(9, 2, 16, 16)
    connector = PagedConnector([tensor], layout, force_device_path=on_device)
    run = random_run(layout, 3, 0, [4, 5, 8])
    connector.batched_from_gpu([run])
    np.testing.assert_array_equal(blocks_of(run.payload, layout, 3)[0], before[[4, 5, 8], : layout.page_bytes].numpy())
    run.payload[:] = bytes(len(run.payload))
    connector.batched_to_gpu([run])
    before[[4, 5, 8], : layout.page_bytes] = 0
    assert torch.equal(memory, before)


@both_paths
def test_blocks_that_the_kernels_cut_up_are_counted_as_the_engine_does(on_device):
    """An engine's blocks of 64 tokens, kept as pages of 16."""
    layout = make_layout()
    engine = Engine(layout, num_blocks=24)
    connector = PagedConnector(engine.tensors, layout, kernel_blocks_per_block=4, force_device_path=on_device)
    assert (connector.num_blocks, connector.block_size) == (6, 64)
    pages = engine.blocks()
    run = random_run(layout, 12, 1, [5, 2])
    connector.batched_from_gpu([run])
    expected = pages[:, [20, 21, 22, 23, 8, 9, 10, 11]]
    np.testing.assert_array_equal(blocks_of(run.payload, layout, 12)[:, 4:], expected)
    connector.batched_to_gpu([PageRun(run.payload, 12, 2, [0])])
    pages[:, :4] = expected[:, 4:]
    np.testing.assert_array_equal(engine.blocks(), pages)
    with pytest.raises(ValueError, match="block ids 6 to 6"):
        connector.batched_from_gpu([random_run(layout, 4, 0, [6])])


def test_only_blocks_between_the_engine_s_own_hit_and_ours_are_written():
    """For every small own hit and stored length, blocks below the hit are untouched and the others right."""
    for block_size, blocks_per_chunk in itertools.product([1, 2, 4], [1, 2, 3]):
        layout = make_layout(block_size=block_size, chunk_size=block_size * blocks_per_chunk, num_layers=2)
        for num_stored in range(1, 8):
            for num_own in range(num_stored + 1):
                check_partial_hit(layout, num_stored, num_own)


def check_partial_hit(layout: ChunkLayout, num_stored: int, num_own: int) -> None:
    engine = Engine(layout)
    connector = PagedConnector(engine.tensors, layout)
    table = random.sample(range(NUM_BLOCKS), num_stored)
    expected = engine.blocks()
    runs, blocks_per_chunk = [], layout.num_blocks(layout.chunk_size)
    for start in range(0, num_stored, blocks_per_chunk):
        stop = min(start + blocks_per_chunk, num_stored)
        begin = max(start, num_own)
        if begin < stop:
            run = random_run(layout, stop - start, begin - start, table[begin:stop])
            expected[:, table[begin:stop]] = blocks_of(run.payload, layout, stop - start)[:, begin - start :]
            runs.append(run)
    connector.batched_to_gpu(runs)
    np.testing.assert_array_equal(engine.blocks(), expected)


@both_paths
def test_nothing_to_move_is_no_work(on_device):
    """B 12, B 47: without runs, or with runs of no blocks, no page and no payload is touched."""
    engine = Engine(make_layout())
    connector = PagedConnector(engine.tensors, engine.layout, force_device_path=on_device)
    before = engine.blocks()
    empty = PageRun(memoryview(bytearray()), 0, 0, [])
    for runs in ([], [empty], [empty, empty]):
        assert connector.batched_from_gpu(runs) is None
        assert connector.batched_to_gpu(runs) is None
        assert connector.batched_to_gpu(runs, make_layout("LPBNHD")) is None
    np.testing.assert_array_equal(engine.blocks(), before)


@pytest.mark.parametrize("num_heads", [8, 7], ids=["whole", "gaps between pages"])
@pytest.mark.parametrize(("first_block", "is_random"), [(0, True), (3, True), (3, False)])
def test_no_memory_is_allocated_for_the_bytes(num_heads, first_block, is_random):
    layout = make_layout(num_layers=4, num_heads=num_heads, head_size=128)
    engine = Engine(make_layout(num_layers=4, num_heads=8, head_size=128), 64)
    connector = PagedConnector([tensor[:, :num_heads] for tensor in engine.tensors], layout)
    ids = random.sample(range(64), 32) if is_random else range(20, 52)
    run = random_run(layout, 32 + first_block, first_block, ids)
    tracemalloc.start()
    connector.batched_from_gpu([run])
    connector.batched_to_gpu([run])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < len(run.payload) / 100


def test_threads_of_torch_are_left_alone():
    before = torch.get_num_threads(), torch.get_num_interop_threads()
    engine = Engine(make_layout())
    connector = PagedConnector(engine.tensors, engine.layout)
    check_both_ways(engine, connector, some_runs(engine.layout))
    assert (torch.get_num_threads(), torch.get_num_interop_threads()) == before


@both_paths
def test_a_payload_that_is_read_may_be_read_only(on_device):
    engine = Engine(make_layout())
    connector = PagedConnector(engine.tensors, engine.layout, force_device_path=on_device)
    run = random_run(engine.layout, 2, 0, [3, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        connector.batched_to_gpu([run._replace(payload=run.payload.toreadonly())])
    np.testing.assert_array_equal(engine.blocks()[:, [3, 1]], blocks_of(run.payload, engine.layout, 2))


@both_paths
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_ids": [0, NUM_BLOCKS]}, "block ids 0 to 12"),
        ({"block_ids": [-1, 0]}, "block ids -1 to 0"),
        ({"block_ids": [0, 1, 2, 3, 4]}, "not in a payload"),
        ({"first_block": -1}, "not in a payload"),
        ({"first_block": 3}, "not in a payload"),
        ({"stored_blocks": 5}, "not in a payload"),
        ({"payload": memoryview(bytearray(10))}, "not in a payload"),
    ],
)
def test_a_run_that_fits_nothing_is_refused_before_any_byte_is_moved(changes, reason, on_device):
    engine = Engine(make_layout())
    connector = PagedConnector(engine.tensors, engine.layout, force_device_path=on_device)
    good = random_run(engine.layout, 4, 0, [1, 2])
    bad = random_run(engine.layout, 4, 0, [1, 2])._replace(**changes)
    pages, payload = engine.blocks(), bytes(good.payload)
    for act in (
        lambda: connector.batched_from_gpu([good, bad]),
        lambda: connector.batched_to_gpu([good, bad]),
        lambda: connector.batched_to_gpu([good, bad], make_layout("BLNHPD")),
    ):
        with pytest.raises(ValueError, match=reason):
            act()
    np.testing.assert_array_equal(engine.blocks(), pages)
    assert good.payload == payload


def test_a_read_only_payload_is_not_filled():
    engine = Engine(make_layout())
    run = random_run(engine.layout, 2, 0, [1])
    before = bytes(run.payload)
    with pytest.raises(ValueError, match="read-only"):
        PagedConnector(engine.tensors, engine.layout).batched_from_gpu(
            [run, run._replace(payload=run.payload.toreadonly())]
        )
    assert run.payload == before


# Other layouts


@both_paths
@pytest.mark.parametrize("order", [*ORDERS, "LBHPND transposed"])
def test_payloads_of_every_other_order_and_block_size_are_converted(order, on_device):
    """Every element of K and V arrives at its token, and blocks that are not named keep theirs."""
    mine = make_layout(order.split()[0], key_transposed=order.endswith("transposed"), block_size=16)
    for theirs in other_layouts(mine):
        engine = Engine(mine)
        connector = PagedConnector(engine.tensors, mine, force_device_path=on_device)
        num_tokens = 96
        payload = memoryview(bytearray(theirs.payload_bytes(num_tokens)))
        parts = [(torch.rand(3, num_tokens, 2, 8) + part).bfloat16() for part in range(2)]
        write_logical(payload, theirs, parts)
        expected = engine_parts(engine)
        for at, block in enumerate([7, 2, 3], start=1):
            for part, whole in zip(parts, expected, strict=True):
                whole[:, block * 16 : block * 16 + 16] = part[:, at * 16 : at * 16 + 16]
        finish(connector.batched_to_gpu([PageRun(payload, theirs.num_blocks(num_tokens), 1, [7, 2, 3])], theirs))
        for seen, wanted in zip(engine_parts(engine), expected, strict=True):
            assert torch.equal(seen.view(torch.int16), wanted.view(torch.int16))


def other_layouts(mine: ChunkLayout) -> list[ChunkLayout]:
    forms = [(order, False) for order in ORDERS] + [("LBHPND", True), ("LPBHND", True)]
    layouts = [
        make_layout(order, key_transposed=is_transposed, block_size=block_size)
        for (order, is_transposed), block_size in itertools.product(forms, [16, 32, 48])
    ]
    return [layout for layout in layouts if not layout.has_same_pages(mine)]


def engine_parts(engine: Engine) -> list[torch.Tensor]:
    """K and V of all blocks, ``[layers, tokens, heads, head_size]``: copies."""
    memory = memoryview(engine.memory.numpy()).cast("B").toreadonly()
    return logical_views(memory, engine.layout, NUM_BLOCKS * engine.layout.block_size)


def test_latents_are_converted_too():
    mine = make_layout(num_heads=1, num_parts=1, head_size=576, block_size=64)
    theirs = make_layout("BLNHPD", num_heads=1, num_parts=1, head_size=576, block_size=16)
    engine = Engine(mine)
    latent = torch.rand(3, 192, 1, 576).bfloat16()
    payload = memoryview(bytearray(theirs.payload_bytes(192)))
    write_logical(payload, theirs, [latent])
    PagedConnector(engine.tensors, mine).batched_to_gpu([PageRun(payload, 12, 0, [4, 9, 1])], theirs)
    (seen,) = engine_parts(engine)
    blocks = [seen[:, block * 64 : block * 64 + 64] for block in (4, 9, 1)]
    assert torch.equal(torch.cat(blocks, dim=1), latent)


def test_kernel_blocks_take_payloads_of_other_orders():
    mine, theirs = make_layout(), make_layout("LPBNHD", block_size=32)
    engine = Engine(mine)
    connector = PagedConnector(engine.tensors, mine, kernel_blocks_per_block=2)
    run = random_run(theirs, 3, 1, [4])
    connector.batched_to_gpu([run], theirs)
    wanted = memoryview(bytearray(2 * mine.block_bytes))
    convert(run.payload, theirs, stored_blocks=3, start=32, out=wanted, out_layout=mine)
    np.testing.assert_array_equal(engine.blocks()[:, 8:10], blocks_of(wanted, mine, 2))


def test_another_chunk_size_is_the_same_layout_of_pages():
    layout = make_layout(opaque=True)
    engine = Engine(layout)
    run = random_run(layout, 2, 0, [3, 1])
    PagedConnector(engine.tensors, layout).batched_to_gpu([run], make_layout(opaque=True, chunk_size=96))
    np.testing.assert_array_equal(engine.blocks()[:, [3, 1]], blocks_of(run.payload, layout, 2))


@pytest.mark.parametrize(
    ("mine", "theirs", "reason"),
    [
        ({}, {"dtype": "float16"}, "is not"),
        ({}, {"num_layers": 4}, "is not"),
        ({}, {"head_size": 16}, "is not"),
        ({}, {"kind": CacheKind.QUERY}, "is not"),
        ({}, {"opaque": True}, "copied, not viewed"),
        ({"opaque": True}, {}, "copied, not viewed"),
        ({"opaque": True}, {"opaque": True, "block_size": 32}, "copied, not viewed"),
    ],
)
def test_other_tensors_and_packed_pages_are_refused_and_nothing_is_written(mine, theirs, reason):
    engine = Engine(make_layout(**mine))
    before = engine.blocks()
    layout = make_layout(**theirs)
    with pytest.raises(LayoutMismatch, match=reason):
        PagedConnector(engine.tensors, engine.layout).batched_to_gpu([random_run(layout, 2, 0, [1])], layout)
    np.testing.assert_array_equal(engine.blocks(), before)


# Finding the pages

TENSOR = torch.zeros(NUM_BLOCKS, 2, 16, 16, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("tensors", "changes", "reason"),
    [
        ([TENSOR] * 2, {}, "2 tensors for 3 layers"),
        ([], {}, "0 tensors"),
        ([TENSOR.float()] * 3, {}, "float32"),
        ([TENSOR.view(torch.uint8)] * 3, {}, "uint8"),
        ([TENSOR[:, :, :, :12]] * 3, {}, "do not fit"),
        ([TENSOR[:, :1]] * 3, {"num_heads": 1}, None),
        ([TENSOR[:, :, :8]] * 3, {"block_size": 8}, "a whole page"),
        ([TENSOR[:, :, :, ::2]] * 3, {"head_size": 4}, "a whole page"),
        ([TENSOR.transpose(1, 2)] * 3, {}, None),
        ([TENSOR.transpose(1, 2).contiguous()] * 3, {}, "do not fit"),
        ([TENSOR.transpose(0, 1)] * 3, {}, None),
        ([TENSOR.transpose(0, 1).contiguous()] * 3, {}, "do not fit"),
        ([TENSOR] * 3, {"num_heads": 4}, "do not fit"),
        ([TENSOR] * 3, {"block_size": 32}, "do not fit"),
        ([TENSOR] * 3, {"order": "LBNHPD"}, "do not fit"),
        ([TENSOR] * 3, {"order": "LPBNHD"}, "do not fit"),
        ([TENSOR] * 3, {"order": "LBHPND"}, None),
        ([TENSOR] * 3, {"order": "BLHNPD"}, "lie 512 apart"),
        ([TENSOR] * 3, {"order": "BHLNPD"}, "axis H"),
        ([TENSOR[:1].expand(12, -1, -1, -1)] * 3, {}, "do not fit"),
        ([TENSOR[:0]] * 3, {}, "is not pages"),
        ([TENSOR, TENSOR, TENSOR[:6]], {}, "tensor 2 has another"),
        ([TENSOR, TENSOR.to("meta"), TENSOR], {}, "tensor 1 has another"),
    ],
    ids=range(23),
)
def test_tensors_of_another_geometry_are_refused_with_the_reason(tensors, changes, reason):
    layout = make_layout(**{"chunk_size": 192, **changes})
    if reason is None:
        assert PagedConnector(tensors, layout).num_blocks == NUM_BLOCKS
        return
    with pytest.raises(LayoutMismatch, match=reason):
        PagedConnector(tensors, layout)


def test_layers_of_one_page_that_do_not_lie_in_it_are_refused():
    engine = Engine(make_layout("BLHNPD"))
    other = Engine(make_layout("BLHNPD"))
    first, second, third = engine.tensors
    memory = np.zeros((NUM_BLOCKS, 3, 2, 16, 16), np.int16)
    neighbours = [torch.from_numpy(memory[:, at]).view(torch.bfloat16) for at in range(3)]  # three storages
    for tensors in (
        [first, third, second],
        [first, second, second],
        [first, second, other.tensors[2]],
        neighbours,
    ):
        with pytest.raises(LayoutMismatch, match="layers inside one page"):
            PagedConnector(tensors, engine.layout)


@pytest.mark.parametrize("kernel_blocks_per_block", [0, 5])
def test_kernel_blocks_that_do_not_add_up_are_refused(kernel_blocks_per_block):
    engine = Engine(make_layout())
    with pytest.raises(LayoutMismatch, match="12 pages"):
        PagedConnector(engine.tensors, engine.layout, kernel_blocks_per_block=kernel_blocks_per_block)


def test_float8_pages_may_be_registered_as_bytes():
    layout = make_layout(dtype="float8_e4m3fn")
    engine = Engine(layout)
    connector = PagedConnector([tensor.view(torch.uint8) for tensor in engine.tensors], layout)
    check_both_ways(engine, connector, some_runs(layout))


# What only the real thing proves


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS)
def test_pages_on_a_gpu_go_to_payloads_and_back(order):
    engine = Engine(make_layout(order), device="cuda")
    check_both_ways(engine, PagedConnector(engine.tensors, engine.layout), some_runs(engine.layout))


@pytest.mark.gpu
def test_copies_of_a_gpu_are_ordered_by_its_stream_and_signalled_by_the_event():
    layout = make_layout(num_layers=16, num_heads=8, head_size=128)
    engine = Engine(layout, 128, device="cuda")
    connector = PagedConnector(engine.tensors, layout)
    pinned = torch.empty(8 * 16 * layout.block_bytes, dtype=torch.uint8, pin_memory=True)
    memory = memoryview(pinned.numpy())
    size = 16 * layout.block_bytes
    runs = [PageRun(memory[at * size : at * size + size], 16, 0, range(at * 16, at * 16 + 16)) for at in range(8)]
    expected = engine.blocks()
    with torch.cuda.stream(torch.cuda.Stream()):
        event = connector.batched_from_gpu(runs)
    assert event is not None
    event.synchronize()
    for run in runs:
        np.testing.assert_array_equal(blocks_of(run.payload, layout, 16), expected[:, list(run.block_ids)])


@pytest.mark.vllm
@pytest.mark.parametrize("isa", ["vec", "vec16"])
def test_vllm_s_cpu_kernels_write_pages_of_the_order_we_think(isa):
    """K and V that vLLM itself wrote into its pages are found element by element, for each dtype and block size."""
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    block_sizes = [32, 64, 128] if isa == "vec" else [16, 32, 64, 128]
    head_sizes = [64, 128] if isa == "vec" else [64, 80]
    for dtype, block_size, head_size in itertools.product(["float32", "bfloat16", "float16"], block_sizes, head_sizes):
        layout = make_layout(
            "LBHPND", key_transposed=True, dtype=dtype, block_size=block_size, head_size=head_size, num_layers=1,
            chunk_size=block_size,
        )  # fmt: skip
        pages = torch.zeros(3, 2, block_size, 2 * head_size, dtype=TORCH_DTYPES[dtype])
        key, value = (torch.rand(block_size, 2, head_size).to(pages.dtype) for _ in range(2))
        slots = torch.arange(block_size, 2 * block_size)
        ops.cpu_attn_reshape_and_cache(
            key, value, *pages.view(3, 2, 2 * block_size, head_size).chunk(2, dim=2), slots, isa
        )
        payload = memoryview(bytearray(layout.block_bytes))
        PagedConnector([pages], layout).batched_from_gpu([PageRun(payload, 1, 0, [1])])
        seen_key, seen_value = logical_views(payload, layout, block_size)
        assert torch.equal(seen_key[0], key)
        assert torch.equal(seen_value[0], value)
