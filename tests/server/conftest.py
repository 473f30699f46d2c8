"""Servers: real ones in processes of their own, and ones in this process where only answers matter."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from qkvault.config import load
from qkvault.connecting import open_client
from qkvault.keys import RequestIdentity
from qkvault.server.server import Server
from qkvault.testing.spaces import described
from qkvault.testing.store_model import ModelChunk
from qkvault.tokens import TokenHasher
from qkvault.wire.messages import Instance

WAIT_SECONDS = 30.0
MAIN = "from qkvault.cli.app import main; main()"


class Process:
    """One ``qkvault serve``."""

    def __init__(self, folder: Path, flags, environment, code, *, is_bare=False):
        self.address = f"unix://{folder}/s"
        self._log = folder / "log"
        listen = [] if "--listen" in flags else ["--listen", self.address]
        always = [] if is_bare else ["--ram", "8MiB", *listen]
        command = [sys.executable, "-c", code, "serve", *always, *flags]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | environment, start_new_session=True
            )
        self.pid = self._process.pid

    @property
    def log(self) -> str:
        """What it has printed."""
        return self._log.read_text()

    def wait_ready(self):
        """Until it says so."""
        return self.wait_for("server_ready")

    def wait_for(self, text):
        """Until it has logged ``text``."""
        deadline = time.monotonic() + WAIT_SECONDS
        while text not in self.log:
            assert self._process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.005)
        return self

    def send(self, number=signal.SIGTERM):
        """Send one."""
        self._process.send_signal(number)

    def wait(self) -> int:
        """Its exit code."""
        return self._process.wait(WAIT_SECONDS)

    def stop(self, number=signal.SIGTERM) -> int:
        """Send a signal and wait for the end."""
        self.send(number)
        return self.wait()

    def close(self):
        """Whatever state it is in."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts servers; flags are those of ``qkvault serve``, all of them if it is bare. They are gone after the test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    with ExitStack() as stack:
        yield lambda *flags, code=MAIN, is_bare=False, **environment: stack.enter_context(
            closing(Process(tmp_path, flags, environment, code, is_bare=is_bare))
        )


@pytest.fixture
def connect():
    """Makes clients of an address; they are closed after the test."""
    with ExitStack() as stack:

        def connect(address, **settings):
            config = load(env={}, cli={"timeout_seconds": WAIT_SECONDS, **settings}).config
            return stack.enter_context(closing(open_client(config, "test", address=address)))

        yield connect


@pytest.fixture
def memory_group():
    """Makes a control group below ours with a memory limit; removed after the test. Skips where that is not allowed."""
    made = []

    def make(limit_bytes):
        own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
        top, name = Path("/sys/fs/cgroup"), "memory.max"
        if "memory" in own:
            top, name = top / "memory", "memory.limit_in_bytes"
        group = top / own.get("memory", own.get("", "/")).lstrip("/") / f"qkvault-test-{os.getpid()}"
        try:
            group.mkdir()
            made.append(group)
            (group / name).write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"no control group of our own: {error}")
        return group

    yield make
    for group in made:
        group.rmdir()


@pytest.fixture
def make_server(tmp_path):
    """Makes servers in this process, with the given settings. They listen at ``tmp_path/s`` unless told otherwise."""
    with ExitStack() as stack:

        def make(**settings):
            cli = {"ram_bytes": 1 << 22, "prefault": False, "listen": f"unix://{tmp_path}/s", **settings}
            return stack.enter_context(closing(Server(load(env={}, cli=cli))))

        yield make


class Http:
    """Asks an HTTP server."""

    def __init__(self, address: str):
        self._address = address

    def ask(self, method, path, body=None, **headers):
        """Status and decoded answer. A name's underscores are hyphens."""
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        connection = self._connect()
        with closing(connection):
            connection.request(method, path, data, {name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            text = response.read()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(text) if is_json else text.decode()

    def _connect(self):
        if self._address.startswith("unix://"):
            connection = http.client.HTTPConnection("localhost", timeout=WAIT_SECONDS)
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(self._address.removeprefix("unix://"))
            return connection
        return http.client.HTTPConnection(self._address.removeprefix("http://"), timeout=WAIT_SECONDS)


def space_of(model_name, **more):
    """A space of chunks of 32 tokens."""
    return replace(described(model_name).space, **more)


def instance_of(*spaces, **more):
    """An engine that stores in ``spaces``."""
    descriptions = tuple(replace(described(), space=space).encode() for space in spaces)
    return Instance("engine", "worker", spaces[0].model_name, spaces=descriptions, **more)


def store(client, space, tokens, identity=None):
    """Store all whole chunks of ``tokens`` under the keys that engines use."""
    hasher = TokenHasher(identity or RequestIdentity(), space.chunk_size, space.hash_algorithm)
    hasher.extend(tokens)
    keys = [space.chunk_key(each) for each in hasher.hashes]
    parents = [space.chunk_key(hasher.root), *keys]
    chunks = [
        ModelChunk(keys[at], parents[at], hasher.tokens_from(at), hasher.tokens_from(at) * 64)
        for at in range(len(keys))
    ]
    reserved = client.reserve([chunk.new() for chunk in chunks])
    for chunk, offset in zip(chunks, reserved.offsets, strict=True):
        if offset >= 0:
            chunk.write(client.pool.view(offset, chunk.new().image_bytes))
    return client.commit(reserved.lease_id)


@pytest.fixture
def kit():
    """How to speak to a server as engines and operators do."""
    return SimpleNamespace(Http=Http, instance_of=instance_of, space_of=space_of, store=store)
