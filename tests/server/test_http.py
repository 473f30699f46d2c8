"""The pages for operators: what they say, who may ask, and what they do with nonsense."""

from __future__ import annotations

import os
import socket
import stat
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from qkvault.address import parse_address
from qkvault.errors import ConfigError
from qkvault.keys import RequestIdentity
from qkvault.testing.transport_contract import WAIT_SECONDS, until
from qkvault.tiers.disk import DiskTier
from qkvault.wire import listen

pytest.importorskip("starlette", reason="the extra `server` is not installed")
pytest.importorskip("uvicorn", reason="the extra `server` is not installed")
TOKEN = {"Authorization": "Bearer geheim"}
TOKENS = list(range(100))


@pytest.fixture
def server(make_server, tmp_path):
    return make_server(http="127.0.0.1:0", token="geheim", disk_path=str(tmp_path / "disk"), disk_bytes="64MiB")


@pytest.fixture
def http(server, kit):
    return kit.Http(server.http_address)


@pytest.fixture
def on_unix(make_server, tmp_path, kit):
    """Pages on a Unix socket, with a store of their own."""
    return kit.Http(make_server(listen=f"unix://{tmp_path}/u", http=f"unix://{tmp_path}/h").http_address)


@pytest.fixture
def engine(server, kit):
    """A client that has registered two models, and stored a prompt for the first."""
    client = server.connect("engine")
    space = kit.space_of("one", worker_id=1, world_size=2)
    client.register(kit.instance_of(space, kit.space_of("two"), pid=7, host="here"))
    assert kit.store(client, space, TOKENS) == 3
    return client


class TestPages:
    def test_health(self, http, server):
        """B212: 200 while the store answers; 503 once it stops."""
        assert http.ask("GET", "/healthz") == (200, {"status": "ok"})
        server.is_closing = True
        assert http.ask("GET", "/healthz") == (503, {"status": "stopping"})

    def test_health_names_media_that_do_not_work(self, make_server, tmp_path, kit):
        """B212: for as long as the disk is gone; the store answers, so the code stays 200."""
        mount, elsewhere = tmp_path / "mount", tmp_path / "elsewhere"
        mount.mkdir()
        server = make_server(http="127.0.0.1:0", disk_path=str(mount / "disk"), disk_bytes="64MiB")
        http = kit.Http(server.http_address)
        client = server.connect("engine")
        mount.rename(elsewhere)
        assert kit.store(client, kit.space_of("one"), TOKENS) == 3
        until(lambda: http.ask("GET", "/healthz") != (200, {"status": "ok"}))
        for _ in range(3):
            assert http.ask("GET", "/healthz") == (200, {"status": "degraded", "unhealthy": ["disk"]})
            time.sleep(0.3)  # the store has looked again
        elsewhere.rename(mount)
        until(lambda: http.ask("GET", "/healthz") == (200, {"status": "ok"}))

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    @pytest.mark.parametrize("name", ["wire", "store", "events", "scan"])
    def test_health_names_threads_that_have_died(self, make_server, tmp_path, kit, monkeypatch, name):
        """B482: 503, since engines wait in vain, or what they store is never written."""
        events = {"events_endpoint": f"ipc://{tmp_path}/events"} if name == "events" else {}
        with monkeypatch.context() as patch:
            if name == "scan":
                patch.setattr(DiskTier, "sample", lambda _: [None])
            server = make_server(http="127.0.0.1:0", disk_path=f"{tmp_path}/disk", disk_bytes="64MiB", **events)
            http = kit.Http(server.http_address)
            if name == "wire":
                server._sockets[0]._epoll.close()
                server._sockets[0]._wake()
            elif name == "store":
                patch.setattr(server.driver, "_wake", None)
            elif name == "events":
                patch.setattr(server._publisher, "_closing", None)
            until(lambda: http.ask("GET", "/healthz") == (503, {"status": "dead", "threads": [f"qkvault-{name}"]}))
            if name == "events":
                server._publisher._context.destroy(linger=0)

    def test_status(self, http, server, engine):
        """B213, B105: the server, its media and counters, who is registered, and which models it knows."""
        code, status = http.ask("GET", "/status")
        assert code == 200
        assert (status["server"]["pid"], status["server"]["addresses"]) == (os.getpid(), server.addresses)
        assert [medium["name"] for medium in status["media"]] == ["ram", "disk"]
        assert status["media"][0]["num_chunks"] == 3
        (instance,) = status["instances"]
        assert (instance["instance_id"], instance["pid"], instance["host"]) == ("engine", 7, "here")
        assert "spaces" not in instance
        assert {model["model_name"] for model in status["models"]} == {"one", "two"}
        assert status["counters"]["stored.ram"] == 3
        engine.close()
        later = http.ask("GET", "/status")[1]
        assert (later["instances"], len(later["models"])) == ([], 2)

    def test_metrics(self, http, engine):
        """B214: what a scraper reads, with names that promtool's rules allow; of the engine there are none."""
        code, text = http.ask("GET", "/metrics")
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert code == 200
        assert families["qkvault_store_up"].samples[0].value == 1
        chunks = {sample.labels["medium"]: sample.value for sample in families["qkvault_store_medium_chunks"].samples}
        assert chunks["ram"] == 3
        assert "process_resident_memory_bytes" in families
        assert "qkvault_requests" not in families
        for name, family in families.items():
            assert ":" not in name
            assert family.documentation
            assert all(sample.name.endswith("_total") for sample in family.samples if family.type == "counter")

    def test_metrics_can_be_off(self, make_server, kit):
        """B214: the setting `metrics` is heard."""
        http = kit.Http(make_server(http="127.0.0.1:0", metrics=False).http_address)
        assert http.ask("GET", "/metrics")[0] == 404

    def test_config(self, http):
        """B215: every setting with its source; a secret says only that it is set."""
        code, settings = http.ask("GET", "/config")
        assert code == 200
        assert settings["token"] == {"value": "(set)", "source": "cli"}
        assert settings["chunk_size"] == {"value": 256, "source": "default"}
        assert "geheim" not in str(settings)

    def test_clear(self, http, engine, server):
        """B216: everything, or only RAM."""
        assert server.driver.drain(WAIT_SECONDS)
        assert http.ask("POST", "/clear", {"lower_tiers": False}, **TOKEN) == (200, {"num_chunks": 3})
        assert http.ask("POST", "/lookup", {"tokens": TOKENS})[1]["spaces"][0]["tokens"] == {"disk": 96}
        assert http.ask("POST", "/clear", **TOKEN) == (200, {"num_chunks": 3})
        assert http.ask("POST", "/lookup", {"tokens": TOKENS})[1]["spaces"][0]["cached_tokens"] == 0

    def test_switches(self, http, engine):
        """B216: freeze and hot-cache turn what the store's own switches turn."""
        assert http.ask("POST", "/freeze", {"enabled": True}, **TOKEN) == (200, {"is_frozen": True})
        assert engine.status().is_frozen
        assert http.ask("POST", "/freeze", {"enabled": False}, **TOKEN) == (200, {"is_frozen": False})
        assert http.ask("POST", "/hot-cache", {"enabled": False}, **TOKEN) == (200, {"hot_cache": False})
        assert not engine.status().hot_cache


class TestPrompts:
    def test_it_tells_how_much_of_a_prompt_is_cached(self, http, engine, server):
        """B61, B211: for each model, by medium; nothing is promoted, leased or counted by it."""
        assert server.driver.drain(WAIT_SECONDS)
        engine.clear(lower_tiers=False)
        before = engine.status()
        code, answer = http.ask("POST", "/lookup", {"tokens": TOKENS})
        assert code == 200
        assert answer["num_tokens"] == 100
        one, two = sorted(answer["spaces"], key=lambda space: space["model_name"])
        assert (one["cached_tokens"], one["tokens"], one["chunks"]) == (96, {"disk": 96}, {"disk": 3})
        assert (one["worker_id"], one["world_size"]) == (1, 2)
        assert (two["model_name"], two["cached_tokens"]) == ("two", 0)
        after = engine.status()
        assert (after.counters, after.num_leases, after.media) == (before.counters, 0, before.media)

    def test_one_model_can_be_asked_for(self, http, engine):
        """B211: by its name, whether its engine still lives or not."""
        engine.close()
        answer = http.ask("POST", "/lookup", {"tokens": TOKENS, "model_name": "one"})[1]
        assert [(space["model_name"], space["cached_tokens"]) for space in answer["spaces"]] == [("one", 96)]
        assert http.ask("POST", "/lookup", {"tokens": TOKENS, "model_name": "three"})[1]["spaces"] == []

    def test_a_prompt_has_a_limit(self, http, engine):
        """B218: a million tokens, and no more."""
        code, answer = http.ask("POST", "/lookup", {"tokens": [1] * ((1 << 20) + 1)})
        assert (code, answer["error"]) == (400, "1048577 tokens, at most 1048576")

    def test_a_hash_that_the_server_cannot_make_is_told(self, http, engine, kit):
        """B211: that model's answer is why; the others are answered."""
        engine.register(kit.instance_of(kit.space_of("odd", hash_algorithm="builtin"), kit.space_of("one")))
        spaces = {space["model_name"]: space for space in http.ask("POST", "/lookup", {"tokens": TOKENS})[1]["spaces"]}
        assert "PYTHONHASHSEED" in spaces["odd"]["problem"]
        assert (spaces["one"]["problem"], spaces["odd"]["cached_tokens"]) == ("", 0)

    def test_a_salt_keeps_its_secret(self, http, server, kit):
        """B211: what was stored under a salt is found by who knows it."""
        client, space = server.connect("engine"), kit.space_of("one")
        client.register(kit.instance_of(space))
        kit.store(client, space, TOKENS, RequestIdentity(cache_salt="s"))
        assert http.ask("POST", "/lookup", {"tokens": TOKENS})[1]["spaces"][0]["cached_tokens"] == 0
        assert http.ask("POST", "/lookup", {"tokens": TOKENS, "cache_salt": "s"})[1]["spaces"][0]["cached_tokens"] == 96

    def test_text_needs_a_tokenizer(self, http, engine, tmp_path):
        """B211: the path of one, on the server's machine; as it names a file there, over TCP it needs the token."""
        tokenizers = pytest.importorskip("tokenizers")
        model = tokenizers.models.WordLevel({str(number): number for number in TOKENS}, unk_token="0")
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        query = {"text": " ".join(map(str, TOKENS)), "tokenizer": str(tmp_path), "model_name": "one"}
        assert http.ask("POST", "/lookup", query)[0] == 401
        assert http.ask("POST", "/lookup", query, **TOKEN)[1]["spaces"][0]["cached_tokens"] == 96
        code, answer = http.ask("POST", "/lookup", {**query, "tokenizer": str(tmp_path / "no")}, **TOKEN)
        assert (code, "no tokenizer.json" in answer["error"]) == (400, True)
        (tmp_path / "broken").write_text("{}")
        code, answer = http.ask("POST", "/lookup", {**query, "tokenizer": str(tmp_path / "broken")}, **TOKEN)
        assert (code, "is no tokenizer" in answer["error"]) == (400, True)

    def test_a_description_of_another_version_is_passed_over(self, http, engine, kit):
        """B211: what cannot be read is not in the way of the rest."""
        instance = kit.instance_of(kit.space_of("three"))
        engine.register(type(instance)("i", "worker", "x", spaces=(b"\x81\xa1x\x01", b"", *instance.spaces)))
        assert len(http.ask("POST", "/lookup", {"tokens": TOKENS})[1]["spaces"]) == 3


class TestAccess:
    @pytest.mark.parametrize("path", ["/clear", "/freeze", "/hot-cache"])
    @pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer no"}, {"Authorization": "geheim"},
                                        {"Authorization": "Bearer geheim\xe9"}])  # fmt: skip
    def test_who_changes_the_cache_needs_the_token(self, http, engine, path, header):
        """B217: 401 without it, and nothing has changed."""
        code, answer = http.ask("POST", path, {"enabled": True} if path != "/clear" else None, **header)
        assert (code, list(answer)) == (401, ["error"])
        status = engine.status()
        assert (status.is_frozen, status.hot_cache, status.media[0].num_chunks) == (False, True, 3)

    def test_without_a_token_nobody_may(self, make_server, kit):
        """B217: over TCP what changes the cache is refused where no token is set, and the answer says what to do."""
        http = kit.Http(make_server(http="127.0.0.1:0").http_address)
        code, answer = http.ask("POST", "/clear", **TOKEN)
        assert code == 403
        assert "set `token`" in answer["error"]
        assert http.ask("GET", "/status")[0] == 200

    def test_a_unix_socket_asks_for_nothing(self, on_unix, tmp_path):
        """B217: its file is this user's alone."""
        assert stat.S_IMODE((tmp_path / "h").stat().st_mode) == 0o600
        assert on_unix.ask("POST", "/freeze", {"enabled": True}) == (200, {"is_frozen": True})
        assert on_unix.ask("GET", "/status", Host="anything")[0] == 200

    @pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::2]:1"])
    def test_a_web_page_cannot_ask(self, http, host):
        """B217: a name that a page has resolve to this machine is not one of its names."""
        code, answer = http.ask("GET", "/status", Host=host)
        assert (code, list(answer)) == (421, ["error"])

    @pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9", "127.0.0.1:1", "[::1]:5", "[::1]"])
    def test_this_machines_names_are_fine(self, http, host):
        """B217: however it is called from here."""
        assert http.ask("GET", "/status", Host=host)[0] == 200

    def test_from_other_machines_reading_needs_the_token_too(self, make_server, kit):
        """B217: all but the health."""
        server = make_server(http="0.0.0.0:0", token="geheim", insecure=True)
        http = kit.Http(server.http_address.replace("0.0.0.0", "127.0.0.1"))
        assert http.ask("GET", "/healthz")[0] == 200
        for path in ("/status", "/metrics", "/config"):
            assert http.ask("GET", path)[0] == 401
            assert http.ask("GET", path, **TOKEN)[0] == 200
        assert http.ask("POST", "/lookup", {"tokens": []})[0] == 401


class TestNonsense:
    @pytest.mark.parametrize(
        ("method", "path", "code"),
        [("GET", "/", 404), ("GET", "/status/", 404), ("GET", "/..%2f..", 404), ("POST", "/status", 405),
         ("GET", "/clear", 405), ("DELETE", "/lookup", 405), ("BREW", "/healthz", 405)],
    )  # fmt: skip
    def test_what_is_not_there_is_json_too(self, http, method, path, code):
        """B218: 404 and 405."""
        found, answer = http.ask(method, path)
        assert (found, list(answer)) == (code, ["error"])

    @pytest.mark.parametrize(
        "body",
        [b"", b"{", b"[]", b"null", b"\xff", b'{"tokens": 1}', b'{"tokens": [-1]}', b'{"tokens": [4294967296]}',
         b'{"tokens": ["1"]}', b'{"tokens": [1], "text": "a"}', b'{"tokens": [1], "more": 1}', b"{}", b'{"text": "a"}',
         b"[" * 100_000, b'{"tokens": [1.5]}', b'{"tokens": [1], "media": "ram"}'],
    )  # fmt: skip
    def test_what_cannot_be_read_is_400(self, http, body):
        """B218: with what is wrong, and no traceback."""
        code, answer = http.ask("POST", "/lookup", body)
        assert (code, list(answer)) == (400, ["error"])
        assert "Traceback" not in answer["error"]

    @pytest.mark.parametrize("chunked", [False, True])
    def test_a_body_has_a_limit(self, http, chunked):
        """B218: 413, whether its length is said or not."""
        piece = b" " * (1 << 20)
        body = (piece for _ in range(17)) if chunked else piece * 17
        try:
            code, answer = _send(http, body, chunked=chunked)
        except (BrokenPipeError, ConnectionResetError):
            return  # it was cut off while it still sent
        assert (code, list(answer)) == (413, ["error"])

    def test_who_is_slow_is_cut_off(self, server, http, monkeypatch):
        """B218: and the others are answered meanwhile."""
        from qkvault.server import app
        from qkvault.server import http as http_module

        monkeypatch.setattr(http_module, "_ASK_SECONDS", 0.3)
        monkeypatch.setattr(app, "_BODY_SECONDS", 0.3)
        host, port = server.http_address.removeprefix("http://").split(":")
        starts = [b"", b"GET /sta", b"POST /lookup HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"]
        slow = [socket.create_connection((host, int(port)), 20) for _ in starts]
        for plain, start in zip(slow, starts, strict=True):
            plain.sendall(start)
        assert http.ask("GET", "/healthz")[0] == 200
        deadline = time.monotonic() + 20
        for plain in slow:
            received = b""
            try:
                while piece := plain.recv(4096):
                    received += piece
                    assert time.monotonic() < deadline
            except ConnectionResetError:
                pass
            assert received == b"" or b" 408 " in received
            plain.close()

    def test_pages_that_start_while_others_close_keep_their_file(self, make_server, tmp_path, monkeypatch):
        """B515: also where the file system gives it the number of the one before."""
        monkeypatch.setattr(listen, "_file_at", lambda _: (1, 1))
        server = make_server(http=f"unix://{tmp_path}/h")
        followers, join = [], server._http._thread.join

        def join_slowly():
            join()
            followers.append(listen.Listener(parse_address(f"unix://{tmp_path}/h")))

        monkeypatch.setattr(server._http._thread, "join", join_slowly)
        server._http.close()
        assert (tmp_path / "h").exists()
        monkeypatch.undo()
        followers[0].socket.close()

    def test_there_are_only_so_many_connections(self, server, http):
        """B218: of operators; what is one too many is closed, and engines are none of them."""
        host, port = server.http_address.removeprefix("http://").split(":")
        many = [socket.create_connection((host, int(port)), 20) for _ in range(80)]
        closed = 0
        for plain in many[64:]:
            try:
                closed += plain.recv(1) == b""
            except ConnectionResetError:
                closed += 1
        assert closed == 16
        for plain in many:
            plain.close()
        deadline = time.monotonic() + 20
        while True:
            try:
                assert http.ask("GET", "/healthz")[0] == 200
                break
            except OSError:
                assert time.monotonic() < deadline

    def test_a_fault_is_500_and_the_server_goes_on(self, http, server, monkeypatch):
        """B218: what nobody thought of is logged, and not told."""
        monkeypatch.setattr(server, "started_seconds", "a fault")
        code, answer = http.ask("GET", "/status")
        assert (code, answer) == (500, {"error": "the server failed, and has logged why"})
        assert http.ask("GET", "/healthz")[0] == 200


def _send(http, body, *, chunked):
    import json

    connection = http._connect()
    try:
        connection.request("POST", "/lookup", body, encode_chunked=chunked)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


class TestLife:
    def test_a_place_that_is_taken_is_refused(self, server, make_server, tmp_path):
        """B204: HTTP's too, and nothing is left of what was begun."""
        place = server.http_address.removeprefix("http://")
        with pytest.raises(ConfigError, match="another server answers"):
            make_server(listen=f"unix://{tmp_path}/t", http=place)
        assert not (tmp_path / "t").exists()

    def test_it_goes_with_its_server(self, make_server, tmp_path):
        """B205: the thread, and the socket's file."""
        server = make_server(http=f"unix://{tmp_path}/h")
        server.close()
        assert [path.name for path in tmp_path.iterdir()] == []
        server.close()
