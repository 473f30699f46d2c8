"""Eviction orders, by name."""

from __future__ import annotations

from typing import Final

from qkvault.policies.base import Policy
from qkvault.registry import Registry

POLICIES: Final[Registry[Policy]] = Registry(
    "eviction policy",
    Policy,
    {
        "lru": "qkvault.policies.lru:LruPolicy",
        "fifo": "qkvault.policies.lru:FifoPolicy",
        "mru": "qkvault.policies.lru:MruPolicy",
        "lfu": "qkvault.policies.lfu:LfuPolicy",
    },
)

__all__ = ["POLICIES", "Policy"]
