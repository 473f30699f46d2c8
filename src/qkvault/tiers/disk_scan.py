"""What a disk tier held before: headers of files, read in batches or by key. Reads no payload, knows no job."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from qkvault.image import ALIGNMENT_BYTES, Header
from qkvault.logs import get_logger
from qkvault.tiers import disk_files as files
from qkvault.tiers import disk_listing as listing
from qkvault.tiers.base import Found

SCAN_BATCH: Final = 128  # chunks, whose files are open at the same time
_SAMPLE_TRIES: Final = 16  # files of one space that are read until one is a whole chunk

_log = get_logger("tiers")


class DiskScan:
    """Looks for chunks below ``root``. Any thread may call; each call blocks for its reads."""

    def __init__(self, root: str, owner: str, is_only_of_file: Callable[[OSError], bool]) -> None:
        """``owner`` marks our temporary files; ``is_only_of_file(error)``: the disk can be read otherwise."""
        self.removed: Counter[str] = Counter()  # files, by reason
        self._root = root
        self._owner = owner
        self._is_only_of_file = is_only_of_file
        self._head_bytes = ALIGNMENT_BYTES  # longest header seen, read of a file at first; a lost update costs a read

    def run(self) -> Iterator[list[Found]]:
        """All chunks in batches, oldest use first; what is none is removed. Raises OSError if it cannot be read.

        What cannot be looked at, while the disk can be read otherwise, is left out; the log says so once.
        """
        skipped: list[OSError] = []

        def is_skipped(error: OSError) -> bool:
            is_one = self._is_only_of_file(error)
            skipped.extend([error] * is_one)
            return is_one

        chunks, num_leftovers = listing.take_stock(self._root, self._owner, is_skipped)
        if skipped:
            _log.warning("disk_scan_skipped", path=self._root, num_skipped=len(skipped), first=skipped[0])
        self.removed["leftover"] += num_leftovers
        for at in range(0, len(chunks), SCAN_BATCH):
            batch, found = chunks[at : at + SCAN_BATCH], []
            headers = self._headers_of([path for _, _, path, _ in batch])
            for (_, num_bytes, path, key), header in zip(batch, headers, strict=True):
                chunk = listing.found_in(header, key)
                if chunk is not None and chunk.stored_bytes == num_bytes:
                    found.append(chunk)
                elif listing.size_of(path) == num_bytes:  # else it was written again meanwhile
                    self._remove(path, header, key)
            if found:
                yield found

    def find(self, keys: Sequence[bytes]) -> list[Found]:
        """Those of ``keys`` that are here; none if the disk cannot be read."""
        found, paths = [], [files.path_of(self._root, key) for key in keys]
        with suppress(OSError):
            for path, key, header in zip(paths, keys, self._headers_of(paths), strict=True):
                if (chunk := listing.found_in(header, key)) is not None and chunk.stored_bytes == listing.size_of(path):
                    found.append(chunk)
        return found

    def sample(self) -> list[Found]:
        """One chunk of each space; none if the disk cannot be read."""
        found: list[Found] = []
        with suppress(OSError):
            for keys in listing.keys_by_space(self._root):
                found += next(filter(None, (self.find([key]) for key in itertools.islice(keys, _SAMPLE_TRIES))), [])
        return found

    def _remove(self, path: str, header: Header | None, key: bytes) -> None:
        why = listing.fault_of(path, header, key)
        self.removed[why] += listing.remove(path)

    def _headers_of(self, paths: Sequence[str]) -> Iterator[Header | None]:
        # None for a file that has none, or is not there. Raises OSError if the disk cannot be read.
        for header in listing.read_headers(paths, self._head_bytes):
            if isinstance(header, Header):
                self._head_bytes = max(self._head_bytes, header.header_bytes)
                yield header
            elif header is None or isinstance(header, FileNotFoundError) or self._is_only_of_file(header):
                yield None
            else:
                raise header
