"""SlotTable: rows find their tokens by KV slot, as sorting would have it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkvault.capture.plan import SlotTable

NUM_SLOTS = 40


@given(data=st.data(), dtype=st.sampled_from([torch.int64, torch.int32]))
def test_rows_are_matched_as_by_sorting(data, dtype, match_by_sorting, wanted_of):
    """B85-88, B91: whatever rows there are, in any order, the table finds what sorted slots find."""
    table = SlotTable(NUM_SLOTS)
    for _ in range(2):  # a step leaves nothing behind for the next
        slots = st.integers(0, NUM_SLOTS - 1)
        kv_slots = data.draw(st.lists(slots, unique=True))
        wanted = wanted_of([(kv, 1000 + 7 * at) for at, kv in enumerate(kv_slots)])
        rows = data.draw(st.lists(slots, unique=True)) + [-1] * data.draw(st.integers(0, 3))
        mapping = torch.tensor(data.draw(st.permutations(rows)), dtype=dtype)
        matched = table.match(mapping, wanted)
        ring_slots, is_found = match_by_sorting(mapping.to(torch.int64), wanted)
        assert torch.equal(matched.ring_slots, ring_slots)
        assert torch.equal(matched.is_found, is_found)


def test_a_match_does_not_wait_for_a_device(wanted_of, no_wait, device):
    """B118, B422: the answer is on the device, when the device gets there."""
    table = SlotTable(NUM_SLOTS, device=device)
    mapping = torch.tensor([9, 3, -1], device=device)
    with no_wait:
        table.match(mapping, wanted_of([(17, 0), (9, 1)]))


def test_a_row_belongs_to_the_token_whose_slot_it_writes(wanted_of, device):
    """B86: the order of the rows, and of the tokens, says nothing."""
    table = SlotTable(NUM_SLOTS, device=device)
    matched = table.match(torch.tensor([9, 3, 17], device=device), wanted_of([(17, 0), (9, 1)]))
    assert matched.ring_slots.tolist() == [1, -1, 0]
    assert matched.is_found.tolist() == [True, True]


def test_a_slot_that_two_rows_write_is_not_found(wanted_of):
    """B87: a KV slot is written at most once a step: where that is not so, nobody knows which row is the token's."""
    matched = SlotTable(NUM_SLOTS).match(torch.tensor([9, 3, 9]), wanted_of([(9, 0), (3, 1)]))
    assert matched.is_found.tolist() == [False, True]


def test_of_two_tokens_of_one_slot_one_is_found(wanted_of):
    """B87: two tokens cannot both own a row."""
    matched = SlotTable(NUM_SLOTS).match(torch.tensor([9]), wanted_of([(9, 0), (9, 1)]))
    assert sum(matched.is_found.tolist()) == 1


@pytest.mark.parametrize("slot", [-1, -2, -1000, NUM_SLOTS, NUM_SLOTS + 5, 2**40])
def test_a_row_without_a_slot_goes_nowhere(slot, wanted_of):
    """B74, B91: padding, and slots that do not exist, are no token's: not even that of the last slot."""
    wanted = wanted_of([(NUM_SLOTS - 1, 5), (0, 6)])
    matched = SlotTable(NUM_SLOTS).match(torch.tensor([slot, NUM_SLOTS - 1]), wanted)
    assert matched.ring_slots.tolist() == [-1, 5]
    assert matched.is_found.tolist() == [True, False]


def test_a_step_that_fails_leaves_nothing_behind(wanted_of):
    """A slot mapping that is none does not make the next step wrong."""
    table = SlotTable(NUM_SLOTS)
    with pytest.raises(AttributeError):
        table.match(None, wanted_of([(3, 0)]))
    for slot in (-1, NUM_SLOTS):
        with pytest.raises(ValueError, match="slots"):
            table.match(torch.tensor([3]), wanted_of([(3, 0), (slot, 1)]))
    assert table.match(torch.tensor([3]), wanted_of([(4, 0)])).ring_slots.tolist() == [-1]
