"""Look at every byte of a disk tier's directory, without a tier: for ``qkvault check PATH [--fix]``."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from qkvault.errors import ConfigError
from qkvault.image import ALIGNMENT_BYTES, Header, align_up, read_header, verify_payload
from qkvault.tiers import disk_files as files
from qkvault.tiers.disk_listing import Entry, FileKind, walk

MAX_PROBLEMS: Final = 100  # that are listed; all are counted


class DiskReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a directory holds: numbers of files and their bytes, by outcome."""

    whole: int = 0
    whole_bytes: int = 0
    corrupt: int = 0  # truncated, flipped, of another key or format
    corrupt_bytes: int = 0
    temporary: int = 0  # left by a process that died, or being written
    temporary_bytes: int = 0
    foreign: int = 0  # not ours; never touched
    foreign_bytes: int = 0
    removed: int = 0
    removed_bytes: int = 0
    in_use: bool = False  # by another process: what is temporary is no problem, it may be being written
    without_parent: int = 0  # whole, but the chunk before is not: first chunks, and those whose parent left
    problems: tuple[tuple[str, str], ...] = ()  # path, what is wrong; the first MAX_PROBLEMS

    @property
    def num_problems(self) -> int:
        """How many files should not be there."""
        return self.corrupt + (0 if self.in_use else self.temporary)

    @property
    def is_clean(self) -> bool:
        """Whether nothing is there that should not be, or it was removed."""
        return self.num_problems == self.removed


def check_directory(
    path: str | os.PathLike[str], *, fix: bool = False, progress: Callable[[int, int], None] | None = None
) -> DiskReport:
    """Verify every file below ``path`` wholly: header, name, size and payload. Reads all of it; blocks.

    ``fix`` removes corrupt and temporary files, under the directory's lock; without it nothing is changed, and a tier
    may be using the directory. ``progress(done, total)`` is called after each file. Raises ConfigError if there is no
    such directory, or with ``fix`` if a process uses it; OSError if the directory cannot be listed.
    """
    root = str(Path(path).absolute())
    if not Path(root).is_dir():
        msg = f"{root} is not a directory"
        raise ConfigError(msg)
    lock = files.DirectoryLock(root)
    if fix:
        lock.take()
    try:
        check = _Check(fix=fix, in_use=not fix and lock.is_anothers)
        entries = sorted(walk(root))
        for number, entry in enumerate(entries, 1):
            check.look_at(entry)
            if progress is not None:
                progress(number, len(entries))
        return check.report()
    finally:
        lock.release(remove=True)


class _Check:
    """One pass over a directory. One thread."""

    def __init__(self, *, fix: bool, in_use: bool) -> None:
        self._fix, self._in_use = fix, in_use
        self._counts: dict[str, int] = {}
        self._problems: list[tuple[str, str]] = []
        self._parents: dict[bytes, bytes] = {}  # whole chunk -> the chunk before it
        self._buffer = memoryview(mmap.mmap(-1, ALIGNMENT_BYTES))  # page-aligned, as long as the longest file so far

    def look_at(self, entry: Entry) -> None:
        """Count ``entry``, and remove it if it is wrong and to be fixed."""
        if entry.kind is FileKind.FOREIGN:
            self._count("foreign", entry.num_bytes)
            return
        if entry.kind is FileKind.TEMPORARY:
            outcome, problem = "temporary", "" if self._in_use else "not finished"
        else:
            try:
                header = self._verify(entry)
            except FileNotFoundError:
                return  # its tier has removed it meanwhile
            except (ValueError, OSError) as error:
                outcome, problem = "corrupt", str(error)
            else:
                self._parents[header.key] = header.parent
                self._count("whole", entry.num_bytes)
                return
        self._count(outcome, entry.num_bytes)
        if problem and len(self._problems) < MAX_PROBLEMS:
            self._problems.append((entry.path, problem))
        if self._fix:
            Path(entry.path).unlink(missing_ok=True)
            self._count("removed", entry.num_bytes)

    def report(self) -> DiskReport:
        without_parent = sum(parent not in self._parents for parent in self._parents.values())
        return DiskReport(
            **self._counts, in_use=self._in_use, without_parent=without_parent, problems=tuple(self._problems)
        )

    def _count(self, outcome: str, num_bytes: int) -> None:
        for name, by in ((outcome, 1), (f"{outcome}_bytes", num_bytes)):
            self._counts[name] = self._counts.get(name, 0) + by

    def _verify(self, entry: Entry) -> Header:
        num_bytes = align_up(entry.num_bytes)
        if num_bytes > len(self._buffer):
            self._buffer = memoryview(mmap.mmap(-1, num_bytes))
        image = self._buffer[: entry.num_bytes]
        files.read_image(entry.path, image, direct=True, touch=False)
        header = read_header(image)
        if header.key != entry.key:
            msg = "it holds another chunk than its name says"
            raise ValueError(msg)
        if align_up(header.image_bytes) != entry.num_bytes:
            msg = f"{entry.num_bytes} bytes do not fit {header.header_bytes} + {header.payload_bytes} and padding"
            raise ValueError(msg)
        verify_payload(image, header)
        return header
