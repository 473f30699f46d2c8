"""Which row of a step is which token: by the KV slot that it writes, never by its place in the batch.

Rows of several requests lie in any order, some are padding, and a request's tokens may be computed over many steps. But
a KV slot is written at most once a step, so that rows and tokens that name one slot belong together (rows 85-91). Knows
slots only; ``rows.py`` says which tokens are wanted and where they go.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
import torch

from qkvault.transfer import SaveItem


class RequestStep(NamedTuple):
    """What one step computes of a request whose queries are wanted. Positions are tokens from the request's start."""

    request_id: str
    num_before: int  # tokens computed before the step: what was captured from there on is void
    num_after: int  # and after it, drafts included
    block_ids: tuple[int, ...]  # the engine's blocks that hold [num_before, num_after), from that of num_before on
    first_chunk: int = 0  # number of the chunk that is the first of items
    items: tuple[SaveItem, ...] = ()  # chunks whose tokens have become known, maybe before their rows are computed
    is_last: bool = False  # the request has ended: what is not whole now never will be


class Wanted(NamedTuple):
    """The tokens that a step captures, as pairs: the KV slot that a token's row writes, and where its query goes."""

    kv_slots: array[int]
    ring_slots: array[int]


class Matched(NamedTuple):
    """The rows of a step (row 88). Both tensors are on the device of the slot mapping, maybe not computed yet."""

    ring_slots: torch.Tensor  # [rows], int64: where each row's query goes; -1 if nowhere
    is_found: torch.Tensor  # [wanted tokens], bool: whether exactly one row is the token's


class SlotTable:
    """Finds rows by KV slot, with a table of all KV slots in place of a search: a few operations on the device a step.

    Nothing waits for the device. Takes 8 bytes a KV slot. Owned by the thread that runs the model.
    """

    def __init__(self, num_slots: int, *, device: torch.device | str = "cpu") -> None:
        self.num_slots = num_slots
        # What is last is no token's: slots that do not exist, and -1, which counts from the end, lead there.
        self._tokens = torch.full((num_slots + 1,), -1, dtype=torch.int64, device=device)

    def match(self, slot_mapping: torch.Tensor, wanted: Wanted) -> Matched:
        """``slot_mapping`` is ``[rows]`` of any integer type, -1 for padding. Slots in ``wanted`` exist and differ.

        Of tokens that name one slot nevertheless, one is found and no other. Raises ValueError for one that does not.
        """
        num_wanted = len(wanted.kv_slots)
        columns = _columns(wanted)
        if num_wanted and not 0 <= columns[0, :-1].min() <= columns[0, :-1].max() < self.num_slots:
            msg = f"a token's KV slot is not one of {self.num_slots} slots"
            raise ValueError(msg)
        pairs = torch.from_numpy(columns)
        if self._tokens.is_cuda:
            pairs = pairs.pin_memory()  # else the host waits for the copy, and so for all that is before it
        pairs = pairs.to(self._tokens.device, non_blocking=True)
        kv_slots, ring_slots = pairs[0, :num_wanted], pairs[1]
        rows = slot_mapping.to(torch.int64).clamp(-1, self.num_slots)
        try:
            self._tokens.index_copy_(0, kv_slots, torch.arange(num_wanted, device=self._tokens.device))
            tokens = self._tokens[rows]  # [rows]: which wanted token each row is, -1 if none
        finally:
            self._tokens.index_fill_(0, kv_slots, -1)
        counts = torch.zeros(num_wanted + 1, dtype=torch.int64, device=self._tokens.device)
        counts.scatter_add_(0, torch.where(tokens < 0, num_wanted, tokens), torch.ones_like(tokens))
        return Matched(ring_slots[tokens], counts[:num_wanted] == 1)


def _columns(wanted: Wanted) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """``[2, wanted + 1]``: KV slots and ring slots, and -1, which is where a row of no token goes."""
    columns = np.full((2, len(wanted.kv_slots) + 1), -1, np.int64)
    columns[0, :-1] = wanted.kv_slots
    columns[1, :-1] = wanted.ring_slots
    return columns
