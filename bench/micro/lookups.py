"""How much of a long prompt is cached: with its keys at hand, and from a list of ids; beside a dict of those keys."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

import numpy as np

from bench import children
from bench.geometry import CHUNK_TOKENS, Geometry, Pages, token_ids
from bench.peers import LMCACHE, lmcache_engine
from bench.report import Screen
from bench.rig import Rig, own_store, pool_bytes
from bench.samples import Case, Measure, Role, Row, Sample, Series, Target, Unit, measure, timed
from bench.settings import Settings
from qkvault.keys import RequestIdentity
from qkvault.prefix import Prefix
from qkvault.wire.messages import Located

DICT = "membership of the keys in a dict"
HASHING = "hashing the list, and nothing else"
WAYS = (
    "keys kept",
    "keys kept, after a rest",
    "keys kept, its lease given back",
    "list of ids",
    "list of ids, unknown",
)
REST_SECONDS = 3e-3  # others of the machine have the caches meanwhile
# Of 128k tokens; the same from another process.
MAX_KEPT_SECONDS = 0.3e-3
MAX_IDS_SECONDS = 3e-3
# Tokens of a few bytes: the store does not look at the payload when it is asked.
THIN = Geometry("thin", 1, 1, 8, 16)


class Lookups:
    """A store that holds one prompt and does not hold another."""

    def __init__(self, rig: Rig, seed: int) -> None:
        """Store the prompt."""
        rig.renew()
        rig.store()
        self.rig = rig
        self.tokens = rig.tokens
        self.others = token_ids(np.random.default_rng(seed + 1), len(self.tokens))
        self.space = rig.engine.metadata.space(rig.engine.config)
        self.prefix = Prefix(self.space, RequestIdentity(), self.tokens)
        number = len(self.tokens) // CHUNK_TOKENS
        keys = [item.key for item in self.prefix.save_items(0, len(self.tokens), rig.pages.source_ids, THIN.block_size)]
        self.keys = keys[:number]
        self.known = dict.fromkeys(self.keys)

    def by_keys(self) -> Sample:
        """A request whose tokens were hashed before: lease all of it. Giving the lease back is not timed.

        Of a store that is at work: the second of two, one right after the other.
        """
        self._lease()
        return self._lease()[0]

    def by_keys_rested(self) -> Sample:
        """The same of a store that has had nothing to do."""
        time.sleep(REST_SECONDS)
        return self._lease()[0]

    def give_back(self) -> Sample:
        """End such a lease, which makes all of it the last that was used. At work, as well."""
        self._lease()
        return self._lease()[1]

    def _lease(self) -> tuple[Sample, Sample]:
        found: list[Located] = []
        finding = timed(lambda: found.append(self.prefix.find(self.rig.client)))
        giving = timed(lambda: self.rig.client.release(found[0].lease_id))
        self._require(len(found[0].ready), len(self.keys))
        return finding, giving

    def by_ids(self) -> None:
        """A new request for a prompt that is there."""
        self._require(self.rig.engine.lookup(self.tokens), len(self.tokens))

    def by_ids_none(self) -> None:
        """A new request for a prompt that is not."""
        self._require(self.rig.engine.lookup(self.others), 0)

    def hash_ids(self) -> None:
        """The first half of a new request."""
        Prefix(self.space, RequestIdentity(), self.tokens)

    def in_dict(self) -> Sample:
        """The least that any index does; the second of two, as well."""
        return [timed(self._in_dict) for _ in range(2)][1]

    def _in_dict(self) -> None:
        known = self.known
        self._require(sum(key in known for key in self.keys), len(self.keys))

    def own_cases(self, names: Iterable[str]) -> list[Case]:
        """Ours and what they are held against; ``names`` are those of the rows, in the order of ``WAYS``."""
        kept, rested, back, ids, none = names
        return [
            Case(kept, "QKVault", Role.OURS, self.by_keys),
            Case(kept, DICT, Role.LIMIT, self.in_dict),
            Case(rested, "QKVault", Role.OURS, self.by_keys_rested),
            Case(back, "QKVault", Role.OURS, self.give_back),
            Case(ids, "QKVault", Role.OURS, self.by_ids),
            Case(ids, HASHING, Role.LIMIT, self.hash_ids),
            Case(none, "QKVault", Role.OURS, self.by_ids_none),
        ]

    @staticmethod
    def _require(found: int, wanted: int) -> None:
        if found != wanted:
            msg = f"found {found} instead of {wanted}"
            raise RuntimeError(msg)


def run(settings: Settings, screen: Screen) -> list[Row]:
    """All rows."""
    count, rounds = settings.sizes.prompt_tokens, settings.sizes.short_rounds
    kept, *_, ids, none = names = [f"{count // 1024}k tokens, {how}" for how in WAYS]
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(own_store(pool_bytes(THIN, count, prompts=1.3)))
        pages = Pages(THIN, count, is_random=False, seed=settings.seed)
        work = Lookups(Rig(store.config, store.connect("bench"), pages, settings.seed), settings.seed)
        group = work.own_cases(names)
        peer = stack.enter_context(lmcache_engine(settings, screen, THIN, count, "lookup"))
        if peer is not None:
            children.ask(peer, do="renew")
            children.ask(peer, do="store")
            group += [
                Case(ids, LMCACHE, Role.PEER, lambda: children.timed(peer, do="lookup")),
                Case(none, LMCACHE, Role.PEER, lambda: children.timed(peer, do="lookup_unknown")),
            ]
        advance = stack.enter_context(screen.task("lookup", rounds + 3))
        found = measure([group], rounds=rounds, warmup=3, advance=advance)
        work.rig.engine.close()
    return lookup_rows(found, kept, ids)


def lookup_rows(found: dict[str, list[Series]], kept: str, ids: str) -> list[Row]:
    """All rows. ``kept`` and ``ids`` name those that have a target."""
    targets = {
        kept: (Target(Measure.SECONDS, MAX_KEPT_SECONDS),),
        ids: (Target(Measure.SECONDS, MAX_IDS_SECONDS),),
    }
    return [
        Row(name=name, unit=Unit.CALLS, amount=1, series=series, targets=targets.get(name, ()))
        for name, series in found.items()
    ]
