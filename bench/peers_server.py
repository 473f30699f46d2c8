"""LMCache's server, and a client of it in a process of its own, driven by orders: the peer of the socket bench.

    python -m bench.peers_server '{"num_layers": 32, ..., "has_shm": true}'

The client does what LMCache's adapter for vLLM does, by the same objects, without an engine around it. Runs in the
peer's environment, so it imports nothing of ours but the standard-library half of ``bench``.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from bench import orders
from bench.peers_rig import PeerRig

PROMPTS = 1.6  # in its memory: it evicts, with its defaults, when four fifths are full
SPARE_GIB = 0.1
START_SECONDS = 120.0
CALL_SECONDS = 120.0
GOODBYE_SECONDS = 15.0
_LOOK_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1


class Server:
    """``lmcache server``, on free ports of this host. Ends with ``close``, or when this process does."""

    def __init__(self, gib: float, chunk_size: int, *, has_shm: bool) -> None:
        """Start it. ``has_shm``: chunks go by shared memory; else, as it comes, pickled over the socket."""
        port, http_port, metrics_port = free_ports(3)
        self.url = f"tcp://127.0.0.1:{port}"
        name = f"qkvault_bench_{os.getpid()}"
        self._segment = Path(f"/dev/shm/lmcache_l1_pool_{name}") if has_shm else None
        options = {
            "--host": "127.0.0.1", "--port": port, "--http-host": "127.0.0.1", "--http-port": http_port,
            "--prometheus-port": metrics_port, "--l1-size-gb": f"{gib:.3f}", "--eviction-policy": "LRU",
            "--chunk-size": chunk_size, "--supported-transfer-mode": "auto",
        }  # fmt: skip
        command = [str(Path(sys.executable).parent / "lmcache"), "server", "--no-l1-use-lazy"]
        command += [str(word) for pair in options.items() for word in pair]
        if has_shm:
            command += ["--shm-name", name]
        libc = ctypes.CDLL(None)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),  # noqa: PLW1509  # no thread runs yet
        )

    def require_alive(self) -> None:
        """Raise RuntimeError if it has ended."""
        if self._process.poll() is not None:
            msg = f"its server ended with {self._process.returncode}"
            raise RuntimeError(msg)

    def close(self) -> None:
        """End it, and remove what it leaves. Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(GOODBYE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._segment is not None:
            self._segment.unlink(missing_ok=True)


class ServerRig(PeerRig):
    """A server, and its client over the pages."""

    def __init__(self, work: dict[str, Any]) -> None:
        super().__init__(work)
        self.server: Server | None = None
        self._client: Any = None  # RequestClient
        self._transfers: Any = None  # TransferContext
        self._layers = {f"layer.{number}": _as_vllm(tensor) for number, tensor in enumerate(self.tensors)}
        self._blocks_in_chunk = work["chunk_size"] // work["block_size"]
        self._numbers = itertools.count()

    def start(self) -> None:
        """Start the server, connect, and register the pages as a worker of vLLM does on a CPU."""
        work = self.work
        self.server = Server(self.num_bytes / 2**30 * PROMPTS + SPARE_GIB, work["chunk_size"], has_shm=work["has_shm"])
        import zmq
        from lmcache.utils import EngineType
        from lmcache.v1.multiprocess.group_view import EngineGroupInfo
        from lmcache.v1.multiprocess.transfer_context import create_transfer_context
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        context = zmq.Context()
        context.setsockopt(zmq.LINGER, 0)
        self._client = RequestClientFactory.create(self.server.url, context=context)
        self.require(int(self._first_answer(self._client.get_chunk_size())), work["chunk_size"])
        self._transfers = create_transfer_context(
            self._layers, instance_id=os.getpid(), req_client=self._client, mode="engine_driven"
        )
        self._transfers.register(
            self._layers,
            "bench",
            1,
            self._blocks_in_chunk,
            CALL_SECONDS,
            layout_hints={"kv_layout": "HND"},
            engine_type=EngineType.VLLM,
            engine_group_infos=[
                EngineGroupInfo(
                    engine_group_id=0,
                    layer_indices=tuple(range(work["num_layers"])),
                    tokens_per_block=work["block_size"],
                )
            ],
        )
        how = type(self._transfers.engine_driven_context).__name__
        if how.endswith("Shm") != work["has_shm"]:  # it falls back without an error
            msg = f"it moves chunks by {how}"
            raise RuntimeError(msg)

    def renew(self) -> None:
        """A prompt that nobody has seen, and an empty cache."""
        super().renew()
        self._client.clear(True).result(timeout=CALL_SECONDS)  # whatever is locked, too

    def store(self) -> dict[str, float]:
        """Store the prompt; whoever asks next finds all of it."""
        request, blocks = self._name(), [self.source.tolist()]
        took = orders.timed(lambda: self._store(request, blocks))
        self._end(request)
        self.lookup()
        return took

    def retrieve(self) -> dict[str, float]:
        """Load the prompt into its other blocks: look it up, which pins it, and copy."""
        request, blocks = self._name(), [self.target.tolist()]
        took = orders.timed(lambda: self._retrieve(request, blocks))
        self._end(request)
        return took

    def lookup(self) -> dict[str, float]:
        """Ask for a prompt that is there."""
        return self._look_up(self.tokens, len(self.tokens))

    def lookup_unknown(self) -> dict[str, float]:
        """Ask for one that is not."""
        return self._look_up(self.others, 0)

    def pings(self, count: int) -> dict[str, list[float]]:
        """Its smallest question, that often."""
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            self._client.noop().result(timeout=CALL_SECONDS)
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds}

    def close(self) -> None:
        """Let go of all of it."""
        try:
            with contextlib.suppress(Exception):  # the server may be gone
                if self._transfers is not None:
                    self._transfers.close()
                if self._client is not None:
                    self._client.close()
        finally:
            if self.server is not None:
                self.server.close()

    def _store(self, request: str, blocks: list[list[int]]) -> None:
        event = self._transfers.create_recorded_event()
        key = self._key(self.tokens, request, 0)
        done = self._transfers.submit_store(request, key, self._layers, blocks, event, self._blocks_in_chunk)
        self._require_done(done.result(timeout=CALL_SECONDS))

    def _retrieve(self, request: str, blocks: list[list[int]]) -> None:
        self.require(self._find(self.tokens, request), len(self.tokens))
        event = self._transfers.create_recorded_event()
        key = self._key(self.tokens, request, 0)
        done = self._transfers.submit_retrieve(request, key, self._layers, blocks, event, self._blocks_in_chunk)
        self._require_done(done.result(timeout=CALL_SECONDS))

    def _look_up(self, tokens: list[int], wanted: int) -> dict[str, float]:
        request = self._name()
        took = orders.timed(lambda: self.require(self._find(tokens, request), wanted))
        self._client.free_lookup_locks(self._key(tokens, request, None), 1).result(timeout=CALL_SECONDS)
        self._end(request)
        return took

    def _find(self, tokens: list[int], request: str) -> int:
        # The second call waits in the server: nothing is polled, so nothing is rounded up to an interval.
        self._client.lookup(self._key(tokens, request, None), 1).result(timeout=CALL_SECONDS)
        chunks = self._client.wait_prefetch_status(request, CALL_SECONDS).result(timeout=CALL_SECONDS)
        return int(chunks or 0) * int(self.work["chunk_size"])

    def _key(self, tokens: list[int], request: str, worker: int | None) -> Any:  # IPCCacheServerKey
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

        return IPCCacheServerKey(
            model_name="bench", world_size=1, num_kv_readers=1, worker_id=worker,
            token_ids=tuple(tokens), start=0, end=len(tokens), request_id=request,
        )  # fmt: skip

    def _name(self) -> str:
        return f"request-{next(self._numbers)}"

    def _end(self, request: str) -> None:
        self._client.end_session(request).result(timeout=CALL_SECONDS)

    @staticmethod
    def _require_done(is_done: object) -> None:
        if not is_done:
            msg = "it says that the copy failed"
            raise RuntimeError(msg)

    def _first_answer(self, future: Any) -> Any:  # MessagingFuture, and what it holds
        deadline = time.monotonic() + START_SECONDS
        while not future.wait(timeout=_LOOK_SECONDS):
            if self.server is not None:
                self.server.require_alive()
            if time.monotonic() > deadline:
                msg = f"its server did not answer in {START_SECONDS:g} s"
                raise RuntimeError(msg)
        return future.result()


def _as_vllm(tensor: torch.Tensor) -> torch.Tensor:
    # [blocks, heads, K or V, tokens, size] as the CPU backend shows it: [blocks, heads, tokens, 2 * size]
    blocks, heads, parts, tokens, size = tensor.shape
    return tensor.view(blocks, heads, tokens, parts * size)


def free_ports(count: int) -> list[int]:
    """Ports of this host that nobody listens at."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def main() -> None:
    """Answer orders until stdin ends."""
    torch.set_num_threads(1)
    rig = ServerRig(json.loads(sys.argv[1]))
    does = ("renew", "store", "retrieve", "lookup", "lookup_unknown", "pings", "verify")
    status = 1
    try:
        orders.serve({name: getattr(rig, name) for name in does}, rig.start)
        status = 0
    except Exception:  # told in our log; the threads of its client would keep the process
        traceback.print_exc()
    finally:
        rig.close()
        os._exit(status)


if __name__ == "__main__":
    main()
