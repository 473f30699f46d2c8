"""What the tests of a tier need, ours and others': a contract suite, the smallest tier, wrappers that misbehave.

Imported by tests only. ``tier_contract`` needs pytest, and is therefore not imported from here.
"""

from __future__ import annotations

from qkvault.testing.dict_tier import DictTier
from qkvault.testing.wrappers import FaultyTier, LatencyTier, WrapperTier

__all__ = ["DictTier", "FaultyTier", "LatencyTier", "WrapperTier"]
