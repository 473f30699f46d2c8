"""QKVaultConnector: the class that vLLM constructs, once for its scheduler and once for every worker.

It only delegates: to ``SchedulerSide`` or ``WorkerSide``. What those raise ends here, as a miss.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, TypeVar, cast

from msgspec.structs import replace

from qkvault import config as configuration
from qkvault import embedded
from qkvault.errors import InvariantError, ProtocolError, Unavailable
from qkvault.integrations.vllm import SUPPORTED, layouts, queries
from qkvault.integrations.vllm.compat import (
    CacheHitSource,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from qkvault.integrations.vllm.events import EngineEvents, are_wanted
from qkvault.integrations.vllm.identity import vllm_hashes_media
from qkvault.integrations.vllm.links import open_link
from qkvault.integrations.vllm.logs import follow_vllm
from qkvault.integrations.vllm.metrics import QKVaultPromMetrics, QKVaultStats, Reporter
from qkvault.integrations.vllm.ops import StepPlan, StepReport
from qkvault.integrations.vllm.scheduler import Engine, SchedulerSide
from qkvault.integrations.vllm.worker import WorkerSide
from qkvault.link import Link
from qkvault.logs import RateLimited, get_logger
from qkvault.spaces import SpaceDescription
from qkvault.stats import StatsMonitor
from qkvault.tokens import load_scheme
from qkvault.types import Medium
from qkvault.wire.messages import Instance

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

F = TypeVar("F", bound=Callable[..., object])

_SOURCES: Final = {Medium.RAM: CacheHitSource.HOST, Medium.DISK: CacheHitSource.DISK}
# What a request ends with that has computed all it was to compute.
_COMPLETE: Final = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"})
_INSTANCE_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
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
                if isinstance(args[0], QKVaultConnector):
                    args[0].on_failure(error)
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
        follow_vllm(loaded)
        self._config = loaded.config
        load_scheme(self._config.hash_algorithm, shared=self._config.is_shared)
        self._spec = layouts.require_supported(vllm_config, kv_cache_config)
        self._layout = layouts.chunk_layout(vllm_config, kv_cache_config, self._spec, self._config)
        self._spaces = layouts.key_spaces(vllm_config, self._spec, self._layout, self._config)
        self._queries: queries.WorkerQueries | None = None
        self._query_geometry = queries.query_geometry(vllm_config, self._layout, self._config)
        self._rank = int(vllm_config.parallel_config.rank) if role is KVConnectorRole.WORKER else 0
        is_named = loaded.sources["instance_id"] != configuration.DEFAULT
        self._instance_id = self._config.instance_id if is_named else _instance_id(str(transfer_config.engine_id))
        self.stats = StatsMonitor()
        self._reporter = Reporter(self.stats, rank=self._rank) if self._config.metrics else None
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        self._store: embedded.EmbeddedStore | None = None
        self._events: EngineEvents | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._start_scheduler()

    def _start_scheduler(self) -> None:
        transfer_config = self._vllm_config.kv_transfer_config
        if transfer_config.kv_load_failure_policy != "recompute":
            # A best-effort cache must not end requests; vLLM reads this after it has constructed us.
            transfer_config.kv_load_failure_policy = "recompute"
            _log.info("load_failure_policy", policy="recompute")
        tells_events = are_wanted(self._vllm_config, self._config)
        if self._config.address is None:
            store = embedded.acquire(replace(self._config, instance_id=self._instance_id), shared=True)
            self._store = store
            try:
                if store.num_users == 1:
                    store.serve(embedded.socket_address(self._instance_id))
                    if tells_events:
                        self._events = EngineEvents(store.driver)
            except BaseException:
                embedded.release(store)
                raise
        engine = Engine(
            self._layout.block_size,
            can_load=transfer_config.is_kv_consumer,
            can_save=transfer_config.is_kv_producer,
            shares_blocks=bool(self._vllm_config.cache_config.enable_prefix_caching),
            hashes_media=vllm_hashes_media(self._vllm_config),
        )
        link = self._link("scheduler")
        if self._reporter is not None and self._store is not None:  # a server exports its own numbers
            self._reporter.status = lambda: link.session().status()
        geometry = self._query_geometry
        self._scheduler = SchedulerSide(
            link,
            self._spaces,
            engine,
            self._config,
            self.stats,
            clock=time.monotonic,
            query_spaces=[geometry.space(space) for space in self._spaces] if geometry is not None else (),
        )

    def _link(self, role: str, description: SpaceDescription | None = None) -> Link:
        """Sessions with the server, or with the store in the scheduler's process, for KV or what is described."""
        instance = Instance(
            instance_id=self._instance_id,
            role=role,
            model_name=self._spaces[0].model_name,
            worker_id=self._rank,
            world_size=len(self._spaces),
            pid=os.getpid(),
            host=socket.gethostname(),
            engine=f"vllm {SUPPORTED}",
            spaces=((description or SpaceDescription(self._spaces[self._rank], self._layout)).encode(),),
        )
        return open_link(self._config, instance, self._store)

    def on_failure(self, error: Exception) -> None:
        """A hook of the scheduler's side has failed; if that was the store, it is looked for from now on."""
        if self._scheduler is not None and isinstance(error, (Unavailable, ProtocolError)):
            self._scheduler.lost(error)

    # ---- both sides, and the process that is asked for metrics ----

    @_guarded(_nothing)
    def get_kv_connector_stats(self) -> QKVaultStats | None:
        """What this side has counted since the last call, if anything."""
        return self._reporter.take() if self._reporter is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, float] | None = None) -> QKVaultStats:
        """What ``get_kv_connector_stats`` said, as it comes out of a message."""
        return QKVaultStats(dict(data or {}))

    @classmethod
    @_guarded(_nothing)
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> QKVaultPromMetrics | None:
        """What stands in vLLM's ``/metrics``: a name for each number, at zero."""
        loaded = configuration.load(vllm=vllm_config.kv_transfer_config.kv_connector_extra_config)
        follow_vllm(loaded)
        if not loaded.config.metrics:
            return None
        return QKVaultPromMetrics(
            vllm_config,
            metric_types,
            labelnames,
            per_engine_labelvalues,
            with_store=loaded.config.address is None,
            with_queries=loaded.config.transfer_intermediate_tensors,
        )

    # ---- the worker's side ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn where the pages are. Raises LayoutMismatch if they are not laid out as vLLM's configuration says."""
        paged = layouts.paged_connector(self._vllm_config, self._kv_cache_config, self._layout, kv_caches)
        link, space = self._link("worker"), self._spaces[self._rank]
        can_save = self._rank == 0 or space != self._spaces[0]
        self._worker = WorkerSide(
            paged,
            space,
            link,
            self.stats,
            rank=self._rank,
            can_save=can_save,
            load_deadline_seconds=self._config.load_deadline_seconds,
        )
        if self._query_geometry is not None and self._vllm_config.kv_transfer_config.is_kv_producer:
            self._queries = queries.start(
                self._vllm_config,
                self._kv_cache_config,
                self._config,
                self._query_geometry,
                paged=paged,
                kv_space=space,
                kv_link=link,
                connect=functools.partial(self._link, "queries"),
                can_save=can_save,
            )
            if self._reporter is not None:
                self._reporter.queries = self._queries.numbers

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, object]) -> bool:
        """Whether attention has to run in Python: while queries are captured."""
        return configuration.load(vllm=extra_config).config.transfer_intermediate_tensors

    @_guarded(_nothing)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step is about to run: store what it may overwrite, and say what is to be captured of it."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, StepPlan):
            self._worker.begin(connector_metadata)
            if self._queries is not None:
                self._queries.start_step(connector_metadata)

    @_guarded(_nothing)
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:  # seam: vLLM's signature
        """Begin the loads of this step. vLLM runs the requests they are for when ``get_finished`` names them."""
        del forward_context, kwargs
        if self._worker is not None and isinstance(self._connector_metadata, StepPlan):
            self._worker.load(self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no request runs before all its layers are loaded."""

    @_guarded(_nothing)
    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: object
    ) -> None:  # seam: vLLM's signature
        """Nothing of KV, whose layers are stored together after the forward; maybe the queries of the layer."""
        del kv_layer
        if self._queries is not None and kwargs:
            self._queries.save_kv_layer(layer_name, attn_metadata, kwargs)

    @_guarded(_nothing)
    def wait_for_save(self) -> None:
        """Store what this step computed."""
        if self._worker is not None and isinstance(self._connector_metadata, StepPlan):
            self._worker.save(self._connector_metadata)
        if self._queries is not None:
            self._queries.wait_for_save()

    @_guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """No finished requests, since no blocks of theirs are kept; requests whose load is over."""
        del finished_req_ids
        if self._queries is not None:
            self._queries.reclaim()
        received = self._worker.take_loaded() if self._worker is not None else set()
        return None, received or None

    @_guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be loaded, of the requests that ``get_finished`` named last."""
        return self._worker.take_failed_blocks() if self._worker is not None else set()

    @_guarded(_nothing)
    def build_connector_worker_meta(self) -> StepReport | None:
        """What the scheduler's side is to hear of this step."""
        return self._worker.take_report() if self._worker is not None else None

    # ---- the scheduler's side ----

    @_guarded(_nothing)
    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Where it is seen whether vLLM's own prefix cache is empty."""
        self._side().local.bind(gpu_block_pool)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a chunk that is not stored is a later miss, nothing more."""
        return False

    @_guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond those computed are cached, to be loaded between steps; None: not all are here yet."""
        num_external = self._side().matched(request, num_computed_tokens)
        return num_external, bool(num_external)

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
        meta = connector_output.kv_connector_worker_meta
        report = meta if isinstance(meta, StepReport) else None
        self._side().heard(report, connector_output.finished_recving or ())

    @_guarded(lambda: (False, None))
    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, object] | None]:
        """Store what a finished request has computed last, with the next step. Its blocks are not kept for that."""
        self._side().finished(request, block_ids, is_complete=request.status.name in _COMPLETE)
        return False, None

    @_guarded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, object] | None]:
        """As ``request_finished``: there is one group."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    @_guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        """Forget everything, in every tier."""
        if self._scheduler is None:
            return None
        self._scheduler.reset()
        return True

    @_guarded(tuple)
    def take_events(self) -> Iterable[object]:
        """What the store has to tell, if vLLM publishes events and the store does not do so itself."""
        return self._events.take() if self._events is not None else ()

    @_guarded(_nothing)
    def shutdown(self) -> None:
        """End the session; the scheduler's side ends the store too. Each part ends, whatever another one raises."""
        with ExitStack() as parts:  # the last one first
            if self._store is not None:
                store, self._store = self._store, None
                parts.callback(embedded.release, store)
            for part in (self._scheduler, self._worker, self._queries):
                if part is not None:
                    parts.callback(part.close)

    def _side(self) -> SchedulerSide:
        if self._scheduler is None:
            msg = "a method of the scheduler's side was called on a worker's"
            raise InvariantError(msg)
        return self._scheduler


def _instance_id(engine_id: str) -> str:
    name = f"vllm-{engine_id}"
    return name if _INSTANCE_ID.fullmatch(name) else f"vllm-{hashlib.sha256(engine_id.encode()).hexdigest()[:32]}"
