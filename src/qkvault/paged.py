"""PagedConnector: copies between an engine's paged tensors and the payloads of chunks. One call moves a whole request.

On the CPU it is plain copies of runs of pages, by as many threads as torch uses; on another torch device one gather or
scatter on the device and one copy between device and host a chunk. It starts no thread, leaves torch's settings alone,
and knows no keys and no store.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from qkvault.errors import LayoutMismatch
from qkvault.layout import ChunkLayout
from qkvault.logical import TORCH_DTYPES, convert

_WIDE_BYTES: Final = 8  # pages are moved as 8-byte elements on a device, where they are aligned
_SCATTERED: Final = 2  # pages a run, below which one indexed copy beats a copy for each run
_THREADS_BYTES: Final = 1 << 17  # of a run, from which torch's threads are worth the 5 us of a call
_Bytes: TypeAlias = npt.NDArray[np.uint8]


class PageRun(NamedTuple):
    """One chunk's payload, and the blocks of the engine that some of its blocks are copied from or to."""

    payload: memoryview  # the whole payload, writable when it is filled; bytes beyond its blocks are left alone
    stored_blocks: int  # blocks of the payload, in its own layout
    first_block: int  # the first block of the payload that is meant, in blocks of the engine
    block_ids: Sequence[int]  # the engine's block for it and for each block after it


class _Plane(NamedTuple):
    """Where the pages of one plane lie. Equal planes at one distance are copied together."""

    storage: int  # address of the storage
    offset: int  # bytes from there to the page of block 0
    block_stride: int  # bytes from page to page
    tensor: int  # which tensor it is part of


class _Move(NamedTuple):
    """A run of pages that lie together on both sides."""

    row: int  # the first page in the payload, counted in a plane
    page: int  # the first page in the engine
    num_pages: int


_Moves: TypeAlias = Sequence[_Move]


class PagedConnector:
    """Moves pages of one group of equal layers.

    ``tensors`` are the engine's, one a layer in order, with any strides: ``[blocks, heads, tokens, 2 * head_size]`` in
    any order of the axes, K and V apart on an axis of 2, or ``[blocks, tokens, width]`` for a latent. Where ``layout``
    has B before L they are views of one storage. They are kept, not copied. ``layout`` is that of the payloads filled;
    its block size is that of the *tensors*: an engine that cuts each of its blocks into several for its kernels says
    into how many by ``kernel_blocks_per_block``, and block ids and first blocks still count the engine's blocks.

    Layers that differ in shape need a connector for each group of equal ones. Not thread-safe.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        layout: ChunkLayout,
        *,
        kernel_blocks_per_block: int = 1,
        force_device_path: bool = False,
    ) -> None:
        """Find the pages. ``force_device_path`` does on the CPU what is otherwise done on a device, for tests.

        Raises LayoutMismatch, saying which tensor and what of it, unless the tensors' strides are those of ``layout``.
        """
        planes, num_pages = _find_planes(tensors, layout)
        if kernel_blocks_per_block < 1 or num_pages % kernel_blocks_per_block:
            msg = f"{num_pages} pages a layer are not blocks of {kernel_blocks_per_block} each"
            raise LayoutMismatch(msg)
        self.layout = layout
        self.num_blocks = num_pages // kernel_blocks_per_block
        self.block_size = layout.block_size * kernel_blocks_per_block  # tokens of an engine's block
        self.device: torch.device = tensors[0].device
        self._ratio = kernel_blocks_per_block
        self._num_planes = layout.num_planes
        self._page_bytes = layout.page_bytes
        self._on_device = force_device_path or self.device.type != "cpu"
        unit_bytes = _unit_bytes(planes, layout) if self._on_device else 1
        # [planes of the stack, pages, units of a page]; all stacks together are the planes in the payload's order
        self._stacks = [_stack(planes[of], tensors, layout, num_pages, unit_bytes) for of in _equal_steps(planes)]
        self._arrays: list[_Bytes] = [] if self._on_device else [stack.numpy() for stack in self._stacks]
        self._scratch = bytearray()  # a converted run

    def batched_from_gpu(self, runs: Sequence[PageRun]) -> torch.Event | None:
        """Fill blocks of payloads, all in this connector's layout, from the engine's pages (rows 3, 12).

        One call for all chunks of a request; no runs, no work. Returns None when the bytes are there, or on a device
        an event of the current stream after which they are; until then pages and payloads must be left alone. All
        calls are to be made on one stream. Each byte is copied once, and no host memory is allocated.

        Raises ValueError, before anything is copied, for a block that the engine or a payload does not have.
        """
        if any(run.payload.readonly for run in runs):
            msg = "a payload is read-only"
            raise ValueError(msg)
        return self._copy(runs, self._moves(runs, self.layout), to_device=False)

    def batched_to_gpu(self, runs: Sequence[PageRun], source: ChunkLayout | None = None) -> torch.Event | None:
        """Fill the engine's pages from blocks of payloads in the layout ``source`` (this connector's if None; row 47).

        As ``batched_from_gpu``, but that payloads of other pages (another order, block size, or a K that is not
        transposed alike) are converted on the host, at a third of the speed, through a scratch of the size of a run,
        which is kept. Only the pages of the blocks in ``block_ids`` are written. Raises LayoutMismatch, before anything
        is copied, if ``source`` holds other tensors, or needs converting while one side is opaque; ValueError as above.
        """
        if source is None or source.has_same_pages(self.layout):
            return self._copy(runs, self._moves(runs, self.layout), to_device=True)
        event = None
        for run, moves in zip(runs, self._moves(runs, source), strict=True):
            if moves:
                event = self._copy([self._converted(run, source)], [moves], to_device=True)
        return event

    def _moves(self, runs: Sequence[PageRun], layout: ChunkLayout) -> list[_Moves]:
        """Check ``runs``, whose payloads are in ``layout``, and merge blocks that follow each other in the engine."""
        block_bytes = layout.block_bytes
        return [self._moves_of(run, layout, block_bytes) for run in runs]

    def _moves_of(self, run: PageRun, layout: ChunkLayout, block_bytes: int) -> _Moves:
        ids, ratio = run.block_ids, self._ratio
        wanted_tokens = (run.first_block + len(ids)) * self.block_size
        stored_tokens = run.stored_blocks * layout.block_size
        if run.first_block < 0 or wanted_tokens > stored_tokens or len(run.payload) < run.stored_blocks * block_bytes:
            msg = (
                f"blocks {run.first_block} to {run.first_block + len(ids)} of {self.block_size} tokens are not in "
                f"a payload of {run.stored_blocks} blocks of {layout.block_size} tokens and {len(run.payload)} bytes"
            )
            raise ValueError(msg)
        if not len(ids):
            return []
        if not 0 <= min(ids) <= max(ids) < self.num_blocks:
            msg = f"block ids {min(ids)} to {max(ids)}: the engine has blocks 0 to {self.num_blocks - 1}"
            raise ValueError(msg)
        first = run.first_block if layout is self.layout else 0  # a converted payload starts where the run does
        starts = [at for at in range(len(ids)) if at == 0 or ids[at] != ids[at - 1] + 1]
        stops = [*starts[1:], len(ids)]
        return [
            _Move((first + start) * ratio, ids[start] * ratio, (stop - start) * ratio)
            for start, stop in zip(starts, stops, strict=True)
        ]

    def _converted(self, run: PageRun, source: ChunkLayout) -> PageRun:
        num_blocks = len(run.block_ids) * self._ratio
        num_bytes = num_blocks * self.layout.block_bytes
        if len(self._scratch) < num_bytes:
            self._scratch = bytearray(num_bytes)
        out = memoryview(self._scratch)[:num_bytes]
        start = run.first_block * self.block_size
        convert(run.payload, source, stored_blocks=run.stored_blocks, start=start, out=out, out_layout=self.layout)
        return PageRun(out, num_blocks, 0, run.block_ids)

    def _rows(self, run: PageRun) -> _Bytes:
        """The payload as ``[planes, pages, page_bytes]``."""
        num_bytes = self._num_planes * run.stored_blocks * self._page_bytes
        return np.frombuffer(run.payload, np.uint8, num_bytes).reshape(self._num_planes, -1, self._page_bytes)

    def _copy(self, runs: Sequence[PageRun], moves: Sequence[_Moves], *, to_device: bool) -> torch.Event | None:
        if self._on_device:
            return self._device_copy(runs, moves, to_device=to_device)
        for run, of_run in zip(runs, moves, strict=True):
            if of_run:
                self._host_copy(run, of_run, to_pages=to_device)
        return None

    def _host_copy(self, run: PageRun, moves: _Moves, *, to_pages: bool) -> None:
        rows, stop = self._rows(run), 0
        num_pages = sum(move.num_pages for move in moves)
        is_scattered = len(moves) * _SCATTERED > num_pages
        ids = np.concatenate([np.arange(move.page, move.page + move.num_pages) for move in moves])
        wanted = rows[:, moves[0].row : moves[0].row + num_pages]
        may_use_threads = torch.get_num_threads() > 1 and rows.flags.writeable  # torch takes no read-only memory
        for stack, pages in zip(self._stacks, self._arrays, strict=True):
            start, stop = stop, stop + len(pages)
            if may_use_threads and len(pages) * num_pages * self._page_bytes >= _THREADS_BYTES * len(moves):
                _copy_by_threads(stack, torch.from_numpy(rows[start:stop]), moves, to_pages=to_pages)
            elif is_scattered:
                _copy_scattered(pages, wanted[start:stop], ids, to_pages=to_pages)
            else:
                _copy_runs(pages, rows[start:stop], moves, to_pages=to_pages)

    def _device_copy(self, runs: Sequence[PageRun], moves: Sequence[_Moves], *, to_device: bool) -> torch.Event | None:
        """Through a staging tensor on the device, a run at a time; the stream's order makes one staging enough."""
        pages = [page for of_run in moves for move in of_run for page in range(move.page, move.page + move.num_pages)]
        if not pages:
            return None
        ids = torch.tensor(pages).to(self.device, non_blocking=True)  # of all runs: one upload
        counts = [sum(move.num_pages for move in of_run) for of_run in moves]
        unit = self._stacks[0].dtype
        num_planes, page_units = self._num_planes, self._stacks[0].shape[2]
        staging = torch.empty(max(counts) * num_planes * page_units, dtype=unit, device=self.device)
        for run, of_run, run_ids in zip(runs, moves, ids.split(counts), strict=True):
            if not of_run:
                continue
            count = len(run_ids)
            staged = staging[: num_planes * count * page_units].view(num_planes, count, page_units)
            rows = self._rows(run)[:, of_run[0].row : of_run[0].row + count]
            parts = staged.split([len(stack) for stack in self._stacks])
            if to_device:
                _copy_rows(staged, rows, to_device=True)
                for stack, part in zip(self._stacks, parts, strict=True):
                    stack.index_copy_(1, run_ids, part)
            else:
                for stack, part in zip(self._stacks, parts, strict=True):
                    torch.index_select(stack, 1, run_ids, out=part)
                _copy_rows(staged, rows, to_device=False)
        return mark(self.device)


def mark(device: torch.device) -> torch.Event | None:
    """An event after which all is done that the current stream of ``device`` has by now; None for the CPU: it is."""
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record()
    return event


def _copy_by_threads(stack: torch.Tensor, rows: torch.Tensor, moves: _Moves, *, to_pages: bool) -> None:
    """Copy between ``[planes, pages, page_bytes]`` of engine and payload, a run of pages at a time."""
    for row, page, num_pages in moves:
        sides = rows[:, row : row + num_pages], stack[:, page : page + num_pages]
        sides[to_pages].copy_(sides[not to_pages])


def _copy_runs(pages: _Bytes, rows: _Bytes, moves: _Moves, *, to_pages: bool) -> None:
    """The same by one thread, whose calls cost a tenth."""
    for row, page, num_pages in moves:
        sides = rows[:, row : row + num_pages], pages[:, page : page + num_pages]
        np.copyto(sides[to_pages], sides[not to_pages])


def _copy_scattered(pages: _Bytes, rows: _Bytes, ids: npt.NDArray[np.intp], *, to_pages: bool) -> None:
    """The same with one call for the pages ``ids``, which is faster where few of them lie together."""
    for plane, of_plane in zip(pages, rows, strict=True):
        if to_pages:
            plane[ids] = of_plane
        elif plane.flags.c_contiguous:
            np.take(plane, ids, axis=0, out=of_plane, mode="clip")  # the other modes copy twice, as do gaps
        else:
            for row, page in zip(of_plane, ids, strict=True):
                row[:] = plane[page]


def _tensor(rows: _Bytes) -> torch.Tensor:
    return torch.from_numpy(rows if rows.flags.writeable else rows.copy())  # torch takes no read-only memory


def _copy_rows(staged: torch.Tensor, rows: _Bytes, *, to_device: bool) -> None:
    """Copy ``[planes, pages, units]`` on the device to or from host bytes, in pieces contiguous on both sides."""
    staged = staged.view(torch.uint8)
    whole = rows.flags.c_contiguous
    for device_piece, host_piece in [(staged, rows)] if whole else zip(staged, rows, strict=True):
        if to_device:
            device_piece.copy_(_tensor(host_piece), non_blocking=host_piece.flags.writeable)
        else:
            torch.from_numpy(host_piece).copy_(device_piece, non_blocking=True)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _equal_steps(planes: Sequence[_Plane]) -> list[slice]:
    """Cut ``planes`` into the longest runs that one strided array can hold."""
    cuts, step = [0], 0
    for at in range(1, len(planes)):
        here, last = planes[at], planes[at - 1]
        distance = here.offset - last.offset
        is_alike = (here.storage, here.block_stride) == (last.storage, last.block_stride) and distance > 0
        if not is_alike or (at - cuts[-1] > 1 and distance != step):
            cuts.append(at)
        step = distance
    return [slice(start, stop) for start, stop in zip(cuts, [*cuts[1:], len(planes)], strict=True)]


def _unit_bytes(planes: Sequence[_Plane], layout: ChunkLayout) -> int:
    numbers = [layout.page_bytes, *(number for plane in planes for number in (plane.offset, plane.block_stride))]
    return 1 if any(number % _WIDE_BYTES for number in numbers) else _WIDE_BYTES


def _stack(
    planes: Sequence[_Plane], tensors: Sequence[torch.Tensor], layout: ChunkLayout, num_pages: int, unit_bytes: int
) -> torch.Tensor:
    """Planes at one distance as one view of the engine's memory: ``[planes, pages, units of a page]``."""
    tensor = tensors[planes[0].tensor]
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    if unit_bytes == _WIDE_BYTES:
        memory = memory[: len(memory) // _WIDE_BYTES * _WIDE_BYTES].view(torch.int64)
    step = planes[1].offset - planes[0].offset if len(planes) > 1 else 0
    page_units = layout.page_bytes // unit_bytes
    strides = (step // unit_bytes, planes[0].block_stride // unit_bytes, 1)
    return memory.as_strided((len(planes), num_pages, page_units), strides, planes[0].offset // unit_bytes)


def _find_planes(tensors: Sequence[torch.Tensor], layout: ChunkLayout) -> tuple[list[_Plane], int]:
    """The planes of ``tensors`` in the payload's order, and the pages of each. Raises LayoutMismatch."""
    if len(tensors) != layout.num_layers:
        msg = f"{len(tensors)} tensors for {layout.num_layers} layers"
        raise LayoutMismatch(msg)
    before, after = layout.order.split("B")
    sizes = {"H": layout.num_heads, "N": layout.block_size, "P": layout.num_parts, "D": layout.head_size}
    strides = _axis_strides(tensors[0], layout, sizes, 0)
    expected = 1  # elements from one index of an axis to the next, inside a page
    layer_stride = 0
    for axis in reversed(after):
        if axis == "L":
            layer_stride, expected = expected, expected * layout.num_layers
            continue
        if sizes[axis] > 1 and strides[axis] != expected:
            msg = f"tensor 0: axis {axis} has stride {strides[axis]}, a whole page of {layout.order} needs {expected}"
            raise LayoutMismatch(msg)
        expected *= sizes[axis]
    num_pages = tensors[0].numel() // math.prod(sizes.values())
    if num_pages > 1 and strides["B"] < expected:
        msg = f"tensor 0: pages of {expected} elements lie {strides['B']} apart, so they are no pages of {layout.order}"
        raise LayoutMismatch(msg)
    for at, tensor in enumerate(tensors[1:], 1):
        same = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if same != (tensors[0].shape, tensors[0].stride(), tensors[0].dtype, tensors[0].device):
            msg = f"tensor {at} has another shape, strides, dtype or device than tensor 0"
            raise LayoutMismatch(msg)
        apart = tensor.data_ptr() - tensors[0].data_ptr()
        if layer_stride and (
            _storage(tensor) != _storage(tensors[0]) or apart != at * layer_stride * tensor.element_size()
        ):
            msg = f"tensor {at} is {apart} bytes from tensor 0; order {layout.order} needs layers inside one page"
            raise LayoutMismatch(msg)
    width = layout.element_bytes
    planes = []
    for index in product(*(range(layout.num_layers if axis == "L" else sizes[axis]) for axis in before)):
        place = dict(zip(before, index, strict=True))
        tensor_index = place.pop("L", 0)
        tensor = tensors[tensor_index]
        elements = tensor.storage_offset() + sum(strides[axis] * position for axis, position in place.items())
        planes.append(_Plane(_storage(tensor), elements * width, strides["B"] * width, tensor_index))
    return planes, num_pages


def _axis_strides(tensor: torch.Tensor, layout: ChunkLayout, sizes: dict[str, int], at: int) -> dict[str, int]:
    """Elements from one index to the next, for each axis but L. Axes of one index have any stride.

    A dimension of the tensor is one axis, or several that follow each other in the order. Only a fused K and V may lie:
    ``[tokens, 2 * head_size]`` whose bytes are ``[2, tokens, head_size]``, as vLLM's CPU kernels have it.
    """
    wanted = math.prod(sizes.values())
    is_raw = tensor.element_size() == layout.element_bytes and tensor.dtype == torch.uint8
    if (tensor.dtype != TORCH_DTYPES[layout.dtype] and not is_raw) or not tensor.numel() or tensor.numel() % wanted:
        msg = f"tensor {at}: {tensor.dtype} {list(tensor.shape)} is not pages of {wanted} {layout.dtype} a layer"
        raise LayoutMismatch(msg)
    sizes = {**sizes, "B": tensor.numel() // wanted}
    strides = dict.fromkeys(sizes, 0)
    axes = [axis for axis in layout.order if axis != "L" and sizes[axis] > 1]
    dims = sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True)
    dims = [(stride, size) for stride, size in dims if size > 1]
    while dims:
        stride, size = dims.pop(0)
        width = sizes["P"] * sizes["D"]
        if axes[:3] == ["P", "N", "D"] and [(stride, size), *dims] == [(width, sizes["N"]), (1, width)]:
            dims, group = [], axes[:3]
            stride, size = 1, width * sizes["N"]
        else:
            group = axes[:1]
            while len(group) < len(axes) and math.prod(sizes[axis] for axis in group) < size:
                group = axes[: len(group) + 1]
        del axes[: len(group)]
        if math.prod(sizes[axis] for axis in group) != size:
            shape, steps = list(tensor.shape), list(tensor.stride())
            msg = f"tensor {at}: shape {shape} and strides {steps} do not fit {layout.order} with {sizes}"
            raise LayoutMismatch(msg)
        for axis in reversed(group):
            strides[axis] = stride
            stride *= sizes[axis]
    return strides
