"""Every tier, and every wrapper around one, keeps the contract."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from qkvault.testing import DictTier, FaultyTier, LatencyTier, WrapperTier
from qkvault.testing.tier_contract import TierContract
from qkvault.tiers.disk import DiskTier

CAPACITY_BYTES = 1 << 30


class TestDictTier(TierContract):
    def make_tier(self, folder):
        return DictTier(CAPACITY_BYTES)


class TestDiskTier(TierContract):
    is_persistent = True

    def make_tier(self, folder):
        return DiskTier(folder, CAPACITY_BYTES)


class TestDiskTierWithOneWorker(TierContract):
    is_persistent = True

    def make_tier(self, folder):
        return DiskTier(folder, CAPACITY_BYTES, workers=1)


class TestDiskTierThroughThePageCache(TierContract):
    is_persistent = True

    def make_tier(self, folder):
        return DiskTier(folder, CAPACITY_BYTES, direct_io=False)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file system in memory")
class TestDiskTierInMemory(TierContract):
    """tmpfs knows no O_DIRECT on many kernels."""

    is_persistent = True

    @pytest.fixture
    def tmp_path(self, tmp_path):
        path = Path("/dev/shm") / f"tier-contract-{tmp_path.name}"
        path.mkdir()
        yield path
        shutil.rmtree(path)

    def make_tier(self, folder):
        return DiskTier(folder, CAPACITY_BYTES)


class TestWrapperTier(TierContract):
    is_persistent = True

    def make_tier(self, folder):
        return WrapperTier(DiskTier(folder, CAPACITY_BYTES))


class TestLatencyTier(TierContract):
    is_persistent = True

    def make_tier(self, folder):
        return LatencyTier(DiskTier(folder, CAPACITY_BYTES), 0.002)


class TestFaultyTierWithoutFaults(TierContract):
    def make_tier(self, folder):
        return FaultyTier(DictTier(CAPACITY_BYTES))
