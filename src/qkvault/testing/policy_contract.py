"""What every eviction order promises, as tests. A new policy is done when this passes.

class TestMyPolicy(PolicyContract):
    make_policy = MyPolicy
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice

import pytest

from qkvault.policies.base import Policy
from qkvault.types import KEY_BYTES

KEYS = tuple(bytes([n]) * KEY_BYTES for n in range(10))


class PolicyContract:
    """Subclass, and say how the policy is made."""

    make_policy: Callable[[], Policy]

    @pytest.fixture
    def policy(self) -> Policy:
        """The policy under test, empty."""
        return type(self).make_policy()

    def test_an_empty_policy_has_no_victims(self, policy: Policy) -> None:
        """Nor has one that has become empty."""
        assert (len(policy), list(policy.victims())) == (0, [])
        policy.add(KEYS[0])
        policy.remove(KEYS[0])
        assert (len(policy), list(policy.victims())) == (0, [])

    def test_every_key_is_a_victim_once(self, policy: Policy) -> None:
        """However often it was added or used."""
        for key in (*KEYS, *KEYS[3:6]):
            policy.add(key)
            policy.touch(key)
        assert len(policy) == len(KEYS)
        assert sorted(policy.victims()) == sorted(KEYS)

    def test_what_was_removed_is_no_victim(self, policy: Policy) -> None:
        """It may come back."""
        for key in KEYS:
            policy.add(key)
        for key in KEYS[::2]:
            policy.remove(key)
        assert sorted(policy.victims()) == sorted(KEYS[1::2])
        policy.add(KEYS[0])
        assert KEYS[0] in set(policy.victims())

    def test_unknown_keys_are_ignored(self, policy: Policy) -> None:
        """To touch or remove one neither raises nor adds it."""
        policy.add(KEYS[0])
        policy.touch(KEYS[1])
        policy.remove(KEYS[1])
        assert list(policy.victims()) == [KEYS[0]]

    def test_what_was_extended_is_here_once(self, policy: Policy) -> None:
        """Unknown keys are ignored too."""
        for key in KEYS[:5]:
            policy.add(key)
            policy.touch(key)
        policy.extend(KEYS[7:2:-1])
        assert (len(policy), sorted(policy.victims())) == (5, sorted(KEYS[:5]))

    def test_adding_a_key_that_is_here_is_the_same_as_using_it(self, policy: Policy) -> None:
        """Whatever a use means."""
        other = type(self).make_policy()
        for key in KEYS:
            policy.add(key)
            other.add(key)
        policy.add(KEYS[4])
        other.touch(KEYS[4])
        assert list(policy.victims()) == list(other.victims())

    def test_looking_changes_nothing(self, policy: Policy) -> None:
        """Whoever asks for victims may stop at any point, and ask again."""
        for key in KEYS:
            policy.add(key)
        order = list(policy.victims())
        assert list(islice(policy.victims(), 3)) == order[:3]
        assert list(policy.victims()) == order

    def test_removing_the_others_keeps_the_order(self, policy: Policy) -> None:
        """Victims leave one after the other as they were announced."""
        for key in (*KEYS, *KEYS[2:8], *KEYS[5:7]):
            policy.add(key)
        order = list(policy.victims())
        for key in order[:5]:
            policy.remove(key)
        assert list(policy.victims()) == order[5:]

    def test_keys_are_counted_whatever_happens(self, policy: Policy) -> None:
        """Random operations, against a set."""
        rng, here = random.Random(1), set[bytes]()  # noqa: S311  # repeatable, not secret
        for _ in range(2000):
            key = rng.choice(KEYS)
            act = rng.randrange(3)
            (policy.add, policy.touch, policy.remove)[act](key)
            here = (here | {key}, here, here - {key})[act]
            victims = list(policy.victims())
            assert (len(policy), sorted(victims)) == (len(here), sorted(here))
