"""The worker's half of the connector: copies between vLLM's pages and the store's slots.

Runs on the thread that runs the model, before and after its forward. Nothing raises out of here: a load that fails, for
whatever reason, is a list of blocks that vLLM computes again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from qkvault.client import StoreClient
from qkvault.errors import QKVaultError
from qkvault.integrations.vllm.ops import LoadOp, SaveOp, StepPlan, StepReport
from qkvault.keys import KeySpace
from qkvault.layout import ChunkLayout
from qkvault.logs import RateLimited, get_logger
from qkvault.paged import PagedConnector
from qkvault.stats import StatsMonitor
from qkvault.transfer import Transfer

if TYPE_CHECKING:
    import torch

_log = RateLimited(get_logger("vllm.worker"))


class WorkerSide:
    """One worker's pages and its session with the store."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        layout: ChunkLayout,
        space: KeySpace,
        connect: Callable[[], StoreClient],
        stats: StatsMonitor,
    ) -> None:
        """``tensors`` are vLLM's, one a layer in order. ``connect`` is called at the first step, and after a loss."""
        self._paged = PagedConnector(tensors, layout)
        self._space = space
        self._connect = connect
        self._stats = stats
        self._transfer: Transfer | None = None
        self._report = StepReport()
        self._leases: set[int] = set()  # of loads whose copies may still be under way
        self._failed_blocks: set[int] = set()
        self._finals_done: set[str] = set()

    def load(self, plan: StepPlan) -> None:
        """Fill the blocks of all loads of this step; what failed is told by ``take_failed_blocks`` and the report."""
        for op in plan.loads:
            self._leases.add(op.lease_id)
            failed = self._try_load(op)
            if failed:
                self._failed_blocks.update(failed)
                self._report.failed_requests.add(op.request_id)

    def save(self, plan: StepPlan) -> None:
        """Store what this step computed. After a failed load nothing is: other chunks may rest on the lost blocks."""
        ops = [op for op in plan.saves if not self._failed_blocks or op.is_final]
        for op in plan.saves:
            if op.is_final:
                self._finals_done.add(op.request_id)
            elif self._failed_blocks:
                self._report.skipped_saves[op.request_id] = op.start_token
        if ops:
            self._try_save(ops)

    def take_failed_blocks(self) -> set[int]:
        """Blocks whose load failed since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_finals_done(self) -> set[str]:
        """Finished requests whose blocks are no longer needed, since the last call."""
        done, self._finals_done = self._finals_done, set()
        return done

    def take_report(self) -> StepReport | None:
        """What the scheduler's half should hear, if anything."""
        if self._leases and (self._transfer is None or self._transfer.settle()):
            self._report.ended_leases.update(self._leases)
            self._leases.clear()
        report, self._report = self._report, StepReport()
        is_empty = not (report.ended_leases or report.failed_requests or report.skipped_saves)
        return None if is_empty else report

    def close(self) -> None:
        """End the session."""
        if self._transfer is not None:
            self._transfer.client.close()
            self._transfer = None

    def _try_load(self, op: LoadOp) -> set[int]:
        num_tokens = sum(len(item.block_ids) for item in op.items) * self._paged.layout.block_size
        num_bytes = num_tokens * self._paged.layout.token_bytes
        try:
            with self._stats.stage("to_gpu", num_bytes, num_tokens=num_tokens):
                bad = self._session().load(op.items)
        except Exception as error:  # thread top: the forward must go on; vLLM computes these blocks again
            self._lost(error, "load_failed")
            bad = set(range(len(op.items)))
        # Everything after the first failure is void: it cannot be used without what was before it.
        return {block for item in op.items[min(bad) :] for block in item.block_ids} if bad else set()

    def _try_save(self, ops: Sequence[SaveOp]) -> None:
        items = [item for op in ops for item in op.items]
        try:
            with self._stats.stage("from_gpu") as stage:
                report = self._session().save(items)
                stage.num_bytes = report.copied_bytes
        except Exception as error:  # thread top: what is not stored is a later miss
            self._lost(error, "save_failed")

    def _session(self) -> Transfer:
        if self._transfer is None:
            self._transfer = Transfer(self._connect(), self._paged, self._space)
        return self._transfer

    def _lost(self, error: Exception, event: str) -> None:
        _log.warning(event, error=f"{type(error).__name__}: {error}")
        if isinstance(error, QKVaultError):
            self.close()  # the next step connects anew


def layer_tensors(layer_names: Sequence[str], kv_caches: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The registered tensors of ``layer_names``, in that order. Raises KeyError if one is missing."""
    return [kv_caches[name] for name in layer_names]
