"""QRingBuffer: blocks that are given once and freed once, and rows that land where they should and nowhere else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from qkvault.capture.ring import QRingBuffer, ring_blocks_for, ring_bytes
from qkvault.errors import InvariantError, LayoutMismatch
from qkvault.layout import ChunkLayout
from qkvault.paged import PagedConnector, PageRun
from qkvault.types import CacheKind

SIZES = {"num_layers": 2, "num_blocks": 3, "block_size": 4, "hidden_dim": 6}


@pytest.fixture
def ring() -> QRingBuffer:
    return QRingBuffer(*SIZES.values(), torch.float32)


@pytest.fixture
def ring_there(device) -> QRingBuffer:
    return QRingBuffer(*SIZES.values(), torch.float32, device=device)


def layer_of(ring: QRingBuffer, at: int) -> torch.Tensor:
    return ring.tensors[f"qkvault_q_layer_{at}"]


def test_a_ring_is_a_tensor_of_blocks_for_each_layer(ring):
    """B63, B66, B68: [blocks, block size, heads * head size], by the number of the layer."""
    assert list(ring.tensors) == ["qkvault_q_layer_0", "qkvault_q_layer_1"]
    assert {tuple(tensor.shape) for tensor in ring.tensors.values()} == {(3, 4, 6)}
    assert all(tensor.is_contiguous() and tensor.dtype == torch.float32 for tensor in ring.tensors.values())


@pytest.mark.parametrize("order", ["LBNHPD", "LBNPHD"])
def test_the_copies_of_kv_move_a_ring(ring_there, order):
    """B63, B66: as a query, one part of all heads, its blocks are gathered into a payload by the same connector."""
    layout = ChunkLayout(
        kind=CacheKind.QUERY, num_layers=2, num_heads=2, head_size=3, num_parts=1, dtype="float32", block_size=4,
        chunk_size=8, order=order,
    )  # fmt: skip
    for at in range(2):
        layer_of(ring_there, at).copy_(torch.arange(72.0).view(3, 4, 6) + 100 * at)
    for is_device in (False, True):
        paged = PagedConnector(list(ring_there.tensors.values()), layout, force_device_path=is_device)
        payload = bytearray(layout.payload_bytes(8))
        copied = paged.batched_from_gpu([PageRun(memoryview(payload), 2, 0, [2, 0])])
        if copied is not None:
            copied.synchronize()
        got = torch.frombuffer(payload, dtype=torch.float32).view(2, 2, 4, 6)
        assert torch.equal(got, torch.stack([layer_of(ring_there, at)[[2, 0]] for at in range(2)]).cpu())


def test_a_ring_of_another_geometry_is_not_moved(ring):
    """B66: heads that are not those of the ring are seen when the copies are set up."""
    layout = ChunkLayout(
        kind=CacheKind.QUERY, num_layers=2, num_heads=5, head_size=3, num_parts=1, dtype="float32", block_size=4,
        chunk_size=8, order="LBNHPD",
    )  # fmt: skip
    with pytest.raises(LayoutMismatch):
        PagedConnector(list(ring.tensors.values()), layout)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [0, -1])
def test_dimensions_must_be_positive(name, size):
    """B65: the error names all four."""
    with pytest.raises(ValueError, match=r"num_layers.*num_blocks.*block_size.*hidden_dim"):
        QRingBuffer(*{**SIZES, name: size}.values(), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_a_ring_takes_is_known_before_it_is_built(dtype):
    """A budget can be checked before anything is allocated."""
    assert QRingBuffer(2, 3, 4, 6, dtype).num_bytes == ring_bytes(2, 3, 4, 6, dtype)
    memory = QRingBuffer(2, 3, 4, 6, dtype).tensors["qkvault_q_layer_0"].untyped_storage()
    assert memory.nbytes() == ring_bytes(2, 3, 4, 6, dtype)


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ({}, 1024),  # 8192 tokens twice
        ({"max_batched_tokens": 2048}, 256),
        ({"max_batched_tokens": 2049}, 258),
        ({"max_batched_tokens": 2048, "ring_depth": 5}, 640),
        ({"max_batched_tokens": 2048, "ring_depth": 0}, 128),
        ({"max_batched_tokens": 1, "ring_depth": -3}, 1),
        ({"max_batched_tokens": 2048, "ring_blocks": 7}, 7),
        ({"max_batched_tokens": 2048, "ring_blocks": 0}, 1),
        ({"ring_blocks": -7, "ring_depth": 9}, 1),
    ],
)
def test_the_size_follows_the_largest_step_or_a_setting(options, blocks):
    """B79: blocks as set, else depth times the blocks of the largest step; never less than one."""
    assert ring_blocks_for(16, **options) == blocks


def test_all_blocks_are_free_at_first_and_the_last_one_goes_first(ring):
    """B69, B70, B72: a ring begins with all its blocks free; what was freed last is taken first."""
    assert ring.num_free_blocks() == 3
    assert ring.allocate(2) == [1, 2]
    assert ring.num_free_blocks() == 1
    ring.free([1])
    assert ring.allocate(1) == [1]
    assert ring.allocate(1) == [0]
    assert ring.num_free_blocks() == 0


def test_too_many_blocks_are_none(ring):
    """B70: more than are free is None and changes nothing, none is an empty list, a negative count is an error."""
    assert ring.allocate(4) is None
    assert ring.allocate(0) == []
    assert ring.num_free_blocks() == 3
    with pytest.raises(ValueError, match="-1"):
        ring.allocate(-1)


@pytest.mark.parametrize("wrong", [[-1], [3], [1000], [2]])
def test_freeing_what_is_not_in_use_changes_nothing(ring, wrong, caplog):
    """B71: out of range or free already is a warning; the rest of the call counts."""
    taken = ring.allocate(1)
    ring.free(taken)
    taken = ring.allocate(2)
    ring.free([2])
    ring.free([*wrong, 1, 1])
    assert ring.num_free_blocks() == 3
    ring.check()


def test_freeing_twice_warns(ring, monkeypatch):
    """B71: a block that is freed twice, or does not exist, is said."""
    said = []
    monkeypatch.setattr("qkvault.capture.ring._log.warning", lambda event, **fields: said.append((event, fields)))
    ring.free([0, 7])
    assert said == [("ring_block_freed_twice", {"block": 0}), ("ring_block_unknown", {"block": 7, "blocks": 3})]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16])
def test_rows_land_in_their_slots(dtype, query_dtype, device):
    """B73, B74: each row with a slot is there, in the ring's dtype; those with -1 are nowhere."""
    ring = QRingBuffer(2, 3, 4, 6, dtype, device=device)
    for tensor in ring.tensors.values():
        tensor.fill_(-7)
    packed = torch.randn(5, 3, 2, 3, device=device).to(query_dtype)
    query = packed[:, 1]  # as when q, k and v come out of one product
    ring.scatter(1, query, torch.tensor([3, -1, 11, 4, -1], device=device))
    rows = layer_of(ring, 1).view(12, 6)
    for at, slot in ((0, 3), (2, 11), (3, 4)):
        assert torch.equal(rows[slot], query[at].reshape(6).to(dtype))
    others = [slot for slot in range(12) if slot not in (3, 11, 4)]
    assert (rows[others] == -7).all()
    assert (layer_of(ring, 0) == -7).all()


def test_no_rows_are_no_work(ring_there, device):
    """B73: a step without rows is one."""
    ring_there.scatter(0, torch.zeros(0, 2, 3, device=device), torch.zeros(0, dtype=torch.int64, device=device))


@pytest.mark.parametrize(
    ("layer", "shape", "num_slots"),
    [(0, (2, 7), 2), (0, (2, 2, 4), 2), (0, (6,), 6), (0, (3, 6), 2), (2, (2, 6), 2), (-1, (2, 6), 2)],
)
def test_rows_of_another_width_are_refused(ring, layer, shape, num_slots):
    """B73: another width, number of rows or layer is a ValueError, and nothing is written."""
    before = {name: tensor.clone() for name, tensor in ring.tensors.items()}
    with pytest.raises(ValueError):
        ring.scatter(layer, torch.ones(shape), torch.zeros(num_slots, dtype=torch.int64))
    assert all(torch.equal(before[name].nan_to_num(), tensor.nan_to_num()) for name, tensor in ring.tensors.items())


def test_a_scatter_does_not_wait_for_a_device(ring_there, device, no_wait):
    """B73, B118: no number is asked for, and no rows are picked by a mask."""
    ring_there._arrays = []  # as on other devices than a CPU
    rows, slots = torch.randn(5, 6, device=device), torch.tensor([3, -1, 11, 4, -1], device=device)
    with no_wait:
        ring_there.scatter(0, rows, slots)
    with pytest.raises(AssertionError), no_wait:
        torch.ones(3).sum().item()
    with pytest.raises(AssertionError), no_wait:
        torch.ones(3)[torch.ones(3) > 0]


def test_a_device_takes_the_same_rows(ring):
    """B73, B116: what other devices do, without the arrays of the CPU, writes the same."""
    query, slots = torch.randn(5, 6), torch.tensor([3, -1, 11, 4, -1])
    other = QRingBuffer(*SIZES.values(), torch.float32)
    other._arrays = []
    for each in (ring, other):
        layer_of(each, 0).zero_()
        each.scatter(0, query, slots)
    assert torch.equal(layer_of(ring, 0), layer_of(other, 0))


@given(data=st.data())
def test_scatter_is_a_dictionary_of_rows(data):
    """B73: whatever slots there are, each holds the row that was written last."""
    ring = QRingBuffer(1, 4, 2, 3, torch.float32)
    layer_of(ring, 0).zero_()
    rows: dict[int, list[float]] = {}
    for step in range(data.draw(st.integers(1, 4))):
        slots = data.draw(st.permutations(range(8)))[: data.draw(st.integers(0, 8))]
        slots += [-1] * data.draw(st.integers(0, 3))
        slots = data.draw(st.permutations(slots))
        query = torch.randn(len(slots), 1, 3) + step
        ring.scatter(0, query, torch.tensor(slots, dtype=torch.int64))
        rows |= {slot: query[at, 0].tolist() for at, slot in enumerate(slots) if slot >= 0}
    assert layer_of(ring, 0).view(8, 3).tolist() == [rows.get(slot, [0.0] * 3) for slot in range(8)]


def test_check_sees_a_block_that_is_free_twice(ring):
    ring.check()
    ring._free_blocks.append(1)
    with pytest.raises(InvariantError):
        ring.check()


class RingMachine(RuleBasedStateMachine):
    """Against a set: what is allocated is nobody else's, and what is freed is there again."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = QRingBuffer(1, 8, 1, 1, torch.float32)
        self.taken: set[int] = set()

    @rule(count=st.integers(0, 9))
    def allocate(self, count):
        got = self.ring.allocate(count)
        if count > 8 - len(self.taken):
            assert got is None
        else:
            assert len(set(got)) == count
            assert not self.taken & set(got)
            self.taken |= set(got)

    @rule(ids=st.lists(st.integers(-2, 9)))
    def free(self, ids):
        self.ring.free(ids)
        self.taken -= set(ids)

    @invariant()
    def counts(self):
        assert self.ring.num_free_blocks() == 8 - len(self.taken)
        self.ring.check()


TestRing = RingMachine.TestCase
