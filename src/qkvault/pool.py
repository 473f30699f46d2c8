"""The pool: one mapping of memory, cut into slots on demand. Everything that is cached in RAM lies in it.

An offset allocator with exact sizes: free runs are binned by size (best fit), neighbours merge when freed. Large slots
grow from the bottom and small ones (prompt tails) from the top, so that the two do not cut each other up. Where that is
not enough, slots are moved. Not thread-safe: the store's thread owns the allocator; anybody may read or write the bytes
of a slot he has a lease on.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from itertools import chain, islice
from typing import Final, NamedTuple

import numpy as np

from qkvault.errors import ConfigError, InvariantError
from qkvault.image import ALIGNMENT_BYTES, align_up
from qkvault.memory import huge_page_bytes, meminfo, require_available, transparent_mode

STEP_BYTES: Final = 64 << 20  # populated at a time, some 10-50 ms: madvise keeps the interpreter to itself
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; not yet in the mmap module
# Whoever maps the pool may write to it, and may not take pages away from under the others.
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SMALL: Final = ("", "never", "deny")  # modes in which the kernel gives no transparent huge pages
_NUM_STARTS: Final = 16  # free runs from which a window is looked for, the longest ones
_NUM_WINDOWS: Final = 8  # of those found this way that are tried, the ones with the fewest bytes in slots


class _Window(NamedTuple):
    """Free runs and the slots between them, offset to bytes each."""

    runs: dict[int, int]
    slots: dict[int, int]


class Pool:
    """A mapping of ``capacity_bytes``, rounded down to whole pages of 4096 or of huge ones, and the allocator over it.

    ``name`` makes it shared memory: another process that is sent its ``descriptor`` maps it with AttachedPool. The name
    is only what /proc shows: nothing is left in any file system, however the process ends. Of huge pages that are
    reserved shared memory is made, if there are enough; they are taken at once.
    """

    def __init__(self, capacity_bytes: int, *, name: str | None = None, prefault: bool = True) -> None:
        """Map and, unless told not to, take all memory now, so that no copy ever faults.

        That lasts 0.1 s a GiB for private memory and 0.9 s for shared (less where shmem_enabled allows huge pages), and
        3 s more in a virtual machine whose host has yet to find the memory. Without ``prefault`` a page is taken when
        it is first written, and a machine on which others have taken them by then kills the process.

        Raises ConfigError, at once and leaving nothing behind, if the size is not positive or more than there is.
        """
        self.capacity_bytes = capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if self.capacity_bytes <= 0:
            msg = f"a pool of {capacity_bytes} bytes is too small: give it at least {ALIGNMENT_BYTES}"
            raise ConfigError(msg)
        self._descriptor: int | None = None
        self.pages = "reserved"  # which the system has given: reserved and huge, transparently huge, or small
        try:
            self._map = self._open_huge(name) or self._open(name, prefault=prefault)
        except BaseException as error:  # also when interrupted, which is likely while memory is taken
            self._close_descriptor()
            if isinstance(error, (OSError, OverflowError, ValueError)):
                msg = f"the pool needs {self.capacity_bytes} bytes of memory, the system refuses: {error}"
                raise ConfigError(msg) from error
            raise
        self.memory = memoryview(self._map)
        self.used_bytes = 0
        # Used slots: how many pages long the one is that begins at this page, or 0. Takes memory where there are slots.
        self._pages = memoryview(mmap.mmap(-1, self.capacity_bytes // ALIGNMENT_BYTES * 4)).cast("I")
        self._free_start: dict[int, int] = {}  # free run: offset -> bytes
        self._free_end: dict[int, int] = {}  # free run: end offset -> offset
        self._bins: dict[int, list[int]] = {}  # free runs by size: bytes -> sorted offsets
        self._bin_sizes: list[int] = []  # sorted keys of _bins
        self._large_bytes = 0  # the largest slot seen; half of it parts small from large
        self._add_free(0, self.capacity_bytes)

    @property
    def descriptor(self) -> int:
        """The file descriptor to send to a process that shall attach; the pool keeps it.

        Raises ValueError if the pool is private (made without a name) or closed.
        """
        if self._descriptor is None:
            msg = "a private or closed pool has no descriptor"
            raise ValueError(msg)
        return self._descriptor

    def allocate(self, num_bytes: int) -> int | None:
        """Offset of a slot of at least ``num_bytes`` (rounded up to 4096), or None if no free run is that long.

        Raises ValueError if ``num_bytes`` is not positive.
        """
        if num_bytes <= 0:
            msg = f"a slot of {num_bytes} bytes"
            raise ValueError(msg)
        size = align_up(num_bytes)
        at = bisect.bisect_left(self._bin_sizes, size)
        if at == len(self._bin_sizes):
            return None
        self._large_bytes = max(self._large_bytes, size)
        from_top = size * 2 <= self._large_bytes
        run_bytes = self._bin_sizes[at]
        run = self._bins[run_bytes][-1 if from_top else 0]
        self._remove_free(run, run_bytes)
        offset = run + run_bytes - size if from_top else run
        if rest := run_bytes - size:
            self._add_free(run if from_top else run + size, rest)
        self._pages[offset // ALIGNMENT_BYTES] = size // ALIGNMENT_BYTES
        self.used_bytes += size
        return offset

    def free(self, offset: int) -> int:
        """Give a slot back; returns its bytes. Raises InvariantError if none is at ``offset``, as when freed twice."""
        page, rest = divmod(offset, ALIGNMENT_BYTES)
        size = self._pages[page] * ALIGNMENT_BYTES if not rest and 0 <= page < len(self._pages) else 0
        if not size:
            msg = f"no slot at {offset}: freed twice, or never allocated"
            raise InvariantError(msg)
        self._pages[page] = 0
        self.used_bytes -= size
        self._release(offset, offset + size)
        return size

    def gather(
        self, num_bytes: int, is_movable: Callable[[int], bool], move: Callable[[int, int, int], None]
    ) -> int | None:
        """As ``allocate``, after moving slots away from between free runs, as few bytes as there need to be.

        ``is_movable(offset)`` tells of which slots; ``move(offset, new_offset, num_bytes)`` copies one. None, and
        nothing has moved, if no window of ``num_bytes`` can be emptied. What is copied is less than ``num_bytes``.
        """
        size = align_up(num_bytes)
        starts = islice(chain.from_iterable(self._bins[size] for size in reversed(self._bin_sizes)), _NUM_STARTS)
        windows = [window for start in starts if (window := self._window(start, size, is_movable))]
        windows.sort(key=lambda window: sum(window.slots.values()))
        is_free = any(self._empty(window, move) for window in windows[:_NUM_WINDOWS])
        return self.allocate(num_bytes) if is_free else None

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """The bytes ``[offset, offset + num_bytes)``. The caller holds a lease on the slot there."""
        return self.memory[offset : offset + num_bytes]

    @property
    def slots(self) -> dict[int, int]:
        """Every used slot: offset to bytes. A copy, made by looking at every page."""
        pages = np.frombuffer(self._pages, np.uint32)
        starts = np.flatnonzero(pages)
        sizes = pages[starts].astype(np.int64) * ALIGNMENT_BYTES
        return dict(zip((starts * ALIGNMENT_BYTES).tolist(), sizes.tolist(), strict=True))

    def check(self) -> None:
        """Raise InvariantError unless used and free runs tile the pool exactly."""
        slots = self.slots
        runs = sorted([*slots.items(), *self._free_start.items()])
        end = 0
        for offset, size in runs:
            if offset != end:
                msg = f"pool: gap or overlap at {offset}, expected {end}"
                raise InvariantError(msg)
            end = offset + size
        if end != self.capacity_bytes or sum(slots.values()) != self.used_bytes:
            msg = f"pool: runs end at {end} of {self.capacity_bytes}, used {self.used_bytes}"
            raise InvariantError(msg)

    def close(self) -> None:
        """Unmap. Views that are still held keep the addresses until they go. Idempotent.

        What is shared is emptied first, header and payload of a slot at one time: an engine that has nothing to do
        keeps its mapping until it is asked again, and the next store needs the memory.
        """
        if self._descriptor is not None and os.getpid() == self._owner_pid:  # a forked child has only copies
            _empty(self._map)
        self._close_descriptor()
        _unmap(self.memory, self._map)

    def _open_huge(self, name: str | None) -> mmap.mmap | None:
        # None, and nothing is left, if the system has other plans for them: then there are others.
        page_bytes = huge_page_bytes(self.capacity_bytes, meminfo()) if name is not None else 0
        if name is None or not page_bytes:
            return None
        try:
            mapping = self._share(name, self.capacity_bytes // page_bytes * page_bytes, os.MFD_HUGETLB)
            for offset, num_bytes in _steps(len(mapping)):  # a group without a right to them learns it now, by an error
                mapping.madvise(_MADV_POPULATE_WRITE, offset, num_bytes)
        except OSError:
            self._close_descriptor()
            return None
        self.capacity_bytes = len(mapping)
        return mapping

    def _share(self, name: str, num_bytes: int, flags: int = 0) -> mmap.mmap:
        self._owner_pid = os.getpid()
        self._descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        os.fchmod(self._descriptor, 0o600)
        os.ftruncate(self._descriptor, num_bytes)
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return mmap.mmap(self._descriptor, num_bytes)

    def _open(self, name: str | None, *, prefault: bool) -> mmap.mmap:
        require_available(self.capacity_bytes)
        self.pages = "small" if transparent_mode(shared=name is not None) in _SMALL else "transparent"
        if name is None:
            mapping = mmap.mmap(-1, self.capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            mapping = self._share(name, self.capacity_bytes)
        with contextlib.suppress(OSError):  # a kernel without huge pages; with them, a tenth of the faults' time
            mapping.madvise(mmap.MADV_HUGEPAGE)
        if prefault:
            _populate(mapping)
        return mapping

    def _close_descriptor(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _window(self, start: int, size: int, is_movable: Callable[[int], bool]) -> _Window | None:
        # That of at least ``size`` bytes which begins with the run at ``start``.
        window, end = _Window({}, {}), start
        runs, slots = window
        while end - start < size:
            if (run_bytes := self._free_start.get(end)) is not None:
                runs[end] = run_bytes
                end += run_bytes
            elif end < self.capacity_bytes and is_movable(end):
                slots[end] = self._pages[end // ALIGNMENT_BYTES] * ALIGNMENT_BYTES
                end += slots[end]
            else:
                return None
        return window

    def _empty(self, window: _Window, move: Callable[[int, int, int], None]) -> bool:
        # Make one free run of a window, if there are places outside for all its slots.
        runs, slots = window
        for run, run_bytes in runs.items():
            self._remove_free(run, run_bytes)
        places: dict[int, int] = {}  # slot -> where it goes
        for slot, slot_bytes in sorted(slots.items(), key=lambda item: -item[1]):
            if (place := self.allocate(slot_bytes)) is None:
                break
            places[slot] = place
        is_possible = len(places) == len(slots)
        for slot, place in places.items():
            if is_possible:
                move(slot, place, slots[slot])
            self.free(slot if is_possible else place)
        for run, run_bytes in runs.items():
            self._release(run, run + run_bytes)
        return is_possible

    def _release(self, start: int, end: int) -> None:
        if (before := self._free_end.get(start)) is not None:
            self._remove_free(before, start - before)
            start = before
        if (after_bytes := self._free_start.get(end)) is not None:
            self._remove_free(end, after_bytes)
            end += after_bytes
        self._add_free(start, end - start)

    def _add_free(self, offset: int, size: int) -> None:
        self._free_start[offset] = size
        self._free_end[offset + size] = offset
        if size not in self._bins:
            self._bins[size] = []
            bisect.insort(self._bin_sizes, size)
        bisect.insort(self._bins[size], offset)

    def _remove_free(self, offset: int, size: int) -> None:
        del self._free_start[offset]
        del self._free_end[offset + size]
        offsets = self._bins[size]
        del offsets[bisect.bisect_left(offsets, offset)]
        if not offsets:
            del self._bins[size]
            del self._bin_sizes[bisect.bisect_left(self._bin_sizes, size)]


class AttachedPool:
    """Another process's pool, mapped here: bytes only, no allocator."""

    def __init__(self, descriptor: int, capacity_bytes: int) -> None:
        """Map the pool behind ``descriptor``, which is closed here, also if that fails.

        The first pass over it pays page faults: 0.5 s a GiB, and less where pages are huge.

        Raises ConfigError if there are fewer bytes behind it than ``capacity_bytes``, OSError if it cannot be mapped.
        """
        try:
            if (size_bytes := os.fstat(descriptor).st_size) < capacity_bytes:
                msg = f"the shared pool holds {size_bytes} bytes, not {capacity_bytes}"
                raise ConfigError(msg)
            self._map = mmap.mmap(descriptor, capacity_bytes)
        finally:
            os.close(descriptor)
        self.capacity_bytes = capacity_bytes
        self.memory = memoryview(self._map)

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """The bytes ``[offset, offset + num_bytes)``. The caller holds a lease on the slot there."""
        return self.memory[offset : offset + num_bytes]

    def empty(self) -> None:
        """Give back all memory, wherever it is mapped: who reads on reads zeros. For that of a store that has died."""
        _empty(self._map)

    def close(self) -> None:
        """Unmap. Views that are still held keep the memory mapped until they go. Idempotent."""
        _unmap(self.memory, self._map)


def _empty(mapping: mmap.mmap) -> None:
    with contextlib.suppress(OSError, ValueError):  # a kernel that cannot, a pool that is closed
        for offset, num_bytes in _steps(len(mapping)):
            mapping.madvise(mmap.MADV_REMOVE, offset, num_bytes)


def _unmap(memory: memoryview, mapping: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # an array still looks at it: the mapping goes with the last one
        memory.release()
        mapping.close()


def _steps(num_bytes: int) -> list[tuple[int, int]]:
    return [(offset, min(STEP_BYTES, num_bytes - offset)) for offset in range(0, num_bytes, STEP_BYTES)]


def _populate(mapping: mmap.mmap) -> None:
    for offset, num_bytes in _steps(len(mapping)):
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, offset, num_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            for at in range(offset, offset + num_bytes, mmap.PAGESIZE):  # a kernel before 5.14
                mapping[at] = 0
