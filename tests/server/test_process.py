"""`qkvault serve` as a process: how fast it is ready, how it ends, and what is left when it is killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress

import psutil
import pytest

from qkvault.address import parse_address
from qkvault.config import Config
from qkvault.connecting import open_client, open_transport
from qkvault.errors import Unavailable
from qkvault.link import Link
from qkvault.memory import meminfo
from qkvault.testing.transport_contract import find, read, save, until
from qkvault.wire.messages import Instance

MAIN = "from qkvault.cli.app import main; main()"
HEAVY = {"torch", "vllm", "transformers", "tokenizers", "starlette", "uvicorn", "zmq", "yaml"}
READY_SECONDS = 0.5
# What no server can do without, and by far the most of its start.
LIBRARIES = """
import msgspec, numpy, psutil, ssl, typer
def main(ram: str = "") -> None: pass
typer.run(main)
"""
LIBRARIES_SHARE = 1.7
LIST_MODULES = """
import atexit, sys
atexit.register(lambda: print("modules", *sys.modules))
from qkvault.cli.app import main
main()
"""
# A file is in its place only after its rename: a disk that hangs there hangs the flush.
DISK_HANGS = """
import os, time
os.rename = os.replace = lambda *a, **k: time.sleep(600)
from qkvault.cli.app import main
main()
"""
# Each file takes a while: a flush does not end in the time that it has.
DISK_IS_SLOW = """
import os, time
def slowly(rename):
    return lambda *args, **kwargs: (time.sleep(0.4), rename(*args, **kwargs))
os.rename, os.replace = slowly(os.rename), slowly(os.replace)
from qkvault.cli.app import main
main()
"""


def on_disk(tmp_path):
    return ("--disk", str(tmp_path / "disk"), "--disk-size", "64MiB")


def cpu_seconds_of(code):
    process = subprocess.Popen([sys.executable, "-c", code])
    _, _, used = os.wait4(process.pid, 0)
    process.returncode = 0  # it was waited for
    return used.ru_utime + used.ru_stime


class TestStart:
    def test_it_is_ready_soon(self, start):
        """B200: half a second of a core, the pool's pre-faulting apart; where a core is slower, or others use it too,
        as much more as the libraries alone take there. By turns, until the least of each tells.
        """
        took, libraries = [], []
        for _ in range(8):
            server = start().wait_ready()
            times = psutil.Process(server.pid).cpu_times()
            took.append(times.user + times.system)
            assert server.stop() == 0
            libraries.append(cpu_seconds_of(LIBRARIES))
            if min(took) < max(READY_SECONDS, LIBRARIES_SHARE * min(libraries)):
                return
        pytest.fail(f"ready after {took} seconds of CPU, and the libraries alone take {libraries}")

    @pytest.mark.parametrize("disk", [False, True])
    def test_it_loads_no_torch(self, start, tmp_path, disk):
        """B201: nor anything else that it was not asked for."""
        server = start(*(on_disk(tmp_path) if disk else ()), code=LIST_MODULES).wait_ready()
        assert server.stop() == 0
        modules = set(server.log.partition("modules ")[2].split())
        assert "qkvault.server.server" in modules
        assert modules & HEAVY == set()

    def test_it_loads_no_torch_for_its_pages_either(self, start):
        """B201: what HTTP needs is loaded, and nothing of engines."""
        server = start("--http", "127.0.0.1:0", code=LIST_MODULES).wait_ready()
        assert server.stop() == 0
        assert HEAVY & set(server.log.partition("modules ")[2].split()) == {"starlette", "uvicorn"}

    @pytest.mark.parametrize("name", ["path", "abstract"])
    def test_it_tells_systemd(self, start, tmp_path, name):
        """B202: when it is ready, and when it begins to stop."""
        path = f"{tmp_path}/notify" if name == "path" else f"\0qkvault-test-{os.getpid()}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(path)
            manager.settimeout(20)
            server = start(NOTIFY_SOCKET=path.replace("\0", "@"))
            assert manager.recv(100) == b"READY=1"
            server.send()
            assert manager.recv(100) == b"STOPPING=1"
            assert server.wait() == 0

    @pytest.mark.parametrize("how", ["file", "environment", "file that the environment names"])
    def test_settings_come_without_a_flag(self, start, connect, tmp_path, how):
        """B496: from YAML, or from `QKVAULT_*` alone; a flag that is given as well wins."""
        settings = {"ram_bytes": "6MiB", "listen": f"unix://{tmp_path}/s", "chunk_size": "64", "prefault": "false"}
        (tmp_path / "settings.yaml").write_text("".join(f"{name}: {value}\n" for name, value in settings.items()))
        variables = {f"QKVAULT_{name.upper()}": value for name, value in settings.items()}
        flags, environment = {
            "file": (["--file", str(tmp_path / "settings.yaml")], {}),
            "environment": ([], variables),
            "file that the environment names": ([], {"QKVAULT_CONFIG": str(tmp_path / "settings.yaml")}),
        }[how]
        server = start(*flags, is_bare=True, **environment).wait_ready()
        client = connect(settings["listen"])
        assert client.status().media[0].capacity_bytes == 6 << 20
        client.close()
        with closing(open_transport(Config(), "test", address=settings["listen"])) as transport:
            assert transport.welcome.chunk_size == 64
        assert server.stop() == 0
        server = start(*flags, "--ram", "4MiB", is_bare=True, **environment).wait_ready()
        assert connect(settings["listen"]).status().media[0].capacity_bytes == 4 << 20
        assert server.stop() == 0

    def test_without_a_word_it_listens_where_clients_look(self, start, connect, monkeypatch, tmp_path):
        """B200: a server and a client that were told nothing find each other."""
        server = start("--listen", "").wait_ready()
        connect(None).check()
        assert f"addresses=unix://{tmp_path}/run/" in server.log
        assert server.stop() == 0

    @pytest.mark.parametrize(
        ("flags", "why"),
        [
            (["--ram", "8G"], "ram_bytes='8G' (cli): expected bytes"),
            (["--ram", "900TiB"], "make it smaller"),
            (["--disk-size", "1GiB"], "disk_path is not"),
            (["--listen", "tcp://0.0.0.0:0"], "tls_cert_path and tls_key_path and token is not set"),
            (["--set", "chunk_sise=64"], "did you mean 'chunk_size'"),
            (["--listen", "unix:///nowhere/at/all"], "cannot listen at /nowhere/at/all"),
            (["--http", "here"], "expected host:port"),
        ],
    )
    def test_what_cannot_be_is_said_in_one_line(self, start, flags, why):
        """B203: exit code 2, at once, with what to do."""
        server = start(*flags)
        assert server.wait() == 2
        assert why in server.log
        assert server.log.startswith("qkvault: ")
        assert server.log.count("\n") == 1

    @pytest.mark.parametrize(("seed", "is_served"), [("", False), ("7", True)])
    def test_hashes_of_each_process_alone_are_refused(self, start, seed, is_served):
        """B42, B43: Python's own hash without a seed made a server whose engines would have found nothing."""
        process = start(QKVAULT_HASH_ALGORITHM="builtin", PYTHONHASHSEED=seed)
        if is_served:
            process.wait_ready()
            return
        assert process.wait() == 2
        assert "PYTHONHASHSEED" in process.log

    def test_a_pool_beyond_the_limits_of_the_process_is_refused(self, start):
        """B203: a limit that is found out by trying is a clear error too."""
        code = (
            "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
            "from qkvault.cli.app import main; main()"
        )
        server = start("--ram", "2GiB", "--set", "prefault=false", code=code)
        assert server.wait() == 2
        assert "the system refuses" in server.log

    @pytest.mark.parametrize(
        "group",
        [("0::/a.slice/b.service", "a.slice/memory.max"), ("4:memory:/not/mounted", "memory/memory.limit_in_bytes")],
        ids=["the limit of a service", "the limit of a container"],
    )
    def test_a_pool_beyond_the_containers_limit_is_refused(self, start, tmp_path, group):
        """B334: before a page of it is taken, whatever the machine has; also where pages would be taken later."""
        root = tmp_path / "root"
        for name, text in (("proc/self/cgroup", group[0]), (f"sys/fs/cgroup/{group[1]}", str(256 << 20))):
            (root / name).parent.mkdir(parents=True)
            (root / name).write_text(text)
        code = f"import pathlib\nfrom qkvault import memory\nmemory._ROOT = pathlib.Path({str(root)!r})\n{MAIN}"
        for prefault in (True, False):
            server = start("--ram", "257MiB", "--set", f"prefault={prefault}", code=code)
            assert server.wait() == 2
            numbers = f"{257 << 20} bytes of memory, {256 << 20} are available in this control group"
            assert server.log == f"qkvault: the pool needs {numbers}: make it smaller (ram_bytes)\n"
        assert start("--ram", "8MiB", code=code).wait_ready().stop() == 0

    def test_the_kernels_own_limit_is_seen(self, start, memory_group):
        """B334: in a control group with a limit, as a container is."""
        group = memory_group(512 << 20)
        code = f"import os\nopen({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n{MAIN}"
        server = start("--ram", "1GiB", code=code)
        assert server.wait() == 2
        found = re.search(r"(\d+) are available in this control group", server.log)
        assert found
        assert 256 << 20 < int(found[1]) < 512 << 20  # without what the process itself has taken by then
        assert start("--ram", "8MiB", code=code).wait_ready().stop() == 0

    def test_it_takes_huge_pages_that_are_reserved(self, start, connect, reserve_huge_pages):
        """B483: and says so; a killed one gives them back."""
        page_bytes = reserve_huge_pages(4)
        free = meminfo()["HugePages_Free"]
        server = start("--ram", str(4 * page_bytes)).wait_ready()
        assert re.search(r"server_ready .* pages=reserved ", server.log)
        client = connect(server.address)
        assert save(client, "aabb") == 2
        assert read(client, find(client, "aabb"), "aabb") == 64
        assert meminfo()["HugePages_Free"] == free - 4
        server.stop(signal.SIGKILL)
        client.close()
        assert meminfo()["HugePages_Free"] == free
        server = start("--ram", str(5 * page_bytes)).wait_ready()
        assert re.search(r"server_ready .* pages=(small|transparent) ", server.log)
        assert server.stop() == 0

    @pytest.mark.parametrize("package", ["starlette", "uvicorn"])
    def test_pages_without_what_they_need_are_refused(self, start, package):
        """B203: with what to install; a server without pages needs none of it."""
        code = f"import sys; sys.modules[{package!r}] = None\n{MAIN}"
        server = start("--http", "127.0.0.1:0", code=code)
        assert server.wait() == 2
        assert "pip install 'qkvault[server]'" in server.log
        assert start(code=code).wait_ready().stop() == 0

    def test_a_second_server_at_an_address_is_refused(self, start, connect):
        """B204: before it takes any memory; the first one goes on."""
        first = start().wait_ready()
        second = start("--ram", "900TiB")
        assert second.wait() == 2
        assert f"another server answers at {first.address}" in second.log
        connect(first.address).check()


class TestStop:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_what_was_stored_is_on_disk_when_it_has_stopped(self, start, connect, tmp_path, number):
        """B205: a signal drains and flushes, and the exit code is 0; the next server has it all."""
        server = start(*on_disk(tmp_path)).wait_ready()
        client = connect(server.address)
        words = [f"{letter}{other}" * 4 for letter in "abcdefgh" for other in "ijklmnop"]
        for word in words:
            assert save(client, word) == 4
        assert server.stop(number) == 0
        assert not os.path.lexists(parse_address(server.address).path)
        server = start(*on_disk(tmp_path)).wait_ready()
        client = connect(server.address)
        for word in words:
            located = client.wait(find(client, word), 20.0, time.monotonic)
            assert read(client, located, word) == 128
            client.release(located.lease_id)

    def test_what_was_acknowledged_under_load_is_there_afterwards(self, start, connect, tmp_path):
        """B205: clients that are cut off in the middle of their work lose what they had not committed, and no more."""
        flags = ("--ram", "128MiB", "--disk", str(tmp_path / "disk"), "--disk-size", "1GiB")  # nothing is evicted
        server = start(*flags).wait_ready()
        acknowledged = []

        def work(letter):
            client = connect(server.address)
            with suppress(Unavailable):
                for number in range(1000):
                    word = letter * 2 + "".join(chr(ord("a") + int(digit)) * 2 for digit in f"{number:04}")
                    if save(client, word):
                        acknowledged.append(word)

        threads = [threading.Thread(target=work, args=(letter,)) for letter in "wxyz"]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        assert server.stop() == 0
        for thread in threads:
            thread.join()
        assert len(acknowledged) > 20
        server = start(*flags).wait_ready()
        client = connect(server.address)
        for word in acknowledged:
            located = client.wait(find(client, word), 20.0, time.monotonic)
            assert read(client, located, word) == len(word) * 16, word
            client.release(located.lease_id)
        client.check()

    def test_a_flush_that_does_not_end_in_time_is_told(self, start, connect, tmp_path):
        """B480: with one warning that counts what is lost, which is what is not found on disk, and exit code 3."""
        drain = ("--set", "drain_seconds=500ms")
        server = start(*on_disk(tmp_path), *drain, code=DISK_IS_SLOW).wait_ready()
        client = connect(server.address)
        words = [letter * 2 for letter in "abcdefghijklmnopq"]
        assert sum(save(client, word) for word in words) == 17
        assert server.stop() == 3
        (lost,) = re.findall(r"WARNING qkvault.store chunks_not_written chunks=(\d+) tiers=disk", server.log)
        server = start(*on_disk(tmp_path)).wait_ready()
        client = connect(server.address)
        until(lambda: not client.status().is_scanning)
        assert client.status().media[1].num_chunks == 17 - int(lost)
        assert 0 < int(lost) < 17
        assert server.stop() == 0
        assert "chunks_not_written" not in server.log

    def test_a_second_signal_ends_it_at_once(self, start, connect, tmp_path):
        """B206: also when a disk hangs that is being flushed to; the code is 1."""
        server = start(*on_disk(tmp_path), code=DISK_HANGS).wait_ready()
        save(connect(server.address), "aa")
        server.send()
        server.wait_for("server_stopping")
        server.send()
        assert server.wait() == 1

    def test_a_signal_ends_a_start(self, start):
        """B206: while memory is taken, which may last, a signal is heard."""
        server = start("--ram", "4GiB")
        deadline = time.monotonic() + 20
        process = psutil.Process(server.pid)
        while process.memory_info().shared < 256 << 20:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert server.stop() == 0
        assert "server_stopped at=start" in server.log


class TestKill:
    def test_ten_kills_leave_nothing(self, start, connect, tmp_path, take_snapshot, pools_of):
        """B207: no memory, process or second socket, and what was on disk before is there again."""
        before, pools = take_snapshot().pools, set()
        for round_ in range(10):
            server = start(*on_disk(tmp_path)).wait_ready()
            client = connect(server.address)
            for seen in range(round_):
                word = chr(ord("a") + seen) * 4
                located = client.wait(find(client, word), 20.0, time.monotonic)
                assert read(client, located, word) == 64
            save(client, chr(ord("a") + round_) * 4)
            pools |= pools_of(server.pid)
            deadline = time.monotonic() + 20
            while (status := client.status()).num_jobs or status.is_scanning:
                assert time.monotonic() < deadline
                time.sleep(0.002)
            assert server.stop(signal.SIGKILL) == -signal.SIGKILL
            with pytest.raises(Unavailable):
                client.status()
            client.close()
        assert len(pools) == 10
        assert take_snapshot().pools == before
        for pid in psutil.pids():
            with suppress(OSError):  # gone meanwhile, or not ours to look at
                assert pools.isdisjoint(pools_of(pid))
        assert [path.name for path in tmp_path.iterdir() if path.is_socket()] == ["s"]
        assert not list((tmp_path / "disk").rglob("*.tmp*"))
        ours = [
            process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in (process.info["cmdline"] or [])
        ]
        assert ours == []

    def test_a_killed_client_holds_nothing(self, start, connect, pools_of):
        """B207: what it was writing is void and what it was reading is free as soon as its connection is gone."""
        server = start().wait_ready()
        code = (
            "import sys, time\nfrom qkvault.config import Config\nfrom qkvault.connecting import open_client\n"
            "from qkvault.testing.transport_contract import find, reserve, save\n"
            f"client = open_client(Config(timeout_seconds=20.0), 'victim', address={server.address!r})\n"
            "save(client, 'aabb'); find(client, 'aabb'); reserve(client, 'ccdd')\n"
            "print('ready', flush=True); time.sleep(600)"
        )
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as victim:
            assert victim.stdout.readline() == b"ready\n"
            client = connect(server.address)
            (pool,) = pools_of(server.pid)
            assert pools_of(victim.pid) == {pool}
            assert client.status().num_leases == 2
            victim.kill()
            victim.wait()
            deadline = time.monotonic() + 20
            while client.status().num_leases:
                assert time.monotonic() < deadline
                time.sleep(0.001)
        client.check()
        assert find(client, "ccdd").lease_id == 0

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
    def test_an_idle_engine_keeps_no_memory_of_a_killed_server(self, start, number):
        """B523: a sign of life finds that it has died, and gives the pages back; one that is only stuck has them."""
        server, config = start().wait_ready(), Config(timeout_seconds=0.2)
        instance = Instance("idle", "worker", "model")
        with closing(
            Link(lambda: open_client(config, "idle", address=server.address), instance, ping_seconds=0.05)
        ) as link:
            link.start()
            client = link.session()
            save(client, "aabb")
            ref = next(iter(find(client, "aabb").ready))
            os.kill(server.pid, number)
            until(lambda: not client.is_usable)
            if number is signal.SIGSTOP:
                for _ in range(5):
                    client.bury()
                assert any(client.pool.view(ref.offset, ref.image_bytes))
                os.kill(server.pid, signal.SIGKILL)
            until(lambda: not any(client.pool.view(ref.offset, ref.image_bytes)))
            assert link.session() is client

    def test_a_session_that_has_failed_leaves_a_living_server_its_memory(self, start, connect):
        """B523: also when it is closed at that moment."""
        server = start().wait_ready()
        save(connect(server.address), "aabb")
        for _ in range(20):
            client = open_client(Config(timeout_seconds=20.0), "idle", address=server.address)
            client._transport._stream.shutdown()
            with pytest.raises(Unavailable):
                client.ping()
            threads = [threading.Thread(target=client.bury), threading.Thread(target=client.close)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        other = connect(server.address)
        assert read(other, find(other, "aabb"), "aabb") == 64
