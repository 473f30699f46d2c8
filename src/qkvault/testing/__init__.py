"""What the tests of a tier need, ours and others': a contract suite, the smallest tier, wrappers that misbehave.

Imported by tests only. The contracts (``tier_contract``, ``transport_contract``, ``policy_contract``) need pytest, and
are therefore not imported from here.
"""

from __future__ import annotations

from qkvault.testing.clock import FakeClock
from qkvault.testing.dict_tier import DictTier
from qkvault.testing.store_model import StoreModel
from qkvault.testing.wrappers import FaultyTier, LatencyTier, WrapperTier

__all__ = ["DictTier", "FakeClock", "FaultyTier", "LatencyTier", "StoreModel", "WrapperTier"]
