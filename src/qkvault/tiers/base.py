"""The contract of a tier: a place below RAM that chunk images are copied to and from.

A tier moves bytes between its storage and pool slots, and knows nothing of tokens, leases or eviction order: the store
decides, the tier does. ``qkvault.testing.TierContract`` holds every promise below as a test; the smallest tier is
``qkvault.testing.DictTier``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Final

import msgspec

from qkvault.types import Medium

# What is wrong with a file that a scan removes: cut off or too long, a wrong sum, another version of the format, the
# name of another chunk, or not written to the end.
SCAN_FAULTS: Final = ("truncated", "corrupt", "format", "misnamed", "leftover")


class JobKind(str, Enum):
    """What a tier is asked to do with the chunks of a job."""

    STORE = "store"  # slots to tier
    LOAD = "load"  # tier to slots
    DELETE = "delete"


class Piece(msgspec.Struct, frozen=True):
    """One chunk of a job. ``image`` is its slot in the pool (empty for DELETE); its length is the image's."""

    key: bytes
    image: memoryview


class TierJob(msgspec.Struct, frozen=True):
    """Work for one tier. ``delete_first`` are keys that must be gone before a STORE begins, to make room for it."""

    job_id: int
    kind: JobKind
    pieces: tuple[Piece, ...]
    delete_first: tuple[bytes, ...] = ()


class JobResult(msgspec.Struct, frozen=True):
    """What became of a job: keys that were done, in any order, and keys that were not, each with its reason.

    Reasons: ``absent`` (not here), ``corrupt`` (was here, was wrong, is removed; of a STORE: the slot's image is),
    ``refused`` (a STORE: there is no place for this key), ``unavailable`` (tier is down).
    """

    job_id: int
    done: tuple[bytes, ...]
    failed: tuple[tuple[bytes, str], ...] = ()


class Found(msgspec.Struct, frozen=True):
    """One chunk that a scan found in a tier. What its header says besides is for those who hear events.

    ``space`` also says what kind of tensor it is: without it the chunk counts as KV.
    """

    key: bytes
    parent: bytes
    sketch: bytes
    num_tokens: int
    image_bytes: int
    stored_bytes: int  # what it takes in the tier; counts against the capacity
    tokens: bytes = b""  # as in the header, like those below; a tier that does not tell them is fine
    space: bytes = b""
    flags: int = 0


class TierCounters(msgspec.Struct, frozen=True):
    """What a tier has done since its start that no result tells: the store counts those."""

    scan_removed: dict[str, int] = {}  # files, by what was wrong with them: ``SCAN_FAULTS``


class Tier(ABC):
    """A place chunks can live besides RAM.

    All methods are called from one thread, the store's. None blocks, but ``drain``, ``close`` and the iteration of
    ``scan``.
    """

    name: str  # unique in a store; appears in metrics and logs
    medium: Medium
    capacity_bytes: int  # the store keeps the sum of ``stored_bytes`` under this

    @abstractmethod
    def stored_bytes(self, image_bytes: int) -> int:
        """What an image of ``image_bytes`` will take here at most. Pure."""

    @abstractmethod
    def submit(self, job: TierJob) -> None:
        """Begin ``job``.

        The caller leaves the job's slots alone until ``poll`` returns the job: nobody writes a slot being stored,
        nobody touches one being loaded. For STORE the tier computes the payload check sum itself (``image.seal``). For
        LOAD the tier fills each slot wholly and verifies key and check sums, or reports the key as failed (the slot's
        bytes are then undefined). A key that is not here is failed with ``absent``: never an error. A piece is
        visible to a later LOAD only when wholly stored. Jobs may finish in any order.
        """

    @abstractmethod
    def poll(self) -> list[JobResult]:
        """Results of jobs that ended since the last call; every submitted job is returned exactly once."""

    @abstractmethod
    def scan(self) -> Iterator[Sequence[Found]]:
        """What is here already, in batches, oldest use first. Runs on a thread of the caller's; may take long.

        It may be left after any batch: one that waits for its storage yields empty ones now and then.

        Jobs may run meanwhile. Anything that is not a whole chunk of ours is removed or skipped, never returned.
        """

    @abstractmethod
    def contains(self, key: bytes) -> bool | None:
        """Whether ``key`` seems to be here, at the cost of one cheap call; None if that cannot be told cheaply.

        A hint: only a LOAD proves it. Also asked after ``close``, of what should have been deleted.
        """

    def find(self, keys: Sequence[bytes]) -> list[Found]:
        """What a scan would tell of ``keys``, those that are here. Blocks for a small read each; any thread.

        Asked while ``scan`` has not come to an end. A tier that scans in no time need not answer.
        """
        del keys
        return []

    def sample(self) -> list[Found]:
        """One chunk of each space that is here, as a scan would tell of it. Blocks for a small read each; any thread.

        Asked once, before ``scan``: who stored here is known at once, from ``Found.space``. A tier that does not tell
        that, or keeps nothing, need not answer.
        """
        return []

    @property
    @abstractmethod
    def is_healthy(self) -> bool:
        """False while the tier cannot be used; jobs then fail at once with ``unavailable``. It comes back by itself."""

    @property
    def can_store(self) -> bool:
        """False while a STORE would fail. What a tier misses meanwhile it is given when this is true again."""
        return self.is_healthy

    @property
    def num_losses(self) -> int:
        """How often all that was here was lost, as when a directory was removed. Read after ``is_healthy``.

        The store then counts the tier as empty. What was stored before the loss may be told of after it.
        """
        return 0

    @property
    def counters(self) -> TierCounters:
        """What was done since the start. A tier need not count."""
        return TierCounters()

    @abstractmethod
    def drain(self, timeout_seconds: float) -> bool:
        """Block until every submitted job has ended, or the time is up. True if all have."""

    @abstractmethod
    def close(self) -> None:
        """Finish what was begun, stop all threads, release everything. Idempotent. Results not polled are lost."""

    def purge(self) -> int:
        """Remove all that is ours here; returns how many chunks. May block. No job may be under way."""
        return 0

    def notify(self, on_result: Callable[[], None]) -> None:
        """Ask for ``on_result()`` to be called, from any thread, whenever ``poll`` has become worth a call."""
        self.on_result = on_result

    on_result: Callable[[], None] = staticmethod(lambda: None)
