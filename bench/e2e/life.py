"""One life of a vLLM engine in a process of its own, driven by orders: with our connector, another's, or none.

    python -m bench.e2e.life '{"model": ..., "dtype": ..., "connector": {...} or null}'

Also runs in the environment of a peer, so it imports nothing of ours but the standard-library half of ``bench``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from bench import orders

BLOCK_TOKENS = 32
MAX_TOKENS = 4096
KV_BYTES = 512 << 20  # vLLM's own cache: some prompts
POKES = 40


class Life:
    """The engine. Times are from the prompt (token ids) handed over to the last token asked for."""

    def __init__(self, work: dict[str, Any]) -> None:
        """``work`` says which model, how, and with which connector."""
        self.work = work
        self.llm: Any = None  # vllm.LLM, imported by ``start``
        self._sampling: Any = None
        self._pokes = 0

    def start(self) -> None:
        """Build the engine."""
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        work = self.work
        transfer = KVTransferConfig(**work["connector"]) if work["connector"] else None
        self._sampling = SamplingParams
        self.llm = LLM(
            work["model"],
            dtype=work["dtype"],
            kv_transfer_config=transfer,
            block_size=BLOCK_TOKENS,
            max_model_len=MAX_TOKENS,
            max_num_batched_tokens=MAX_TOKENS,  # a prompt is one step
            max_num_seqs=4,
            kv_cache_memory_bytes=KV_BYTES,
            enforce_eager=True,
            enable_prefix_caching=True,
            seed=work["seed"],
            disable_log_stats=not work["is_counted"],
        )

    def tokenize(self, text: str) -> dict[str, Any]:
        """The token ids of a text."""
        return {"ids": self.llm.get_tokenizer().encode(text)}

    def ask(self, ids: list[int], num_tokens: int) -> dict[str, Any]:
        """Answer a prompt, greedily."""
        params = self._sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        cpu, start = tree_cpu_seconds(), time.perf_counter()
        output = self.llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0]
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "cpu_seconds": tree_cpu_seconds() - cpu,
            "cached": output.num_cached_tokens or 0,
            "tokens": list(output.outputs[0].token_ids),
        }

    def drop(self) -> dict[str, Any]:
        """Empty vLLM's own prefix cache, so that what is found next comes from the connector.

        A connector may keep a finished request's blocks until it has stored them, which an idle engine does not
        notice: a tiny request makes it look.
        """
        params = self._sampling(temperature=0.0, max_tokens=1)
        for poke in range(POKES):
            if self.llm.reset_prefix_cache() is not False:
                return {"pokes": poke}
            time.sleep(0.1)
            self._pokes += 1
            self.llm.generate([{"prompt_token_ids": [100 + self._pokes % 1000, 7, 8]}], params, use_tqdm=False)
        msg = "vLLM does not let go of its prefix cache"
        raise RuntimeError(msg)

    def numbers(self) -> dict[str, Any]:
        """What is told of captured queries. Numbers come with steps, so that some tiny ones are run first."""
        params = self._sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
        self._pokes += 1
        self.llm.generate([{"prompt_token_ids": [100 + self._pokes % 1000, 7, 8]}], params, use_tqdm=False)
        prefix = "vllm:qkvault_query_"
        found = [metric for metric in self.llm.get_metrics() if metric.name.startswith(prefix)]
        labels = [list(metric.labels.values())[2:] for metric in found]  # behind vLLM's own two
        names = [".".join([m.name.removeprefix(prefix), *more]) for m, more in zip(found, labels, strict=True)]
        return {name: metric.value for name, metric in zip(names, found, strict=True)}

    def end(self) -> dict[str, Any]:
        """End the engine, so that what was begun is finished. Idempotent."""
        llm, self.llm = self.llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        return {}


def tree_cpu_seconds() -> float:
    """CPU time of this process and all below it."""
    import psutil

    total = 0.0
    here = psutil.Process()
    for process in [here, *here.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def main() -> None:
    """Answer orders until stdin ends."""
    life = Life(json.loads(sys.argv[1]))
    does = ("tokenize", "ask", "drop", "numbers", "end")
    orders.serve({name: getattr(life, name) for name in does}, life.start)
    life.end()
    os._exit(0)  # threads of a connector may keep the process


if __name__ == "__main__":
    main()
