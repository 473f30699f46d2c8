"""The feed: what those who follow a store from outside are told, transition by transition.

One reader. What waits for it is bounded: a reader that comes too late starts over, and is told what is here. Knows no
wire format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from qkvault.events import RESTART, StoreEvent
from qkvault.image import PLAIN, peek, tokens_in
from qkvault.store.book import TierBook
from qkvault.store.index import Entry, Index
from qkvault.tiers.base import Found
from qkvault.types import ChunkState, Medium

_MAX_WAITING: Final = 16_384  # events; one has about a kilobyte of tokens
PAGE: Final = 4_096  # events that one call returns


class Feed:
    """Events since the last call. Costs nothing until the first."""

    def __init__(
        self,
        index: Index,
        image_of: Callable[[Entry], memoryview],
        books: Sequence[TierBook],
        *,
        max_waiting: int = _MAX_WAITING,
    ) -> None:
        """``image_of`` gives the slot of an entry that is READY."""
        self.max_waiting = max_waiting
        self._index = index
        self._image_of = image_of
        self._books = books
        self._is_on = False
        self._was_on = False
        self._waiting: list[StoreEvent] = []
        self._untold: list[bytes] = []  # keys whose state is to be told since the start, the last one first
        self._told: set[bytes] = set()  # while there are any: those of which no more than what changes is to be told
        self._space = b""  # the last one seen: most are alike

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, limit: int = PAGE, *, start_over: bool = False) -> list[StoreEvent]:
        """The next events, in order, at most ``limit``; none: there are none now.

        The first call begins to tell what is here, a parent before its children. So does ``start_over``, and the call
        after too many have waited; then RESTART comes first.
        """
        if start_over or not self._is_on:
            self._untold, self._told = list(self._index.keys_backwards()), set()
            self._waiting = [RESTART] if self._was_on else []
            self._is_on = self._was_on = True
        while self._untold and len(self._waiting) < limit:
            self._tell_line(self._index.get(self._untold[-1]))
            self._untold.pop()
        if not self._untold:
            self._told = set()
        taken, self._waiting = self._waiting[:limit], self._waiting[limit:]
        return taken

    def tell(
        self, entry: Entry, medium: Medium, tier: str, *, stored: bool, reason: str = "", found: Found | None = None
    ) -> None:
        """Something has become of ``entry``. ``found`` is what a scan has read of it."""
        if self._is_on and len(self._waiting) >= self.max_waiting:
            self._is_on = False  # nobody reads: the next one starts over
            self._waiting, self._untold, self._told = [], [], set()
        if not self._is_on:
            return
        if not self._tell_line(entry):  # else its state, as it is now, was all news
            self._note(entry, medium, tier, entry.tiers.bit_count(), stored=stored, reason=reason, found=found)

    def _tell_line(self, entry: Entry | None) -> bool:
        # Tells what is untold of ``entry`` and its ancestors, the oldest first. False if ``entry`` was told before.
        line = []
        node = entry if self._untold else None
        while node is not None and node.key not in self._told:
            self._told.add(node.key)
            line.append(node)
            node = node.parent
        for ancestor in reversed(line):
            self._tell_state(ancestor)
        return bool(line)

    def _tell_state(self, entry: Entry) -> None:
        num_tiers = 0
        if entry.state is ChunkState.READY:
            self._note(entry, Medium.RAM, Medium.RAM.value, num_tiers, stored=True)
        for book in self._books:
            if entry.tiers & book.bit:
                num_tiers += 1
                self._note(entry, book.medium, book.name, num_tiers, stored=True)

    def _note(
        self,
        entry: Entry,
        medium: Medium,
        tier: str,
        num_tiers: int,
        *,
        stored: bool,
        reason: str = "",
        found: Found | None = None,
    ) -> None:
        parent = entry.parent.key if entry.parent is not None else b""
        told = self._header_of(entry, found) if stored else (b"", b"", 0)
        self._waiting.append(
            StoreEvent(stored, medium, entry.key, parent, entry.num_tokens, reason, tier, num_tiers, *told)
        )

    def _header_of(self, entry: Entry, found: Found | None) -> tuple[bytes, bytes, int]:
        # Tokens, space and flags, as far as they are at hand. Tokens that are not PLAIN stay where they are.
        if found is not None:
            tokens, space, flags = found.tokens, found.space, found.flags
        elif entry.state is ChunkState.READY and (seen := peek(image := self._image_of(entry))) is not None:
            is_usable = seen.num_tokens == entry.num_tokens
            tokens = bytes(tokens_in(image, seen.num_tokens)) if is_usable and seen.flags & PLAIN else b""
            space, flags = seen.space, seen.flags
        else:
            return b"", b"", 0
        if space == self._space:
            space = self._space  # one copy for all
        self._space = space
        return tokens if flags & PLAIN else b"", space, flags
