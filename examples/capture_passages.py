"""Passages of real documents and questions about them: what half of a document is dropped from, and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

HERE: Final = Path(__file__).resolve().parent


class Passage(NamedTuple):
    """Part of a file, from one line to before another. Where the files are from: ``data/README.md``."""

    name: str
    path: Path
    begins: str  # with the first line that begins so
    ends: str  # before the next line that begins so; "": with the file
    questions: tuple[str, ...]

    def text(self) -> str:
        """The passage itself."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        first = next(at for at, line in enumerate(lines) if line.startswith(self.begins))
        stop = len(lines)
        if self.ends:
            stop = next(at for at in range(first + 1, len(lines)) if lines[at].startswith(self.ends))
        return "\n".join(lines[first:stop]).strip()


_CAESAR: Final = HERE / "data" / "julius-caesar.txt"
_HAMLET: Final = HERE / "data" / "hamlet.txt"
_LICENCE: Final = HERE.parent / "LICENSE"
PASSAGES: Final = (
    Passage(
        "Caesar: Brutus",
        _CAESAR,
        "JULIUS CAESAR",
        "You gentle Romans,",
        ("Why did Brutus kill Caesar?", "What do the citizens want to do for Brutus?", "Who brings Caesar's body?"),
    ),
    Passage(
        "Caesar: Antony",
        _CAESAR,
        "You gentle Romans,",
        "",
        (
            "What did Caesar do three times on the Lupercal?",
            "What do the citizens want Antony to read?",
            "What does Antony say about Brutus?",
        ),
    ),
    Passage(
        "Hamlet: to be",
        _HAMLET,
        "HAMLET, PRINCE",
        "Oph.",
        ("What does Hamlet say about death?", "What puzzles the will?", "Who is fair?"),
    ),
    Passage(
        "Hamlet: players",
        _HAMLET,
        "Scene II.",
        "",
        ("How should the players speak?", "What should the clowns do?", "What is the purpose of playing?"),
    ),
    Passage(
        "Licence: grants",
        _LICENCE,
        "   1. Definitions.",
        "   4. Redistribution.",
        ('What does "Contributor" mean?', "What does a patent license allow?", "What is a Derivative Work?"),
    ),
    Passage(
        "Licence: duties",
        _LICENCE,
        "   4. Redistribution.",
        "   END OF TERMS",
        (
            "What must be given to the recipients of the Work?",
            "Does the license grant permission to use trademarks?",
            "Is there any warranty?",
        ),
    ),
)  # fmt: skip
