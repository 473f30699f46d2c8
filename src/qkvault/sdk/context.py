"""A session of a user: what is stored of a prompt, by its token ids, as tensors with all ranks in one.

Knows no engine: chunks are read and written through the store's pool, as an engine's workers do.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Final, NamedTuple

import torch

from qkvault import embedded
from qkvault.client import StoreClient
from qkvault.config import Config, load
from qkvault.connecting import open_client
from qkvault.image import Header, header_bytes_for, sketch_of, write_header
from qkvault.keys import RequestIdentity
from qkvault.logical import TORCH_DTYPES, write_logical
from qkvault.prefix import Prefix
from qkvault.reports import spaces_of
from qkvault.sdk.geometry import Geometry, choose
from qkvault.sdk.reading import Reader
from qkvault.sdk.tensors import CacheTensors, Span, Written
from qkvault.spaces import SpaceDescription
from qkvault.tokens import Tokens
from qkvault.transfer import SaveItem
from qkvault.types import SPACE_BYTES, CacheKind, NewChunk, Outcome
from qkvault.wire.messages import MAX_CHUNKS, Instance, Located

_NOBODY: Final = RequestIdentity()
_PART_BYTES: Final = 128 << 20  # that are reserved at a time
_NAP_SECONDS: Final = 0.005  # between two looks at what is still being read by others
_MAX_DESCRIBED: Final = 16  # spaces in one message
_WAITS: Final = "busy"


def connect(
    where: str | Config | None = None,
    *,
    kind: CacheKind | str = CacheKind.KV,
    model: str | None = None,
    fields: Mapping[str, object] | None = None,
    spaces: Sequence[SpaceDescription] = (),
) -> Context:
    """A session with the store at an address (None: where settings say), or with the one of a Config in this process.

    The model is the only one that the store has been told of, or is chosen by its name, and by ``fields`` of its
    KeySpace where a name is not enough. ``spaces`` tells the store of one that it does not know: one space a rank.
    Raises ValueError for a kind or field that there is not, ConfigError if no single model fits, LayoutMismatch if its
    pages cannot be seen into, and as ``open_client``.
    """
    kind = CacheKind(kind)
    config = where if isinstance(where, Config) else load(cli={"address": where}).config
    if isinstance(where, Config) and config.address is None:
        store = embedded.acquire(config)
        client, end = store.connect("sdk"), partial(embedded.release, store)
    else:
        client, end = open_client(config, "sdk"), partial(_nothing)
    try:
        for start in range(0, len(spaces), _MAX_DESCRIBED):
            name, described = spaces[0].space.model_name, [each.encode() for each in spaces[start:][:_MAX_DESCRIBED]]
            client.register(Instance(f"sdk-{os.getpid()}", "sdk", name, pid=os.getpid(), spaces=tuple(described)))
        geometry = choose([*spaces, *spaces_of(client.status())], kind, model, fields)
        is_shared = config.is_shared or not isinstance(where, Config)
        return Context(client, geometry, timeout_seconds=config.load_deadline_seconds, shared=is_shared, end=end)
    except BaseException:
        client.close()
        end()
        raise


def _nothing() -> None:
    """What ends with a session whose store is a server's."""


class _Item(NamedTuple):
    chunk: SaveItem  # in the space of the first rank
    row: int  # of the tensors, where it begins


class Context:
    """One session. Calls are to come from one thread at a time. Every one raises Unavailable without a store.

    Those that delete or overwrite raise Refused where a store of TCP has no token.
    """

    def __init__(
        self,
        client: StoreClient,
        geometry: Geometry,
        *,
        timeout_seconds: float = 10.0,
        shared: bool = True,
        end: Callable[[], None] = _nothing,
    ) -> None:
        """The context owns ``client``. ``timeout_seconds`` is how long a call waits for a lower tier or for readers.

        ``shared``: others than this process make the same keys.
        """
        self.geometry, self.timeout_seconds = geometry, timeout_seconds
        self.kind, self.chunk_size = geometry.layout.kind, geometry.layout.chunk_size
        self._client, self._end, self._is_shared = client, end, shared
        self._descriptions = [SpaceDescription(space, geometry.layout).encode() for space in geometry.spaces]
        self._header_bytes = header_bytes_for(self.chunk_size, max(map(len, self._descriptions)))

    def lookup(self, tokens: Tokens, *, identity: RequestIdentity = _NOBODY) -> int:
        """How many leading tokens are stored, of all ranks. What lies in a lower tier begins to come up."""
        found = self._prefix(tokens, identity).find_each(self._client, self.geometry.spaces)
        self._release(found)
        return min(each.ready.num_tokens + sum(each.pending_tokens.values()) for each in found)

    def retrieve(
        self,
        tokens: Tokens,
        *,
        layers: Sequence[int] | None = None,
        span: tuple[int, int] | None = None,
        past_holes: bool | None = None,
        identity: RequestIdentity = _NOBODY,
    ) -> CacheTensors | None:
        """What is stored of ``tokens``, or of its ``span``, for ``layers`` (None: all); None if it is nothing.

        Without ``past_holes`` it ends where the first token is missing; queries, which an engine that has hit a prefix
        does not compute, go on behind (None: queries do, K and V do not). Waits for lower tiers as long as
        ``timeout_seconds``; what is not here then counts as missing. Raises ValueError for a layer that there is not.
        """
        known = self.geometry.layers
        chosen = known if layers is None else tuple(layers)
        if not set(chosen) <= set(known):
            msg = f"layers {list(chosen)} are wanted, there are {list(known)}"
            raise ValueError(msg)
        start, stop = (0, len(tokens)) if span is None else (max(0, span[0]), min(span[1], len(tokens)))
        if start >= stop or not chosen:
            return None
        deadline = time.monotonic() + self.timeout_seconds
        reader = Reader(self._client, self.geometry, Span(start, stop), layers=chosen, deadline=deadline)
        prefix = self._prefix(tokens[: -(-stop // self.chunk_size) * self.chunk_size], identity)
        goes_on = self.kind is CacheKind.QUERY if past_holes is None else past_holes
        at = start // self.chunk_size
        while at * self.chunk_size < stop:
            found = prefix.find_each(self._client, self.geometry.spaces, start_chunk=at)
            try:
                num_tokens = reader.read(found, at)
            finally:
                self._release(found)
            if not goes_on:
                break
            at += max(1, -(-num_tokens // self.chunk_size))
        return reader.result()

    def store(
        self,
        tensors: CacheTensors | Sequence[torch.Tensor] | torch.Tensor,
        tokens: Tokens,
        *,
        overwrite: bool = False,
        identity: RequestIdentity = _NOBODY,
    ) -> Written:
        """Store what ``tensors`` has of ``tokens``: whole chunks, and of one that is not whole its first blocks.

        ``tensors`` is what ``retrieve`` gives, or its parts, or the ``flat`` form, for all layers. What is there stays
        as it was, unless ``overwrite``: then it goes, with all that hangs on it, before the new is written. Reasons
        for what is rejected: ``hole`` (behind a missing token of its chunk), ``block`` (less than one), ``busy`` (the
        old is being read for too long), ``lost`` (others got the slots), and those of ``Outcome``. Raises ValueError
        for tensors of another shape or dtype than the model's, or of tokens that there are not.
        """
        given = self._checked(tensors, len(tokens))
        prefix = self._prefix(tokens, identity)
        items, rejected = self._items(prefix, given)
        if overwrite and items:
            first = int(given.positions[items[0].row]) // self.chunk_size
            prefix.forget(self._client, self.geometry.spaces, start_chunk=first)
        counts: Counter[str] = Counter()
        size = len(self.geometry.spaces) * (self._header_bytes + self.geometry.layout.payload_bytes(self.chunk_size))
        step = max(1, min(_PART_BYTES // size, MAX_CHUNKS // len(self.geometry.spaces)))
        deadline = time.monotonic() + self.timeout_seconds
        for start in range(0, len(items), step):
            part = items[start : start + step]
            while part:
                outcomes = self._write(part, given)
                waits = overwrite and time.monotonic() < deadline
                left = [item for item, outcome in zip(part, outcomes, strict=True) if waits and outcome == _WAITS]
                for item, outcome in zip(part, outcomes, strict=True):
                    if item not in left:
                        counts[outcome] += item.chunk.num_tokens
                part = left
                if part:
                    self._client.wait_change(_NAP_SECONDS)
        written, present = counts.pop("written", 0), counts.pop(Outcome.PRESENT.value, 0)
        return Written(written, present, dict(counts + rejected))

    def delete(self, tokens: Tokens, *, start: int = 0, identity: RequestIdentity = _NOBODY) -> int:
        """Forget the prompt from the chunk on that holds token ``start``, and all prompts that go on from there.

        In every medium, of this kind of tensor. Readers finish first. Returns how many chunks are to go.
        """
        prefix = self._prefix(tokens, identity)
        first = min(max(0, start), prefix.num_tokens) // self.chunk_size
        return prefix.forget(self._client, self.geometry.spaces, start_chunk=first)

    def close(self) -> None:
        """End the session. Idempotent."""
        self._client.close()
        end, self._end = self._end, _nothing
        end()

    def __enter__(self) -> Context:  # noqa: PYI034  # Self is not in Python 3.10
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _prefix(self, tokens: Tokens, identity: RequestIdentity) -> Prefix:
        return Prefix(self.geometry.spaces[0], identity, tokens, shared=self._is_shared)

    def _release(self, found: Sequence[Located]) -> None:
        self._client.release(*(each.lease_id for each in found if each.lease_id))

    def _checked(self, tensors: CacheTensors | Sequence[torch.Tensor] | torch.Tensor, num_tokens: int) -> CacheTensors:
        """``tensors`` in the form that ``retrieve`` gives. Raises ValueError unless they are this model's."""
        layout = self.geometry.layout
        if isinstance(tensors, torch.Tensor):
            width = self.geometry.num_heads * layout.head_size
            if tensors.ndim != 4 or tensors.shape[-1] != width:  # noqa: PLR2004  # as ``CacheTensors.flat`` gives it
                msg = f"[parts, layers, tokens, {width}] wanted, got {list(tensors.shape)}"
                raise ValueError(msg)
            tensors = tensors.unflatten(-1, (self.geometry.num_heads, layout.head_size)).unbind(0)
        layers = self.geometry.layers
        given = (
            tensors
            if isinstance(tensors, CacheTensors)
            else replace(CacheTensors.of(self.kind, tensors), layers=layers)
        )
        dtype = TORCH_DTYPES[layout.dtype]
        num_layers, num_heads, head_size = self.geometry.shape
        shape = (num_layers, given.num_tokens, num_heads, head_size)
        is_right = given.kind is self.kind and given.layers == layers
        is_right &= len(given.parts) == layout.num_parts
        if not is_right or any(part.shape != shape or part.dtype != dtype for part in given.parts):
            got = [(tuple(part.shape), str(part.dtype)) for part in given.parts]
            what = f"{layout.num_parts} parts of {self.kind.value} {dtype} {list(shape)} of layers {list(layers)}"
            msg = f"{what} wanted, got {got} of {list(given.layers)}"
            raise ValueError(msg)
        if given.num_tokens and int(given.positions[-1]) >= num_tokens:
            msg = f"the tensors go to token {int(given.positions[-1])}, there are {num_tokens}"
            raise ValueError(msg)
        return given

    def _items(self, prefix: Prefix, given: CacheTensors) -> tuple[list[_Item], Counter[str]]:
        """The chunks that can be stored, and how many tokens cannot, by reason."""
        size, block_size = self.chunk_size, self.geometry.layout.block_size
        table = range(-(-prefix.num_tokens // block_size))
        firsts = torch.arange(0, prefix.num_tokens + size, size)
        bounds = torch.searchsorted(given.positions, firsts).tolist()
        items, rejected = [], Counter[str]()
        for number, (row, end) in enumerate(pairwise(bounds)):
            expected = torch.arange(number * size, number * size + end - row)
            num_here = int((given.positions[row:end] == expected).cumprod(0).sum())
            num_tokens = num_here // block_size * block_size
            if num_tokens:
                first = number * size
                (chunk,) = prefix.save_items(first, first + num_tokens, table, block_size)
                items.append(_Item(chunk, row))
            rejected["hole"] += end - row - num_here
            rejected["block"] += num_here - num_tokens
        return items, rejected

    def _write(self, items: Sequence[_Item], given: CacheTensors) -> list[str]:
        """Store ``items``, each in the spaces of all ranks. Returns what became of each."""
        layout, ranks = self.geometry.layout, range(len(self.geometry.spaces))
        headers = [self._header_of(item.chunk, rank) for item in items for rank in ranks]
        new = [
            NewChunk(head.key, head.parent, sketch_of(head.tokens), head.num_tokens, head.image_bytes)
            for head in headers
        ]
        reserved = self._client.reserve(new, self.kind)
        try:
            for at, (head, offset) in enumerate(zip(headers, reserved.offsets, strict=True)):
                if offset < 0:
                    continue
                row, heads = items[at // len(ranks)].row, at % len(ranks) * layout.num_heads
                image = self._client.pool.view(offset, head.image_bytes)
                rows, columns = slice(row, row + head.num_tokens), slice(heads, heads + layout.num_heads)
                parts = [part[:, rows, columns].detach().cpu() for part in given.parts]
                write_logical(image[head.header_bytes :], layout, parts)
                write_header(image, head)
        except BaseException:
            self._client.abort(reserved.lease_id)
            raise
        num_published = self._client.commit(reserved.lease_id) if reserved.lease_id else 0
        each = []
        for outcome in reserved.outcomes:
            is_written = outcome is Outcome.RESERVED and num_published > 0
            num_published -= is_written
            each.append("written" if is_written else "lost" if outcome is Outcome.RESERVED else outcome.value)
        return [_worst(each[at : at + len(ranks)]) for at in range(0, len(each), len(ranks))]

    def _header_of(self, chunk: SaveItem, rank: int) -> Header:
        space, description = self.geometry.spaces[rank], self._descriptions[rank]
        key, parent = (space.chunk_key(name[SPACE_BYTES:]) for name in (chunk.key, chunk.parent))
        payload_bytes = self.geometry.layout.payload_bytes(chunk.num_tokens)
        return Header(key, parent, chunk.tokens, description, self._header_bytes, payload_bytes, 0, chunk.flags)


def _worst(outcomes: Sequence[str]) -> str:
    """What became of a chunk, given what became of it in each rank."""
    others = [outcome for outcome in outcomes if outcome not in ("written", Outcome.PRESENT.value)]
    return others[0] if others else "written" if "written" in outcomes else Outcome.PRESENT.value
