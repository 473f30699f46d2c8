"""Commands that speak to a running store: status, lookup, clear, freeze, hot-cache, top, and the doctor's question."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress

import pytest
from typer.testing import CliRunner

from qkvault.cli.app import app
from qkvault.cli.doctor import examine
from qkvault.cli.top import tick_between
from qkvault.config import load
from qkvault.connecting import default_address
from qkvault.server.server import Server
from qkvault.testing.spaces import described
from qkvault.testing.store_model import ModelChunk
from qkvault.testing.transport_contract import until
from qkvault.tokens import TokenHasher
from qkvault.wire.messages import Instance, Status, TierStatus

TOKENS = list(range(70))
runner = CliRunner()


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The runtime directory of these tests."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def server():
    """A server at the default address."""
    with closing(Server(load(env={}, cli={"ram_bytes": 1 << 22, "prefault": False, "chunk_size": 32}))) as server:
        yield server


@pytest.fixture
def engine(server):
    """A client that is an engine's worker, and has stored two chunks."""
    description = described("a/model")
    space = description.space
    client = server.connect("engine")
    client.register(Instance("engine", "worker", "a/model", pid=77, host="here", spaces=(description.encode(),)))
    hasher = TokenHasher(_identity(), 32)
    hasher.extend(TOKENS)
    parent = space.chunk_key(hasher.root)
    for at, chunk_hash in enumerate(hasher.hashes):
        chunk = ModelChunk(space.chunk_key(chunk_hash), parent, hasher.tokens_from(at), b"payload" * 100)
        reserved = client.reserve([chunk.new()])
        chunk.write(client.pool.view(reserved.offsets[0], chunk.new().image_bytes))
        assert client.commit(reserved.lease_id) == 1
        parent = chunk.key
    return client


def _identity():
    from qkvault.keys import RequestIdentity

    return RequestIdentity()


def run(*arguments, code=0, text=None):
    """What a command prints."""
    result = runner.invoke(app, list(arguments), input=text)
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


class TestStatus:
    def test_it_shows_media_engines_and_hits(self, engine):
        """B220, B315: as a table, and with --json as the server's own page has it."""
        text = run("status")
        for part in (
            "ram",
            "4.0 MiB",
            "engine",
            "worker",
            "a/model",
            "77@here",
            "1 of 1",
            "running; clients 2",
            "lookups 0",
        ):
            assert part in text
        assert "queries" in text
        found = json.loads(run("status", "--json"))
        assert found["media"][0]["num_chunks"] == 2
        assert found["media"][0]["query_share_bytes"] == 1 << 20
        assert [model["model_name"] for model in found["models"]] == ["a/model"]
        assert found["instances"][0]["instance_id"] == "engine"

    def test_the_largest_disk_that_can_be_set_has_room_in_an_answer(self, folder):
        """B542: and in every command that shows it."""
        settings = {"ram_bytes": "4MiB", "query_bytes": "4MiB", "prefault": False, "disk_path": str(folder / "disk")}
        with closing(Server(load(env={}, cli={**settings, "disk_bytes": (1 << 62) - 1}))):
            disk = json.loads(run("status", "--json"))["media"][1]
            assert disk["capacity_bytes"] == disk["query_share_bytes"] == (1 << 62) - 1
            for command in (["status"], ["top", "--once", "--interval", "0.1"]):
                assert "4194304.0 TiB" in run(*command)

    def test_what_others_wrote_does_not_steer_the_terminal(self, engine, server):
        """B333: an instance may call itself what it likes."""
        server.connect("other").register(Instance("\x1b[2Jgone\r\n", "worker", "a/model"))
        for command in (["status"], ["top", "--once"]):
            text = run(*command)
            assert "?[2Jgone??" in text
            assert "\x1b" not in text

    @pytest.mark.parametrize("command", [["status"], ["lookup", "1"], ["clear"], ["freeze", "on"], ["hot-cache", "off"],
                                         ["top", "--once"]])  # fmt: skip
    def test_without_a_server_it_says_what_to_do(self, command):
        """B221: one line, and code 1."""
        said = run(*command, code=1)
        assert said == (
            f"qkvault: no store answers at {default_address()}: [Errno 2] No such file or directory; start one with "
            "`qkvault serve`, or say where it is with --address\n"
        )

    def test_an_address_can_be_given(self, engine, folder, server):
        """B221: by flag, by setting, or none: then it is where a server with the same settings would listen."""
        (address,) = server.addresses
        for where in (["--address", address], ["--set", f"address={address}"], []):
            assert json.loads(run("status", "--json", *where))["num_sessions"] == 2
        elsewhere = f"tcp://0.0.0.0:1,unix://{folder}/elsewhere"
        assert f"at unix://{folder}/elsewhere:" in run("status", "--set", f"listen={elsewhere}", code=1)
        assert "expected unix:///" in run("status", "--address", "here", code=2)


class TestLookup:
    @pytest.mark.parametrize("how", ["words", "commas", "stdin", "file"])
    def test_ids_come_as_words_from_stdin_or_a_file(self, engine, folder, how):
        """B222: however they are written."""
        text = str(TOKENS) if how != "words" else " ".join(map(str, TOKENS))
        (folder / "ids").write_text(text)
        arguments = {"words": text.split(), "commas": [text], "stdin": ["-"], "file": ["--from", str(folder / "ids")]}[
            how
        ]
        found = json.loads(run("lookup", "--json", *arguments, text=text))
        assert found["num_tokens"] == 70
        assert (found["spaces"][0]["cached_tokens"], found["spaces"][0]["tokens"]) == (64, {"ram": 64})
        assert "64 of 70" in run("lookup", *arguments, text=text)

    def test_text_is_taken_apart_by_the_models_tokenizer(self, engine, folder):
        """B222: where one is named."""
        tokenizers = pytest.importorskip("tokenizers")
        model = tokenizers.models.WordLevel({f"w{number}": number for number in TOKENS}, unk_token="w0")
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.save(str(folder / "tokenizer.json"))
        text = " ".join(f"w{number}" for number in TOKENS)
        found = json.loads(run("lookup", "--json", "--tokenizer", str(folder), text))
        assert found["spaces"][0]["cached_tokens"] == 64
        assert "no tokenizer.json at /nowhere" in run("lookup", "--tokenizer", "/nowhere", "a", code=2)

    def test_models_and_salts_are_told_apart(self, engine):
        """B222: a name that the store does not know, and a salt that was not stored under."""
        ids = [str(token) for token in TOKENS]
        assert "knows no such model" in run("lookup", "--model", "other", *ids)
        assert json.loads(run("lookup", "--json", "--salt", "s", *ids))["spaces"][0]["cached_tokens"] == 0

    @pytest.mark.parametrize(
        ("arguments", "why"),
        [([], "give token ids"), (["hello"], "'hello' is not a token id"), (["-5", "--"], "No such option"),
         (["1", "--from", "x"], "one of them"), (["--from", "/nowhere"], "cannot read /nowhere"),
         (["--from", "/"], "Is a directory"), (["1", "4294967296"], "'4294967296' is not a token id, a whole number"),
         (["9" * 5000], "is not a token id"), (["--", "-5"], "'-5' is not a token id"), ([""], "nothing to look up"),
         (["-"], "nothing to look up"), (["--salt", "\udcff", "1"], "surrogates not allowed"),
         (["1," * ((1 << 20) + 1)], "1048577 tokens, at most 1048576"),
         (["--tokenizer", "a" * 5000, "text"], "no tokenizer.json at aaa")],
    )  # fmt: skip
    def test_what_is_no_prompt_is_refused(self, engine, arguments, why):
        """B222: code 2, with what is expected."""
        assert why in run("lookup", *arguments, code=2)

    def test_stdin_that_is_no_text_is_refused(self, engine):
        """B543: with what was wrong there."""
        assert "cannot read stdin: 'utf-8' codec" in run("lookup", "-", code=2, text=b"1 \xff")


class TestOrders:
    def test_clear(self, engine):
        """B223: chunks are counted."""
        assert run("clear", "--ram-only") == "2 chunks cleared\n"
        assert json.loads(run("clear", "--json")) == {"num_chunks": 0}
        assert engine.status().media[0].num_chunks == 0

    def test_freeze_and_hot_cache(self, engine):
        """B223: both ways, and any other word is refused."""
        assert run("freeze", "on") == "frozen\n"
        assert engine.status().is_frozen
        assert "frozen; clients" in run("status")
        assert json.loads(run("freeze", "off", "--json")) == {"is_frozen": False}
        assert run("hot-cache", "off") == "hot cache off\n"
        assert json.loads(run("hot-cache", "on", "--json")) == {"hot_cache": True}
        assert "maybe" in run("freeze", "maybe", code=2)


class TestTop:
    def test_rates_are_differences_of_counters(self):
        """B224: per second, tiers summed; hits are those since the last look."""

        def status(**counters):
            media = (TierStatus("ram", 100, 10, 1, is_healthy=True),)
            flat = {name.replace("__", "."): count for name, count in counters.items()}
            return Status(media, 0, 0, 0, is_frozen=False, hot_cache=True, is_scanning=False, counters=flat)

        before = status(chunks_asked=10, chunks_found=10, loaded__disk=1, loaded_bytes__disk=5, stored__ram=4)
        now = status(chunks_asked=30, chunks_found=15, loaded__disk=3, loaded_bytes__disk=105, stored__ram=4)
        tick = tick_between(before, now, 2.0)
        assert tick.hit_rate == 0.25
        assert (tick.rates["chunks asked"], tick.rates["chunks from tiers"], tick.rates["bytes from tiers"]) == (
            10,
            1,
            50,
        )
        assert tick.rates["chunks stored"] == 0
        assert tick_between(now, now, 1.0).hit_rate is None

    def test_once_is_one_picture(self, engine):
        """B224, B315: bars, rates and engines."""
        text = run("top", "--once", "--interval", "0.1")
        for part in ("ram", "4.0 MiB", "queries", "0 B of 1.0 MiB", "2 chunks", "hit rate -", "lookups", "a/model"):
            assert part in text

    def test_it_lives_in_a_terminal_until_ctrl_c(self, engine, server, terminal):
        """B224: what happens is seen at the next tick; then the terminal is as it was, and the exit code 0."""
        read, process = terminal("top", "--interval", "0.1")
        until(lambda: "2 chunks" in read())
        engine.clear()
        until(lambda: "0 chunks" in read())
        assert "\x1b[?1049l" not in read()
        process.send_signal(signal.SIGINT)
        until(lambda: read() and process.poll() is not None)  # who writes to a terminal waits for it to be read
        assert process.returncode == 0
        assert "\x1b[?1049l" in read()  # the screen from before is back
        assert "Traceback" not in read()

    def test_sigterm_gives_the_terminal_back(self, engine, terminal):
        """B544: what was on the screen, and the cursor; then it ends as a shell tells of a signal."""
        read, process = terminal("top", "--interval", "0.1")
        until(lambda: "2 chunks" in read())
        process.terminate()
        until(lambda: read() and process.poll() is not None)
        assert process.returncode == 128 + signal.SIGTERM
        assert read().rindex("\x1b[?1049l") > read().rindex("\x1b[?1049h")
        assert read().rindex("\x1b[?25h") > read().rindex("\x1b[?25l")
        assert "Traceback" not in read()

    def test_where_there_is_no_terminal_nothing_was_written(self, engine, folder):
        """B563: a picture a tick comes, as lines without escapes; Ctrl-C ends it with exit code 0."""
        out = folder / "out"
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell has its background jobs ignore it
        with out.open("wb") as file:
            process = subprocess.Popen([sys.executable, "-m", "qkvault", "top", "--interval", "0.1"], stdout=file)
        signal.signal(signal.SIGINT, before)
        try:
            until(lambda: out.read_text().count("hit rate") > 1)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
        assert "2 chunks" in out.read_text()
        assert "\x1b" not in out.read_text()

    def test_json_is_one_object_a_tick(self, engine):
        """B224: for programs."""
        (line,) = run("top", "--once", "--json", "--interval", "0.1").splitlines()
        tick = json.loads(line)
        assert tick["rates_per_second"]["lookups"] == 0
        assert tick["media"][0]["num_chunks"] == 2
        assert abs(tick["time_seconds"] - time.time()) < 60


@pytest.fixture
def terminal():
    """Runs a command in a terminal of its own: what has been written there so far, and the process."""
    ends, processes = os.openpty(), []
    os.set_blocking(ends[0], False)
    written = bytearray()

    def read():
        with suppress(BlockingIOError, OSError):  # the last one has closed it
            while data := os.read(ends[0], 1 << 16):
                written.extend(data)
        return written.decode(errors="replace")

    def start(*arguments, code=None):
        command = [sys.executable, *(["-c", code] if code else ["-m", "qkvault"]), *arguments]
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell has its background jobs ignore it
        processes.append(subprocess.Popen(command, stdin=ends[1], stdout=ends[1], stderr=ends[1], env=environment))
        signal.signal(signal.SIGINT, before)
        return read, processes[0]

    yield start
    for process in processes:
        process.kill()
        process.wait()
    for end in ends:
        os.close(end)


def test_sigterm_during_a_check_gives_the_cursor_back(terminal):
    """B544: which the bar has hidden."""
    code = "import time; from qkvault.cli.check import _progress\nwith _progress(hidden=False): time.sleep(60)"
    read, process = terminal(code=code)
    until(lambda: "\x1b[?25l" in read())
    process.terminate()
    until(lambda: read() and process.poll() is not None)
    assert process.returncode == 128 + signal.SIGTERM
    assert read().rindex("\x1b[?25h") > read().rindex("\x1b[?25l")
    assert "Traceback" not in read()


class TestDoctor:
    def finding(self, address=None):
        return {finding.name: finding for finding in examine(address=address)}["server"]

    def test_it_asks_the_server(self, server, monkeypatch):
        """B219: what answers, and whether these settings would find what is there."""
        monkeypatch.setenv("QKVAULT_CHUNK_SIZE", "32")
        assert self.finding()[2:] == ("ok", "")
        assert "pool 4.0 MiB, chunks of 32 tokens, sha256" in self.finding().value
        monkeypatch.setenv("QKVAULT_CHUNK_SIZE", "64")
        assert self.finding().verdict == "problem"
        assert "chunk_size=64" in self.finding().advice

    def test_it_examines_the_settings_of_a_server_with_a_file(self, folder, server):
        """B495: `--file` and `--set` are those of `qkvault serve`; a file that cannot be read is a problem."""
        (folder / "settings.yaml").write_text("chunk_size: 32\nram_bytes: 3MiB\n")
        arguments = ("doctor", "--json", "--file", str(folder / "settings.yaml"))

        def findings(*more, code=0):
            result = runner.invoke(app, [*arguments, *more])
            assert result.exit_code == code, result.output
            return {finding["name"]: finding for finding in json.loads(result.stdout)}

        found = findings()
        assert found["settings"]["value"].startswith("2 set")
        assert (found["ram_bytes"]["value"], found["server"]["verdict"]) == ("3.0 MiB", "ok")
        assert "chunk_size=64" in findings("--set", "chunk_size=64", code=1)["server"]["advice"]
        (folder / "settings.yaml").write_text("chunk: 32\n")
        assert findings(code=1)["settings"]["verdict"] == "problem"

    def test_the_pool_of_a_server_that_answers_is_there_already(self, folder, server):
        """B541: nobody needs its memory once more."""
        (folder / "proc").mkdir()
        (folder / "proc/meminfo").write_text("MemTotal: 8 kB\nMemAvailable: 4 kB\n")
        found = {finding.name: finding for finding in examine(folder)}
        assert found["ram_bytes"].verdict == "ok"
        server.close()
        found = {finding.name: finding for finding in examine(folder)}
        assert found["ram_bytes"].verdict == "problem"

    def test_another_version_is_noted(self, monkeypatch):
        """B219: a server that was not restarted after an upgrade."""
        monkeypatch.setattr("qkvault.__version__", "0.0.1", raising=False)
        with closing(Server(load(env={}, cli={"ram_bytes": 1 << 20, "prefault": False}))):
            monkeypatch.setattr("qkvault.__version__", "0.0.2", raising=False)
            assert self.finding().verdict == "note"
            assert "restart the server" in self.finding().advice

    def test_none_is_a_problem_only_where_one_is_expected(self, monkeypatch, folder):
        """B219: with an address that nobody answers at, unless one is started on demand."""
        assert self.finding() == ("server", f"none at {default_address()}", "ok", "")
        assert self.finding(f"unix://{folder}/s").verdict == "problem"
        monkeypatch.setenv("QKVAULT_ADDRESS", f"unix://{folder}/s")
        assert "`qkvault serve`" in self.finding().advice
        monkeypatch.setenv("QKVAULT_AUTOSTART", "yes")
        assert self.finding().verdict == "ok"
