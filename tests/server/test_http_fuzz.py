"""Nonsense from a generator: whatever comes over HTTP, the pages go on. ``QKV_FUZZ_SECONDS=600`` makes it longer."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import time
from contextlib import closing

import pytest

pytest.importorskip("starlette", reason="the extra `server` is not installed")
pytest.importorskip("uvicorn", reason="the extra `server` is not installed")
SECONDS = float(os.environ.get("QKV_FUZZ_SECONDS", "3"))
PAGES = ["/healthz", "/status", "/metrics", "/config", "/lookup", "/clear", "/freeze", "/hot-cache", "/", "/no"]
WORDS = [
    "tokens", "text", "tokenizer", "model_name", "cache_salt", "adapter", "media", "enabled", "lower_tiers", "",
    "\u0000", "\ud7ff\U0001f600", "\ud800", "ram", "disk", "/etc/passwd", "/dev/zero", "../..", "x" * 5000,
]  # fmt: skip
HEADERS = [
    b"Host: localhost", b"Host: evil", b"Authorization: Bearer geheim", b"Authorization: Bearer \xff",
    b"Transfer-Encoding: chunked", b"Content-Length: 5", b"Content-Length: -1", b"Connection: upgrade",
    b"Upgrade: websocket", b"Upgrade: h2c", b"Content-Type: text/plain", b"X: " + b"y" * 70000,
    b"Content-Encoding: gzip", b"Connection: close", b"Expect: 100-continue",
]  # fmt: skip


def value(rng, depth=0):
    """Something that JSON can say."""
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind >= 7:
        return {rng.choice(WORDS): value(rng, depth + 1) for _ in range(rng.randrange(4))}
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return [None, True, rng.choice([0, -1, 2**32, 2**64, 10**40, 7]), rng.random(), rng.choice(WORDS), [1, 2, 3]][kind]


def request(rng):
    """Mostly a request; sometimes bytes of it are others."""
    body = json.dumps({rng.choice(WORDS): value(rng) for _ in range(rng.randrange(3))}).encode()
    if rng.random() < 0.1:
        body = b"[" * rng.randrange(100_000)
    lines = [b"%s %s HTTP/1.1" % (rng.choice([b"GET", b"POST", b"POST", b"HEAD", b"PUT"]), rng.choice(PAGES).encode())]
    lines += [b"Host: localhost", b"Authorization: Bearer geheim", b"Content-Length: %d" % len(body)]
    if rng.random() < 0.3:
        lines += rng.sample(HEADERS, rng.randrange(3))
    data = bytearray(b"\r\n".join(lines) + b"\r\n\r\n" + body)
    if rng.random() < 0.3:
        for _ in range(rng.randrange(1, 20)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.randrange(len(data) + 1)] if rng.random() < 0.1 else data) * rng.choice([1, 1, 1, 3])


@pytest.mark.timeout(SECONDS + 120)
def test_nothing_that_comes_is_a_fault(make_server, kit, caplog):
    """B218: no answer is 500, no page logs a fault, and /healthz answers all the time."""
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    server = make_server(http="127.0.0.1:0", token="geheim")
    client, space = server.connect("engine"), kit.space_of("one")
    client.register(kit.instance_of(space))
    kit.store(client, space, list(range(100)))
    host, port = server.http_address.removeprefix("http://").split(":")
    http, count, codes = kit.Http(server.http_address), 0, set()
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        data = request(rng)
        with closing(socket.create_connection((host, int(port)), 20)) as plain, contextlib.suppress(ConnectionError):
            plain.sendall(data)
            plain.settimeout(rng.choice([0.01, 0.05]))
            answer = b""
            with contextlib.suppress(TimeoutError):
                while piece := plain.recv(65536):
                    answer += piece
            codes.add(answer[9:12])
            assert answer[9:12] != b"500", (seed, data, answer)
            assert b"Traceback" not in answer
        count += 1
        if count % 50 == 0:
            assert http.ask("GET", "/healthz")[0] == 200, seed
    assert {b"200", b"400", b"404", b"405"} <= codes
    assert "page_failed" not in caplog.text, seed
    client.check()
