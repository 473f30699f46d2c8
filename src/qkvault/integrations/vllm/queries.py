"""The worker's half of query capture: the features' dispatcher, the tap that feeds it, and what both need of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from qkvault.capture.adapter import query_layout, query_space
from qkvault.capture.features import QUERY_NAMES, EngineContext, init_dispatcher
from qkvault.capture.ring import ring_blocks_for, ring_bytes
from qkvault.errors import ConfigError, Unavailable
from qkvault.integrations.vllm.query_tap import QueryTap, attention_layers, slot_mapping_of
from qkvault.logs import get_logger
from qkvault.memory import available_memory
from qkvault.spaces import SpaceDescription
from qkvault.types import TRANSFER_QUERY

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from qkvault.capture.features import Dispatcher, Numbers
    from qkvault.config import Config
    from qkvault.integrations.vllm.ops import StepPlan
    from qkvault.keys import KeySpace
    from qkvault.layout import ChunkLayout
    from qkvault.link import Link
    from qkvault.paged import PagedConnector

_TENSORS: Final = "intermediate_tensors"  # what an engine that shows queries itself calls them
_log = get_logger("vllm.queries")


class QueryGeometry(NamedTuple):
    """Of what is captured on each rank. The same on the scheduler's side and on every worker's."""

    layers: tuple[int, ...] | None  # numbers; None: all
    layout: ChunkLayout

    def space(self, kv_space: KeySpace) -> KeySpace:
        """Where a rank's queries are, beside its KV."""
        return query_space(kv_space, self.layout, self.layers)


def query_geometry(vllm_config: VllmConfig, kv_layout: ChunkLayout, config: Config) -> QueryGeometry | None:
    """What is captured, from vLLM's configuration (row 78); None: nothing is."""
    if not config.transfer_intermediate_tensors:
        return None
    model, layers = vllm_config.model_config, config.query_layers
    if layers == tuple(range(kv_layout.num_layers)):
        layers = None
    layout = query_layout(
        kv_layout,
        num_layers=kv_layout.num_layers if layers is None else len(layers),
        num_heads=model.get_num_attention_heads(vllm_config.parallel_config),
        head_size=model.get_head_size(),
        dtype=str(model.dtype).removeprefix("torch."),
    )
    return QueryGeometry(layers, layout)


class WorkerQueries:
    """Capture in one worker. Owned by the thread that runs the model; after ``start`` nothing raises."""

    def __init__(self, dispatcher: Dispatcher, layers: Mapping[str, Attention], kv_link: Link) -> None:
        """Taps ``layers`` for features that are registered. ``kv_link`` is the KV's, which tells of a restart."""
        self._dispatcher = dispatcher
        self._kv_link = kv_link
        self._num_sessions = 0  # of those whose features are known: that of the start may have gone already
        self._tap: QueryTap | None = QueryTap(layers, self._show)
        self._step = 0  # number of the last plan: none is begun twice

    def start_step(self, plan: StepPlan) -> None:
        """Before the forward: what it is to capture."""
        if plan.number != self._step:
            self._step = plan.number
            self._dispatcher.start_step(plan.query_steps, plan.query_drops)

    def save_kv_layer(self, layer_name: str, attn_metadata: AttentionMetadata, extra: Mapping[str, object]) -> None:
        """After a layer: take the queries that the engine itself shows, if it does, instead of the tap's (row 81)."""
        self._dispatcher.guarded("given", lambda: self._take_given(layer_name, attn_metadata, extra))

    def _show(self, layer_name: str, queries: Callable[[], torch.Tensor]) -> None:
        self._dispatcher.guarded("tap", lambda: self._take_tapped(layer_name, queries))

    def _take_tapped(self, layer_name: str, queries: Callable[[], torch.Tensor]) -> None:
        if self._dispatcher.is_capturing:
            self._dispatcher.save_kv_layer(layer_name, {"q": queries()}, slot_mapping_of(layer_name))

    def _take_given(self, layer_name: str, attn_metadata: AttentionMetadata, extra: Mapping[str, object]) -> None:
        given = extra.get(_TENSORS)
        if not isinstance(given, Mapping) or not any(name in given for name in QUERY_NAMES):
            return
        if self._tap is not None:  # the tap has shown this layer's; the engine shows those of the next ones
            self._tap.close()
            self._tap = None
            return
        self._dispatcher.save_kv_layer(layer_name, given, slot_mapping_of(layer_name, attn_metadata))

    def wait_for_save(self) -> None:
        """After the forward: store what has become whole."""
        self._dispatcher.wait_for_save()

    def reclaim(self) -> None:
        """Between steps: free what copies have done with, and follow the KV to a store that is back (row 97)."""
        self._dispatcher.reclaim()
        if (num_sessions := self._kv_link.num_sessions) != self._num_sessions:
            with suppress(Unavailable):  # gone again: the next session says what it takes
                self._dispatcher.reregister(self._kv_link.session().features)
                self._num_sessions = num_sessions

    def close(self) -> None:
        """Give vLLM its methods back, finish the copies, end the session."""
        if self._tap is not None:
            self._dispatcher.guarded("tap.close", self._tap.close)
        self._dispatcher.shutdown()

    def numbers(self) -> Numbers:
        return self._dispatcher.numbers()


def start(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    config: Config,
    geometry: QueryGeometry,
    *,
    paged: PagedConnector,
    kv_space: KeySpace,
    kv_link: Link,
    connect: Callable[[SpaceDescription], Link],
    can_save: bool,
) -> WorkerQueries:
    """Begin to capture (rows 76, 113, 114), after the KV pages are known.

    Raises ConfigError for layers whose queries cannot be had and for a ring that memory has no room for, and ValueError
    if the store takes no queries. One that is away is taken to; while one is there that does not, none are captured.
    """
    try:
        advertised = kv_link.session().features
    except Unavailable:
        advertised = (TRANSFER_QUERY,)
    dispatcher = init_dispatcher((TRANSFER_QUERY,), advertised)
    layers = attention_layers(vllm_config, kv_cache_config.kv_cache_groups[0].layer_names, geometry.layers)
    num_blocks = ring_blocks_for(
        paged.block_size,
        vllm_config.scheduler_config.max_num_batched_tokens,
        ring_blocks=config.q_ring_blocks or None,
        ring_depth=config.q_ring_depth,
    )
    _require_room(geometry.layout, num_blocks, paged.device, vllm_config.cache_config.gpu_memory_utilization)
    engine = EngineContext(
        kv=paged,
        layout=geometry.layout,
        space=geometry.space(kv_space),
        connect=connect,
        layer_names=list(layers),
        num_ring_blocks=num_blocks,
        can_save=can_save,
    )
    dispatcher.register(engine)
    return WorkerQueries(dispatcher, layers if can_save else {}, kv_link)


def room_beside(free_bytes: int, total_bytes: int, utilization: float) -> int:
    """What of a GPU is nobody's: of what is free now vLLM needs the peak of a step again, up to its share of all."""
    return max(0, min(free_bytes, int(total_bytes * (1 - utilization))))


def _require_room(layout: ChunkLayout, num_blocks: int, device: torch.device, utilization: float) -> None:
    """Raise ConfigError unless the device has memory for the ring: vLLM has taken its own by now."""
    width, dtype = layout.num_heads * layout.head_size, getattr(torch, layout.dtype)
    num_bytes = ring_bytes(layout.num_layers, num_blocks, layout.block_size, width, dtype)
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        room_bytes, where = room_beside(free_bytes, total_bytes, utilization), f"on {device} beside vLLM"
    else:
        room_bytes, where = available_memory()
    if num_bytes > room_bytes:
        msg = (
            f"the ring of queries needs {num_bytes} bytes, {room_bytes} are free {where}: make q_ring_blocks "
            f"(now {num_blocks}) smaller, capture fewer q_layers, or leave it room by a lower --gpu-memory-utilization"
        )
        raise ConfigError(msg)
