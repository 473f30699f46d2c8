"""What a disk gives: files of plain bytes, written and read past the page cache by a few threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from bench.samples import Skip


class RawFiles:
    """``count`` files of ``file_bytes`` each, in ``folder``, from and to ``memory`` (pages of 4096)."""

    def __init__(self, folder: Path, memory: memoryview, count: int, file_bytes: int, *, threads: int) -> None:
        """Start the threads. Raises Skip where there is no O_DIRECT."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._paths = [folder / f"raw-{number}" for number in range(count)]
        self._pieces = [memory[number * file_bytes : (number + 1) * file_bytes] for number in range(count)]
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="raw")
        try:
            self._write_one(0)
        except OSError as error:
            self._threads.shutdown()
            msg = f"{folder}: no O_DIRECT here ({error.strerror}); --scratch names another folder"
            raise Skip(msg) from error

    def __enter__(self) -> RawFiles:  # noqa: PYI034  # Self is not in Python 3.10
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._threads.shutdown()
        self.remove()
        self._pieces.clear()

    def write(self) -> None:
        """All files, new ones."""
        self._on_all(self._write_one)

    def read(self) -> None:
        """All files."""
        self._on_all(self._read_one)

    def remove(self) -> None:
        """Those that are there."""
        for path in self._paths:
            path.unlink(missing_ok=True)

    def _on_all(self, what: Callable[[int], None]) -> None:
        for done in [self._threads.submit(what, number) for number in range(len(self._paths))]:
            done.result()

    def _write_one(self, number: int) -> None:
        descriptor = os.open(self._paths[number], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
        _move(descriptor, os.pwritev, self._pieces[number])

    def _read_one(self, number: int) -> None:
        _move(os.open(self._paths[number], os.O_RDONLY | os.O_DIRECT), os.preadv, self._pieces[number])


def _move(descriptor: int, how: Callable[[int, list[memoryview], int], int], piece: memoryview) -> None:
    try:
        moved = 0
        while moved < len(piece):
            count = how(descriptor, [piece[moved:]], moved)
            if not count:
                msg = f"{moved} bytes of {len(piece)}"
                raise OSError(msg)
            moved += count
    finally:
        os.close(descriptor)


def drop_page_cache(folder: Path) -> None:
    """Have the kernel forget what it keeps of the files below ``folder``, so that they are read from the disk."""
    for path in folder.rglob("*"):
        with suppress(OSError):  # gone meanwhile, or a folder
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(descriptor)  # a page that is not written yet would stay
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below it."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_file():
                total += path.stat().st_size
    return total
