"""QRingBufferCapture: one step of the engine, from its plan to the store: every layer's rows into the same ring blocks.

Called by whoever has the queries of a layer (a tap, or an engine that passes them). It never raises: a fault costs the
chunks that the step touched, never the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from qkvault.capture.adapter import QRingBufferAdapter
from qkvault.capture.plan import Matched, RequestStep, SlotTable
from qkvault.capture.rows import StepCapture
from qkvault.errors import InvariantError
from qkvault.logs import RateLimited, get_logger
from qkvault.paged import mark

_UNSEEN_STEPS: Final = 5
_UNSEEN_TODO: Final = "the engine does not show its attention layers: use --enforce-eager, or report vLLM's version"
_log: Final = RateLimited(get_logger("capture"))


class _Mapping(NamedTuple):
    """A slot mapping of this step, kept so that its address is not given to another, and its rows."""

    slot_mapping: torch.Tensor
    matched: Matched


class _Ran(NamedTuple):
    """A step whose layers are all in the ring, or will be once the device gets there."""

    capture: StepCapture
    is_found: torch.Tensor | None  # on the CPU; None: a layer is missing
    copied: torch.Event | None  # after which is_found is there


class QRingBufferCapture:
    """The steps of one engine. Owned by the model's thread."""

    def __init__(self, adapter: QRingBufferAdapter, layer_names: Sequence[str], *, num_slots: int) -> None:
        """``layer_names`` are the layers that are captured, in the ring's order; ``num_slots`` the engine's KV slots.

        Raises ValueError unless the ring has as many layers.
        """
        if len(layer_names) != adapter.ring.num_layers or len(set(layer_names)) != len(layer_names):
            msg = f"a ring of {adapter.ring.num_layers} layers for {len(layer_names)}: {', '.join(layer_names)}"
            raise ValueError(msg)
        self.adapter = adapter
        self.num_faults = 0  # steps that were not captured because of one
        self._layer_numbers = {name: number for number, name in enumerate(layer_names)}
        self._table = SlotTable(num_slots, device=adapter.ring.device)
        self._step: StepCapture | None = None  # None: nothing is captured now
        self._mappings: dict[tuple[int, int], _Mapping] = {}  # by address and rows: most often one for all layers
        self._seen: set[str] = set()
        self._num_unseen = 0  # steps in a row that should have shown queries, and showed none
        self._ran: deque[_Ran] = deque()  # not verified yet, oldest first

    @property
    def is_capturing(self) -> bool:
        """Whether the step that runs now wants any row. While it does not, queries need not be shown."""
        return self._step is not None

    def start_step(self, steps: Sequence[RequestStep]) -> None:
        """Take the requests of a step, before its first layer. A step before it that was not submitted is void."""
        try:
            if self._step is not None:
                self._fault(InvariantError("a step was not submitted"))
                self._finish(None)
            capture = self.adapter.collector.begin(steps)
            self._mappings, self._seen = {}, set()
            if capture.spans:
                self._step = capture
        except Exception as error:  # thread top: the engine goes on; what was begun is void
            self._fault(error)
            self.give_up()

    def drop(self, request_id: str) -> None:
        """A request was preempted or aborted."""
        self.adapter.collector.drop(request_id)

    def save_q_layer(self, layer_name: str, query: torch.Tensor | None, slot_mapping: torch.Tensor | None) -> None:
        """Put the rows of a layer into the ring (rows 80-83, 115).

        ``query`` is ``[rows, heads, head_size]``, as the attention sees it; ``slot_mapping`` ``[rows or fewer]`` says
        which KV slot each row writes. Without either, and for a layer that is not captured, nothing is done: a step
        that lacks a layer when it is submitted is not stored.
        """
        number = self._layer_numbers.get(layer_name)
        if self._step is None or number is None or query is None or slot_mapping is None:
            return
        try:
            ring_slots = self._match(self._step, layer_name, slot_mapping[: len(query)])
            self.adapter.ring.scatter(number, query[: len(ring_slots)], ring_slots)
            self._seen.add(layer_name)
        except Exception as error:  # thread top: the engine goes on; the step is not captured
            self._fault(error)
            self._finish(None)

    def batched_submit_qstore_requests(self) -> None:
        """The step has run: store the chunks that are whole by now (row 84). Nothing waits for a device."""
        try:
            if self._step is not None:
                self._watch()
                self._finish(self._is_found() if len(self._seen) == len(self._layer_numbers) else None)
            self._verify()
            self.adapter.submit()
        except Exception as error:  # thread top: the engine goes on; chunks that are lost are missing, no more
            self._fault(error)
            self.give_up()

    def reclaim(self) -> None:
        """See which steps and copies a device has done with, and go on with their chunks."""
        if self._step is None:
            self.batched_submit_qstore_requests()
        self.adapter.reclaim()

    def give_up(self) -> None:
        """Forget what has been captured and is not handed over. Requests that go on are captured anew."""
        self._step = None
        self._ran.clear()
        self.adapter.collector.clear()

    def shutdown(self) -> None:
        """Store what is whole once the device is done, then free everything and end the session. Idempotent."""
        if self._step is not None:
            self._finish(None)
        try:
            for ran in self._ran:
                if ran.copied is not None:
                    ran.copied.synchronize()
            self._verify()
            self.adapter.submit()
        except Exception as error:  # thread top: as in a step
            self._fault(error)
        self._ran.clear()
        self.adapter.shutdown()

    def _watch(self) -> None:
        if self._num_unseen < _UNSEEN_STEPS:  # else it has been said
            self._num_unseen = 0 if self._seen else self._num_unseen + 1
            if self._num_unseen == _UNSEEN_STEPS:
                _log.warning("queries_not_seen", steps=_UNSEEN_STEPS, todo=_UNSEEN_TODO)

    def _match(self, step: StepCapture, layer_name: str, slot_mapping: torch.Tensor) -> torch.Tensor:
        if layer_name in self._seen:
            msg = f"{layer_name} ran twice in one step"
            raise InvariantError(msg)
        key = (slot_mapping.data_ptr(), len(slot_mapping))
        if key not in self._mappings:
            self._mappings[key] = _Mapping(slot_mapping, self._table.match(slot_mapping, step.wanted))
        return self._mappings[key].matched.ring_slots

    def _is_found(self) -> torch.Tensor:
        founds = [mapping.matched.is_found for mapping in self._mappings.values()]
        return founds[0] if len(founds) == 1 else torch.stack(founds).all(0)

    def _finish(self, is_found: torch.Tensor | None) -> None:
        # On a device the answer is fetched behind its work, and looked at when it is there.
        capture, self._step = self._step, None
        self._mappings = {}
        if capture is None:
            return
        copied = None
        if is_found is not None and is_found.device.type != "cpu":
            device, is_found = is_found.device, is_found.to("cpu", non_blocking=True)
            copied = mark(device)
        self._ran.append(_Ran(capture, is_found, copied))

    def _verify(self) -> None:
        while self._ran and (self._ran[0].copied is None or self._ran[0].copied.query()):
            ran = self._ran.popleft()
            self.adapter.collector.verify(ran.capture, None if ran.is_found is None else ran.is_found.tolist())

    def _fault(self, error: Exception) -> None:
        self.num_faults += 1
        _log.warning("query_capture_failed", error=f"{type(error).__name__}: {error}")
