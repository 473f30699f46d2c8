"""The command line: ``qkvault COMMAND``. Knows the commands, and how an error ends: one line on stderr, and a code."""

from __future__ import annotations

import platform
from typing import Any

import typer
from typer.core import TyperGroup

from qkvault.cli import check, config, doctor, serve, store, top
from qkvault.cli.output import JsonOption, print_json
from qkvault.errors import ConfigError, QKVaultError


class ErrorsAreLines(TyperGroup):
    """Ends a command that raises an error of ours or of the system: code 2 for a wrong setting, else 1."""

    def invoke(self, ctx: Any) -> Any:  # the context is typer's own class or click's, by its version
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # typer's: who reads has seen enough
            raise
        except (QKVaultError, OSError) as error:
            typer.echo(f"qkvault: {error}", err=True)
            raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error


app = typer.Typer(
    name="qkvault",
    cls=ErrorsAreLines,
    help="A cache of LLM attention state in RAM and on disk.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich takes longer to load than the rest of a command to run
)
app.add_typer(config.app, name="config")
app.command("check")(check.check)
app.command("doctor")(doctor.doctor)
app.command("serve")(serve.serve)
app.command("status")(store.status)
app.command("lookup")(store.lookup)
app.command("clear")(store.clear)
app.command("freeze")(store.freeze)
app.command("hot-cache")(store.hot_cache)
app.command("top")(top.top)


@app.command()
def version(*, as_json: JsonOption = False) -> None:
    """Print the versions of QKVault and Python."""
    import qkvault

    found = {"qkvault": qkvault.__version__, "python": platform.python_version()}
    if as_json:
        print_json(found)
    else:
        typer.echo(f"qkvault {found['qkvault']} (Python {found['python']})")


def main() -> None:
    """Run the command line; the console script's entry."""
    app()
