"""Processes that do what they are told, a line of JSON at a time: an engine, a store, a peer in its own environment.

What a child prints otherwise goes to its log; the last lines of that are told when it fails.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from bench.machine import ROOT
from bench.samples import Sample, Skip

_LOG_LINES: Final = 6
_GOODBYE_SECONDS: Final = 60.0


class Child:
    """A running process. Ends with ``close``, or when we do: it reads orders from a pipe that closes with us."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Start it, at the root of the repository, with ``env`` on top of ours."""
        self.name = name
        self._log = tempfile.NamedTemporaryFile(prefix="qkvault-bench-", suffix=".log", mode="w+b")  # noqa: SIM115  # closed by close()
        sources = os.pathsep.join((str(ROOT), str(ROOT / "src")))  # those of this tree, whatever is installed
        environment = os.environ | {"PYTHONPATH": sources} | dict(env or {})
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # a signal to all of us must not keep it from ending what it has started itself
        )
        self._pending = b""

    def send(self, **order: object) -> None:
        """Give an order. Raises Skip if the child has ended."""
        pipe = self._process.stdin
        try:
            if pipe is not None:
                pipe.write(json.dumps(order).encode() + b"\n")
                pipe.flush()
        except OSError:
            raise Skip(self.last_words()) from None

    def receive(self, timeout_seconds: float = 600.0) -> dict[str, object]:
        """The answer to the oldest order that has none. Raises Skip if the child has ended, failed or is too slow."""
        answer = json.loads(self._line(timeout_seconds))
        if "error" in answer:
            msg = f"{self.name}: {answer['error']}"
            raise Skip(msg)
        return dict(answer)

    def close(self) -> None:
        """Ask it to end, and wait. Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.stdin.close()
            except OSError:
                self._process.stdin = None
        try:
            self._process.wait(_GOODBYE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def last_words(self) -> str:
        """Why it ended, as far as its log tells."""
        text = Path(self._log.name).read_bytes().decode("utf-8", "replace")
        lines = [line for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or "Exception" in line]
        return f"{self.name} ended: " + " | ".join((errors or lines)[-_LOG_LINES:])

    def _line(self, timeout_seconds: float) -> bytes:
        pipe = self._process.stdout
        if pipe is None:
            raise Skip(self.last_words())
        deadline = time.monotonic() + timeout_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    msg = f"{self.name} did not answer in {timeout_seconds:g} s"
                    raise Skip(msg)
                data = os.read(pipe.fileno(), 1 << 20)
                if not data:
                    raise Skip(self.last_words())
                self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line


def ask(child: Child, **order: object) -> dict[str, object]:
    """Give an order and wait for its answer. Raises Skip."""
    child.send(**order)
    return child.receive()


def timed(child: Child, **order: object) -> Sample:
    """The same for an order whose answer tells how long it took."""
    answer = ask(child, **order)
    return Sample(float(str(answer["seconds"])), float(str(answer["cpu_seconds"])))
