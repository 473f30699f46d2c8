"""The index: every chunk that is known, as a tree of chained chunks.

An entry exists while its chunk is somewhere (RAM or a tier), while somebody writes it, or while it has children. The
children of a chunk are kept sorted by sketch, so that the one that shares the longest run of tokens with a prompt is a
neighbour of the place where the prompt would stand.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Final

from qkvault.errors import InvariantError
from qkvault.types import SKETCH_BYTES, ChunkState

NOWHERE: Final = -1  # offset of an entry without a slot
_NEIGHBOURS: Final = 8  # how far from its place a usable child is looked for, each way


class Entry:
    """One chunk. Only ``Index`` changes ``parent`` and ``children``; only the store changes the rest."""

    __slots__ = (
        "children", "doom", "image_bytes", "key", "num_tokens", "offset", "parent", "pins", "sketch", "state",
        "storing", "tiers",
    )  # fmt: skip

    def __init__(self, key: bytes) -> None:
        """A placeholder: nowhere, without a parent or tokens."""
        self.key = key
        self.parent: Entry | None = None
        self.children: list[Entry] = []  # sorted by sketch
        self.sketch = b""
        self.num_tokens = 0
        self.image_bytes = 0
        self.state = ChunkState.ABSENT
        self.offset = NOWHERE
        self.pins = 0  # leases and tier jobs that need the slot
        self.tiers = 0  # bit i: tier i has it
        self.storing = 0  # bit i: a job is writing it to tier i
        self.doom = ""  # why it is to go as soon as nobody needs it; empty: it stays

    @property
    def is_somewhere(self) -> bool:
        """Whether its bytes are, or may soon be, in RAM or in a tier."""
        return self.state is not ChunkState.ABSENT or self.tiers != 0

    @property
    def is_usable(self) -> bool:
        """Whether a lookup may promise it: readable now, or on its way from a tier, or in one."""
        if self.doom or self.state is ChunkState.WRITING:
            return False
        return self.state is not ChunkState.ABSENT or self.tiers != 0


def common_grains(one: bytes, other: bytes) -> int:
    """In how many leading grains two sketches agree."""
    if one.startswith(other) or other.startswith(one):
        return min(len(one), len(other)) // SKETCH_BYTES
    for start in range(0, min(len(one), len(other)), SKETCH_BYTES):
        end = start + SKETCH_BYTES
        if one[start:end] != other[start:end]:
            return start // SKETCH_BYTES
    return min(len(one), len(other)) // SKETCH_BYTES


class Index:
    """Entries by key, and the tree over them."""

    def __init__(self) -> None:
        """Start empty."""
        self._entries: dict[bytes, Entry] = {}

    def __len__(self) -> int:
        """How many entries there are, placeholders included."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """Every entry, placeholders included."""
        return iter(self._entries.values())

    def get(self, key: bytes) -> Entry | None:
        """The entry of ``key``, if there is one."""
        return self._entries.get(key)

    def accepts(self, key: bytes, parent_key: bytes, sketch: bytes, num_tokens: int) -> bool:
        """Whether such a chunk can be added: ``key`` is not that of other tokens, and not its own ancestor's."""
        entry = self._entries.get(key)
        if entry is None:
            return key != parent_key
        if entry.parent is not None:
            return entry.parent.key == parent_key and entry.sketch == sketch and entry.num_tokens == num_tokens
        node = self._entries.get(parent_key)
        while node is not None and node is not entry:
            node = node.parent
        return node is None

    def add(self, key: bytes, parent_key: bytes, sketch: bytes, num_tokens: int, image_bytes: int) -> Entry:
        """The entry of ``key`` under its parent; made, or filled in if it was a placeholder.

        The caller has checked that the index ``accepts`` it, and that an entry that is somewhere has these very bytes.
        """
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Entry(key)
        if entry.parent is None:
            parent = self._entries.get(parent_key)
            if parent is None:
                parent = self._entries[parent_key] = Entry(parent_key)
            entry.parent = parent
            entry.sketch = sketch
            at = bisect.bisect_left(parent.children, sketch, key=_sketch)
            parent.children.insert(at, entry)
        entry.num_tokens = num_tokens
        entry.image_bytes = image_bytes
        return entry

    def prune(self, entry: Entry) -> None:
        """Forget ``entry`` if nothing is left of it, then its parents likewise."""
        node: Entry | None = entry
        while node is not None and not node.is_somewhere and not node.children and not node.pins:
            if self._entries.pop(node.key, None) is None:
                return
            parent = node.parent
            if parent is not None:
                del parent.children[self._place(parent, node)]
                node.parent = None
            node = parent

    def best_child(self, parent_key: bytes, sketch: bytes) -> tuple[Entry, int] | None:
        """The usable child of ``parent_key`` that agrees with ``sketch`` in most leading grains, and in how many.

        Among equals one that is in RAM. None if no child agrees in the first grain.
        """
        parent = self._entries.get(parent_key)
        if parent is None:
            return None
        children = parent.children
        at = bisect.bisect_left(children, sketch, key=_sketch)
        best: tuple[Entry, int] | None = None
        for child in children[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS]:
            grains = common_grains(child.sketch, sketch)
            if not grains or not child.is_usable or (best is not None and grains < best[1]):
                continue
            if best is None or grains > best[1] or best[0].state is not ChunkState.READY:
                best = child, grains
        return best

    def covering_child(self, parent_key: bytes, sketch: bytes) -> Entry | None:
        """A child of ``parent_key`` that is somewhere and holds all the tokens that ``sketch`` tells."""
        parent = self._entries.get(parent_key)
        if parent is None:
            return None
        at = bisect.bisect_left(parent.children, sketch, key=_sketch)
        for child in parent.children[at : at + _NEIGHBOURS]:
            if not child.sketch.startswith(sketch):
                return None
            if child.is_somewhere and not child.doom:
                return child
        return None

    def covered_siblings(self, entry: Entry) -> list[Entry]:
        """Siblings whose tokens are a strict prefix of ``entry``'s: shorter versions of the same tail."""
        parent = entry.parent
        if parent is None or len(parent.children) == 1:
            return []
        found = []
        for end in range(SKETCH_BYTES, len(entry.sketch), SKETCH_BYTES):
            prefix = entry.sketch[:end]
            at = bisect.bisect_left(parent.children, prefix, key=_sketch)
            while at < len(parent.children) and parent.children[at].sketch == prefix:
                found.append(parent.children[at])
                at += 1
        return found

    def check(self) -> None:
        """Raise InvariantError unless the tree is whole and nothing needless is kept."""
        num_children = 0
        for key, entry in self._entries.items():
            num_children += len(entry.children)
            sketches = [child.sketch for child in entry.children]
            if sketches != sorted(sketches) or any(child.parent is not entry for child in entry.children):
                msg = f"index: children of {key.hex()[:16]} out of order, or not its own"
                raise InvariantError(msg)
            if not (entry.is_somewhere or entry.children or entry.pins):
                msg = f"index: {key.hex()[:16]} is nowhere and has no children"
                raise InvariantError(msg)
        if num_children != sum(entry.parent is not None for entry in self._entries.values()):
            msg = "index: an entry is not among its parent's children"
            raise InvariantError(msg)

    @staticmethod
    def _place(parent: Entry, child: Entry) -> int:
        at = bisect.bisect_left(parent.children, child.sketch, key=_sketch)
        while parent.children[at] is not child:  # siblings with equal sketches: crc collisions, so hardly ever
            at += 1
        return at


def _sketch(entry: Entry) -> bytes:
    return entry.sketch
