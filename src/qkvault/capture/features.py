"""Features: what an engine's connector does besides KV, behind one dispatcher that keeps their faults to themselves.

A connector knows ``Dispatcher`` only. Each feature has the same hooks, in the order in which an engine reaches them:
register, start_step, save_kv_layer, wait_for_save, reclaim, reregister, shutdown (row 99).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

import torch

from qkvault.capture.adapter import QRingBufferAdapter
from qkvault.capture.plan import RequestStep
from qkvault.capture.recorder import QRingBufferCapture
from qkvault.capture.ring import QRingBuffer
from qkvault.errors import LayoutMismatch
from qkvault.logs import RateLimited, get_logger
from qkvault.spaces import SpaceDescription
from qkvault.types import TRANSFER_QUERY

if TYPE_CHECKING:
    from qkvault.keys import KeySpace
    from qkvault.layout import ChunkLayout
    from qkvault.link import Link
    from qkvault.paged import PagedConnector

QUERY_NAMES: Final = ("q", "query")  # of a layer's intermediate tensors; the first that is there
Numbers: TypeAlias = Mapping[str, Mapping[tuple[str, ...], float]]  # by name, then by the values of its labels
_log = RateLimited(get_logger("capture.features"))


class EngineContext(NamedTuple):
    """What a feature has to know of the engine when it registers."""

    kv: PagedConnector | None  # the KV pages; None: they are not registered yet
    layout: ChunkLayout  # of the queries of this rank
    space: KeySpace  # theirs
    connect: Callable[[SpaceDescription], Link]  # a session of the feature's own, which tells what it stores
    layer_names: Sequence[str]  # those to be captured, in the model's order
    num_ring_blocks: int
    can_save: bool = True  # else another rank stores what this one would


class Feature(Protocol):
    """One thing that is done beside KV. ``register`` may refuse; what the others raise ends in the dispatcher.

    ``reregister`` comes with each new session of KV, and what its store takes. While the feature is not capturing,
    ``save_kv_layer`` need not be called. ``numbers`` are for metrics.
    """

    @property
    def is_capturing(self) -> bool: ...
    def numbers(self) -> Numbers: ...
    def register(self, engine: EngineContext) -> None: ...
    def start_step(self, steps: Sequence[RequestStep], dropped: Collection[str]) -> None: ...
    def save_kv_layer(
        self, layer_name: str, tensors: Mapping[str, torch.Tensor], slot_mapping: torch.Tensor | None
    ) -> None: ...
    def wait_for_save(self) -> None: ...
    def reclaim(self) -> None: ...
    def reregister(self, advertised: Collection[str]) -> None: ...
    def shutdown(self) -> None: ...


class QTensorFeature:
    """Queries: captured into a ring, stored beside KV."""

    def __init__(self) -> None:
        self.capture: QRingBufferCapture | None = None  # None: not registered, or another rank stores
        self._is_wanted = True

    @property
    def is_capturing(self) -> bool:
        return self.capture is not None and self.capture.is_capturing

    def numbers(self) -> Numbers:
        """What became of chunks, and how full the ring is."""
        if self.capture is None:
            return {}
        adapter, ring = self.capture.adapter, self.capture.adapter.ring
        counters = adapter.counters
        outcomes = {"captured": counters.num_captured, "stored": counters.num_stored, "present": counters.num_present}
        return {
            "chunks": {(outcome,): count for outcome, count in outcomes.items()},
            "dropped_chunks": {(reason.value,): count for reason, count in counters.dropped.items()},
            "faults": {(): self.capture.num_faults},
            "ring_bytes": {(): ring.num_bytes},
            "ring_blocks": {(): ring.num_blocks},
            "ring_free_blocks": {(): ring.num_free_blocks()},
        }

    def register(self, engine: EngineContext) -> None:
        """Build the ring. Raises RuntimeError before the KV pages are known (rows 93, 114), LayoutMismatch, ValueError.

        Memory for the ring is taken here, and none later.
        """
        if engine.kv is None:
            msg = "queries register after KV: call register_kv_caches() first"
            raise RuntimeError(msg)
        if not engine.can_save:
            return
        kv, layout = engine.kv, engine.layout
        if (layout.block_size, layout.chunk_size) != (kv.block_size, kv.layout.chunk_size):
            msg = f"queries in blocks of {layout.block_size} tokens beside KV in blocks of {kv.block_size}"
            raise LayoutMismatch(msg)
        ring = QRingBuffer(
            layout.num_layers,
            engine.num_ring_blocks,
            layout.block_size,
            layout.num_heads * layout.head_size,
            getattr(torch, layout.dtype),
            device=kv.device,
        )
        link = engine.connect(SpaceDescription(engine.space, layout))
        adapter = QRingBufferAdapter(ring, layout, engine.space, link, num_engine_blocks=kv.num_blocks)
        num_slots = kv.num_blocks * kv.block_size
        self.capture = QRingBufferCapture(adapter, engine.layer_names, num_slots=num_slots)
        adapter.register()
        _log.info("query_ring", layers=ring.num_layers, blocks=ring.num_blocks, bytes=ring.num_bytes)

    def start_step(self, steps: Sequence[RequestStep], dropped: Collection[str]) -> None:
        """The requests of a step that is about to run; ``dropped`` were preempted or aborted before it."""
        if self.capture is not None:
            for request_id in dropped:
                self.capture.drop(request_id)
            self.capture.start_step(steps if self._is_wanted else ())

    def save_kv_layer(
        self, layer_name: str, tensors: Mapping[str, torch.Tensor], slot_mapping: torch.Tensor | None
    ) -> None:
        """A layer has run; ``tensors`` are those between its projections and its attention (row 81)."""
        if self.capture is not None:
            query = next((tensors[name] for name in QUERY_NAMES if name in tensors), None)
            self.capture.save_q_layer(layer_name, query, slot_mapping)

    def wait_for_save(self) -> None:
        if self.capture is not None:
            self.capture.batched_submit_qstore_requests()

    def reclaim(self) -> None:
        if self.capture is not None:
            self.capture.reclaim()

    def reregister(self, advertised: Collection[str]) -> None:
        """The server came back. While it takes no queries none are captured."""
        if self.capture is None:
            return
        if is_wanted := TRANSFER_QUERY in advertised:
            self.capture.adapter.reregister()
        if is_wanted != self._is_wanted:
            self._is_wanted = is_wanted
            if is_wanted:
                _log.info("queries_wanted_again")
            else:
                self.capture.give_up()
                _log.warning("queries_not_wanted", todo="give the store a share for them: query_bytes")

    def shutdown(self) -> None:
        """End the session; the ring goes with the feature."""
        if self.capture is not None:
            self.capture.shutdown()


FEATURE_REGISTRY: Final[dict[str, Callable[[], Feature]]] = {TRANSFER_QUERY: QTensorFeature}


class Dispatcher:
    """Hands every hook to every feature. After ``register`` nothing raises: a fault is logged and counted."""

    def __init__(self, features: Mapping[str, Feature]) -> None:
        self.features = dict(features)
        self.num_faults: Counter[str] = Counter()  # by feature and hook, with a dot between them; or by ``guarded``

    @property
    def is_capturing(self) -> bool:
        """Whether any feature wants the layers of the step that runs now."""
        return any(feature.is_capturing for feature in self.features.values())

    def numbers(self) -> Numbers:
        """Those of all features. Faults of all hooks are among them."""
        numbers = {name: values for feature in self.features.values() for name, values in feature.numbers().items()}
        if "faults" in numbers:
            numbers["faults"] = {(): numbers["faults"][()] + self.num_faults.total()}
        return numbers

    def register(self, engine: EngineContext) -> None:
        """At start, after the KV pages (row 114). Raises what a feature raises: it cannot work with this engine."""
        for feature in self.features.values():
            feature.register(engine)

    def start_step(self, steps: Sequence[RequestStep], dropped: Collection[str] = ()) -> None:
        """Before the first layer of a step."""
        self._each("start_step", lambda feature: feature.start_step(steps, dropped))

    def save_kv_layer(
        self, layer_name: str, tensors: Mapping[str, torch.Tensor], slot_mapping: torch.Tensor | None
    ) -> None:
        """A layer has run, or its attention is about to."""
        self._each("save_kv_layer", lambda feature: feature.save_kv_layer(layer_name, tensors, slot_mapping))

    def wait_for_save(self) -> None:
        """A step has run."""
        self._each("wait_for_save", lambda feature: feature.wait_for_save())

    def reclaim(self) -> None:
        self._each("reclaim", lambda feature: feature.reclaim())

    def reregister(self, advertised: Collection[str]) -> None:
        """The server came back, or is another one; ``advertised`` is what it takes."""
        self._each("reregister", lambda feature: feature.reregister(advertised))

    def shutdown(self) -> None:
        self._each("shutdown", lambda feature: feature.shutdown())

    def _each(self, hook: str, call: Callable[[Feature], None]) -> None:
        for name, feature in self.features.items():
            self.guarded(f"{name}.{hook}", partial(call, feature))

    def guarded(self, hook: str, call: Callable[[], None]) -> None:
        """Also for whoever stands between an engine and this: what ``call`` raises is logged and counted, no more."""
        try:
            call()
        except Exception as error:  # thread top: no fault of a feature may reach the engine, or another feature
            self.num_faults[hook] += 1
            _log.warning("feature_failed", hook=hook, error=f"{type(error).__name__}: {error}")


def init_dispatcher(requested: Sequence[str], advertised: Collection[str]) -> Dispatcher:
    """The features that the connector asks for. Raises ValueError for one that the server lacks (row 113)."""
    for name in requested:
        if name not in advertised:
            msg = f"Connector enables {name} but server does not."
            raise ValueError(msg)
        if name not in FEATURE_REGISTRY:
            msg = f"unknown feature {name!r}: one of {', '.join(FEATURE_REGISTRY)}"
            raise ValueError(msg)
    return Dispatcher({name: FEATURE_REGISTRY[name]() for name in requested})
