"""An engine of stock vLLM that does what it is told, a line at a time. Told by stdin; answers begin with ``TOLD``."""

from __future__ import annotations

import json
import sys
from typing import Any

from real_engine import RealEngine


def tell(value: Any) -> None:
    sys.stdout.write("TOLD " + json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    task = json.loads(sys.argv[1])
    engine = RealEngine(task["model"], task["settings"], **task.get("options", {}))
    tell("ready")
    for line in sys.stdin:
        order = json.loads(line)
        if order.get("forgets"):
            engine.forget_own_prefixes()
        outputs = engine.outputs(order["prompts"], order.get("max_tokens", 8))
        tell(
            {
                "texts": [list(output.outputs[0].token_ids) for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
            }
        )
    engine.close()


if __name__ == "__main__":
    main()
