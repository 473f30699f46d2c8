"""What every test gets: an environment without our settings, and a check that it left nothing behind.

Leaked threads, descriptors and shared memory are the typical bugs of a cache, so the harness looks after each test.
"""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import os
import runpy
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import psutil
import pytest
from hypothesis import settings

from qkvault.memory import meminfo

OURS = "qkvault"
GRACE_SECONDS = 2.0  # a thread that was told to stop may still be on its way out
ROOT = Path(__file__).resolve().parent.parent
MODEL = runpy.run_path(str(ROOT / "scripts" / "fetch_model.py"))["model_path"]()
MACHINE = pytest.StashKey[IO[str]]()  # a file that is locked, shared or alone
REQUIRE_VLLM = os.environ.get("QKV_REQUIRE_VLLM") == "1"  # set by `make test`: what is missing fails, not skips

# The contract suites assert like tests, and must be rewritten before anybody imports them.
pytest.register_assert_rewrite(
    *(
        f"qkvault.testing.{name}"
        for name in ("store_model", "policy_contract", "tier_contract", "transport_contract", "transport_bytes")
    )
)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Before anything loads OpenMP: threads that spin while the one they wait for has no core take ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
settings.register_profile("default", deadline=None, print_blob=True)
settings.register_profile("long", settings.get_profile("default"), max_examples=10_000)
settings.load_profile("default")


def clean_environment() -> None:
    """No setting of the developer's shell, nor of an earlier test, reaches a test."""
    for name in [name for name in os.environ if name.startswith("QKVAULT_")]:
        del os.environ[name]


clean_environment()  # for what modules and fixtures of a larger scope read


@dataclass(frozen=True)
class Snapshot:
    """What this process holds at one moment."""

    threads: frozenset[threading.Thread]
    descriptors: dict[str, str]  # number to what it is open on
    pools: frozenset[str]  # shared ones of ours that it maps or has open, by name and inode

    @classmethod
    def take(cls) -> Snapshot:
        return cls(frozenset(threading.enumerate()), _open_descriptors(), pools_of("self"))

    def leaks(self) -> list[str]:
        """What is held now and was not then, and should not be."""
        now = Snapshot.take()
        found = [
            f"thread {thread.name!r}"
            for thread in now.threads - self.threads
            if not thread.daemon or thread.name.startswith(OURS)
        ]
        if len(now.descriptors) > len(self.descriptors):
            new = now.descriptors.items() - self.descriptors.items()
            found += [f"descriptor {number} on {target}" for number, target in new]
        found += [f"shared memory {pool}" for pool in now.pools - self.pools]
        return sorted(found)

    def leaks_after(self, grace_seconds: float) -> list[str]:
        """The leaks that are still there when the grace is over."""
        if not (found := self.leaks()):
            return []
        gc.collect()  # what only a cycle keeps alive is no leak
        deadline = time.monotonic() + grace_seconds
        while (found := self.leaks()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found


def _open_descriptors() -> dict[str, str]:
    descriptors = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            descriptors[entry.name] = str(entry.readlink())
        except FileNotFoundError:
            continue  # the one that lists the folder
    return descriptors


def pools_of(pid: int | str) -> frozenset[str]:
    """The shared pools that a process maps or has open: a memfd is in no directory, but in these two lists."""
    process, prefix = Path("/proc") / str(pid), f"/memfd:{OURS}"
    found = set()
    for line in (process / "maps").read_text().splitlines():
        *_, inode, name = (*line.split(maxsplit=5), "", "")[:6]
        if name.startswith(prefix):
            found.add(f"{name.split()[0]} {inode}")
    for entry in (process / "fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists the folder
            if (target := str(entry.readlink())).startswith(prefix):
                found.add(f"{target.split(maxsplit=1)[0]} {entry.stat().st_ino}")
    return frozenset(found)


@pytest.fixture(scope="session", autouse=True)
def _warm_up() -> None:
    """Open once what Python keeps open for good from its first use on, so that no test is charged with it."""
    resource_tracker.ensure_running()


@pytest.fixture(autouse=True)
def _isolation(request: pytest.FixtureRequest) -> Iterator[None]:
    clean_environment()
    marker = request.node.get_closest_marker("allow_leaks")
    before = Snapshot.take()
    yield
    if marker is None and (found := before.leaks_after(GRACE_SECONDS)):
        pytest.fail("the test left behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture
def take_snapshot() -> Callable[[], Snapshot]:
    """Look at what the process holds, as the leak checks do."""
    return Snapshot.take


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Tests of other processes run beside this one, with its fixtures, unless it asks for the machine."""
    with Path(tempfile.gettempdir(), f"qkvault-tests-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        item.stash[MACHINE] = lock
        return (yield)


@pytest.fixture
def reserve_huge_pages(request: pytest.FixtureRequest) -> Iterator[Callable[[int], int]]:
    """Has the kernel reserve so many huge pages until the test ends, and tells their size; skips where it does not.

    Any pool of another test would take them: none runs meanwhile.
    """
    fcntl.flock(request.node.stash[MACHINE], fcntl.LOCK_EX)
    setting = Path("/proc/sys/vm/nr_hugepages")
    before = setting.read_text()

    def reserve(num_pages: int) -> int:
        try:
            setting.write_text(str(int(before) + num_pages))
        except OSError as error:
            pytest.skip(f"no huge pages of our own: {error}")
        memory = meminfo()
        if memory["HugePages_Free"] - memory["HugePages_Rsvd"] < num_pages:
            pytest.skip("the kernel finds no memory for huge pages")
        return memory["Hugepagesize"]

    yield reserve
    with suppress(OSError):
        setting.write_text(before)


@pytest.fixture(name="pools_of")
def _pools_of() -> Callable[[int], frozenset[str]]:
    """The shared pools of ours that a process holds."""
    return pools_of


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The directory of the small model that `make setup` fetches."""
    if not (MODEL / "model.safetensors").is_file():
        _skip_or_fail(f"no model in {MODEL}: run scripts/fetch_model.py")
    return MODEL


@pytest.fixture(scope="session")
def model_run() -> SimpleNamespace:
    """Models as transformers computes them: ``load_model`` and ``run_model`` of the module of that name."""
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("model_run.py"))))


@pytest.fixture
def network() -> Iterator[Callable[[str], object]]:
    """Puts a network before a server's address: ``Network`` of the module of that name. Closed after the test."""
    with ExitStack() as stack:
        make = runpy.run_path(str(Path(__file__).with_name("network.py")))["Network"]
        yield lambda address: stack.enter_context(closing(make(address)))


@pytest.fixture(scope="session")
def servers_at() -> Callable[[str], list[psutil.Process]]:
    """The processes of ``qkvault serve`` at an address."""

    def servers_at(address: str) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            with suppress(psutil.Error):
                if address in (process.info["cmdline"] or []) and "serve" in process.info["cmdline"]:
                    found.append(process)
        return found

    return servers_at


@pytest.fixture
def address(tmp_path: Path, servers_at: Callable[[str], list[psutil.Process]]) -> Iterator[str]:
    """An address whose servers are ended after the test."""
    address = f"unix://{tmp_path}/s"
    yield address
    for process in servers_at(address):
        process.kill()
        process.wait(10)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Paths of a certificate of 127.0.0.1 that signs itself, and of its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = (
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=qkvault "
        f"-addext subjectAltName=IP:127.0.0.1,DNS:localhost -keyout {key} -out {cert}"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    return str(cert), str(key)


@pytest.fixture(scope="session")
def tls(certificate: tuple[str, str]) -> SimpleNamespace:
    """What both ends of TLS on 127.0.0.1 need: ``server`` and ``client`` are contexts, made as from settings."""
    from qkvault.address import parse_address
    from qkvault.config import load
    from qkvault.connecting import tls_for
    from qkvault.server.places import server_tls

    cert, key = certificate
    server = server_tls(load(env={}, cli={"tls_cert_path": cert, "tls_key_path": key}).config)
    client = tls_for(load(env={}, cli={"tls_ca_path": cert}).config, parse_address("tcp://127.0.0.1:1"))
    return SimpleNamespace(server=server, client=client, ca_path=cert)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files of slow tests first: of several processes (`-n`) none is left with a long one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, and say why."""
    leaks = item.get_closest_marker("allow_leaks")
    if leaks is not None and not (leaks.args and str(leaks.args[0]).strip()):
        pytest.fail("allow_leaks needs a reason", pytrace=False)
    if item.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
        _skip_or_fail("vllm is not importable: run `make setup`")
    if item.get_closest_marker("gpu") and not _has_cuda():
        pytest.skip("no CUDA device")


def _skip_or_fail(reason: str) -> None:
    if REQUIRE_VLLM:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
