"""Loader: what a lease holds, and what is still on its way to it, into an engine's blocks.

Chunks are copied while later ones are still coming up from a tier, so that the two times overlap.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from qkvault.client import StoreClient
from qkvault.prefix import load_items
from qkvault.stats import StatsMonitor
from qkvault.transfer import LoadItem, Transfer
from qkvault.types import Medium
from qkvault.wire.messages import Located

_LAST_SECONDS: Final = 1.0  # for what is here at the deadline and has to be sent yet
_NAP_SECONDS: Final = 0.005  # between two looks at what is on its way: a wake-up that comes between them is missed


class Loaded(NamedTuple):
    """What came of a load: tokens before ``end_token`` that were to be loaded are there."""

    end_token: int
    failed_tokens: int = 0
    voided_tokens: int = 0  # arrived, and are of no use behind one that did not


class Loader:
    """Loads for one engine. Owned by the thread that calls it."""

    def __init__(
        self, client: StoreClient, transfer: Transfer, stats: StatsMonitor, *, deadline_seconds: float
    ) -> None:
        """``deadline_seconds`` is how long a load waits for what is on its way, and for what is sent."""
        self._client, self._transfer = client, transfer
        self._stats = stats
        self._deadline_seconds = deadline_seconds
        self._block_size = transfer.paged.block_size

    def load(self, located: Located, start: int, stop: int, block_ids: Sequence[int], *, min_tokens: int = 1) -> Loaded:
        """Load the tokens ``[start, stop)``, which begin and end blocks, as far as they come (rows 28, 29).

        Nothing is copied before ``min_tokens`` of them are here, and so never if fewer come. Blocks until copies are
        done. Raises Unavailable and ProtocolError; what was copied by then proves nothing.
        """
        copying = _Copying(self._transfer)
        deadline = time.monotonic() + self._deadline_seconds
        waited_seconds = 0.0
        while True:
            found = min(located.ready.num_tokens, stop) // self._block_size * self._block_size
            if found - start >= min_tokens:
                fetch_seconds = max(deadline - time.monotonic(), _LAST_SECONDS)
                copying.go_on(self._items(located, start, found, block_ids), fetch_seconds)
            left_seconds = deadline - time.monotonic()
            if not located.num_pending or copying.has_failed or left_seconds <= 0:
                break
            began_seconds = self._stats.clock()
            self._client.wait_change(min(left_seconds, _NAP_SECONDS))
            located = self._client.poll(located.lease_id)
            waited_seconds += self._stats.clock() - began_seconds
        self._count(located, waited_seconds)
        if found - start < min_tokens:
            return Loaded(start, stop - max(found, start))
        end, num_void = copying.end(located.lease_id, found)
        num_void *= self._block_size
        return Loaded(end, stop - end - num_void, num_void)

    def _items(self, located: Located, start: int, stop: int, block_ids: Sequence[int]) -> list[LoadItem]:
        chunk_size = self._transfer.layout.chunk_size
        return load_items(located.ready, start, stop, block_ids, chunk_size=chunk_size, block_size=self._block_size)

    def _count(self, located: Located, waited_seconds: float) -> None:
        lower = sum(run.count * run.image_bytes for run in located.ready.runs if run.medium is not Medium.RAM)
        self._stats.on_stage("get", waited_seconds, num_bytes=lower, num_tokens=located.ready.num_tokens)


class _Copying:
    """The items of one load, of which more and more are here."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._items: list[LoadItem] = []  # copied, or being copied
        self._failed: set[int] = set()  # positions in it
        self._first_stale: LoadItem | None = None  # not copied, and nothing behind it

    @property
    def has_failed(self) -> bool:
        """Whether what comes now would be of no use."""
        return bool(self._failed) or self._first_stale is not None

    def go_on(self, items: Sequence[LoadItem], fetch_seconds: float) -> None:
        """Copy what of ``items``, the leading ones of all, was not copied yet; it is fetched in ``fetch_seconds``."""
        fresh = items[len(self._items) :]
        if not fresh or self.has_failed:
            return
        self._transfer.fetch(fresh, fetch_seconds)
        num_whole = min(self._transfer.stale(fresh), default=len(fresh))
        if num_whole < len(fresh):
            self._first_stale = fresh[num_whole]
        failed = self._transfer.load(fresh[:num_whole])
        self._failed |= {len(self._items) + at for at in failed}
        self._items += fresh[:num_whole]

    def end(self, lease_id: int, stop: int) -> tuple[int, int]:
        """Up to which token all is there, of those before ``stop``, and how many blocks behind it arrived in vain."""
        self._transfer.wait()
        failed = self._failed | self._transfer.lost(self._items, lease_id)
        first_failed = min(failed, default=len(self._items))
        if first_failed < len(self._items):
            stop = self._items[first_failed].start_token
        elif self._first_stale is not None:
            stop = self._first_stale.start_token
        behind = range(first_failed, len(self._items))
        return stop, sum(len(self._items[at].block_ids) for at in behind if at not in failed)
