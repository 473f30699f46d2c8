"""Prompts of one length that share nothing: seeded prose, since a model is not fed noise."""

from __future__ import annotations

import random
from typing import Final

_WORDS: Final = (
    "river stone market winter garden letter engine silver morning harbour music paper window forest bridge summer "
    "clock candle mirror valley teacher sailor farmer doctor painter writer soldier merchant child stranger village "
    "mountain island kitchen station theatre library castle desert ocean signal pattern reason answer question story "
    "promise secret journey weather shadow thunder feather copper marble velvet"
).split()
_VERBS: Final = "found lost built carried followed painted forgot remembered crossed opened sold kept watched".split()
_LONGEST_WORD: Final = 8  # tokens that a sentence certainly has at least: far fewer than it has


def prompt_text(seed: int, number: int, num_tokens: int) -> str:
    """Text that certainly has more than ``num_tokens`` tokens; differs from the first word on for every number."""
    rng = random.Random(f"{seed}/{number}")
    sentences = [f"Number {number * 7919 + seed} begins a story of its own."]
    for at in range(num_tokens // _LONGEST_WORD + 8):
        one, other, third = rng.sample(_WORDS, 3)
        sentences.append(f"In year {at + 100} the {one} {rng.choice(_VERBS)} a {other} near the {third}.")
    return " ".join(sentences)
