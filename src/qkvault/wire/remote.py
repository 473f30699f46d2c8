"""A client that cannot map the pool: what is in slots is sent and received, behind the same calls."""

from __future__ import annotations

import contextlib
import mmap
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from qkvault.errors import ProtocolError, Unavailable
from qkvault.image import ALIGNMENT_BYTES, wipe_header
from qkvault.types import KEY_BYTES, ChunkRef
from qkvault.wire import messages as m
from qkvault.wire.sockets import SocketTransport
from qkvault.wire.transport import PoolView

_MAP_NORESERVE: Final = 0x4000  # Linux; in the mmap module since Python 3.13
_MAX_POOL_BYTES: Final = 1 << 46  # half of what a process can address
_SLOWEST_BYTES_PER_SECOND: Final = 32 << 20  # that data is waited for: a quarter of what a network of 1 Gb/s carries
_KEPT_BYTES: Final = 512 << 20  # of memory that was used: to take it anew costs a fault for every page
_GRANULE_BYTES: Final = 1 << 20  # what memory is given back by; slots begin and end anywhere in it

Slot = tuple[int, int]  # offset, bytes


class MirrorPool:
    """Addresses as large as the store's pool, of which only what is used takes memory."""

    def __init__(self, capacity_bytes: int) -> None:
        """Raises OSError or ValueError if there are no such addresses."""
        self.capacity_bytes = capacity_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._map = mmap.mmap(-1, capacity_bytes, flags=flags)
        self._memory = memoryview(self._map)
        self._used: OrderedDict[int, None] = OrderedDict()  # granules that have memory, the least recently used first

    def view(self, offset: int, num_bytes: int) -> memoryview:
        return self._memory[offset : offset + num_bytes]

    @property
    def used_bytes(self) -> int:
        """Of memory that it has."""
        return len(self._used) * _GRANULE_BYTES

    def take(self, offset: int, num_bytes: int) -> memoryview:
        """The same, about to be written."""
        for granule in _granules(offset, num_bytes):
            self._used[granule] = None
            self._used.move_to_end(granule)
        return self.view(offset, num_bytes)

    def trim(self, unsent: Iterable[Slot]) -> None:
        """Give memory back that was used longest ago, but for that of ``unsent``, whoever else had it before."""
        if self.used_bytes <= _KEPT_BYTES:
            return
        held = {granule for slot in unsent for granule in _granules(*slot)}
        for granule in [granule for granule in self._used if granule not in held]:
            del self._used[granule]
            start = granule * _GRANULE_BYTES
            self._map.madvise(mmap.MADV_DONTNEED, start, min(_GRANULE_BYTES, self.capacity_bytes - start))
            if self.used_bytes <= _KEPT_BYTES:
                break

    def close(self) -> None:
        """Give back everything, unless somebody still looks at it; then with him."""
        with contextlib.suppress(BufferError):
            self._memory.release()
            self._map.close()


class RemoteTransport(SocketTransport):
    """A session over TCP."""

    pool: MirrorPool

    def fetch(self, refs: Sequence[ChunkRef], timeout_seconds: float | None = None) -> int:
        if timeout_seconds is None:
            timeout_seconds = self._seconds_for(sum(ref.image_bytes for ref in refs))
        self._take_turn(timeout_seconds)
        try:
            self.pool.trim(self._unsent())
            steps = range(0, len(refs), m.MAX_CHUNKS)
            return sum(self._download(refs[start : start + m.MAX_CHUNKS]) for start in steps)
        finally:
            self._lock.release()

    def _download(self, refs: Sequence[ChunkRef]) -> int:
        head, reply = self._exchange(m.Download(b"".join(ref.key for ref in refs)), exact=True)
        sizes = reply.image_bytes if isinstance(reply, m.Data) else ()
        self._is_usable = False  # until the end of the data has come
        if len(sizes) != len(refs) or sum(sizes) != head.data_bytes or any(map(_is_odd, refs, sizes)):
            msg = f"the store at {self.address} sends other chunks than were asked for: {type(reply).__name__} {sizes}"
            raise ProtocolError(msg)
        views = [self._view_of(ref) for ref in refs]
        try:
            for view, size in zip(views, sizes, strict=True):
                if size:
                    self._stream.fill(view)
                else:
                    wipe_header(view)
            _, end = self._receive(exact=True)
        except OSError as error:
            raise self._lost(error) from error
        self._is_usable = True
        if not isinstance(end, m.Done):
            for view in views:
                wipe_header(view)
        return head.data_bytes

    def _view_of(self, ref: ChunkRef) -> memoryview:
        # Where to receive it. Its lease may have run out, and its slot be one that we are writing: that stays ours.
        end = ref.offset + ref.image_bytes
        if any(offset < end and ref.offset < offset + num_bytes for offset, num_bytes in self._unsent()):
            return memoryview(bytearray(ref.image_bytes))
        return self.pool.take(ref.offset, ref.image_bytes)

    def _answer(self, request: m.AnyRequest) -> m.AnyReply:
        if isinstance(request, m.Commit):
            return self._commit(request)
        reply = super()._answer(request)
        if isinstance(request, m.Reserve) and isinstance(reply, m.Reserved):
            self._remember(request, reply)
        elif isinstance(request, m.Abort):
            self._written.pop(request.lease_id, None)
        return reply

    def _seconds_for(self, num_bytes: int) -> float:
        return self._timeout_seconds + num_bytes / _SLOWEST_BYTES_PER_SECOND

    def _unsent(self) -> Iterator[Slot]:
        for slots in self._written.values():
            yield from slots.values()

    def _remember(self, request: m.Reserve, reply: m.Reserved) -> None:
        # Where the bytes of a lease are to be sent from.
        self.pool.trim(self._unsent())
        slots = {}
        for chunk, offset in zip(request.chunks, reply.offsets, strict=True):
            if offset >= 0:
                wipe_header(self.pool.take(offset, chunk.image_bytes))  # as the store does: nothing is written yet
                slots[chunk.key] = (offset, chunk.image_bytes)
        if reply.lease_id:
            self._written[reply.lease_id] = slots

    def _commit(self, request: m.Commit) -> m.AnyReply:
        slots = self._written.pop(request.lease_id, {})
        named = slots.keys() if request.keys is None else set(request.keys)
        data = tuple(self.pool.view(*slot) for key, slot in slots.items() if key in named)
        self._allow(self._seconds_for(sum(map(len, data))))
        return self._exchange(request, data=data)[1]

    def _open_pool(self, welcome: m.Welcome) -> PoolView:
        self._written: dict[int, dict[bytes, Slot]] = {}  # by write lease, in the order of its reserve
        if not 0 < welcome.pool_bytes <= _MAX_POOL_BYTES or welcome.pool_bytes % ALIGNMENT_BYTES:
            msg = f"the store at {self.address} says that its pool has {welcome.pool_bytes} bytes"
            raise ProtocolError(msg)
        try:
            return MirrorPool(welcome.pool_bytes)
        except (OSError, ValueError, OverflowError) as error:
            msg = f"no addresses for the pool of the store at {self.address}: {error}"
            raise Unavailable(msg) from error


def _granules(offset: int, num_bytes: int) -> range:
    return range(offset // _GRANULE_BYTES, -(-(offset + num_bytes) // _GRANULE_BYTES))


def _is_odd(ref: ChunkRef, image_bytes: int) -> bool:
    return image_bytes not in (0, ref.image_bytes) or len(ref.key) != KEY_BYTES
