"""What commands share: the --json option, and tables."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated, Final, TypeVar

import typer

T = TypeVar("T")
PIPE_COLUMNS: Final = 1000  # the program behind a pipe reads lines: none is broken
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@contextmanager
def drawing(view: AbstractContextManager[T]) -> Iterator[T]:
    """``view`` in the terminal, which is as it was however this ends; SIGTERM is exit code 143. For the main thread."""
    ends = (signal.SIGINT, signal.SIGTERM)
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # on its way in or out it would leave half of it
    try:
        with view as entered:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
            try:
                yield entered
            finally:
                signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
        signal.signal(signal.SIGTERM, before)


def print_json(value: object) -> None:
    """Write ``value`` to stdout as JSON, and nothing else."""
    import json

    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def printable(text: str) -> str:
    """``text``, which somebody else wrote, without what would steer a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write a table to stdout. Cells are shown as they are; none is markup, and none can steer the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    if sys.stdout is not None:  # it was closed
        Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS).print(table)
