"""``connect`` for keys and values, under the name that users of LMCache know."""

from __future__ import annotations

from functools import partial
from typing import Final

from qkvault.sdk.context import connect as connect_any
from qkvault.types import CacheKind

connect: Final = partial(connect_any, kind=CacheKind.KV)
