"""Random traffic for a toy engine: requests that share much, and what a client does to them."""

from __future__ import annotations

import random

import pytest


class Traffic:
    """Random requests that share much, and what a client does to them."""

    def __init__(self, toy, engine, seed: int, *, num_requests: int, failing: float = 0.0) -> None:
        self.toy, self.engine, self.random = toy, engine, random.Random(seed)
        self.left, self.failing = num_requests, failing
        self.num_failed = 0
        self.stems = [self.tokens(200) for _ in range(3)]
        engine.on_plan = self.damage

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(3, self.toy.VOCABULARY) for _ in range(count)]

    def prompt(self) -> list[int]:
        said = [
            r.prompt_token_ids + self.engine.texts[n]
            for n, r in self.engine.requests.items()
            if n in self.engine.endings
        ]
        if said and self.random.random() < 0.4:  # the next turn of a talk
            return self.random.choice(said)[:400] + self.tokens(self.random.randrange(1, 30))
        stem = self.random.choice(self.stems)
        return stem[: self.random.randrange(1, len(stem))] + self.tokens(self.random.randrange(1, 90))

    def add(self) -> None:
        self.left -= 1
        sampling = {"stop_token_ids": [5]} if self.random.random() < 0.5 else {}
        name = f"r{self.left}"
        self.engine.add(name, self.prompt(), self.random.randrange(1, 60), sampling=sampling)

    def damage(self, plan) -> None:
        for op in plan.loads:
            if op.items_of(0) and self.random.random() < self.failing:
                self.engine.damage(op, self.random.randrange(len(op.items_of(0))))
                self.num_failed += 1

    def run(self) -> None:
        engine, chance = self.engine, self.random.random
        for _ in range(4000):
            while self.left and chance() < 0.25:
                self.add()
            alive = [name for name in engine.requests if name not in engine.endings]
            if alive and chance() < 0.02:
                engine.abort(self.random.choice(alive))
            if not engine.scheduler.running and chance() < 0.2:
                engine.scheduler.reset_prefix_cache()
            engine.step()
            if not (self.left or engine.scheduler.has_requests() or engine._running):
                return
        pytest.fail("it does not come to an end")
