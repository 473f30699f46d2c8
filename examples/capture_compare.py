"""How far an answer moves when half of a document is dropped: by score, at random, or all but the latest tokens.

The measure is the exact Kullback-Leibler divergence over the whole vocabulary, mean over the tokens of the answer that
the engine gave with the whole document. transformers computes the distributions, with K and V from the store as its
past: of the whole body once, and of each edited one. The question is computed behind either.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from capture_passages import Passage
from capture_steps import Read, Session, ask_and_read, kept_by_score, num_kept, prompt_of
from engine_life import BLOCK_TOKENS
from rich import box
from rich.table import Table

from qkvault.sdk import CacheTensors
from qkvault.sdk.edit import Rope, moved_up

SCORE, RANDOM, LATEST = "by score", "at random", "the latest"


class Compared(NamedTuple):
    """One question. Divergences from the whole document's answer are in nats, the mean over the answer's tokens."""

    passage: str
    question: str
    num_body_tokens: int
    num_kept_tokens: int  # of the body, the same in every way
    divergences: dict[str, list[float]]  # by way; at random: one for each seed
    same_tokens: dict[str, float]  # by way: share of the answer's tokens that are still the likeliest; whole: ""

    def mean(self, way: str) -> float:
        return statistics.fmean(self.divergences[way])


class Judge:
    """The model under transformers, with one thread: others may be at work."""

    def __init__(self, model: Path, rope: Rope) -> None:
        """Load it."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._rope = rope

    def log_probabilities(self, body: CacheTensors, tail: Sequence[int], num_last: int) -> torch.Tensor:
        """``[num_last, vocabulary]``: what comes after each of the last tokens of ``tail``, behind ``body``."""
        from transformers import DynamicCache

        moved, past = moved_up(body, self._rope), DynamicCache()
        for layer, (k, v) in enumerate(zip(moved.k, moved.v, strict=True)):
            past.update(k.transpose(0, 1)[None].float(), v.transpose(0, 1)[None].float(), layer)
        first = moved.num_tokens
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor([list(tail)]),
                position_ids=torch.arange(first, first + len(tail))[None],
                past_key_values=past,
                logits_to_keep=num_last,
            )
        return torch.log_softmax(output.logits[0].double(), dim=-1)


def compare(judge: Judge, read: Read, passage: str, question: str, *, seeds: Sequence[int], share: float) -> Compared:
    """All ways of dropping, for one question."""
    prompt, num_said = read.prompt, len(read.said)
    tail = prompt.tokens[prompt.body :] + read.said[:-1]
    count = num_kept(prompt, share)
    kept: list[tuple[str, list[int]]] = [(SCORE, kept_by_score(read, share))]
    kept += [(RANDOM, kept_at_random(read, count, seed)) for seed in seeds]
    kept += [(LATEST, kept_latest(read, count))]
    whole = judge.log_probabilities(read.keys.rows(range(prompt.body)), tail, num_said)
    answer = torch.tensor(read.said)
    divergences: dict[str, list[float]] = {}
    same: dict[str, list[float]] = {"": [_share_of(whole, answer)]}
    for way, positions in kept:
        assert len(positions) == count, (way, len(positions), count)
        edited = judge.log_probabilities(read.keys.rows(positions), tail, num_said)
        divergence = (whole.exp() * (whole - edited)).sum(-1).mean()
        divergences.setdefault(way, []).append(float(divergence))
        same.setdefault(way, []).append(_share_of(edited, answer))
    same_tokens = {way: statistics.fmean(shares) for way, shares in same.items()}
    return Compared(passage, question, prompt.body, count, divergences, same_tokens)


def compare_all(
    session: Session, judge: Judge, passages: Iterable[Passage], *, seeds: Sequence[int], share: float
) -> Iterator[Compared]:
    """One question after the other, each asked of the engine first; a later one hits the document of the first."""
    for passage in passages:
        for question in passage.questions:
            read = ask_and_read(session, prompt_of(session, passage.text(), question), passage.name, whole=False)
            yield compare(judge, read, passage.name, question, seeds=seeds, share=share)


def kept_at_random(read: Read, count: int, seed: int) -> list[int]:
    """As by score, what is before the document and its last block stay; the rest is drawn."""
    start, body = read.prompt.start, read.prompt.body
    drawn = random.Random(seed).sample(range(start, body - BLOCK_TOKENS), count - start - BLOCK_TOKENS)
    return [*range(start), *sorted(drawn), *range(body - BLOCK_TOKENS, body)]


def kept_latest(read: Read, count: int) -> list[int]:
    """What is before the document, and its end."""
    start, body = read.prompt.start, read.prompt.body
    return [*range(start), *range(body - (count - start), body)]


def _share_of(log_probabilities: torch.Tensor, answer: torch.Tensor) -> float:
    return float((log_probabilities.argmax(-1) == answer).double().mean())


def mean_of(compared: Sequence[Compared], way: str) -> float:
    """Over questions, each of them once."""
    return statistics.fmean(one.mean(way) for one in compared)


def num_closer(compared: Sequence[Compared]) -> int:
    """For how many questions the half by score is closer than a random half is on average."""
    return sum(one.mean(SCORE) < one.mean(RANDOM) for one in compared)


def problems_of(compared: Sequence[Compared]) -> Iterator[str]:
    """What is not as it should be."""
    by_score, at_random = mean_of(compared, SCORE), mean_of(compared, RANDOM)
    if by_score >= at_random:
        yield f"half by score is no closer ({by_score:.3f} nats) than half at random ({at_random:.3f})"


def compared_table(compared: Sequence[Compared]) -> Table:
    """A row for each passage, and one for all."""
    num_seeds = len(compared[0].divergences[RANDOM])
    same = {way: statistics.fmean(one.same_tokens[way] for one in compared) for way in ("", SCORE, RANDOM)}
    table = Table(
        title="KL divergence from the answer with the whole document, in nats",
        caption=(
            f"Mean over the answer's tokens and over questions; at random: over {num_seeds} draws as well. In each way "
            "equally many of the prompt's tokens stay, its first ones too. Closer: questions for which the half "
            "by score is closer than a random one on average. The answer's own token is still the likeliest for "
            f"{same[SCORE]:.0%} by score, {same[RANDOM]:.0%} at random, {same['']:.0%} with the whole document."
        ),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for name in ("", "tokens", "kept", SCORE, RANDOM, LATEST, "closer"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for name in dict.fromkeys(one.passage for one in compared):
        _add_row(table, name, [one for one in compared if one.passage == name])
    table.add_section()
    _add_row(table, "all", compared)
    return table


def _add_row(table: Table, name: str, rows: Sequence[Compared]) -> None:
    table.add_row(
        name,
        f"{statistics.fmean(one.num_body_tokens for one in rows):,.0f}",
        f"{statistics.fmean(one.num_kept_tokens for one in rows):,.0f}",
        *(f"{mean_of(rows, way):.3f}" for way in (SCORE, RANDOM, LATEST)),
        f"{num_closer(rows)} of {len(rows)}",
    )
