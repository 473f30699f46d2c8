"""The disk tier: one self-describing file a chunk, straight between pool slots and the disk.

Every file is found again by a scan, so nothing is lost with the process; every byte that comes back was checked. What
is done to single files is in ``disk_files``; this module knows jobs, and what an error means for the tier.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from qkvault.errors import ConfigError
from qkvault.image import Header, align_up, read_header, seal, verify_payload
from qkvault.logs import RateLimited, get_logger
from qkvault.tiers import disk_files as files
from qkvault.tiers import disk_listing as listing
from qkvault.tiers.base import Found, JobKind, JobResult, Piece, Tier, TierCounters, TierJob
from qkvault.tiers.disk_scan import DiskScan
from qkvault.tiers.workers import ABSENT, CORRUPT, LOG_SECONDS, REFUSED, UNAVAILABLE, Health, Workers
from qkvault.types import Medium

PROBE_SECONDS: Final = 2.0
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

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
        self._scan = DiskScan(name, self._root, self._owner, self._is_only_of_file, is_ours=lambda: self._lock.is_held)
        self._numbers = itertools.count()
        self._deadlines: dict[JobKind | None, float] = dict.fromkeys((*JobKind, None), write_deadline_seconds)
        self._deadlines[JobKind.LOAD] = read_deadline_seconds
        self._reads = Health(name, "reading", probe_seconds)
        self._writes = Health(name, "writing", probe_seconds)
        self._is_probing = False  # set by the caller's thread, cleared by the worker that has probed
        self._room_bytes = 0  # image that did not fit; by workers
        # Keys whose removal failed, tried again before writing recovers -> whether it was logged; by workers.
        self._owed: dict[bytes, bool] = {}
        self._spares = files.Spares()
        self._is_replaced = False  # the directory came in place of another, and may hold what no book knows; by workers
        self._is_purged = False
        self._log = RateLimited(_log, LOG_SECONDS)
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
        return TierCounters(dict(self._scan.removed))

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
        if not self._workers.close():
            self._reads.report("the disk does not answer")  # nor does anybody ask it from now on
        elif self._lock.is_held:
            self._remove_owed()
        self._spares.drop()
        self._lock.release(remove=self._is_purged)

    def scan(self) -> Iterator[Sequence[Found]]:
        """Reads the headers of all files; payloads are checked when they are loaded. See the interface."""
        return self._scan.run(lambda error: self._judge(error, self._reads), lambda: self._reads.is_up)

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
            if kind is not JobKind.LOAD and self._is_only_of_file(error, writing=True):
                return self._refuse(kind, piece.key, error)
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
        image_bytes, path = _stored_image_bytes(piece), files.path_of(self._root, piece.key)
        if image_bytes is not None and self._spares.count(align_up(len(piece.image))):
            files.make_folders(path)  # first, lest all is written before the rename finds them missing
        spare = self._spares.take(align_up(len(piece.image)))
        if image_bytes is None:
            if spare is not None:
                listing.remove(spare)
            return CORRUPT
        seal(piece.image)
        image = piece.image[:image_bytes]
        try:
            files.write_image(path, spare or self._temporary_of(path), image, direct=self._direct)
        except FileNotFoundError:
            if not self._lock.is_held:
                raise
            files.make_folders(path)
            files.write_image(path, self._temporary_of(path), image, direct=self._direct)
        self._owed.pop(piece.key, None)
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
            self._owed.setdefault(piece.key, False)
            raise
        self._owed.pop(piece.key, None)
        if not self._writes.is_up:
            self._writes.hasten()
        return None

    def _temporary_of(self, path: str) -> str:
        return files.temporary_of(path, self._owner, next(self._numbers))

    def _discard(self, piece: Piece, why: str) -> str:
        listing.remove(files.path_of(self._root, piece.key))
        _log.debug("chunk_corrupt", tier=self.name, key=piece.key, why=why)
        return CORRUPT

    def _refuse(self, kind: JobKind, key: bytes, error: OSError) -> str:
        """A file could not be written or removed, though others can. Tells of each such file once."""
        if not (kind is JobKind.DELETE and self._owed.get(key)):
            self._log.warning("file_refused", tier=self.name, what=kind.value, error=error)
        if kind is JobKind.STORE:
            return REFUSED
        self._owed[key] = True
        return UNAVAILABLE

    def _remove_owed(self) -> None:
        # When a page could be written just now: what cannot be removed even so is nobody's fault but its own.
        for key in list(self._owed):
            try:
                Path(files.path_of(self._root, key)).unlink(missing_ok=True)
            except OSError as error:
                self._refuse(JobKind.DELETE, key, error)
            else:
                self._owed.pop(key, None)

    def _is_only_of_file(self, error: OSError, *, writing: bool = False) -> bool:
        return self._lock.is_held and files.is_only_of_file(self._root, error, direct=self._direct, writing=writing)

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
                self._remove_owed()
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
            files.probe_write(self._root, 0, direct=self._direct)
            self._owed |= dict.fromkeys(left, False)
        self._is_replaced = False


def _image_bytes(header: Header, piece: Piece) -> int | None:
    """Size of the image that ``header`` describes, or None if it is not the image of ``piece``."""
    fits = header.image_bytes <= len(piece.image) <= align_up(header.image_bytes)
    return header.image_bytes if header.key == piece.key and fits else None


def _stored_image_bytes(piece: Piece) -> int | None:
    try:
        return _image_bytes(read_header(piece.image), piece)
    except ValueError:
        return None
