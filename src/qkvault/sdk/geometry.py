"""Whose tensors: the ranks of one model, chosen from what the store knows: described by engines, or found on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

from msgspec.structs import replace

from qkvault.config_names import nearest
from qkvault.errors import ConfigError
from qkvault.keys import KeySpace
from qkvault.layout import ChunkLayout
from qkvault.spaces import SpaceDescription
from qkvault.types import CacheKind

_MAX_TOLD: Final = 16  # ranks that an error names


class Geometry(NamedTuple):
    """The spaces of all ranks, in order, and the layout that chunks are written in."""

    spaces: tuple[KeySpace, ...]
    layout: ChunkLayout  # of one rank

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's numbers of the layers that are there, in order: where some are left out, the space names them."""
        _, _, numbers = self.spaces[0].tensors.partition(":")
        return tuple(map(int, numbers.split(","))) if numbers else tuple(range(self.layout.num_layers))

    @property
    def num_heads(self) -> int:
        """Heads of all ranks."""
        return self.layout.num_heads * len(self.spaces)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(layers, heads, head_size) of a part, all ranks in one."""
        return self.layout.num_layers, self.num_heads, self.layout.head_size


def choose(
    known: Sequence[SpaceDescription], kind: CacheKind, model: str | None, fields: Mapping[str, object] | None
) -> Geometry:
    """The one model of ``known`` (the latest first) with that kind of tensor, ``model`` name and space ``fields``.

    Raises ValueError for a field that a space has not; ConfigError if there is no such model, or several, or one of its
    ranks has not been heard of; LayoutMismatch if its engine packs pages in a way we cannot see into.
    """
    names = {field: field for field in KeySpace.__struct_fields__}
    for field in set(fields or {}) - set(names):
        msg = f"fields: a KeySpace has no {field!r}: {nearest(field, names)}"
        raise ValueError(msg)
    name = None if model is None else kind.base_model_name(model)
    found: dict[KeySpace, dict[int, SpaceDescription]] = {}  # by rank, of each model
    for each in known:
        space = each.space
        wanted = {"kind": kind, **({} if name is None else {"model_name": name}), **(fields or {})}
        if all(getattr(space, field, None) == value for field, value in wanted.items()):
            found.setdefault(replace(space, worker_id=0), {}).setdefault(space.worker_id, each)
    if len(found) != 1:
        have = "; ".join(sorted({_told(each.space) for each in known})) or "nothing"
        what = f"{kind.value} of {name or 'any model'}" + (f" with {dict(fields)}" if fields else "")
        hint = (
            "choose by model= or fields="
            if found
            else "its engine has not connected and nothing of it is on disk: say spaces="
        )
        msg = f"{len(found) or 'no'} models fit {what}: {hint}. The store knows {have}"
        raise ConfigError(msg)
    ((space, ranks),) = found.items()
    if missing := list(islice((rank for rank in range(space.world_size) if rank not in ranks), _MAX_TOLD)):
        msg = f"ranks {missing} of {space.world_size} of {_told(space)} are not known: neither connected nor on disk"
        raise ConfigError(msg)
    layout = ranks[0].layout
    layout.require_viewable()
    for each in ranks.values():
        layout.require_same_tensors(each.layout)
    return Geometry(tuple(ranks[rank].space for rank in range(space.world_size)), layout)


def _told(space: KeySpace) -> str:
    model = space.kind.server_model_name(space.model_name)
    return (
        f"{model} (model_fingerprint {space.model_fingerprint}, dtype {space.dtype}, world_size {space.world_size}, "
        f"chunk_size {space.chunk_size}, layer_group {space.layer_group}, tensors {space.tensors})"
    )
