"""A server and engines in processes of their own, to be killed or to be told what to do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from qkvault.config import Config
from qkvault.connecting import open_client
from qkvault.errors import Unavailable


class Server:
    """``qkvault serve`` in a process of its own."""

    def __init__(self, address, disk):
        self.config = Config(address=address, timeout_seconds=20.0)
        command = [sys.executable, "-m", "qkvault", "serve", "--listen", address, "--ram", "64MiB", "--disk", str(disk)]
        self.process = subprocess.Popen([*command, "--set", "chunk_size=64", "--set", "prefault=false"])
        self.until_ready()

    def until_ready(self):
        deadline = time.monotonic() + 60
        while True:
            try:
                return open_client(self.config, "test").close()
            except Unavailable:
                assert time.monotonic() < deadline
                assert self.process.poll() is None
                time.sleep(0.01)

    def status(self):
        client = open_client(self.config, "test")
        try:
            client.check()
            return client.status()
        finally:
            client.close()

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(60)


class Engine:
    """An engine that is told what to do. ``program`` says which: ``engine_child.py``, or one that obeys as it does."""

    def __init__(self, model, settings, program="engine_child.py", environment=None, **options):
        task = {"model": model, "settings": settings, "options": options}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(program)), json.dumps(task)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | (environment or {}),
        )  # fmt: skip

    def told(self):
        for line in self.process.stdout:
            if line.startswith("TOLD "):
                return json.loads(line.removeprefix("TOLD "))
        msg = "the engine has ended"
        raise AssertionError(msg)

    def ask(self, *prompts, max_tokens=8, **more):
        order = {"prompts": prompts, "max_tokens": max_tokens, **more}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self.told()

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait(120) == 0
