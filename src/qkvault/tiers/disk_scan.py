"""What a disk tier held before: headers of files, read in batches or by key. Reads no payload, knows no job."""

from __future__ import annotations

import itertools
import time
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
_REST_SECONDS: Final = 0.1  # between two looks whether a disk can be read again
_MAX_RESTS: Final = 300  # of one scan
_SAMPLE_TRIES: Final = 16  # files of one space that are read until one is a whole chunk

_log = get_logger("tiers")


class DiskScan:
    """Looks for chunks below ``root``. Any thread may call; each call blocks for its reads."""

    def __init__(
        self,
        name: str,
        root: str,
        owner: str,
        is_only_of_file: Callable[[OSError], bool],
        *,
        is_ours: Callable[[], bool],
    ) -> None:
        """``owner`` marks our temporary files; ``is_only_of_file(error)``: the disk can be read otherwise.

        Nothing is removed unless ``is_ours()``: a scan that hung may go on when the directory has another owner.
        """
        self.removed: Counter[str] = Counter()  # files, by reason
        self._name = name
        self._root = root
        self._owner = owner
        self._is_only_of_file = is_only_of_file
        self._is_ours = is_ours
        self._head_bytes = ALIGNMENT_BYTES  # longest header seen, read of a file at first; a lost update costs a read

    def run(self, judge: Callable[[OSError], None], is_readable: Callable[[], bool]) -> Iterator[list[Found]]:
        """All chunks in batches, oldest use first; what is none is removed.

        If the disk cannot be read, ``judge(error)`` is told, and all begins again when ``is_readable()``; until then,
        for half a minute in all, batches are empty.
        """
        start, before, rests = time.monotonic(), self.removed.total(), iter(range(_MAX_RESTS))
        while True:
            num_found = 0
            try:
                for found in self._read():
                    num_found += len(found)
                    yield found
                break
            except OSError as error:
                if not self._is_only_of_file(error):
                    judge(error)
                for _ in rests:
                    yield []
                    time.sleep(_REST_SECONDS)
                    if is_readable():
                        break
                else:
                    _log.warning("disk_scan_ended_early", tier=self._name, path=self._root, error=error)
                    break
        fields = {"removed": self.removed.total() - before, "seconds": time.monotonic() - start}
        _log.info("disk_scanned", tier=self._name, chunks=num_found, **fields)

    def _read(self) -> Iterator[list[Found]]:
        # Leaves out what cannot be looked at while the disk can be read otherwise. Raises OSError if it cannot be.
        skipped: list[OSError] = []

        def is_skipped(error: OSError) -> bool:
            skipped.append(error)
            return self._is_only_of_file(error)

        chunks, leftovers = listing.take_stock(self._root, self._owner, is_skipped)
        if skipped:
            _log.warning("disk_scan_skipped", tier=self._name, num_skipped=len(skipped), first=skipped[0])
        self.removed["leftover"] += sum(map(self._remove, leftovers))
        for at in range(0, len(chunks), SCAN_BATCH):
            batch, found = chunks[at : at + SCAN_BATCH], []
            headers = self._headers_of([path for _, _, path, _ in batch])
            for (_, num_bytes, path, key), header in zip(batch, headers, strict=True):
                chunk = listing.found_in(header, key)
                if chunk is not None and chunk.stored_bytes == num_bytes:
                    found.append(chunk)
                elif listing.size_of(path) == num_bytes:  # else it was written again meanwhile
                    self.removed[listing.fault_of(path, header, key)] += self._remove(path)
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

    def _remove(self, path: str) -> bool:
        return self._is_ours() and listing.remove(path)

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
