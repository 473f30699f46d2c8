"""The files of a disk tier: where a key's file is, how an image gets into it and out, whose the directory is.

    <root>/.lock                          who owns the directory
    <root>/<space>/<xx>/<hash>.qkv        a chunk image, zeros up to a multiple of 4096; <xx> begins the hash
    <root>/<space>/<xx>/<hash>.<owner>-<n>.tmp   one that is being written, or was when its process died

All names are hexadecimal digits of the key, so no key reaches outside of the root. Knows nothing of jobs or threads;
errors are OSError as the system raises them.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from qkvault.errors import ConfigError
from qkvault.image import ALIGNMENT_BYTES, align_up
from qkvault.logs import get_logger
from qkvault.types import KEY_BYTES, SPACE_BYTES

CHUNK_SUFFIX: Final = ".qkv"
TEMPORARY_SUFFIX: Final = ".tmp"
LOCK_NAME: Final = ".lock"
PROBE_NAME: Final = ".probe"

CANNOT_WRITE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})  # and reading goes on
_OF_THE_FILE: Final = frozenset({errno.EPERM, errno.EACCES, errno.EISDIR, errno.ENOTDIR, errno.EEXIST})  # if written
_NOT_THE_FILE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})  # this process is short of something

_SHARD_DIGITS: Final = 2
OPEN: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # non-blocking, lest a FIFO hold up a thread

_log = get_logger("tiers")


class WrongSize(ValueError):
    """A file is not as long as its image must be, or is no regular file at all."""


def path_of(root: str, key: bytes) -> str:
    """Path of the file of ``key``. Raises ValueError unless it has the length of a key."""
    if len(key) != KEY_BYTES:
        msg = f"a key has {KEY_BYTES} bytes, not {len(key)}"
        raise ValueError(msg)
    digest = key[SPACE_BYTES:].hex()
    return f"{root}/{key[:SPACE_BYTES].hex()}/{digest[:_SHARD_DIGITS]}/{digest}{CHUNK_SUFFIX}"


def temporary_of(path: str, owner: str, number: int) -> str:
    """A name beside ``path`` that nobody else uses, if ``owner`` (hexadecimal) and ``number`` are his alone."""
    return f"{path.removesuffix(CHUNK_SUFFIX)}.{owner}-{number}{TEMPORARY_SUFFIX}"


def make_folders(path: str) -> None:
    """Make the folders between the root and the file at ``path``, but not the root."""
    shard = Path(path).parent
    shard.parent.mkdir(0o700, exist_ok=True)
    shard.mkdir(0o700, exist_ok=True)


def write_image(path: str, temporary: str, image: memoryview, *, direct: bool) -> None:
    """Write ``image`` to ``temporary``, padded with zeros, and rename it to ``path``: whole, or not at all.

    ``temporary`` may be a file of the same length, to be written over. Raises FileNotFoundError if a folder is not
    there. Not synced: what a power cut leaves is told from a whole chunk by its check sums.
    """
    try:
        descriptor = _create(temporary)
        try:
            padded_bytes = align_up(len(image))
            parts = _padded(image)
            if _transfer(os.pwritev, descriptor, parts, padded_bytes, direct=direct) != padded_bytes:
                raise OSError(errno.EIO, "the file took no more bytes")
        finally:
            os.close(descriptor)
        Path(temporary).rename(path)
    except OSError:
        with suppress(OSError):
            Path(temporary).unlink()
        raise


def read_image(path: str, image: memoryview, *, direct: bool, touch: bool = True) -> None:
    """Fill ``image`` from the file at ``path`` and, with ``touch``, let the file count as used now.

    Raises FileNotFoundError if it is not there, WrongSize if it is not exactly as long as the padded image.
    """
    descriptor = os.open(path, os.O_RDONLY | OPEN)
    try:
        status = os.fstat(descriptor)
        padded_bytes = align_up(len(image))
        if not stat.S_ISREG(status.st_mode) or status.st_size != padded_bytes:
            msg = f"{status.st_size} bytes instead of {padded_bytes}"
            raise WrongSize(msg)
        parts = _padded(image)
        num_bytes = _transfer(os.preadv, descriptor, parts, padded_bytes, direct=direct)
        if num_bytes != padded_bytes:
            msg = f"{num_bytes} bytes read of {padded_bytes}"
            raise WrongSize(msg)
        if tail_bytes := len(image) % ALIGNMENT_BYTES:
            image[-tail_bytes:] = parts[-1][:tail_bytes]
        if touch:
            with suppress(OSError):  # a read-only file system: the order of use is lost, the bytes are not
                os.utime(descriptor)
    finally:
        os.close(descriptor)


def probe_read(root: str, *, direct: bool) -> None:
    """Read a few bytes from the disk. Raises OSError if that does not work."""
    descriptor = os.open(f"{root}/{LOCK_NAME}", os.O_RDONLY | OPEN)
    try:
        _transfer(os.preadv, descriptor, [_page()], 1, direct=direct)
    finally:
        os.close(descriptor)


def probe_write(root: str, room_bytes: int, *, direct: bool) -> None:
    """Write a page. Raises OSError if that does not work, or if there is no room for ``room_bytes`` more."""
    path = f"{root}/{PROBE_NAME}"
    descriptor = _create(path)
    try:
        _transfer(os.pwritev, descriptor, [_page()], ALIGNMENT_BYTES, direct=direct)
        room = os.fstatvfs(descriptor)
        if room.f_bavail * room.f_frsize < room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)
        Path(path).unlink(missing_ok=True)  # another thread may probe as well


def is_only_of_file(root: str, error: OSError, *, direct: bool, writing: bool) -> bool:
    """Whether what failed, failed for its file alone: the disk can be read, or written, otherwise."""
    try:
        if writing and error.errno in _OF_THE_FILE:
            probe_write(root, 0, direct=direct)
        elif writing or error.errno in _NOT_THE_FILE:
            return False
        else:
            probe_read(root, direct=direct)
    except OSError:
        return False
    return True


def probe_start(root: str, *, direct: bool) -> str | None:
    """Read and write a page. Returns why it cannot be written, if all else works; raises OSError if not."""
    try:
        probe_write(root, 0, direct=direct)
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        probe_read(root, direct=direct)
        return error.strerror
    return None


class Spares:
    """Files of chunks that had to leave for a store, for that store to write over: no blocks to free and to find.

    On some file systems that doubles what a full tier takes in a second. Any thread may call; deques keep it right.
    """

    def __init__(self) -> None:
        self._paths: dict[int, deque[str]] = {}  # bytes of the file -> temporary names

    def count(self, num_bytes: int) -> int:
        return len(self._paths.get(num_bytes, ()))

    def keep(self, path: str, temporary: str, num_bytes: int) -> None:
        """Rename the file at ``path``, of ``num_bytes``, to ``temporary``, and keep it. Raises OSError."""
        Path(path).rename(temporary)
        self._paths.setdefault(num_bytes, deque()).append(temporary)

    def take(self, num_bytes: int) -> str | None:
        """A file of exactly ``num_bytes``, if there is one."""
        try:
            return self._paths.get(num_bytes, deque()).popleft()
        except IndexError:
            return None

    def drop(self) -> None:
        for num_bytes in list(self._paths):
            while (path := self.take(num_bytes)) is not None:
                with suppress(OSError):
                    Path(path).unlink()


def require_directory(root: str) -> None:
    """Raise ConfigError unless ``root`` is a directory that this user can lock, or can be made one. Makes nothing."""
    at = next(each for each in (Path(root), *Path(root).parents) if os.path.lexists(each))
    can_lock = os.access(at, os.W_OK | os.X_OK) or os.access(f"{root}/{LOCK_NAME}", os.R_OK)  # a disk may be read-only
    if not (at.is_dir() and can_lock):
        msg = f"{root} cannot be the disk tier's directory: {at} is no directory that this user can write to"
        raise ConfigError(msg)


class DirectoryLock:
    """The right to write below a root. The system frees it when its process ends, however that ends.

    Taken and released by one thread at a time; any may ask whether it is held.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._path = f"{root}/{LOCK_NAME}"
        self._descriptor = -1
        self._folder = -1  # the directory as it was when it was last taken: open, lest another gets its number

    @property
    def is_held(self) -> bool:
        """Whether we hold the lock that is in the directory now."""
        return self._descriptor >= 0 and self._is_there(self._descriptor)

    @property
    def is_anothers(self) -> bool:
        """Whether another process holds it now. Leaves nothing behind."""
        with suppress(OSError), ExitStack() as stack:  # no such file, or no locks here
            descriptor = os.open(self._path, os.O_RDONLY | OPEN)
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def take(self) -> bool:
        """Take it, unless it is held: also again, when the directory was removed and made anew.

        Returns whether it is another directory than the last time. Raises ConfigError, naming the process, if the
        directory has another owner; OSError otherwise.
        """
        while not self.is_held:
            self._let_go()
            # Kept open for reading only: one that may write would keep an operator from remounting read-only.
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CREAT | OPEN, 0o600)
            try:
                self._lock(descriptor)
                if self._is_there(descriptor):  # else its last owner removed it before he let go: take the new one
                    self._sign()
                    self._descriptor, descriptor = descriptor, -1
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
        return self._is_another_folder()

    def release(self, *, remove: bool = False) -> None:
        """Give it back, and leave no trace of it if ``remove``. Idempotent."""
        with suppress(OSError):
            if remove and self.is_held:
                Path(self._path).unlink()
        self._let_go()
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def _let_go(self) -> None:
        if self._descriptor >= 0:
            with suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a forked child may hold a copy of the descriptor
            os.close(self._descriptor)
            self._descriptor = -1

    def _sign(self) -> None:
        try:
            Path(self._path).write_text(f"{os.getpid()}\n", encoding="ascii")
        except OSError as error:
            if error.errno not in CANNOT_WRITE:
                raise  # else nobody learns who we are, and the lock is ours all the same

    def _is_another_folder(self) -> bool:
        folder = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        before, self._folder = self._folder, folder
        if before < 0:
            return False
        try:
            return not os.path.samestat(os.fstat(before), os.fstat(folder))
        finally:
            os.close(before)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            msg = f"{Path(self._path).parent} is in use by process {owner}: give each its own directory"
            raise ConfigError(msg) from None
        except OSError as error:
            _log.warning("directory_not_locked", path=self._path, error=error, hint="let one process use it")

    def _is_there(self, descriptor: int) -> bool:
        try:
            ours, there = os.fstat(descriptor), os.lstat(self._path)
        except OSError:
            return False
        return (ours.st_ino, ours.st_dev) == (there.st_ino, there.st_dev)


def _create(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | OPEN, 0o600)


def _page() -> memoryview:
    return memoryview(mmap.mmap(-1, ALIGNMENT_BYTES))  # of zeros, where O_DIRECT wants it; unmapped with its last view


def _padded(image: memoryview) -> list[memoryview]:
    # The aligned body in place, then a page that holds its tail: O_DIRECT knows whole pages only.
    body_bytes = len(image) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    if body_bytes == len(image):
        return [image]
    page = _page()
    page[: len(image) - body_bytes] = image[body_bytes:]
    return [image[:body_bytes], page] if body_bytes else [page]


def _transfer(
    move: Callable[[int, Sequence[memoryview], int], int],
    descriptor: int,
    parts: list[memoryview],
    num_bytes: int,
    *,
    direct: bool,
) -> int:
    """Move ``parts`` to or from the start of a file. Returns the bytes moved: fewer at the end of a file only."""
    if direct:
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
        except OSError:
            direct = False  # this file system cannot
    moved = 0
    while moved < num_bytes:
        try:
            count = move(descriptor, _after(parts, moved), moved)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            # Not as this device wants it, e.g. memory that does not begin at a page: once more, through the page cache.
            direct = False
            fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)
            continue
        if count == 0:
            break
        moved += count
    return moved


def _after(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    left = []
    for part in parts:
        if num_bytes < len(part):
            left.append(part[num_bytes:])
        num_bytes = max(0, num_bytes - len(part))
    return left
