"""Attention layers for the toy engine: vLLM's own modules over a backend that computes nothing.

The query of a token in a layer is a digest of all tokens up to it and the layer's number. So every query that is stored
can be compared with what it must be, whatever else shared its step.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from qkvault.image import peek
from qkvault.logical import logical_views
from qkvault.prefix import Prefix
from qkvault.types import SPACE_BYTES, ChunkState

HEADS, HEAD_SIZE = 4, 32  # those of the model's config.json
WIDTH = HEADS * HEAD_SIZE


class Impl:
    """What a backend's implementation is to a layer."""

    supports_quant_query_input = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.num_heads, self.head_size = args[0], args[1]

    def forward(self, layer: Any, query: Any, *args: Any, output: Any, **kwargs: Any) -> Any:
        return output.zero_()


class Backend(CPUAttentionBackend):
    """A backend of that implementation."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl


@lru_cache(maxsize=200_000)
def query_of(digest: bytes, layer: int) -> bytes:
    """The query of the token whose KV is ``digest``, a byte for each element."""
    return hashlib.shake_128(digest + bytes([layer])).digest(WIDTH)


def queries_of(digests: Sequence[bytes], layer: int) -> np.ndarray[Any, Any]:
    """``[tokens, WIDTH]``."""
    rows = b"".join(query_of(digest, layer) for digest in digests)
    return np.frombuffer(rows, np.uint8).reshape(-1, WIDTH).astype(np.float32)


class Layers:
    """The layers of one engine. ``passes``: the name under which vLLM, were it patched, would pass their queries."""

    def __init__(self, config: Any, names: Sequence[str], *, attn_type: str = "decoder") -> None:
        with set_current_vllm_config(config):
            self.modules = {
                name: Attention(
                    HEADS, HEAD_SIZE, 1.0, num_kv_heads=1, cache_config=config.cache_config, prefix=name,
                    attn_type=attn_type, attn_backend=Backend,
                )
                for name in names
            }  # fmt: skip
        self.config, self.random = config, random.Random(len(names))
        self.passes: str | None = None

    def run(self, worker: Any, rows: list[tuple[int, bytes]]) -> None:
        """A forward over ``rows``, pairs of KV slot and digest, in any order, with padding in between and behind."""
        rows += [(-1, b"padding")] * self.random.randrange(3)
        self.random.shuffle(rows)
        mapping = torch.tensor([slot for slot, _ in rows], dtype=torch.int64)
        rows += [(-1, b"more padding")] * self.random.randrange(3)  # the mapping may be shorter than the batch
        metadata = dict.fromkeys(self.modules, SimpleNamespace(slot_mapping=mapping))
        save = worker.save_kv_layer
        with set_forward_context(metadata, self.config, slot_mapping=dict.fromkeys(self.modules, mapping)):
            for number, module in enumerate(self.modules.values()):
                query = torch.from_numpy(queries_of([digest for _, digest in rows], number))
                if self.passes is not None:
                    shown = {self.passes: query.view(-1, HEADS, HEAD_SIZE)}
                    worker.save_kv_layer = lambda *args, shown=shown: save(*args, intermediate_tensors=shown)
                try:
                    module(query, query[:, :HEAD_SIZE], query[:, :HEAD_SIZE])
                finally:
                    vars(worker).pop("save_kv_layer", None)


class LateStream:
    """Copies out of the ring that read it only when somebody waits for them, or has asked for the third time."""

    def __init__(self, paged: Any) -> None:
        self.waiting: list[Any] = []
        self.num_done = self.num_begun = 0
        self.copy, paged.batched_from_gpu = paged.batched_from_gpu, self.begin

    def begin(self, runs: Sequence[Any]) -> LateEvent:
        self.waiting.append(runs)
        self.num_begun += 1
        return LateEvent(self, self.num_begun)

    def finish(self, number: int) -> None:
        while self.num_done < number:
            self.copy(self.waiting.pop(0))
            self.num_done += 1


class LateEvent:
    def __init__(self, stream: LateStream, number: int) -> None:
        self.stream, self.number, self.num_looks = stream, number, 0

    def query(self) -> bool:
        self.num_looks += 1
        if self.num_looks >= 3:
            self.synchronize()
        return self.stream.num_done >= self.number

    def synchronize(self) -> None:
        self.stream.finish(self.number)


class Holes:
    """What an engine's capture said of chunks that it could not capture, by request."""

    def __init__(self, engine: Any) -> None:
        self.found: dict[str, dict[int, set[str]]] = {}
        self.engine = engine
        collector = collector_of(engine)
        self.take, collector.take_holes = collector.take_holes, self.look

    def look(self) -> Sequence[Any]:
        """In place of the collector's ``take_holes``."""
        holes = self.take()
        for hole in holes:
            self.found.setdefault(hole.request_id, {}).setdefault(hole.chunk, set()).add(hole.reason.value)
        return holes

    def of(self, name: str) -> dict[int, set[str]]:
        return self.found.get(name, {})

    @property
    def reasons(self) -> set[str]:
        return {reason for chunks in self.found.values() for reasons in chunks.values() for reason in reasons}


def capture_of(engine: Any) -> Any:
    return engine.worker._queries._dispatcher.features["transfer_query"].capture


def collector_of(engine: Any) -> Any:
    return capture_of(engine).adapter.collector


def names_of(engine: Any, tokens: Sequence[int], digests: Sequence[bytes]) -> dict[bytes, list[bytes]]:
    """Every key that a chunk of ``tokens`` may have in the space of queries, to the digests of its tokens."""
    space = capture_of(engine).adapter.space
    chunk, block = space.chunk_size, engine.config.cache_config.block_size
    prefix = Prefix(space, engine.identity, tokens, shared=engine.connector._config.is_shared)
    found = {}
    for start in range(0, len(tokens), chunk):
        for stop in range(start + block, min(start + chunk, len(tokens)) + 1, block):
            (item,) = prefix.save_items(start, stop, range(len(tokens)), block)
            found[item.key] = list(digests[start:stop])
    return found


def stored(engine: Any) -> Iterator[tuple[bytes, torch.Tensor]]:
    """Key and queries ``[layers, tokens, WIDTH]`` of every chunk of queries that the store has in RAM."""
    adapter, manager = capture_of(engine).adapter, engine.store.driver.manager
    for entry in list(manager.index):
        if entry.key[:SPACE_BYTES] == adapter.space.space_id and entry.state is ChunkState.READY:
            image = manager.room.image(entry)
            seen = peek(image)
            assert seen is not None
            assert seen.key == entry.key
            payload = image[seen.header_bytes : seen.header_bytes + seen.payload_bytes]
            yield entry.key, logical_views(payload, adapter.layout, seen.num_tokens)[0].flatten(2)


def assert_stored_is_right(engine: Any, digests_of: Any, layers: Sequence[int]) -> set[bytes]:
    """Every chunk of queries in the store is one of the engine's requests, and has the queries of its tokens."""
    known: dict[bytes, list[bytes]] = {}
    for request in engine.requests.values():
        tokens = list(request.all_token_ids)
        known |= names_of(engine, tokens, digests_of(tokens))
    keys = set()
    for key, queries in stored(engine):
        assert key in known, "a chunk of tokens that no request has"
        wanted = [queries_of(known[key][: queries.shape[1]], layer) for layer in layers]
        assert np.array_equal(queries.numpy(), np.stack(wanted)), "a query that is not its token's"
        keys.add(key)
    return keys


def assert_ring_is_free(engine: Any) -> None:
    """Nothing was a fault, nothing is held, and what was captured is accounted for."""
    capture, dispatcher = capture_of(engine), engine.worker._queries._dispatcher
    for _ in range(4):
        capture.reclaim()
    adapter, counters = capture.adapter, capture.adapter.counters
    adapter.check()
    assert adapter.ring.num_free_blocks() == adapter.ring.num_blocks
    assert (capture.num_faults, dict(dispatcher.num_faults)) == (0, {})
    collector, steps = adapter.collector, engine.connector._scheduler._queries
    assert (collector._requests, collector._ended, list(collector._whole), collector._holes) == ({}, set(), [], [])
    assert (steps._num_told, steps._ended, steps._last_steps) == ({}, [], set())
    lost = counters.dropped["no_room"] + counters.dropped["not_stored"]
    lost += adapter._num_reserved - adapter._num_published  # a reset came before the commit: told when the session ends
    assert counters.num_captured == counters.num_stored + counters.num_present + lost
