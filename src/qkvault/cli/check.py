"""``qkvault check``: verify every file of a disk tier."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkvault.cli.output import JsonOption, drawing, print_json, print_table, printable
from qkvault.errors import ConfigError

if TYPE_CHECKING:
    from qkvault.tiers.disk_check import DiskReport

FixOption = Annotated[bool, typer.Option("--fix", help="Remove what is broken. No process may use the directory.")]


def check(
    path: Annotated[Path, typer.Argument(help="Directory of a disk tier.")],
    *,
    fix: FixOption = False,
    as_json: JsonOption = False,
) -> None:
    """Read and verify every file of a disk tier. Exit code 0 if it is clean, 1 if something broken is there."""
    import msgspec

    from qkvault.tiers.disk_check import check_directory

    try:
        with _progress(hidden=as_json or sys.stderr is None or not sys.stderr.isatty()) as progress:
            report = check_directory(path, fix=fix, progress=progress)
    except OSError as error:
        msg = f"cannot check {path}: {error}"
        raise ConfigError(msg) from error
    if as_json:
        print_json({**msgspec.structs.asdict(report), "is_clean": report.is_clean})
    else:
        _print(report)
    raise typer.Exit(0 if report.is_clean else 1)


def _print(report: DiskReport) -> None:
    from qkvault.units import approximate_size

    counted = (
        ("whole", report.whole, report.whole_bytes),
        ("corrupt", report.corrupt, report.corrupt_bytes),
        ("temporary", report.temporary, report.temporary_bytes),
        ("not ours", report.foreign, report.foreign_bytes),
        ("removed", report.removed, report.removed_bytes),
    )
    print_table(
        ("files", "number", "size"), [(what, str(number), approximate_size(size)) for what, number, size in counted]
    )
    for path, problem in report.problems:
        typer.echo(printable(f"{path}: {problem}"))
    if (unlisted := report.num_problems - len(report.problems)) > 0:
        typer.echo(f"and {unlisted} more")


@contextmanager
def _progress(*, hidden: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A callback that moves a bar on stderr; none if nobody would see it."""
    if hidden:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with drawing(Progress(*columns, console=Console(stderr=True), transient=True)) as bar:
        task = bar.add_task("checking", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
