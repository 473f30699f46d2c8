"""What tiers held before the store began: read by a thread of its own, and by key where that has not come to yet."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import islice
from queue import SimpleQueue
from typing import Final

from qkvault.logs import get_logger
from qkvault.spaces import space_id_of
from qkvault.store.book import TierBook
from qkvault.store.manager import StorageManager
from qkvault.tiers.base import Tier
from qkvault.types import KEY_BYTES, SPACE_BYTES
from qkvault.wire.transport import Early

_MAX_EARLY: Final = 256  # keys that one request asks tiers for while they are scanned: some 20 ms of small reads
_EARLY_SECONDS: Final = 0.25  # that it waits for the answer at most
_END_SECONDS: Final = 5.0  # given to reads that hang when the store closes
_log = get_logger("store")


class Scan:
    """The scan of all tiers of one store, once, by two threads: one reads all, one what it is asked for."""

    def __init__(
        self,
        manager: StorageManager,
        tiers: Sequence[Tier],
        changed: threading.Condition,
        after_change: Callable[[], None],
        *,
        on_spaces: Callable[[list[bytes]], None],
    ) -> None:
        """Start, if there are tiers. ``changed`` is the condition over the lock of ``manager``.

        Under it ``after_change()`` is called, and ``on_spaces`` first of all with descriptions of the spaces there are.
        """
        self._manager = manager
        self._each = list(zip(manager.tiering.books, tiers, strict=False))
        self._changed = changed
        self._after_change = after_change
        self._on_spaces = on_spaces
        self._num_left = len(self._each)  # tiers that are not scanned to the end
        self._is_sampled = threading.Event()
        self._questions: SimpleQueue[tuple[list[bytes], Future[None]] | None] = SimpleQueue()
        self._asked_seconds: deque[float] = deque()  # when those were asked that have no answer, the oldest first
        self.thread = threading.Thread(target=self._run, name="qkvault-scan", daemon=True)
        self._finder = threading.Thread(target=self._run_finder, name="qkvault-find", daemon=True)
        self.is_given_up = False
        if self._each:
            self.thread.start()
            self._finder.start()
        else:
            manager.forgotten.end()

    @property
    def is_over(self) -> bool:
        """Whether all is known."""
        return self._num_left == 0

    def wait_sampled(self, timeout_seconds: float) -> None:
        """Block until it is known what spaces there are, if there are tiers, or the time is up."""
        if self._each:
            self._is_sampled.wait(timeout_seconds)

    def find_early(self, keys: bytes) -> Early | None:
        """Have the tiers asked for the first of ``keys`` that are not known. Does not block.

        What takes longer than the answer says is known later. Until then nobody asks: a disk that hangs costs one wait,
        and that of those who asked at the same time.
        """
        each = (keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))
        index = self._manager.index
        with self._changed:
            unknown = (key for key in each if (entry := index.get(key)) is None or not entry.is_somewhere)
            wanted = list(islice(unknown, _MAX_EARLY))
            now = time.monotonic()
            is_late = bool(self._asked_seconds) and now - self._asked_seconds[0] >= _EARLY_SECONDS
            if not wanted or is_late or self.is_over or self.is_given_up:
                return None
            early = Early(Future[None](), now + _EARLY_SECONDS)
            self._asked_seconds.append(now)
            self._questions.put((wanted, early.answer))
        return early

    def close(self) -> None:
        """End both threads; a scan under way is given up by ``is_given_up``. One that hangs is left behind.

        It blocks for some seconds at most. What such a thread still finds nobody is told.
        """
        self._questions.put(None)
        if not self._each:
            return
        deadline = time.monotonic() + _END_SECONDS
        threads = (self.thread, self._finder)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if hanging := [thread.name for thread in threads if thread.is_alive()]:
            _log.warning("closed_while_hanging", threads=",".join(hanging))

    def _run(self) -> None:
        for _, tier in self._each:
            try:
                sample = tier.sample()
            except Exception:  # thread top: engines will describe their spaces themselves
                _log.exception("sample_failed", tier=tier.name)
                continue
            with self._changed:
                self._on_spaces(
                    [found.space for found in sample if space_id_of(found.space) == found.key[:SPACE_BYTES]]
                )
        self._is_sampled.set()
        for book, tier in self._each:
            if self.is_given_up:
                return
            try:
                self._read(book, tier)
            except Exception:  # thread top: a tier that cannot be scanned starts empty
                _log.exception("scan_failed", tier=tier.name)
            with self._changed:
                self._num_left -= 1
                if self.is_over:
                    self._manager.forgotten.end()
                    self._questions.put(None)
                self._changed.notify_all()

    def _run_finder(self) -> None:
        while (question := self._questions.get()) is not None:
            wanted, answer = question
            for book, tier in self._each:
                try:
                    found = tier.find(wanted)
                except Exception:  # thread top: a hint is not worth the request
                    _log.exception("find_failed", tier=tier.name)
                    continue
                with self._changed:
                    if not (self.is_over or self.is_given_up):  # else all was adopted that is still there
                        self._manager.adopt(book, found)
                        self._after_change()
            with self._changed:
                self._asked_seconds.popleft()
            answer.set_result(None)

    def _read(self, book: TierBook, tier: Tier) -> None:
        for batch in tier.scan():
            with self._changed:
                if self.is_given_up:
                    return
                self._manager.adopt(book, batch)
                self._after_change()
