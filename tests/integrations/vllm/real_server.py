"""A server in a process of its own, to be killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from qkvault.config import Config
from qkvault.connecting import open_client
from qkvault.errors import Unavailable


class Server:
    """``qkvault serve`` in a process of its own."""

    def __init__(self, address, disk):
        self.config = Config(address=address)
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
