"""What LMCache lacks for tensors on the CPU: the class that copies between an engine's pages and its own memory.

Written against its public interface. It copies whole pages, as they are, with numpy's two fastest calls: the same that
our own connector does, so that a difference is not one of copying. LMCache's chunks must hold whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface


class PageCopies(GPUConnectorInterface):  # type: ignore[misc]  # untyped
    """Pages of tensors ``[blocks, ...]``, one a layer. Each call names the tensors and the blocks.

    ``kvcaches`` are the tensors; ``blocks`` the prompt's block table, or ``slot_mapping`` its slots (block * size +
    position), as vLLM's adapter has them.
    """

    def __init__(self, block_size: int = 0) -> None:
        """``block_size`` in tokens; 0 where vLLM tells it by the shape of its tensors."""
        self._block_size = block_size
        self._pages: list[npt.NDArray[np.uint8]] = []
        self._known: Any = None  # the list of tensors that the pages are of

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:  # seam: LMCache's signature
        ids = self._blocks(start, end, kwargs)
        for pages, rows in zip(self._pages, self._rows(memory_obj, len(ids)), strict=True):
            np.take(pages, ids, axis=0, out=rows, mode="clip")

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:  # seam: LMCache's signature
        ids = self._blocks(start, end, kwargs)
        for pages, rows in zip(self._pages, self._rows(memory_obj, len(ids)), strict=True):
            pages[ids] = rows

    def batched_from_gpu(
        self, memory_objs: Sequence[Any], starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> None:  # seam: LMCache's signature
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def batched_to_gpu(
        self,
        memory_objs: Sequence[Any] | None = None,
        starts: Sequence[int] | None = None,
        ends: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:  # seam: LMCache's signature
        for memory_obj, start, end in zip(memory_objs or (), starts or (), ends or (), strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Only asked for by modes that are not used here."""
        raise NotImplementedError

    def _blocks(self, start: int, end: int, kwargs: dict[str, Any]) -> npt.NDArray[np.int64]:
        tensors = kwargs["kvcaches"]
        if tensors is not self._known:
            self._known = tensors
            self._pages = [_pages_of(tensor) for tensor in tensors]
            self._block_size = self._block_size or int(tensors[0].shape[2])  # vLLM: [blocks, heads, tokens, 2 * size]
        size = self._block_size
        if start % size or end % size:
            msg = f"tokens {start} to {end} are not whole blocks of {size}"
            raise ValueError(msg)
        if "blocks" in kwargs:
            table: npt.NDArray[np.int64] = kwargs["blocks"]
            return table[start // size : end // size]
        slots: npt.NDArray[np.int64] = kwargs["slot_mapping"][start:end:size].cpu().numpy()
        return slots // size

    def _rows(self, memory_obj: Any, count: int) -> npt.NDArray[np.uint8]:
        flat = memory_obj.tensor.view(torch.uint8).numpy().reshape(-1)  # its memory, whatever it takes it for
        page_bytes = self._pages[0].shape[1]
        rows: npt.NDArray[np.uint8] = flat[: len(self._pages) * count * page_bytes].reshape(
            len(self._pages), count, page_bytes
        )
        return rows


def _pages_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    # [blocks, bytes of a page], sharing memory: a page must lie in one piece
    if not tensor[0].is_contiguous():
        msg = f"pages of {list(tensor.shape)} with strides {tensor.stride()} do not lie in one piece"
        raise ValueError(msg)
    words = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).numpy()
    pages: npt.NDArray[np.uint8] = words.reshape(len(words), -1).view(np.uint8)
    return pages
