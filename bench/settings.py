"""How large a run is, and what else was asked for. All sizes of all benches stand here, side by side."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path


class Size(str, Enum):
    """How much is measured."""

    FULL = "full"  # what is published
    QUICK = "quick"  # a look, in a couple of minutes
    TINY = "tiny"  # only to see that everything runs: its numbers mean nothing


@dataclass(frozen=True)
class Sizes:
    """The work of one size."""

    prompt_tokens: int  # of hashing and lookup
    short_rounds: int  # of what takes milliseconds
    copy_bytes: int  # of a store or retrieve; well above the last-level cache
    copy_rounds: int
    disk_bytes: int
    disk_rounds: int
    pings: int  # round trips in a block
    ping_blocks: int
    ttft_tokens: int  # of the prompt whose first token is waited for
    ttft_rounds: int
    index_keys: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)  # the last one is ours
    load_clients: tuple[int, ...] = (1, 4, 16, 64)
    load_chunks: int = 2_000  # that the pool holds; some half of what is asked for
    load_seconds: float = 60.0  # of each number of clients
    scan_files: int = 100_000


SIZES = {
    Size.FULL: Sizes(131_072, 30, 512 << 20, 9, 512 << 20, 7, 200, 20, 2_790, 5),
    Size.QUICK: Sizes(131_072, 10, 128 << 20, 5, 256 << 20, 3, 100, 10, 2_790, 3, load_seconds=4.0, scan_files=10_000),
    Size.TINY: Sizes(2_048, 2, 1 << 20, 2, 1 << 20, 2, 10, 2, 200, 1, (1_000, 2_000), (2,), 100, 0.5, 200),
}


def scratch_folder() -> Path:
    """Where files go unless told otherwise."""
    return Path(tempfile.gettempdir())


@dataclass(frozen=True)
class Settings:
    """One run."""

    size: Size = Size.FULL
    seed: int = 1
    scratch: Path = field(default_factory=scratch_folder)
    peer_venv: Path | None = None
    model: Path | None = None
    dtype: str = ""
    engines: tuple[str, ...] = ("mp", "inproc")
    cases: tuple[str, ...] = ()  # none: all
    seconds: float | None = None  # of the load bench; None: as long as the size says
    rounds: int | None = None  # of everything; None: as many as the size says

    @property
    def sizes(self) -> Sizes:
        """The work to do."""
        sizes = SIZES[self.size]
        if self.rounds is None:
            return sizes
        of_rounds = [name for name in Sizes.__dataclass_fields__ if name.endswith("_rounds")]
        return replace(sizes, **dict.fromkeys(of_rounds, self.rounds))

    @property
    def load_seconds(self) -> float:
        """How long the load bench keeps each number of clients busy."""
        return self.sizes.load_seconds if self.seconds is None else self.seconds

    @property
    def peer_python(self) -> Path | None:
        """The interpreter that has the peers, if there is one."""
        return None if self.peer_venv is None else self.peer_venv / "bin" / "python"

    def as_json(self) -> dict[str, object]:
        """What of it decides the numbers."""
        return {
            "size": self.size.value,
            "seed": self.seed,
            "rounds": self.rounds,
            "load_seconds": self.load_seconds,
            "dtype": self.dtype,
            "engines": list(self.engines),
            "has_peers": self.peer_venv is not None,
        }
