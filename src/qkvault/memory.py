"""The memory of this machine as the kernel tells it: how much can be had. Takes none."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from qkvault.errors import ConfigError

_UNLIMITED_BYTES: Final = 1 << 60  # the kernel writes a number near 2**63 where there is no limit
_ROOT: Final = Path("/")


def require_available(num_bytes: int, root: Path | None = None) -> None:
    """Raise ConfigError if there are fewer: a pool that does not fit ends the process some day."""
    room_bytes, where = available_memory(root)
    if num_bytes > room_bytes:
        numbers = f"{num_bytes} bytes of memory, {room_bytes} are available {where}"
        msg = f"the pool needs {numbers}: make it smaller (ram_bytes)"
        raise ConfigError(msg)


def available_memory(root: Path | None = None) -> tuple[int, str]:
    """Bytes of memory that can be had without swapping and within the container's limit, and which of both that is."""
    limits = [(meminfo(root or _ROOT).get("MemAvailable", _UNLIMITED_BYTES), "on this machine")]
    if (group := cgroup_memory(root or _ROOT)) is not None:
        limits.append((group.available_bytes, "in this control group"))
    return min(limits)


class GroupMemory(NamedTuple):
    """What a control group may use, and how much of that it can still have."""

    available_bytes: int
    limit_bytes: int


def cgroup_memory(root: Path = _ROOT) -> GroupMemory | None:
    """Of the control groups that this process is in (version 1 or 2) the one that leaves the least; None without limit.

    ``root`` holds proc and sys.
    """
    groups = []
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, used, idle = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            idle = "total_inactive_file"
        else:
            continue
        # In a container the group's own path is often not mounted, while its limit is that of the top.
        at = top / path.lstrip("/")
        for folder in (at, *at.parents):
            limit_bytes = _number(read_text(folder / limit))
            if 0 < limit_bytes < _UNLIMITED_BYTES:
                stat = dict(line.split(" ", 1) for line in read_text(folder / "memory.stat").splitlines())
                # What files have left in memory goes when something else needs it.
                taken_bytes = max(0, _number(read_text(folder / used)) - _number(stat.get(idle, "")))
                groups.append(GroupMemory(max(0, limit_bytes - taken_bytes), limit_bytes))
            if folder == top:
                break
    return min(groups, default=None)


def _number(text: str) -> int:
    return int(text) if text.strip().isdecimal() else 0


def huge_page_bytes(pool_bytes: int, memory: dict[str, int]) -> int:
    """The size of huge pages, if so many are reserved and free that a pool can be made of them; else 0.

    It is made of whole ones and never larger than it was asked for, so that it may lose a sixteenth of its size.
    ``memory`` is what ``meminfo`` tells.
    """
    page_bytes = memory.get("Hugepagesize", 0)
    num_free = memory.get("HugePages_Free", 0) - memory.get("HugePages_Rsvd", 0)  # others have mapped those
    num_pages = pool_bytes // page_bytes if page_bytes else 0
    is_alike = num_pages > 0 and pool_bytes - num_pages * page_bytes <= pool_bytes >> 4
    return page_bytes if is_alike and num_pages <= num_free else 0


def transparent_mode(*, shared: bool, root: Path = _ROOT) -> str:
    """When the kernel makes pages huge by itself: the mode in brackets, as in ``always [madvise] never``."""
    file = "shmem_enabled" if shared else "enabled"
    return read_text(root / "sys/kernel/mm/transparent_hugepage" / file).partition("[")[2].partition("]")[0]


def meminfo(root: Path = _ROOT) -> dict[str, int]:
    """What the kernel tells of memory, by its names: bytes, and numbers of pages."""
    each = [line.split() for line in read_text(root / "proc/meminfo").splitlines()]
    return {name[:-1]: int(count) << 10 * bool(unit) for name, count, *unit in each}


def read_text(path: Path) -> str:
    """The text of a file of the kernel, or nothing if it is not there or not ours to read."""
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
