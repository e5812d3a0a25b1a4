"""`lathe promote`, `rollback`, `alias`, `delete`, `load`, `unload`: change the versions that a server runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lathe.server.cli.connection import Connection, with_connection
from lathe.server.cli.models import Name
from lathe.server.cli.terminal import console, fail, make_table

if TYPE_CHECKING:
    from lathe.server.api.management.schemas import AliasState

Version = Annotated[int, typer.Argument(help="The version's number.", min=1, metavar="VERSION")]
OtherSignature = Annotated[
    bool,
    typer.Option("--allow-signature-change", help="Allow inputs or outputs that differ from the live version's."),
]


def alias_text(name: str, state: AliasState, before: int | None = None) -> str:
    """Return one line on the version that an alias names after a call; `before`: the version that it named before."""
    fact = f"version {state.version} is live" if state.alias == "live" else f"{state.alias} is version {state.version}"
    if not state.changed:
        return f"{name} {fact} already: nothing was changed"
    return f"{name} {fact}" + (f" (before: {before})" if before else "")


@with_connection
def promote(server: Connection, name: Name, version: Version, allow_signature_change: OtherSignature = False) -> None:
    """Make a version live: it answers the requests that name no version.

    `lathe rollback MODEL` undoes it.

    \b
    Examples:
      lathe promote digits 3
    """
    with server.client(name) as client:
        state = client.set_alias(name, "live", version, allow_signature_change=allow_signature_change)
    console.print(alias_text(name, state, before=state.previous))


@with_connection
def rollback(
    server: Connection,
    name: Name,
    alias: Annotated[str, typer.Option(help="Move this alias back.")] = "live",
    to: Annotated[int | None, typer.Option(help="Go back to this version. Default: the previous one.", min=1)] = None,
) -> None:
    """Roll a model back to the version that was live before.

    \b
    Examples:
      lathe rollback digits
      lathe rollback digits --to 1
    """
    with server.client(name) as client:
        state = client.rollback(name, alias=alias, to=to)
    console.print(alias_text(name, state))


@with_connection
def alias(
    server: Connection,
    name: Name,
    alias: Annotated[
        str | None,
        typer.Argument(help="The alias, such as `live` or `staging`.", metavar="ALIAS", show_default=False),
    ] = None,
    version: Annotated[
        int | None,
        typer.Argument(help="The version to which the alias points.", min=1, metavar="VERSION", show_default=False),
    ] = None,
    allow_signature_change: OtherSignature = False,
) -> None:
    """Point an alias to a version; without ALIAS and VERSION, list the aliases of a model.

    A request may name an alias instead of a version: /v2/models/MODEL/versions/ALIAS/infer

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
            state = client.set_alias(name, alias, version, allow_signature_change=allow_signature_change)
            console.print(alias_text(name, state))
            return
    table = make_table("alias", "version", "answers now")
    for each, number in sorted(model.aliases.items()):
        table.add_row(each, str(number), str(model.answering.get(each, "none is loaded")))
    console.print(table)


@with_connection
def delete(server: Connection, name: Name, version: Version) -> None:
    """Delete a version permanently. Refused while an alias points to it."""
    with server.client(name) as client:
        client.delete(name, version)
    console.print(f"{name} version {version} is deleted")


@with_connection
def load(server: Connection, name: Name) -> None:
    """Load a model into memory, after `lathe unload` or to retry after a failure."""
    with server.client(name) as client:
        client.load(name)
        answering = client.model(name).answering.get("live")
    console.print(f"{name} is loaded" + (f", version {answering} answers" if answering else ""))


@with_connection
def unload(server: Connection, name: Name) -> None:
    """Unload a model from memory. Requests for it get 503 until `lathe load`; its versions stay on disk."""
    with server.client(name) as client:
        client.unload(name)
    console.print(f"{name} is unloaded; `lathe load {name}` loads it again")
