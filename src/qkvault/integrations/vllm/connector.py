"""QKVaultConnector: the class that vLLM constructs, once for its scheduler and once for every worker.

It only delegates: to ``SchedulerSide`` or ``WorkerSide``. What those raise ends here, as a miss.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from qkvault import config as configuration
from qkvault import embedded
from qkvault.client import StoreClient
from qkvault.errors import InvariantError
from qkvault.integrations.vllm import layouts
from qkvault.integrations.vllm.ops import StepPlan, StepReport
from qkvault.integrations.vllm.scheduler import SchedulerSide
from qkvault.integrations.vllm.worker import WorkerSide, layer_tensors
from qkvault.logs import RateLimited, get_logger
from qkvault.stats import StatsMonitor
from qkvault.types import Medium
from qkvault.wire.sockets import SocketTransport

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

F = TypeVar("F", bound=Callable[..., object])

_SOURCES = {Medium.RAM: CacheHitSource.HOST, Medium.DISK: CacheHitSource.DISK}
_log = get_logger("vllm")
_limited = RateLimited(_log)


def _nothing() -> None:
    return None


def _guarded(default: Callable[[], object]) -> Callable[[F], F]:
    """Answer ``default()``, and say so, when the method raises: no fault of ours may reach the engine."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def guarded(*args: object, **kwargs: object) -> object:  # seam: vLLM's own arguments
            try:
                return method(*args, **kwargs)
            except Exception as error:  # thread top: the edge of the engine
                _limited.warning(f"{method.__name__}_failed", error=f"{type(error).__name__}: {error}")
                return default()

        return cast("F", guarded)

    return decorate


class QKVaultConnector(KVConnectorBase_V1, SupportsHMA):
    """The cache under one vLLM engine. Best effort: whatever goes wrong costs a recompute, never a request."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Read the settings and refuse what is not supported. Raises ConfigError, at start only."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer_config = vllm_config.kv_transfer_config
        loaded = configuration.load(vllm=transfer_config.kv_connector_extra_config)
        engine_id = str(transfer_config.engine_id)
        self._config = loaded.config
        self._spec = layouts.require_supported(vllm_config, kv_cache_config)
        layout = layouts.chunk_layout(vllm_config, kv_cache_config, self._spec, self._config)
        self._space = layouts.key_space(vllm_config, layout, self._config)
        self._instance_id = f"vllm-{engine_id}"[:64]
        self._stats = StatsMonitor()
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        self._store: embedded.EmbeddedStore | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._start_scheduler(layout.block_size)

    def _start_scheduler(self, block_size: int) -> None:
        transfer_config = self._vllm_config.kv_transfer_config
        if transfer_config.kv_load_failure_policy != "recompute":
            # A best-effort cache must not end requests; vLLM reads this after it has constructed us.
            transfer_config.kv_load_failure_policy = "recompute"
            _log.info("load_failure_policy", policy="recompute")
        self._store = embedded.acquire(self._settings(), shared=True)
        self._store.serve(embedded.socket_address(self._instance_id))
        client = self._store.connect("vllm-scheduler")
        self._client = client
        self._scheduler = SchedulerSide(client, self._space, block_size, self._config, time.monotonic)

    def _settings(self) -> configuration.Config:
        return msgspec.structs.replace(self._config, instance_id=self._instance_id)

    def _connect_worker(self) -> StoreClient:
        store = embedded.find(self._instance_id)
        if store is not None:
            return store.connect("vllm-worker")
        return StoreClient(SocketTransport(embedded.socket_address(self._instance_id), "vllm-worker"))

    # ---- the worker's side ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn where the pages are. Raises LayoutMismatch if they are not laid out as vLLM's configuration says."""
        names = self._kv_cache_config.kv_cache_groups[0].layer_names
        layer = self._vllm_config.compilation_config.static_forward_context[names[0]]
        isa = getattr(layer, "isa", None)  # set by vLLM's CPU attention only
        layout = layouts.chunk_layout(self._vllm_config, self._kv_cache_config, self._spec, self._config, isa)
        tensors = layer_tensors(names, kv_caches)
        self._worker = WorkerSide(tensors, layout, self._space, self._connect_worker, self._stats)

    @_guarded(_nothing)
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:  # seam: vLLM's signature
        """Load what this step needs. On failure the blocks are reported, in this same step."""
        del forward_context, kwargs
        if self._worker is not None:
            self._worker.load(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: all layers were loaded by ``start_load_kv``."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: object
    ) -> None:  # seam: vLLM's signature
        """Nothing: all layers are stored together after the forward."""

    @_guarded(_nothing)
    def wait_for_save(self) -> None:
        """Store what this step computed."""
        if self._worker is not None:
            self._worker.save(self._plan())

    @_guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Finished requests whose blocks we kept, and keep no longer. Loads are never asynchronous to vLLM."""
        del finished_req_ids
        return (self._worker.take_finals_done() or None, None) if self._worker is not None else (None, None)

    @_guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be loaded in this step."""
        return self._worker.take_failed_blocks() if self._worker is not None else set()

    @_guarded(_nothing)
    def build_connector_worker_meta(self) -> StepReport | None:
        """What the scheduler's side is to hear of this step."""
        return self._worker.take_report() if self._worker is not None else None

    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        return plan if isinstance(plan, StepPlan) else StepPlan()

    # ---- the scheduler's side ----

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a chunk that is not stored is a later miss, nothing more."""
        return False

    @_guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond those computed are cached; None while some are on their way from a lower tier."""
        return self._side().matched(request, num_computed_tokens), False

    @_guarded(_nothing)
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Plan the load of the tokens that were promised."""
        self._side().allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    @_guarded(dict)
    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """From which media the promised tokens come."""
        loaded = self._side().loaded_from(request.request_id)
        sources = {_SOURCES.get(medium, CacheHitSource.EXTERNAL_UNSPECIFIED): n for medium, n in loaded.items()}
        return sources if sum(sources.values()) == num_external_tokens else {}

    @_guarded(StepPlan)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """All loads and stores of the coming step."""
        return self._side().plan(scheduler_output)

    @_guarded(_nothing)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Hear what the workers did."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            self._side().heard(report)

    @_guarded(lambda: (False, None))
    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, object] | None]:
        """Store what a finished request has computed last; True keeps its blocks until that is done."""
        is_complete = request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
        return self._side().finished(request, block_ids, is_complete=is_complete), None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, object] | None]:
        """As ``request_finished``: there is one group."""
        return self.request_finished(request, block_ids[0])

    @_guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        """Forget everything, in every tier."""
        if self._scheduler is None:
            return None
        self._client.clear()
        return True

    def take_events(self) -> Iterable[object]:
        """None yet."""
        return ()

    def shutdown(self) -> None:
        """End the session; the scheduler's side ends the store too."""
        if self._worker is not None:
            self._worker.close()
        if self._store is not None:
            store, self._store = self._store, None
            embedded.release(store)

    def _side(self) -> SchedulerSide:
        if self._scheduler is None:
            msg = "a method of the scheduler's side was called on a worker's"
            raise InvariantError(msg)
        return self._scheduler
