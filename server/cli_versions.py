"""``lathe promote``, ``rollback``, ``alias``, ``delete``, ``load``, ``unload``: change what a server answers with."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from server.cli_models import Name
from server.connection import Connection, asks_server
from server.terminal import console, fail

Version = Annotated[int, typer.Argument(help="The version's number.", min=1, metavar="VERSION")]
OtherSignature = Annotated[
    bool,
    typer.Option("--allow-signature-change", help="Permit other inputs or outputs than those of the live version."),
]


@asks_server
def promote(server: Connection, name: Name, version: Version, allow_signature_change: OtherSignature = False) -> None:
    """Make a version live: it answers the requests that name no version.

    `lathe rollback MODEL` undoes it.

    \b
    Examples:
      lathe promote digits 3
    """
    with server.client(name) as client:
        state = client.set_alias(name, "live", version, allow_signature_change=allow_signature_change)
    before = f" (before: {state.previous})" if state.previous else ""
    console.print(f"{name} version {state.version} is live{before}")


@asks_server
def rollback(
    server: Connection,
    name: Name,
    alias: Annotated[str, typer.Option(help="The alias to move back.")] = "live",
    to: Annotated[int | None, typer.Option(help="The version to go back to. Default: the one before.")] = None,
) -> None:
    """Take a model back to the version that was live before.

    \b
    Examples:
      lathe rollback digits
      lathe rollback digits --to 1
    """
    with server.client(name) as client:
        state = client.rollback(name, alias=alias, to=to)
    console.print(f"{name} {alias} is version {state.version}")


@asks_server
def alias(
    server: Connection,
    name: Name,
    alias: Annotated[
        str | None,
        typer.Argument(help="The alias, such as `live` or `staging`.", metavar="ALIAS", show_default=False),
    ] = None,
    version: Annotated[
        int | None, typer.Argument(help="The version that it points to.", min=1, metavar="VERSION", show_default=False)
    ] = None,
    allow_signature_change: OtherSignature = False,
) -> None:
    """Point an alias to a version; without ALIAS and VERSION, list the aliases of a model.

    A request may name an alias in place of a version: /v2/models/MODEL/versions/ALIAS/infer

    \b
    Examples:
      lathe alias digits staging 3
    """
    if (alias is None) != (version is None):
        raise fail("expected an alias and a version, or neither to list the aliases")
    with server.client(name) as client:
        if alias is None or version is None:
            model = client.model(name)
        else:
            client.set_alias(name, alias, version, allow_signature_change=allow_signature_change)
            console.print(f"{name} {alias} is version {version}")
            return
    table = Table("alias", "version", "answers now")
    for each, number in sorted(model.aliases.items()):
        table.add_row(each, str(number), str(model.answering.get(each, "none is loaded")))
    console.print(table)


@asks_server
def delete(server: Connection, name: Name, version: Version) -> None:
    """Delete a version for good. Refused while an alias points to it."""
    with server.client(name) as client:
        client.delete(name, version)
    console.print(f"{name} version {version} is deleted")


@asks_server
def load(server: Connection, name: Name) -> None:
    """Load a model into memory: after `lathe unload`, or to try again after a failure."""
    with server.client(name) as client:
        client.load(name)
        answering = client.model(name).answering.get("live")
    console.print(f"{name} is loaded" + (f", version {answering} answers" if answering else ""))


@asks_server
def unload(server: Connection, name: Name) -> None:
    """Take a model out of memory. Requests for it get 503 until `lathe load`; its versions stay on disk."""
    with server.client(name) as client:
        client.unload(name)
    console.print(f"{name} is unloaded; `lathe load {name}` brings it back")
