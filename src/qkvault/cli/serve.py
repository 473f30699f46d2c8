"""``qkvault serve``: the server. Every flag is a setting under another spelling."""

from __future__ import annotations

from typing import Annotated

import typer

from qkvault.cli.config import FileOption, SetOption, split


def serve(
    *,
    ram: Annotated[str | None, typer.Option(metavar="SIZE", help="ram_bytes: the pool, for example 8GiB.")] = None,
    disk: Annotated[str | None, typer.Option(metavar="PATH", help="disk_path: directory of the disk tier.")] = None,
    disk_size: Annotated[str | None, typer.Option(metavar="SIZE", help="disk_bytes: cap of the disk tier.")] = None,
    listen: Annotated[
        list[str] | None, typer.Option(metavar="ADDRESS", help="unix:///path or tcp://host:port; repeatable.")
    ] = None,
    http: Annotated[
        str | None, typer.Option(metavar="PLACE", help="HTTP for operators: host:port or unix:///path.")
    ] = None,
    token: Annotated[
        str | None, typer.Option(help="What clients of TCP have to know. QKVAULT_TOKEN keeps it out of `ps`.")
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(metavar="PATH", help="tls_cert_path, for TCP.")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="PATH", help="tls_key_path, for TCP.")] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Listen where others reach it without TLS and a token.")
    ] = None,
    file: FileOption = None,
    settings: SetOption = None,
) -> None:
    """Keep a cache for every engine of this machine, until SIGTERM or SIGINT: then flush to disk and exit.

    Exit codes: 0; 1 on a second signal; 2 if it cannot start; 3 if something was not written to disk in time.
    """
    from qkvault.config import load

    flags: dict[str, object] = {
        "ram_bytes": ram,
        "disk_path": disk,
        "disk_bytes": disk_size,
        "listen": ",".join(listen) if listen else None,
        "http": http,
        "token": token,
        "tls_cert_path": tls_cert,
        "tls_key_path": tls_key,
        "insecure": insecure,
    }
    loaded = load(file, cli=flags | split(settings))

    from qkvault.server.process import run

    raise typer.Exit(run(loaded))
