"""Engines of stock vLLM: in this process, for tests that look inside, or as a program of its own, to be killed."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group, has_kv_transfer_group

DOORS = {
    "by name": {"kv_connector": "QKVaultConnector"},
    "by module": {
        "kv_connector": "QKVaultConnector",
        "kv_connector_module_path": "qkvault.integrations.vllm.connector",
    },
}


OURS = {"qkvault.chunk_size": 64, "qkvault.ram_bytes": "64MiB", "qkvault.prefault": False}
SMALL = {
    "max_model_len": 2048,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 128,
    "enforce_eager": True,
}


def arguments_of(
    model: str, settings: dict[str, Any] | None, options: dict[str, Any], door: str = "by name"
) -> dict[str, Any]:
    """What vLLM is told to start with: small, and with our connector unless ``settings`` is None."""
    ours: dict[str, Any] = {}
    if settings is not None:
        ours["kv_transfer_config"] = {
            **DOORS[door],
            "kv_role": "kv_both",
            "kv_connector_extra_config": OURS | settings,
        }
    always = {"skip_tokenizer_init": True, "dtype": "float32", "block_size": 32, "disable_log_stats": False}
    return {"model": model, **always, **SMALL, **ours, **options}


class RealEngine:
    """One ``LLM``, with our connector unless ``settings`` is None. Prompts are token ids; decoding is greedy."""

    def __init__(
        self, model: str, settings: dict[str, Any] | None = None, *, door: str = "by name", **options: Any
    ) -> None:
        self.llm = LLM(**arguments_of(model, settings, options, door))
        self.num_preempted = 0
        if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
            self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
            self.connector = self.scheduler.connector
            self.worker = get_kv_transfer_group() if has_kv_transfer_group() else None
            self._preempt, self.scheduler._preempt_request = self.scheduler._preempt_request, self._count_preemption

    def _count_preemption(self, *args: Any, **kwargs: Any) -> None:
        self.num_preempted += 1
        self._preempt(*args, **kwargs)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int = 8) -> list[list[int]]:
        """What the model says after each prompt, all of them at once."""
        return [list(output.outputs[0].token_ids) for output in self.outputs(prompts, max_tokens)]

    def outputs(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, *, kv_transfer_params: Any = None, **sampling: Any
    ) -> list[Any]:
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True, **sampling,
            extra_args={"kv_transfer_params": kv_transfer_params} if kv_transfer_params else None,
        )  # fmt: skip
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self.llm.generate(asked, params, use_tqdm=False)

    def forget_own_prefixes(self) -> None:
        assert self.llm.reset_prefix_cache()

    def cached_by_source(self) -> dict[str, int]:
        """vLLM's own count of prompt tokens that it did not compute, by where they came from."""
        name = "vllm:prompt_tokens_cached_by_source"
        return {m.labels["source"]: int(m.value) for m in self.llm.get_metrics() if m.name == name and m.value}

    def our_metrics(self) -> dict[str, float]:
        """Our names in vLLM's metrics, without the prefix and ``_total``, with our labels' values, to the number."""
        prefix = "vllm:qkvault_"
        return {
            ".".join([m.name.removeprefix(prefix), *list(m.labels.values())[2:]]): m.value
            for m in self.llm.get_metrics()
            if m.name.startswith(prefix)
        }

    def assert_clean(self) -> None:
        """Nobody holds anything of the store."""
        while self.scheduler.has_requests():
            self.llm.llm_engine.step()
        client = self.connector._store.connect("test")
        client.check()
        assert client.status().num_leases == 0
        client.close()
        assert self.connector._scheduler._tracked == {}
        assert self.scheduler.requests == {}

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()


def main(task: dict[str, Any]) -> dict[str, Any]:
    """Start an engine, do what ``task`` says, and tell what came out."""
    release = threading.Event()
    if task.get("slow_scan"):
        from qkvault.tiers.disk import DiskTier

        scan = DiskTier.scan

        def slow(self: Any) -> Any:
            release.wait(120)
            return scan(self)

        DiskTier.scan = slow  # type: ignore[method-assign]  # it is released below
    options = {"max_num_batched_tokens": 1024, **task.get("options", {})}
    settings = {"qkvault.disk_path": task["disk"], **task.get("settings", {})}
    engine = RealEngine(task["model"], settings, door=task["door"], **options)
    told: dict[str, Any] = {"texts": [], "cached": []}
    for prompts in task["rounds"]:
        outputs = engine.outputs(prompts, task["max_tokens"])
        told["texts"] += [list(output.outputs[0].token_ids) for output in outputs]
        told["cached"] += [output.num_cached_tokens for output in outputs]
        if task.get("forgets"):
            engine.forget_own_prefixes()
    told["sources"] = engine.cached_by_source()
    told["metrics"] = engine.our_metrics()
    if hasattr(engine, "connector"):
        told["is_scanning"] = engine.connector._store.connect("test").status().is_scanning
    told["processes"] = len(psutil.Process().children(recursive=True))
    release.set()
    if task.get("num_files"):
        deadline = time.monotonic() + 60
        while len(list(Path(task["disk"]).rglob("*.qkv"))) < task["num_files"] and time.monotonic() < deadline:
            time.sleep(0.05)
    if task["end"] == "exit":
        engine.close()
    return told


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    sys.stdout.write("TOLD " + json.dumps(main(task)) + "\n")
    sys.stdout.flush()
    if task["end"] == "kill":
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        os.kill(os.getpid(), signal.SIGKILL)
