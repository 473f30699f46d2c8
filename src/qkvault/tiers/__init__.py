"""Places below RAM, by name."""

from __future__ import annotations

from typing import Final

from qkvault.registry import Registry
from qkvault.tiers.base import Tier

TIERS: Final[Registry[Tier]] = Registry("tier", Tier, {"disk": "qkvault.tiers.disk:DiskTier"})

__all__ = ["TIERS", "Tier"]
