"""What is in a disk tier's directory: its files by name, and their headers. Reads no payload, knows no job."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

from qkvault.image import MAGIC, MAGIC_AND_FORMAT, PREFIX_BYTES, Header, align_up, read_header, sketch_of
from qkvault.tiers.base import Found
from qkvault.tiers.disk_files import LOCK_NAME, OPEN, PROBE_NAME

_SPACE_NAME: Final = re.compile(r"[0-9a-f]{32}")
_SHARD_NAME: Final = re.compile(r"[0-9a-f]{2}")
_FILE_NAME: Final = re.compile(r"([0-9a-f]{64})(?:\.qkv|\.([0-9a-f]+)-[0-9]+\.tmp)")
_MAX_HEAD_BYTES: Final = 1 << 22
Skip = Callable[[OSError], bool]


class FileKind(str, Enum):
    """What a name in the directory says its file is."""

    CHUNK = "chunk"
    TEMPORARY = "temporary"
    FOREIGN = "foreign"


class Entry(NamedTuple):
    """A file below the root. ``key`` is what its name says; empty for a foreign file."""

    path: str
    kind: FileKind
    key: bytes
    owner: str  # of a temporary file
    num_bytes: int
    modified: int  # nanoseconds


def _never(_error: OSError) -> bool:
    return False


def _always(_error: OSError) -> bool:
    return True


def walk(root: str, is_skipped: Skip = _never) -> Iterator[Entry]:
    """Every file below ``root`` but the lock, in no order. Follows no links; what vanishes meanwhile is left out.

    ``is_skipped(error)``: go on after a folder or file that could not be looked at. Raises OSError for the others, and
    for ``root``.
    """
    for top in _list(root):
        if top.name in (LOCK_NAME, PROBE_NAME):
            continue
        yield from _walk_space(top, is_skipped) if _is_folder(top, _SPACE_NAME) else _foreign(top)


def keys_by_space(root: str) -> Iterator[Iterator[bytes]]:
    """The chunks of each space below ``root``, in no order. Reads no more of the directory than is asked for."""
    for top in _list(root):
        if _is_folder(top, _SPACE_NAME):
            yield (entry.key for entry in _walk_space(top, _always) if entry.kind is FileKind.CHUNK)


def take_stock(root: str, owner: str, is_skipped: Skip) -> tuple[list[tuple[int, int, str, bytes]], list[str]]:
    """All chunks below ``root``, oldest use first: time of that, bytes of the file, path, key. As ``walk``.

    The second value are temporary files of others than ``owner``, who have died if the directory is his.
    """
    chunks, leftovers = [], []
    for entry in walk(root, is_skipped):
        if entry.kind is FileKind.CHUNK:
            chunks.append((entry.modified, entry.num_bytes, entry.path, entry.key))
        elif entry.kind is FileKind.TEMPORARY and entry.owner != owner:
            leftovers.append(entry.path)
    chunks.sort()
    return chunks, leftovers


def read_headers(paths: Sequence[str], num_bytes: int) -> Iterator[Header | OSError | None]:
    """The header of each file; None for a file that has none. ``num_bytes`` is how long a header is likely to be.

    Holds all files open at the same time, and goes through the page cache. All are asked for before the first is
    waited for: on a cold cache that is five times as fast as one after the other.
    """
    opened = [_open_ahead(path, num_bytes) for path in paths]
    heads = [_read_and_close(descriptor, num_bytes) for descriptor in opened]
    for path, head in zip(paths, heads, strict=True):
        yield _header_of(path, head, num_bytes)


def found_in(header: Header | None, key: bytes) -> Found | None:
    """What a file with ``header`` holds, if that is the chunk ``key``. Its payload was not looked at."""
    if header is None or header.key != key:
        return None
    sketch = sketch_of(header.tokens)
    sizes = (header.num_tokens, header.image_bytes, align_up(header.image_bytes))
    return Found(key, header.parent, sketch, *sizes, header.tokens, header.space, header.flags)


def fault_of(path: str, header: Header | None, key: bytes) -> str:
    """What is wrong with a file that is not the whole chunk ``key``: one of ``SCAN_FAULTS``."""
    if header is not None:
        return "misnamed" if header.key != key else "truncated"
    head = _read_and_close(_open_ahead(path, PREFIX_BYTES), PREFIX_BYTES)
    if isinstance(head, OSError):
        return "corrupt"
    is_other = head.startswith(MAGIC) and not head.startswith(MAGIC_AND_FORMAT)
    return "truncated" if len(head) < PREFIX_BYTES else "format" if is_other else "corrupt"


def size_of(path: str) -> int | None:
    """Bytes of a file, None if it is not there."""
    try:
        return Path(path).lstat().st_size
    except OSError:
        return None


def remove(path: str) -> bool:
    """Remove a file. False if that cannot be done."""
    try:
        Path(path).unlink()
    except OSError:
        return False
    return True


def remove_all(root: str) -> tuple[int, list[bytes]]:
    """Remove all that is ours and can be removed, but for the lock: how many chunks that was, and those that stay.

    A folder that cannot be listed is passed over. Raises OSError if that is ``root``.
    """
    num_chunks, left = 0, []
    for entry in walk(root, _always):
        if entry.kind is FileKind.TEMPORARY:
            remove(entry.path)
        elif entry.kind is FileKind.CHUNK and remove(entry.path):
            num_chunks += 1
        elif entry.kind is FileKind.CHUNK:
            left.append(entry.key)
    for top in _list(root):
        if _is_folder(top, _SPACE_NAME):
            shards = [shard.path for shard in _list(top.path, _always) if _is_folder(shard, _SHARD_NAME)]
            for folder in (*shards, top.path):
                with suppress(OSError):  # not empty
                    Path(folder).rmdir()
    return num_chunks, left


def _header_of(path: str, head: bytes | OSError, num_bytes: int) -> Header | OSError | None:
    """The header in ``head``, which is what reading ``num_bytes`` of the file gave; reads more if need be."""
    while not isinstance(head, OSError):
        try:
            return read_header(memoryview(head))
        except ValueError:
            if len(head) < num_bytes or num_bytes >= _MAX_HEAD_BYTES:
                return None  # it was not for want of bytes
        num_bytes *= 4
        head = _read_and_close(_open_ahead(path, num_bytes), num_bytes)
    return head


def _open_ahead(path: str, num_bytes: int) -> int | OSError:
    try:
        descriptor = os.open(path, os.O_RDONLY | OPEN)
    except OSError as error:
        return error
    with suppress(OSError):  # what cannot be read ahead, such as a pipe
        os.posix_fadvise(descriptor, 0, num_bytes, os.POSIX_FADV_WILLNEED)
    return descriptor


def _read_and_close(descriptor: int | OSError, num_bytes: int) -> bytes | OSError:
    if isinstance(descriptor, OSError):
        return descriptor
    try:
        return os.pread(descriptor, num_bytes, 0)
    except OSError as error:
        return error
    finally:
        os.close(descriptor)


def _list(folder: str, is_skipped: Skip = _never) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        if is_skipped(error):
            return []
        raise


def _walk_space(top: os.DirEntry[str], is_skipped: Skip) -> Iterator[Entry]:
    for shard in _list(top.path, is_skipped):
        if not _is_folder(shard, _SHARD_NAME):
            yield from _foreign(shard)
            continue
        for file in _list(shard.path, is_skipped):
            if (entry := _entry(file, top.name, shard.name, is_skipped)) is not None:
                yield entry


def _is_folder(entry: os.DirEntry[str], pattern: re.Pattern[str]) -> bool:
    return pattern.fullmatch(entry.name) is not None and entry.is_dir(follow_symlinks=False)


def _foreign(entry: os.DirEntry[str]) -> Iterator[Entry]:
    if entry.is_dir(follow_symlinks=False):
        with suppress(PermissionError):  # such as lost+found
            for inner in _list(entry.path):
                yield from _foreign(inner)
    elif (found := _entry(entry)) is not None:
        yield found


def _entry(file: os.DirEntry[str], space: str = "", shard: str = "", is_skipped: Skip = _never) -> Entry | None:
    try:
        status = file.stat(follow_symlinks=False)
    except OSError as error:
        if isinstance(error, FileNotFoundError) or is_skipped(error):
            return None
        raise
    match = _FILE_NAME.fullmatch(file.name) if space else None
    if match is None or not match[1].startswith(shard) or not stat.S_ISREG(status.st_mode):
        return Entry(file.path, FileKind.FOREIGN, b"", "", status.st_size, status.st_mtime_ns)
    kind = FileKind.TEMPORARY if match[2] else FileKind.CHUNK
    key = bytes.fromhex(space + match[1])
    return Entry(file.path, kind, key, match[2] or "", status.st_size, status.st_mtime_ns)
