"""The scheduler's half of query capture: which tokens of which requests a step computes, and what their chunks are.

Copies nothing and asks no store. A chunk is told once, when all its tokens are known; the worker's half matches it with
the rows that it has collected, maybe over many steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from qkvault.capture.plan import RequestStep
from qkvault.integrations.vllm.identity import QUERIES
from qkvault.integrations.vllm.tracked import Tracked, block_ids_of, computed_before, floor_to
from qkvault.logs import RateLimited, get_logger
from qkvault.transfer import SaveItem
from qkvault.units import parse_bool

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from qkvault.config import Config

_log = RateLimited(get_logger("vllm.query_steps"))


class QuerySteps:
    """What is told of each request, from its first step to its last. Owned by the scheduler's thread."""

    def __init__(self, config: Config, *, block_size: int) -> None:
        self._config = config
        self._block_size = block_size
        self._num_told: dict[str, int] = {}  # of requests that are captured: chunks that were told
        self._ended: list[RequestStep] = []
        self._last_steps: set[str] = set()  # requests whose last step has been told
        self._dropped: list[str] = []

    def plan(
        self, output: SchedulerOutput, tracked: Mapping[str, Tracked | None]
    ) -> tuple[list[RequestStep], list[str]]:
        """What the step computes of requests that are captured, and requests that were aborted or preempted before."""
        for request_id in output.preempted_req_ids or ():
            self._drop(request_id)
        told: list[RequestStep] = []
        for request_id, num_before in list(computed_before(output)):  # all is read before anything changes
            try:
                told += self._step_of(output, request_id, num_before, tracked.get(request_id))
            except Exception as error:  # thread top: the others, and those that ended, must be told
                _log.warning("queries_not_planned", request=request_id, error=f"{type(error).__name__}: {error}")
                self._drop(request_id)
        told, self._ended = self._ended + told, []
        dropped, self._dropped = self._dropped, []
        return told, dropped

    def finished(self, tracked: Tracked, end: int, *, is_complete: bool) -> None:
        """A request has ended with tokens ``[0, end)`` computed; those of one that was aborted are not stored."""
        request_id = tracked.request.request_id
        self._last_steps.discard(request_id)
        if request_id not in self._num_told:
            return
        if not (is_complete and tracked.can_save):
            self._drop(request_id)
            return
        first, items = self._untold(tracked, end, with_tail=True)
        del self._num_told[request_id]
        at = tracked.request.num_computed_tokens
        self._ended.append(RequestStep(request_id, at, at, (), first, items, is_last=True))

    def reset(self) -> None:
        """What was computed so far is not to be stored."""
        self._dropped += [*(step.request_id for step in self._ended), *self._last_steps]
        self._ended = []

    def _step_of(
        self, output: SchedulerOutput, request_id: str, num_before: int, known: Tracked | None
    ) -> Iterator[RequestStep]:
        if known is None or not self._is_captured(known):
            return
        if not known.can_save:
            self._drop(request_id)
            return
        num_after = num_before + output.num_scheduled_tokens.get(request_id, 0)
        told = self._num_told.get(request_id, 0)
        self._num_told[request_id] = min(told, num_before // self._config.chunk_size)  # less: it is computed anew
        first, items = self._untold(known, num_after, with_tail=(is_last := known.is_last_step(num_after)))
        size = self._block_size
        table: Sequence[int] = block_ids_of(output, request_id) or ()
        blocks = tuple(table[num_before // size : -(-num_after // size)])
        if is_last:
            del self._num_told[request_id]
            self._last_steps.add(request_id)
        yield RequestStep(request_id, num_before, num_after, blocks, first, items, is_last)

    def _is_captured(self, tracked: Tracked) -> bool:
        if tracked.request.request_id in self._last_steps:
            return False
        params = tracked.request.kv_transfer_params or {}
        return parse_bool(params.get(QUERIES, self._config.q_requests == "all"))

    def _untold(self, tracked: Tracked, end: int, *, with_tail: bool) -> tuple[int, tuple[SaveItem, ...]]:
        """The chunks of ``[told, end)`` and the number of the first one. They count as told from now on."""
        request, size = tracked.request, self._config.chunk_size
        # Drafts that may be rejected and tokens that are still to be sampled are not among num_tokens.
        end = min(end, request.num_tokens if self._config.save_decode else request.num_prompt_tokens)
        end = floor_to(self._block_size if with_tail and self._config.save_partial_chunks else size, end)
        first = self._num_told.get(request.request_id, 0)
        if end <= first * size:
            return first, ()
        tracked.prefix.update_to(request.all_token_ids)
        no_blocks = range(end // self._block_size)  # the ring's take their place
        items = tracked.prefix.save_items(first * size, end, no_blocks, self._block_size)
        self._num_told[request.request_id] = end // size
        return first, tuple(items)

    def _drop(self, request_id: str) -> None:
        self._last_steps.discard(request_id)
        if self._num_told.pop(request_id, None) is not None:
            self._dropped.append(request_id)
