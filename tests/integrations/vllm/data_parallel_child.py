"""Data parallel ranks as vLLM starts them: one front, and behind it an engine with a cache of its own for each rank.

Obeys as ``engine_child`` does; an order says which rank is to answer.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from engine_child import tell
from real_engine import arguments_of
from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def main() -> None:
    task = json.loads(sys.argv[1])
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(**arguments_of(task["model"], task["settings"], task["options"]))
    )
    tell("ready")
    number = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        told: dict[str, list[Any]] = {"texts": [], "cached": []}
        for prompt in order["prompts"]:
            number += 1
            params = SamplingParams(
                temperature=0, max_tokens=order["max_tokens"], detokenize=False, ignore_eos=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            asked = {"prompt_token_ids": prompt}
            async for output in engine.generate(asked, params, str(number), data_parallel_rank=order["rank"]):
                told["texts"].append(list(output.outputs[0].token_ids))
                told["cached"].append(output.num_cached_tokens)
        tell(told)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
