"""The child's end of ``children``. Knows the standard library only, since a child may live in another environment."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

Answer = Mapping[str, Any]  # whatever JSON can say
Handler = Callable[..., "Answer | None"]


def serve(handlers: Mapping[str, Handler], begin: Callable[[], object] | None = None) -> None:
    """Answer each line of stdin with one on stdout, until it ends; all that others print goes to stderr.

    ``begin`` is called first; "ready" is the answer to it.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if begin is not None:
        begin()
        _tell(answers, {"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = handlers[order.pop("do")](**order)
        except Exception as error:  # told to whoever gave the order
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        _tell(answers, answer or {})


def timed(run: Callable[[], object]) -> dict[str, float]:
    """How long ``run`` takes, as an answer."""
    cpu, start = time.process_time(), time.perf_counter()
    run()
    return {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}


def _tell(answers: Any, answer: Answer) -> None:  # a text file
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
