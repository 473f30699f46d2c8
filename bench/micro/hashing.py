"""Token ids, a list as engines keep it, to finished keys; beside hashing the same bytes when they are there already."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from array import array

import numpy as np

from bench import children
from bench.geometry import CHUNK_TOKENS, LLAMA, token_ids
from bench.peers import LMCACHE_HASHES, lmcache_hashing
from bench.report import Screen
from bench.samples import Case, Measure, Role, Row, Target, Unit, measure
from bench.settings import Settings
from qkvault.keys import KeySpace, RequestIdentity
from qkvault.tokens import TokenHasher

SHA = "SHA-256 of the bytes, in one go"
CHAINED = "SHA-256 of the bytes, chunk by chunk, chained"
PACK = "list to bytes, nothing else"
MIN_TOKENS_A_SECOND = 50e6


class Hashing:
    """One prompt, and the ways to its keys."""

    def __init__(self, num_tokens: int, seed: int) -> None:
        """Make the prompt."""
        self.tokens = token_ids(np.random.default_rng(seed), num_tokens)
        self.array = np.array(self.tokens, dtype=np.int32)
        self.packed = array("I", self.tokens).tobytes()
        self.grown = self._hasher("sha256")
        self.space = KeySpace(
            model_name="bench",
            model_fingerprint="bench",
            dtype="bfloat16",
            tensors=LLAMA.layout.logical,
            chunk_size=CHUNK_TOKENS,
        )

    def list_to_keys(self) -> None:
        """What a lookup or store of a new prompt does first."""
        hasher = self._hasher("sha256")
        hasher.extend(self.tokens)
        self.space.chunk_keys(hasher.hashes)

    def blake3_to_keys(self) -> None:
        """The same by the other scheme."""
        hasher = self._hasher("blake3")
        hasher.extend(self.tokens)
        self.space.chunk_keys(hasher.hashes)

    def array_to_keys(self) -> None:
        """The same from a numpy array."""
        hasher = self._hasher("sha256")
        hasher.extend(self.array)
        self.space.chunk_keys(hasher.hashes)

    def grow(self) -> None:
        """A request that was hashed grows by one chunk: what each later step of it costs."""
        kept = len(self.tokens) - CHUNK_TOKENS
        self.grown.truncate(kept)
        self.grown.update_to(self.tokens)

    def sha_at_once(self) -> None:
        """No chunks at all."""
        hashlib.sha256(self.packed).digest()

    def sha_chained(self) -> None:
        """As many digests as there are chunks."""
        parent, size = b"", CHUNK_TOKENS * 4
        view = memoryview(self.packed)
        for start in range(0, len(view), size):
            state = hashlib.sha256(parent)
            state.update(view[start : start + size])
            parent = state.digest()

    def pack(self) -> None:
        """The fastest way from a list to bytes that Python has."""
        array("I", self.tokens).tobytes()

    @staticmethod
    def _hasher(scheme: str) -> TokenHasher:
        return TokenHasher(RequestIdentity(), CHUNK_TOKENS, scheme)


def run(settings: Settings, screen: Screen) -> list[Row]:
    """All rows."""
    count = settings.sizes.prompt_tokens
    work = Hashing(count, settings.seed)
    work.grown.extend(work.tokens)
    name = f"{count // 1024}k tokens, list to keys"
    from_array, grown = "the same from an int32 array", "one more chunk on top of them"
    group = [
        Case(name, "QKVault (SHA-256)", Role.OURS, work.list_to_keys),
        Case(name, SHA, Role.LIMIT, work.sha_at_once),
        Case(name, CHAINED, Role.LIMIT, work.sha_chained),
        Case(name, PACK, Role.LIMIT, work.pack),
        Case(from_array, "QKVault (SHA-256)", Role.OURS, work.array_to_keys),
        Case(from_array, SHA, Role.LIMIT, work.sha_at_once),
        Case(grown, "QKVault (SHA-256)", Role.OURS, work.grow),
    ]
    blake3 = "the same by BLAKE3"
    try:
        work.blake3_to_keys()
    except Exception as error:  # the scheme is optional
        screen.skip("hash by BLAKE3", str(error))
    else:
        group.append(Case(blake3, "QKVault (BLAKE3)", Role.OURS, work.blake3_to_keys))
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(lmcache_hashing(settings, screen, LLAMA, count))
        if peer is not None:
            group += [
                Case(name, told, Role.PEER, functools.partial(children.timed, peer, do="keys", scheme=scheme))
                for told, scheme in LMCACHE_HASHES.items()
            ]
        advance = stack.enter_context(screen.task("hash", settings.sizes.short_rounds + 3))
        found = measure([group], rounds=settings.sizes.short_rounds, warmup=3, advance=advance)
    amounts = {grown: CHUNK_TOKENS}
    targets = {name: (Target(Measure.RATE, MIN_TOKENS_A_SECOND),)}
    return [
        Row(name=row, unit=Unit.TOKENS, amount=amounts.get(row, count), series=series, targets=targets.get(row, ()))
        for row, series in found.items()
    ]
