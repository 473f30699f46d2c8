"""What a tier has missed and RAM still has: it failed, came while the tier was down, or found no room there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from qkvault.store.index import Entry
from qkvault.types import ChunkState

_READY: Final = ChunkState.READY  # a member of an enumeration takes ten times as long to look up


class Missed:
    """Keys of chunks in RAM, in the order in which one tier is to be given them: a chunk after the one it hangs on."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()  # of a plain one the first is not found at once

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def add(self, entry: Entry, is_held: Callable[[Entry], bool]) -> None:
        """Note ``entry``, and before it what it hangs on, as far as RAM has it and the tier (``is_held``) does not."""
        path = []
        node: Entry | None = entry
        while node is not None and node.key not in self._keys and is_wanted(node, is_held):
            path.append(node.key)
            node = node.parent
        for key in reversed(path):
            self._keys[key] = None

    def add_first(self, entries: Iterable[Entry]) -> None:
        """These come before all others."""
        for entry in entries:
            self._keys[entry.key] = None
            self._keys.move_to_end(entry.key, last=False)

    def put_off(self, key: bytes) -> None:
        """``key`` comes after all others."""
        self._keys[key] = None
        self._keys.move_to_end(key)

    def take(self) -> bytes:
        """The first, which is not missed any more. There has to be one."""
        return self._keys.popitem(last=False)[0]

    def discard(self, key: bytes) -> None:
        """``key`` is not missed, or not in RAM, any more."""
        self._keys.pop(key, None)


def is_wanted(entry: Entry, is_held: Callable[[Entry], bool]) -> bool:
    """Whether a tier that holds what ``is_held`` says should get ``entry`` from RAM."""
    return entry.state is _READY and not entry.doom and not is_held(entry)
