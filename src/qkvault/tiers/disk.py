"""The disk tier: one self-describing file a chunk, straight between pool slots and the disk.

Every file is found again by a scan, so nothing is lost with the process; every byte that comes back was checked. What
is done to single files is in ``disk_files``; this module knows jobs, and what an error means for the tier.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from qkvault.errors import ConfigError
from qkvault.image import Header, align_up, read_header, seal, verify_payload
from qkvault.logs import get_logger
from qkvault.tiers import disk_files as files
from qkvault.tiers import disk_listing as listing
from qkvault.tiers.base import Found, JobKind, JobResult, Piece, Tier, TierCounters, TierJob
from qkvault.tiers.disk_scan import DiskScan
from qkvault.tiers.workers import ABSENT, CORRUPT, UNAVAILABLE, Health, Workers
from qkvault.types import Medium

PROBE_SECONDS: Final = 2.0
_SCAN_REST_SECONDS: Final = 0.1  # between two looks whether the disk can be read again
_MAX_SCAN_RESTS: Final = 300  # of one scan
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NOT_THE_FILE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})  # this process is short of something

_log = get_logger("tiers")


class DiskTier(Tier):
    """Chunks in files below one directory, which it owns: a second owner is refused.

    Reading and writing fail and recover apart: a full or read-only disk still serves loads. The time of a file's last
    use is its modification time.
    """

    medium = Medium.DISK
    num_losses = 0  # by the worker that probes

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        workers: int = 4,
        direct_io: bool = True,
        name: str = "disk",
        read_deadline_seconds: float = 10.0,
        write_deadline_seconds: float = 30.0,
        probe_seconds: float = PROBE_SECONDS,
    ) -> None:
        """Make the directory if need be, take its lock and start the threads.

        ``direct_io`` goes around the page cache where the file system can. A file operation that takes longer than its
        deadline makes that direction unavailable, and what waits for it fails; its own slot is not given back before
        the system lets go of it. A disk that is full or read-only starts with writing down. Raises ConfigError if the
        directory cannot be used otherwise, cannot be locked, or another process owns it.
        """
        if capacity_bytes <= 0 or workers <= 0:
            msg = f"a disk tier needs a capacity and workers: {capacity_bytes} bytes, {workers} workers"
            raise ConfigError(msg)
        self.name = name
        self.capacity_bytes = capacity_bytes
        self._root = os.path.abspath(path)  # noqa: PTH100  # a string: paths are made a million times
        self._direct = direct_io
        self._owner = secrets.token_hex(4)  # marks our temporary files
        self._scan = DiskScan(self._root, self._owner, self._is_only_of_file)
        self._numbers = itertools.count()
        self._deadlines: dict[JobKind | None, float] = dict.fromkeys((*JobKind, None), write_deadline_seconds)
        self._deadlines[JobKind.LOAD] = read_deadline_seconds
        self._reads = Health(name, "reading", probe_seconds)
        self._writes = Health(name, "writing", probe_seconds)
        self._is_probing = False  # set by the caller's thread, cleared by the worker that has probed
        self._room_bytes = 0  # image that did not fit; by workers
        self._owed: deque[bytes] = deque()  # keys whose removal failed, removed before writing recovers; by workers
        self._spares = files.Spares()
        self._is_replaced = False  # the directory came in place of another, and may hold what no book knows; by workers
        self._is_purged = False
        self._lock = files.DirectoryLock(self._root)
        try:
            Path(self._root).mkdir(0o700, parents=True, exist_ok=True)
            self._lock.take()
            if (problem := files.probe_start(self._root, direct=direct_io)) is not None:
                self._writes.report(problem)
        except OSError as error:
            self._lock.release()
            msg = f"{self._root} cannot be the disk tier's directory: {error.strerror}"
            raise ConfigError(msg) from error
        self._workers = Workers(name, workers, self._run, self._tell)

    @property
    def counters(self) -> TierCounters:
        return msgspec.structs.replace(self._workers.counters, scan_removed=dict(self._scan.removed))

    @property
    def problems(self) -> dict[str, str]:
        """What does not work right now (``reading``, ``writing``), and why."""
        sides = (("reading", self._reads.problem), ("writing", self._writes.problem))
        return {what: problem for what, problem in sides if problem is not None}

    @property
    def is_healthy(self) -> bool:
        """Whether chunks can be loaded. While only writing is down, stores fail at once and loads go on."""
        self._tend()
        return self._reads.is_up

    @property
    def can_store(self) -> bool:
        return self._reads.is_up and self._writes.is_up

    def stored_bytes(self, image_bytes: int) -> int:
        return align_up(image_bytes)

    def submit(self, job: TierJob) -> None:
        self._tend()
        side = self._reads if job.kind is JobKind.LOAD else self._writes
        # Deletions are tried all the same: on a full disk they are the cure.
        if side.is_up or job.kind is JobKind.DELETE or job.delete_first:
            self._workers.submit(job)
        else:
            self._workers.fail(job, UNAVAILABLE)

    def poll(self) -> list[JobResult]:
        self._tend()
        return self._workers.poll()

    def contains(self, key: bytes) -> bool | None:
        if not self.is_healthy:
            return None
        try:
            return Path(files.path_of(self._root, key)).is_file()
        except OSError:
            return None

    def drain(self, timeout_seconds: float) -> bool:
        return self._workers.drain(timeout_seconds)

    def close(self) -> None:
        if self._workers.close() and self._lock.is_held:
            for key in self._owed:
                listing.remove(files.path_of(self._root, key))
        self._spares.drop()
        self._lock.release(remove=self._is_purged)

    def scan(self) -> Iterator[Sequence[Found]]:
        """Reads the headers of all files; payloads are checked when they are loaded. See the interface.

        Begins again, with empty batches in between, after the disk could not be read for some 30 s at most.
        """
        start, num_found, before = time.monotonic(), 0, self._scan.removed.total()
        rests = iter(range(_MAX_SCAN_RESTS))
        while True:
            try:
                num_found = 0
                for found in self._scan.run():
                    num_found += len(found)
                    yield found
                break
            except OSError as error:
                if not self._is_only_of_file(error):
                    self._judge(error, self._reads)
                problem = str(error)
            for _ in rests:
                yield ()
                time.sleep(_SCAN_REST_SECONDS)
                if self._reads.is_up:
                    break
            else:
                _log.warning("disk_scan_ended_early", tier=self.name, path=self._root, error=problem)
                break
        num_removed = self._scan.removed.total() - before
        fields = {"chunks": num_found, "removed": num_removed, "seconds": time.monotonic() - start}
        _log.info("disk_scanned", tier=self.name, **fields)

    def find(self, keys: Sequence[bytes]) -> list[Found]:
        return self._scan.find(keys) if self._reads.is_up else []

    def sample(self) -> list[Found]:
        return self._scan.sample() if self._reads.is_up else []

    def purge(self) -> int:
        """See the interface. Files that are not ours stay; ``close`` then removes the lock as well."""
        self._is_purged = True
        with suppress(OSError):
            return listing.remove_all(self._root)[0]
        return 0

    def _tend(self) -> None:
        """Look after what hangs and what is down. By the caller's thread; does not block."""
        late, is_stuck = self._workers.overdue(self._deadlines)
        if late or is_stuck:
            if is_stuck or JobKind.LOAD in late:
                self._reads.report("the disk does not answer")
                self._workers.fail_waiting(JobKind.LOAD)
            if is_stuck or late & {JobKind.STORE, JobKind.DELETE}:
                self._writes.report("the disk does not answer")
                self._workers.fail_waiting(JobKind.STORE)
        if not self._is_probing and (self._reads.claim_probe() or self._writes.claim_probe()):
            self._is_probing = True
            self._workers.call(self._probe)

    def _tell(self) -> None:
        self.on_result()  # looked up late: ``notify`` may come at any time

    # All that follows runs on the worker threads, or on the one that scans.

    def _run(self, kind: JobKind, piece: Piece, job: TierJob) -> str | None:
        try:
            if kind is JobKind.LOAD:
                return self._load(piece) if self._reads.is_up else UNAVAILABLE
            if kind is JobKind.STORE:
                return self._store(piece) if self._writes.is_up else UNAVAILABLE
            return self._delete(piece, job)
        except OSError as error:
            if kind is JobKind.LOAD and self._is_only_of_file(error):
                return self._discard(piece, str(error))
            if kind is JobKind.STORE and error.errno in _NO_ROOM:
                self._room_bytes = len(piece.image)
            self._judge(error, self._reads if kind is JobKind.LOAD else self._writes)
            return UNAVAILABLE

    def _load(self, piece: Piece) -> str | None:
        try:
            files.read_image(files.path_of(self._root, piece.key), piece.image, direct=self._direct)
            header = read_header(piece.image)
            if _image_bytes(header, piece) is None:
                return self._discard(piece, "another key or size")
            verify_payload(piece.image, header)
        except FileNotFoundError:
            if not self._lock.is_held:
                raise
            return ABSENT
        except ValueError as error:
            return self._discard(piece, str(error))
        return None

    def _store(self, piece: Piece) -> str | None:
        spare = self._spares.take(align_up(len(piece.image)))
        image_bytes = _stored_image_bytes(piece)
        if image_bytes is None:
            if spare is not None:
                listing.remove(spare)
            return CORRUPT
        seal(piece.image)
        image, path = piece.image[:image_bytes], files.path_of(self._root, piece.key)
        try:
            if spare is not None:
                files.make_folders(path)  # first, lest all is written before the rename finds them missing
            files.write_image(path, spare or self._temporary_of(path), image, direct=self._direct)
        except FileNotFoundError:
            if not self._lock.is_held:
                raise
            files.make_folders(path)
            files.write_image(path, self._temporary_of(path), image, direct=self._direct)
        return None

    def _delete(self, piece: Piece, job: TierJob) -> str | None:
        path = files.path_of(self._root, piece.key)
        try:
            num_bytes = listing.size_of(path) if job.kind is JobKind.STORE and self._writes.is_up else None
            num_wanted = sum(align_up(len(other.image)) == num_bytes for other in job.pieces)
            if num_bytes is not None and self._spares.count(num_bytes) < num_wanted:
                self._spares.keep(path, self._temporary_of(path), num_bytes)
            else:
                Path(path).unlink()
        except OSError as error:
            if isinstance(error, FileNotFoundError) and self._lock.is_held:
                return ABSENT
            self._owed.append(piece.key)
            raise
        if not self._writes.is_up:
            self._writes.hasten()
        return None

    def _temporary_of(self, path: str) -> str:
        return files.temporary_of(path, self._owner, next(self._numbers))

    def _discard(self, piece: Piece, why: str) -> str:
        listing.remove(files.path_of(self._root, piece.key))
        _log.debug("chunk_corrupt", tier=self.name, key=piece.key, why=why)
        return CORRUPT

    def _is_only_of_file(self, error: OSError) -> bool:
        """Whether a load failed for this file alone: the disk can be read otherwise."""
        if error.errno in _NOT_THE_FILE or not self._lock.is_held:
            return False
        try:
            files.probe_read(self._root, direct=self._direct)
        except OSError:
            return False
        return True

    def _judge(self, error: OSError, *sides: Health) -> None:
        """Take down what ``error`` says does not work: at least ``sides``, both if the directory is gone."""
        is_gone = not self._lock.is_held
        for side in (self._reads, self._writes) if is_gone else sides:
            side.report("the directory is gone" if is_gone else error.strerror or str(error))

    def _probe(self) -> None:
        """See whether what is down works again, and make the directory anew if it is gone."""
        try:
            Path(self._root).mkdir(0o700, exist_ok=True)  # not its parents: a mount that is gone is not replaced
            if self._lock.take():
                self.num_losses += 1
                self._is_replaced = True
            if self._is_replaced:
                self._empty()
            if not self._reads.is_up:
                files.probe_read(self._root, direct=self._direct)
                self._reads.recover()
            if not self._writes.is_up:
                files.probe_write(self._root, self._room_bytes, direct=self._direct)
                while self._owed:
                    Path(files.path_of(self._root, self._owed[0])).unlink(missing_ok=True)
                    self._owed.popleft()
                self._spares.drop()
                self._room_bytes = 0
                self._writes.recover()
        except (OSError, ConfigError) as error:
            for side in (self._reads, self._writes):
                if not side.is_up:
                    side.report(str(error))
        finally:
            self._is_probing = False

    def _empty(self) -> None:
        """Remove what is in a directory that came in place of the last one: no book knows it. Raises OSError."""
        num_removed, left = listing.remove_all(self._root)
        if num_removed:
            _log.warning("directory_replaced", tier=self.name, path=self._root, removed=num_removed, left=len(left))
        if left:
            raise OSError(errno.ENOTEMPTY, f"{len(left)} chunks of another directory cannot be removed")
        self._is_replaced = False


def _image_bytes(header: Header, piece: Piece) -> int | None:
    """Size of the image that ``header`` describes, or None if it is not the image of ``piece``."""
    image_bytes = header.header_bytes + header.payload_bytes
    fits = image_bytes <= len(piece.image) <= align_up(image_bytes)
    return image_bytes if header.key == piece.key and fits else None


def _stored_image_bytes(piece: Piece) -> int | None:
    try:
        return _image_bytes(read_header(piece.image), piece)
    except ValueError:
        return None
