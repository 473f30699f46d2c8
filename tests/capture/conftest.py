"""Capture without an engine: a model whose queries are known, batches in any order, and a ring."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qkvault.capture.plan import RequestStep, Wanted
from qkvault.transfer import SaveItem


def reference_match(slot_mapping, wanted):
    """Rows and tokens matched by sorted slots, as the rows of the checklist say: for each row its ring slot or -1, for
    each token whether a row is its own."""
    op_slots = torch.tensor(list(wanted.kv_slots), dtype=torch.int64)
    ring_slot_by_token = torch.tensor(list(wanted.ring_slots), dtype=torch.int64)
    ring_slots = torch.full((len(slot_mapping),), -1, dtype=torch.int64)
    if not len(op_slots):
        return ring_slots, torch.zeros(0, dtype=torch.bool)
    sorted_slots, token_order = torch.sort(op_slots)
    pos = torch.searchsorted(sorted_slots, slot_mapping)
    pos = pos.clamp(max=len(sorted_slots) - 1)
    hit = (slot_mapping >= 0) & (sorted_slots[pos] == slot_mapping)
    ring_slots[hit] = ring_slot_by_token[token_order[pos[hit]]]
    found = torch.zeros(len(op_slots), dtype=torch.bool)
    found[token_order[pos[hit]]] = True
    return ring_slots, found


def make_wanted(pairs) -> Wanted:
    return Wanted(array("q", [kv for kv, _ in pairs]), array("q", [ring for _, ring in pairs]))


@dataclass
class FakeRequest:
    """A request of the fake scheduler. ``table`` are its KV blocks."""

    request_id: str
    tokens: list[int]
    table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_items: int = 0  # chunks that were told


class FakeScheduler:
    """KV blocks, requests and steps of an engine; makes the slot mapping of a step in any order, with padding."""

    def __init__(self, num_blocks: int, block_size: int, chunk_size: int, seed: int) -> None:
        self.block_size, self.chunk_size = block_size, chunk_size
        self.rng = random.Random(seed)
        self.free = self.rng.sample(range(num_blocks), num_blocks)
        self.requests: dict[str, FakeRequest] = {}

    def add(self, request_id: str, tokens: list[int], num_cached: int = 0) -> FakeRequest:
        request = self.requests[request_id] = FakeRequest(request_id, tokens)
        request.num_computed = num_cached
        return request

    def schedule(self, request: FakeRequest, count: int, items=None, num_drafts: int = 0) -> RequestStep:
        """The next ``count`` tokens, and drafts after them, which do not count as computed."""
        before, after = request.num_computed, request.num_computed + count
        while len(request.table) * self.block_size < after + num_drafts:
            request.table.append(self.free.pop())
        request.num_computed = after
        size = self.block_size
        ids = tuple(request.table[before // size : -(-(after + num_drafts) // size)])
        num_known = after // self.chunk_size
        first, request.num_items = request.num_items, max(request.num_items, num_known)
        known = () if items is None else tuple(items[first:num_known])
        return RequestStep(request.request_id, before, after + num_drafts, ids, first, known)

    def end(self, request: FakeRequest) -> None:
        self.free += request.table
        self.requests.pop(request.request_id, None)

    def rows(self, steps) -> list[tuple[str, int]]:
        """(request, position) of each row, in any order; ("", -1) is padding."""
        rows = [(step.request_id, at) for step in steps for at in range(step.num_before, step.num_after)]
        rows += [("", -1)] * self.rng.randrange(4)
        self.rng.shuffle(rows)
        return rows

    def slot_of(self, row: tuple[str, int]) -> int:
        request_id, position = row
        if not request_id:
            return -1
        table = self.requests[request_id].table
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def slot_mapping(self, rows) -> torch.Tensor:
        return torch.tensor([self.slot_of(row) for row in rows], dtype=torch.int64)


def fake_items(request_id: str, count: int, chunk_size: int) -> list[SaveItem]:
    """Items that name chunks and nothing else."""
    return [SaveItem(f"{request_id}:{number}".encode(), b"", bytes(4 * chunk_size), ()) for number in range(count)]


class NoWait(TorchDispatchMode):
    """Fails where torch would wait for a device: a value that the host asks for, or an index that says which rows."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "equal"), name
        if name == "_to_copy" and str((kwargs or {}).get("device")).startswith("cuda"):
            assert args[0].is_cuda or args[0].is_pinned(), "memory that the host copies"
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "a boolean index"
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    """Where a ring and the rows for it are."""
    return request.param


@pytest.fixture
def no_wait() -> TorchDispatchMode:
    return NoWait()


@pytest.fixture(scope="session")
def match_by_sorting():
    return reference_match


@pytest.fixture(scope="session")
def wanted_of():
    return make_wanted


@pytest.fixture(scope="session")
def new_scheduler():
    return FakeScheduler


@pytest.fixture(scope="session")
def items_of():
    return fake_items
