"""What was cleared or forgotten while tiers are being scanned, so that the scan does not bring it back.

A scan comes to a chunk before or after the one it hangs on: what hangs on a forgotten chunk is forgotten as soon as
that is known. Knows no entries and no tiers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from qkvault.tiers.base import Found
from qkvault.types import SPACE_BYTES

_MAX_BYTES: Final = 32 << 20  # that this may take; instead of more, all of their spaces is forgotten
_ENTRY_BYTES: Final = 128  # a key in a set, or an entry of a dict, about
_MAX_SPACES: Final = 1 << 12  # of more, everything is


def is_one_chain(one: bytes, other: bytes) -> bool:
    """Whether of two sketches one goes on where the other ends. An empty one tells nothing."""
    return bool(one and other) and (one.startswith(other) or other.startswith(one))


class Forgotten:
    """Notes it as long as something may still be found."""

    def __init__(self, *, is_on: bool) -> None:
        """``is_on``: there is something to scan."""
        self._is_on = is_on
        self._is_all = False
        self._spaces: set[bytes] = set()
        self._keys: set[bytes] = set()
        self._tails: dict[bytes, set[bytes]] = {}  # key of the chunk before -> sketches
        self._tail_bytes = 0

    def add_all(self, spaces: Collection[bytes] = ()) -> None:
        """Everything is forgotten, or all of some ``spaces``."""
        if self._is_on:
            self._spaces.update(spaces)
            self._is_all |= not spaces or len(self._spaces) > _MAX_SPACES

    def add(self, keys: Iterable[bytes]) -> None:
        """The chunks ``keys`` are forgotten, and what hangs on them."""
        if self._is_on:
            self._keys.update(keys)
            self._bound()

    def add_tail(self, parent: bytes, sketch: bytes) -> None:
        """What hangs on ``parent`` and holds the tokens that ``sketch`` tells, more or fewer, is forgotten."""
        if self._is_on and sketch and sketch not in (known := self._tails.setdefault(parent, set())):
            known.add(sketch)
            self._tail_bytes += _ENTRY_BYTES + len(sketch)
            self._bound()

    def inherits(self, key: bytes, parent: bytes) -> bool:
        """Whether ``key`` turns out to hang on what was forgotten: true once, and it is forgotten from then on."""
        is_news = parent in self._keys and key not in self._keys
        if is_news:
            self.add([key])
        return is_news

    def covers(self, chunk: Found) -> bool:
        """Whether ``chunk``, as it was before the start, is forgotten."""
        return (
            self._is_all
            or chunk.key[:SPACE_BYTES] in self._spaces
            or chunk.key in self._keys
            or any(is_one_chain(chunk.sketch, sketch) for sketch in self._tails.get(chunk.parent, ()))
        )

    def end(self) -> None:
        """All was found: nothing needs to be known any more."""
        self._is_on = self._is_all = False
        self._spaces, self._keys, self._tails, self._tail_bytes = set(), set(), {}, 0

    def _bound(self) -> None:
        # Whoever forgets so much during one scan loses what else the scan would find of these spaces.
        if len(self._keys) * _ENTRY_BYTES + self._tail_bytes > _MAX_BYTES:
            self.add_all({key[:SPACE_BYTES] for key in (*self._keys, *self._tails)})
            self._keys, self._tails, self._tail_bytes = set(), {}, 0
