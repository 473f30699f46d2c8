"""The index: every chunk that is known, as a tree of chained chunks.

An entry exists while its chunk is somewhere (RAM or a tier), while somebody writes it, or while it has children. The
children of a chunk are kept sorted by sketch, so that the one that shares the longest run of tokens with a prompt is a
neighbour of the place where the prompt would stand.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from qkvault.errors import InvariantError
from qkvault.types import KEY_BYTES, OFFSET_BYTES, SKETCH_BYTES, CacheKind, ChunkState

Shape = tuple[int, int, CacheKind]  # tokens, bytes of the image, what is in it

NOWHERE: Final = -1  # offset of an entry without a slot
_OFFSET: Final = struct.Struct("<q")
_NO_SLOT: Final = _OFFSET.pack(NOWHERE)
_NO_SHAPE: Final[Shape] = (0, 0, CacheKind.KV)  # of a placeholder
_NEIGHBOURS: Final = 8  # how far from its place a usable child is looked for, each way


class Entry:
    """One chunk. Only ``Index`` changes ``parent`` and ``children``; only the store changes the rest."""

    # Nine pointers: there may be a million of these. A chain's chunk has one child, so a list is made for the second.
    __slots__ = ("_children", "doom", "key", "packed", "parent", "pins", "shape", "state", "tiers")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.parent: Entry | None = None
        self._children: Entry | list[Entry] | None = None  # sorted by sketch
        self.packed = _NO_SLOT  # the sketch, then the offset in 8 bytes: in one object, since each has a head of 33
        self.shape = _NO_SHAPE  # one tuple for all chunks that agree in all of it
        self.state = ChunkState.ABSENT
        self.pins = 0  # leases and tier jobs that need the slot
        self.tiers = 0  # bit i: tier i has it
        self.doom = ""  # why it is to go as soon as nobody needs it; empty: it stays

    @property
    def sketch(self) -> bytes:
        """What tells its tokens from those of its siblings."""
        return self.packed[:-OFFSET_BYTES]

    @sketch.setter
    def sketch(self, sketch: bytes) -> None:
        self.packed = sketch + self.packed[-OFFSET_BYTES:]

    @property
    def offset(self) -> int:
        """Where its slot is, or NOWHERE."""
        offset: int = _OFFSET.unpack_from(self.packed, -OFFSET_BYTES)[0]
        return offset

    @offset.setter
    def offset(self, offset: int) -> None:
        self.packed = self.packed[:-OFFSET_BYTES] + _OFFSET.pack(offset)

    @property
    def num_tokens(self) -> int:
        return self.shape[0]

    @property
    def image_bytes(self) -> int:
        return self.shape[1]

    @property
    def kind(self) -> CacheKind:
        return self.shape[2]

    @property
    def children(self) -> Sequence[Entry]:
        """The chunks that hang on it, sorted by sketch."""
        children = self._children
        if children is None:
            return ()
        return children if isinstance(children, list) else (children,)

    @property
    def has_children(self) -> bool:
        return self._children is not None

    def adopt(self, child: Entry) -> None:
        children = self._children
        if children is None:
            self._children = child
        elif isinstance(children, list):
            children.insert(bisect.bisect_left(children, child.sketch, key=_sketch), child)
        else:
            self._children = sorted((child, children), key=_sketch)
        child.parent = self

    def disown(self, child: Entry) -> None:
        """Let go of ``child``, which is among the children."""
        children = self._children
        if isinstance(children, list):
            at = bisect.bisect_left(children, child.sketch, key=_sketch)
            while children[at] is not child:  # siblings with equal sketches: crc collisions, so hardly ever
                at += 1
            del children[at]
            self._children = children[0] if len(children) == 1 else children
        else:
            self._children = None
        child.parent = None

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


class Packed:
    """What entries pack, of all of them at once: as it is now, and not when it changes."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.each = [entry.packed for entry in entries]
        self._rows = b"".join(self.each)

    def __len__(self) -> int:
        return len(self.each)

    def checks(self) -> bytes:
        """The check of all tokens of each, as a lookup sends it; anything unless their sketches are of one length."""
        return self._column(OFFSET_BYTES, SKETCH_BYTES)

    def checks_one_by_one(self) -> bytes:
        """The same, whatever their lengths."""
        return b"".join([each[-OFFSET_BYTES - SKETCH_BYTES : -OFFSET_BYTES] for each in self.each])

    def num_alike(self, checks: bytes) -> int:
        """How many of the leading ones have tokens with these check sums."""
        if self.checks() == checks[: len(self) * SKETCH_BYTES]:
            return len(self)  # all at once: faster than one by one, and they are nearly always alike
        here = self.checks_one_by_one()
        if checks.startswith(here):
            return len(self)
        starts = range(0, len(here), SKETCH_BYTES)
        return next(at for at, i in enumerate(starts) if here[i : i + SKETCH_BYTES] != checks[i : i + SKETCH_BYTES])

    def offsets(self) -> bytes:
        """The offset of each, as ``pack_offsets`` packs it; anything unless their sketches are of one length."""
        return self._column(0, OFFSET_BYTES)

    def _column(self, end: int, num_bytes: int) -> bytes:
        # Of each the num_bytes before the last ``end``.
        width = len(self.each[0]) if self.each else 0
        if not width or len(self._rows) != width * len(self.each):
            return b""
        first = width - end - num_bytes
        column: NDArray[np.void] = np.ndarray((len(self.each),), f"V{num_bytes}", self._rows, first, (width,))
        return column.tobytes()


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
        self._entries: dict[bytes, Entry] = {}
        self._shapes: dict[Shape, Shape] = {}  # as many as there are sizes of chunks

    def __len__(self) -> int:
        """How many entries there are, placeholders included."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """Every entry, placeholders included."""
        return iter(self._entries.values())

    def keys_backwards(self) -> Iterator[bytes]:
        """Every key, placeholders included; a parent comes after its children."""
        return reversed(self._entries)

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def run(self, root_key: bytes, keys: bytes) -> list[Entry]:
        """The entries of the leading ``keys`` (48 bytes each) that are a chain hanging on ``root_key``.

        A chunk's parent is an entry if the chunk is: the last one that is known is searched for by halves, and those
        before it are its ancestors. Their keys are not compared: a chunk's key is made of its parent's.
        """
        root = self._entries.get(root_key)
        if root is None:
            return []
        last, num_known, first_unknown = None, 0, len(keys) // KEY_BYTES
        middle = first_unknown - 1  # most prompts are known to the end, or not at all
        while num_known < first_unknown:
            entry = self._entries.get(keys[middle * KEY_BYTES : (middle + 1) * KEY_BYTES])
            if entry is None:
                first_unknown = middle
            else:
                last, num_known = entry, middle + 1
            middle = (num_known + first_unknown) // 2
        run: list[Entry] = []
        node = last
        for _ in range(num_known):
            if node is None:
                break
            run.append(node)
            node = node.parent
        if num_known and node is not root:  # they do not hang on it: other chunks are on the way
            return self._run_by_steps(root, keys)
        run.reverse()
        return run

    def _run_by_steps(self, parent: Entry, keys: bytes) -> list[Entry]:
        run: list[Entry] = []
        for at in range(0, len(keys), KEY_BYTES):
            entry = self._entries.get(keys[at : at + KEY_BYTES])
            if entry is None or entry.parent is None or entry.parent is not parent:
                break
            run.append(entry)
            parent = entry
        return run

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

    def add(self, key: bytes, parent_key: bytes, sketch: bytes, shape: Shape) -> Entry:
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
            entry.sketch = sketch
            parent.adopt(entry)
        entry.shape = self._shapes.setdefault(shape, shape)
        return entry

    def prune(self, entry: Entry) -> None:
        """Forget ``entry`` if nothing is left of it, then its parents likewise."""
        node: Entry | None = entry
        while node is not None and not node.is_somewhere and not node.children and not node.pins:
            if self._entries.pop(node.key, None) is None:
                return
            parent = node.parent
            if parent is not None:
                parent.disown(node)
            node = parent

    def best_child(
        self, parent_key: bytes, sketch: bytes, is_wanted: Callable[[Entry], bool]
    ) -> tuple[Entry, int] | None:
        """The child of ``parent_key`` that agrees with ``sketch`` in most leading grains, and in how many.

        Of those that are wanted; among equals one that is in RAM. None if none of them agrees in the first grain.
        """
        parent = self._entries.get(parent_key)
        if parent is None:
            return None
        children = parent.children
        at = bisect.bisect_left(children, sketch, key=_sketch)
        best: tuple[Entry, int] | None = None
        for child in children[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS]:
            grains = common_grains(child.sketch, sketch)
            if not grains or (best is not None and grains < best[1]) or not is_wanted(child):
                continue
            if best is None or grains > best[1] or best[0].state is not ChunkState.READY:
                best = child, grains
        return best

    def covering_child(self, parent_key: bytes, sketch: bytes) -> Entry | None:
        """A child of ``parent_key`` that is somewhere and holds all the tokens that ``sketch`` tells."""
        parent = self._entries.get(parent_key)
        if parent is None:
            return None
        children = parent.children
        at = bisect.bisect_left(children, sketch, key=_sketch)
        for child in children[at : at + _NEIGHBOURS]:
            if not child.sketch.startswith(sketch):
                return None
            if child.is_somewhere and not child.doom:
                return child
        return None

    def longer_siblings(self, entry: Entry) -> Iterator[Entry]:
        """Siblings that hold all the tokens of ``entry``, and more."""
        children = entry.parent.children if entry.parent is not None else ()
        for child in islice(children, bisect.bisect_left(children, entry.sketch, key=_sketch), None):
            if not child.sketch.startswith(entry.sketch):
                return
            if len(child.sketch) > len(entry.sketch):
                yield child

    def covered_siblings(self, entry: Entry) -> list[Entry]:
        """Siblings whose tokens are a strict prefix of ``entry``'s: shorter versions of the same tail."""
        children = entry.parent.children if entry.parent is not None else ()
        if len(children) == 1:
            return []
        found = []
        for end in range(SKETCH_BYTES, len(entry.sketch), SKETCH_BYTES):
            prefix = entry.sketch[:end]
            at = bisect.bisect_left(children, prefix, key=_sketch)
            while at < len(children) and children[at].sketch == prefix:
                found.append(children[at])
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


def _sketch(entry: Entry) -> bytes:
    return entry.sketch
