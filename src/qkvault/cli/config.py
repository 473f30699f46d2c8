"""``qkvault config``: show what is in force and where it came from, check a file, print the schema."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qkvault.cli.output import JsonOption, print_json, print_table, printable
from qkvault.errors import ConfigError

app = typer.Typer(help="Show and check settings.", no_args_is_help=True)

FileOption = Annotated[
    Path | None, typer.Option("--file", "-f", help="Settings in YAML, instead of what QKVAULT_CONFIG names.")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting; repeatable.")]


@app.command()
def show(*, file: FileOption = None, settings: SetOption = None, as_json: JsonOption = False) -> None:
    """Print every setting in force, and where its value came from."""
    from qkvault.config import load
    from qkvault.units import format_size

    values = load(file, cli=split(settings)).shown()
    if as_json:
        print_json({name: {"value": value, "source": source} for name, (value, source) in values.items()})
        return
    rows = []
    for name, (value, source) in values.items():
        if name.endswith("_bytes") and isinstance(value, int):
            shown = format_size(value)
        else:
            shown = "" if value is None else str(value)
        rows.append((name, shown.lower() if isinstance(value, bool) else shown, source))
    print_table(("setting", "value", "source"), rows)


@app.command()
def validate(file: Annotated[Path, typer.Argument(help="Settings in YAML.")], *, as_json: JsonOption = False) -> None:
    """Check a file by itself, as `serve` does, without environment and memory. Exit code 2 if something is wrong."""
    from qkvault.config import DEFAULT, load
    from qkvault.server.places import require_servable

    loaded = load(file, env={})
    require_servable(loaded.config)
    names = [name for name, source in loaded.sources.items() if source != DEFAULT]
    if as_json:
        print_json({"file": str(file), "settings": names})
    else:
        typer.echo(printable(f"{file}: fine, sets {', '.join(names) or 'nothing'}"))


@app.command()
def schema(*, as_json: JsonOption = False) -> None:
    """Print what can be set: a page, or JSON Schema for editors."""
    import msgspec

    from qkvault.config import Config
    from qkvault.config_page import schema_markdown

    if not as_json:
        typer.echo(schema_markdown(), nl=False)
        return
    page = msgspec.json.schema(Config)["$defs"]["Config"]
    for name, field in page["properties"].items():
        if name.endswith(("_bytes", "_seconds")):  # "8GiB", "500ms"
            if "type" in field:
                field["type"] = [field["type"], "string"]
            else:
                field["anyOf"].append({"type": "string"})
    print_json({"$schema": "https://json-schema.org/draft/2020-12/schema", **page})


def split(settings: list[str] | None) -> dict[str, str]:
    """Settings of ``--set`` by name. Raises ConfigError."""
    pairs = {}
    for setting in settings or []:
        name, equals, value = setting.partition("=")
        if not equals:
            name = setting.strip().replace(":", " ").split(" ")[0]  # what follows may be a secret
            msg = f"--set {name!r}: expected NAME=VALUE"
            raise ConfigError(msg)
        pairs[name.strip()] = value
    return pairs
