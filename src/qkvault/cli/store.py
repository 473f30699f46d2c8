"""``qkvault status``, ``lookup``, ``clear``, ``freeze`` and ``hot-cache``: questions and orders to a running store.

They speak the store's own protocol, so that they work wherever an engine's would.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from qkvault.cli.config import FileOption, SetOption, split
from qkvault.cli.output import JsonOption, print_json, print_table
from qkvault.errors import ConfigError, DeadlineExceeded, Unavailable, Unwelcome
from qkvault.units import approximate_size

if TYPE_CHECKING:
    from qkvault.client import StoreClient
    from qkvault.wire.messages import Status

Command = Callable[..., None]
_ID: Final = re.compile("[0-9]{1,10}")
AddressOption = Annotated[
    str | None,
    typer.Option("--address", metavar="ADDRESS", help="Where the store is; else the setting, else the default."),
]


class OnOff(str, Enum):
    """A switch."""

    ON = "on"
    OFF = "off"


@contextmanager
def reach(address: str | None, file: Path | None = None, settings: list[str] | None = None) -> Iterator[StoreClient]:
    """A session with the store at ``address``, with the token and certificate of the settings.

    Raises ConfigError, and Unavailable with what to do about it.
    """
    from qkvault.config import load
    from qkvault.connecting import open_client

    config = load(file, cli=split(settings)).config
    try:
        with closing(open_client(config, "qkvault-cli", address=address)) as client:
            yield client
    except DeadlineExceeded as error:
        msg = f"{error}; it may be overloaded or stopped, or no store: try --set timeout_seconds=10"
        raise DeadlineExceeded(msg) from error
    except Unwelcome:
        raise
    except Unavailable as error:
        msg = f"{error}; start one with `qkvault serve`, or say where it is with --address"
        raise Unavailable(msg) from error


def status(
    *,
    address: AddressOption = None,
    file: FileOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a store holds, who is connected and what happened so far."""
    from qkvault.reports import status_report

    with reach(address, file, settings) as client:
        found = client.status()
    if as_json:
        print_json(status_report(found))
        return
    print_table(("medium", "used", "of", "queries", "of", "chunks", ""), media_rows(found))
    switches = [
        ("frozen", found.is_frozen),
        ("without hot cache", not found.hot_cache),
        ("scanning", found.is_scanning),
    ]
    state = ", ".join(name for name, is_on in switches if is_on) or "running"
    typer.echo(f"\n{state}; clients {found.num_sessions}, leases {found.num_leases}, tier jobs {found.num_jobs}")
    counters = found.counters
    asked, hits = counters.get("chunks_asked", 0), counters.get("chunks_found", 0)
    rate = f" ({hits / asked:.1%})" if asked else ""
    typer.echo(f"lookups {counters.get('lookups', 0)}, chunks asked {asked}, found {hits}{rate}")
    if models := model_rows(found):
        typer.echo()
        print_table(("model", "kind", "dtype", "ranks", "tokens a chunk"), models)
    if found.instances:
        typer.echo()
        print_table(("instance", "role", "model", "rank", "pid", "heard", "leases"), instance_rows(found))


def media_rows(found: Status) -> list[tuple[str, ...]]:
    """The rows of a table of media."""
    return [
        (
            medium.name,
            approximate_size(medium.used_bytes),
            approximate_size(medium.capacity_bytes),
            approximate_size(medium.query_used_bytes),
            approximate_size(medium.query_share_bytes),
            str(medium.num_chunks),
            "" if medium.is_healthy else "not working",
        )
        for medium in found.media
    ]


def model_rows(found: Status) -> list[tuple[str, ...]]:
    """The rows of a table of models: what is known of them, or was found on disk."""
    from msgspec.structs import replace

    from qkvault.reports import spaces_of

    ranks = Counter(replace(each, worker_id=0) for each in {each.space for each in spaces_of(found)})
    return sorted(
        (space.model_name, space.kind.value, space.dtype, f"{count} of {space.world_size}", str(space.chunk_size))
        for space, count in ranks.items()
    )


def instance_rows(found: Status) -> list[tuple[str, ...]]:
    """The rows of a table of instances."""
    return [
        (
            each.instance.instance_id,
            each.instance.role,
            each.instance.model_name,
            f"{each.instance.worker_id}/{each.instance.world_size}",
            f"{each.instance.pid}{'@' if each.instance.host else ''}{each.instance.host}",
            f"{each.seconds_since_heard:.0f} s ago",
            str(each.num_leases),
        )
        for each in found.instances
    ]


def lookup(
    tokens: Annotated[
        list[str] | None, typer.Argument(help="Token ids, or with --tokenizer the text. `-` reads them from stdin.")
    ] = None,
    *,
    source: Annotated[Path | None, typer.Option("--from", metavar="PATH", help="Read them from a file.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="PATH", help="The model's tokenizer.json, or the folder it is in.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Only this model; else all that the store knows.")] = None,
    salt: Annotated[str, typer.Option(help="The request's cache_salt.")] = "",
    adapter: Annotated[str, typer.Option(help="Its adapter, as the engine's log names it: adapter_named.")] = "",
    address: AddressOption = None,
    file: FileOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell how much of a prompt is cached, for each model, and where. Nothing is moved or held."""
    import msgspec

    from qkvault.keys import RequestIdentity
    from qkvault.reports import cached_prefixes, read_tokenizer

    text = _text_of(tokens or [], source)
    token_ids = read_tokenizer(tokenizer, text) if tokenizer is not None else _ids_in(text)
    if not token_ids:
        msg = "there is nothing to look up: no token id was given, and no text that has any"
        raise ConfigError(msg)
    identity = RequestIdentity(cache_salt=salt, adapter=adapter)
    try:
        with reach(address, file, settings) as client:
            found = cached_prefixes(client, token_ids, model_name=model, identity=identity)
    except ValueError as error:  # too many, or a salt that is no text
        raise ConfigError(str(error)) from error
    if as_json:
        print_json({"num_tokens": len(token_ids), "spaces": msgspec.to_builtins(found)})
        return
    if not found:
        typer.echo("the store knows no such model: none of its engines has registered, and nothing of it is on disk")
        return
    rows = [
        (
            each.model_name,
            each.kind,
            f"{each.worker_id}/{each.world_size}",
            each.problem or f"{each.cached_tokens} of {each.num_tokens}",
            ", ".join(f"{count} in {medium}" for medium, count in each.tokens.items()),
            str(sum(each.chunks.values())),
        )
        for each in found
    ]
    print_table(("model", "kind", "rank", "tokens cached", "where", "chunks"), rows)


def clear(
    *,
    ram_only: Annotated[bool, typer.Option("--ram-only", help="Leave what is on disk.")] = False,
    address: AddressOption = None,
    file: FileOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have a store forget everything, or what lies idle in RAM."""
    with reach(address, file, settings) as client:
        count = client.clear(lower_tiers=not ram_only)
    if as_json:
        print_json({"num_chunks": count})
    else:
        typer.echo(f"{count} chunks cleared")


def _switch(name: str, words: tuple[str, str], turn: Callable[[StoreClient, bool], bool], about: str) -> Command:
    """A command that turns a switch and tells how it stands: as ``name`` to ``--json``, else by one of ``words``."""

    def command(
        state: OnOff,
        *,
        address: AddressOption = None,
        file: FileOption = None,
        settings: SetOption = None,
        as_json: JsonOption = False,
    ) -> None:
        with reach(address, file, settings) as client:
            is_on = turn(client, state is OnOff.ON)
        if as_json:
            print_json({name: is_on})
        else:
            typer.echo(words[is_on])

    command.__doc__ = about
    return command


freeze: Final = _switch(
    "is_frozen",
    ("not frozen", "frozen"),
    lambda client, is_on: client.switch(frozen=is_on).is_frozen,
    "Freeze a store, or thaw it. Frozen, it serves what is in RAM, and stores nothing.",
)
hot_cache: Final = _switch(
    "hot_cache",
    ("hot cache off", "hot cache on"),
    lambda client, is_on: client.switch(hot_cache=is_on).hot_cache,
    "Switch a store's cache in RAM on or off. Off, RAM is emptied, and keeps nothing that a lower tier holds.",
)


def _text_of(words: list[str], source: Path | None) -> str:
    if (source is not None) == bool(words):
        msg = "give token ids or text, `-` for stdin, or --from PATH: one of them"
        raise ConfigError(msg)
    try:
        if source is not None:
            return source.read_text(encoding="utf-8")
        if words != ["-"]:
            return " ".join(words)
        return "" if sys.stdin is None else sys.stdin.read()  # None: it is closed
    except (OSError, ValueError) as error:
        msg = f"cannot read {source or 'stdin'}: {error}"
        raise ConfigError(msg) from error


def _ids_in(text: str) -> list[int]:
    """Ids between blanks, commas or brackets."""
    words = text.translate(str.maketrans(",[]\n\t", "     ")).split()
    if wrong := next((word for word in words if not _ID.fullmatch(word) or int(word) >> 32), None):
        msg = f"{wrong[:40]!r} is not a token id, a whole number below 2**32: for text, name the model's --tokenizer"
        raise ConfigError(msg)
    return [int(word) for word in words]
