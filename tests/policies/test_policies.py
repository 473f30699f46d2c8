"""Every policy keeps the contract, and has the order that its name says."""

from __future__ import annotations

import pytest

from qkvault.config import CACHE_POLICIES
from qkvault.errors import ConfigError
from qkvault.policies import POLICIES
from qkvault.policies.lfu import LfuPolicy
from qkvault.policies.lru import FifoPolicy, LruPolicy, MruPolicy
from qkvault.testing.policy_contract import PolicyContract


class TestLru(PolicyContract):
    make_policy = LruPolicy


class TestFifo(PolicyContract):
    make_policy = FifoPolicy


class TestMru(PolicyContract):
    make_policy = MruPolicy


class TestLfu(PolicyContract):
    make_policy = LfuPolicy


def order(name, added, used):
    policy = POLICIES.load(name)()
    for letter in added:
        policy.add(letter.encode())
    for letter in used:
        policy.touch(letter.encode())
    return b"".join(policy.victims()).decode()


@pytest.mark.parametrize(
    ("name", "added", "used", "expected"),
    [
        ("lru", "abcd", "", "abcd"),
        ("lru", "abcd", "ba", "cdba"),
        ("fifo", "abcd", "ba", "abcd"),
        ("mru", "abcd", "", "dcba"),
        ("mru", "abcd", "ba", "abdc"),
        ("lfu", "abcd", "", "abcd"),
        ("lfu", "abcd", "bba", "cdab"),
        ("lfu", "abcd", "dcba", "dcba"),  # all used once: who came to that count first
        ("lfu", "abcda", "b", "cdab"),  # added again counts as a use
    ],
)
def test_the_order_is_that_of_the_name(name, added, used, expected):
    assert order(name, added, used) == expected


def test_a_prompt_that_is_touched_from_its_tail_loses_its_tail_first():
    """Under a recency order; that is how the store touches."""
    assert order("lru", "abc", "cba") == "cba"


def test_the_names_are_those_of_the_settings():
    assert sorted(POLICIES.names) == sorted(CACHE_POLICIES)


def test_an_unknown_name_is_refused_with_the_right_ones():
    with pytest.raises(ConfigError, match="lru"):
        POLICIES.load("lur")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("broken_policy:Thing", "cannot be imported: ZeroDivisionError"),
        ("no.such:Thing", "cannot be imported: ModuleNotFoundError"),
        (":Thing", "cannot be imported: ValueError"),
        ("json:loads", "is no class"),
        ("collections:OrderedDict", "is no class derived from Policy"),
        ("qkvault.policies.base:Policy", "lacks methods"),
    ],
)
def test_a_policy_of_ones_own_that_is_no_use_is_refused(monkeypatch, tmp_path, path, why):
    """B541, B562: as a wrong setting, whatever the module does when it is imported."""
    (tmp_path / "broken_policy.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=why):
        POLICIES.load(path)


def test_a_policy_of_ones_own_is_loaded_by_its_path():
    assert POLICIES.load("qkvault.policies.lru:MruPolicy") is MruPolicy
