"""``lathe models``, ``lathe versions``, ``lathe audit``: what there is, and what became of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Column, Table

from server.connection import Connection, asks_server
from server.terminal import Json, console, print_json

if TYPE_CHECKING:
    from server.api.schemas import ModelState, VersionDetail


def known(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the server's models that begin so, for a shell; none if the server does not say."""
    from server.client import Client, ClientError

    given: dict[str, Any] = {
        option: context.params.get(option) for option in ("url", "api_key", "ca", "cert", "cert_key")
    }
    try:
        with Client(**given, timeout=1.0, patience=0.0) as client:
            return [state.name for state in client.models() if state.name.startswith(incomplete)]
    except (ClientError, OSError, ValueError):
        return []  # nothing may be printed while somebody types


Name = Annotated[str, typer.Argument(help="The model's name on the server.", metavar="MODEL", autocompletion=known)]


@asks_server
def models(server: Connection, as_json: Json = False) -> None:
    """List the models of a server: their live version, all versions, and what is wrong."""
    with server.client() as client:
        found = client.models()
    if as_json:
        print_json([state.model_dump() for state in found])
        return
    table = Table("model", "live", "versions", "other aliases", "state")
    for state in found:
        table.add_row(
            state.name, str(state.aliases.get("live", "")), ranges(state.versions), other_aliases(state), _state(state)
        )
    console.print(table)


@asks_server
def versions(server: Connection, name: Name, as_json: Json = False) -> None:
    """List the versions of a model: their states, aliases, sizes, and why one failed."""
    with server.client(name) as client:
        found = [client.version(name, state.version) for state in client.versions(name)]
    if as_json:
        print_json([version.model_dump() for version in found])
        return
    whole = Column("version", no_wrap=True)
    table = Table(whole, "state", "aliases", "created", "size", "sha256", "takes -> gives")
    for version in found:
        state = f"{version.state}: {version.reason}" if version.reason else version.state
        digest, created = (version.digest or "")[:12], (version.created or "")[:19]
        row = (", ".join(version.aliases), created, size_of(version), digest, signature_of(version))
        table.add_row(str(version.version), state, *row)
    console.print(table)


@asks_server
def audit(
    server: Connection,
    name: Name,
    last: Annotated[int | None, typer.Option(help="Show only this many of the latest changes.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """List the changes of a model, oldest first: when, what, and by whom."""
    with server.client(name) as client:
        changes = client.audit(name)[-(last or 0) :]
    if as_json:
        print_json([entry.model_dump() for entry in changes])
        return
    table = Table("when", "what", "version", "alias", "live after it", "who", "why")
    for entry in changes:
        live = str(entry.aliases.get("live", ""))
        row = (entry.action, str(entry.version), entry.alias or "", live, entry.actor, entry.reason)
        table.add_row(entry.time, *row)
    console.print(table)


def size_of(version: VersionDetail) -> str:
    """Return how large a version's files are, empty where its manifest is not known."""
    files = (version.manifest or {}).get("files", {})
    return decimal(sum(int(file["size"]) for file in files.values())) if files else ""


def signature_of(version: VersionDetail) -> str:
    """Return what a version takes and gives, in one line; empty where its manifest does not say."""
    manifest = version.manifest or {}
    sides = ([tensor(spec) for spec in manifest.get(side, ())] for side in ("inputs", "outputs"))
    return " -> ".join(", ".join(side) for side in sides) if "inputs" in manifest else ""


def tensor(spec: dict[str, object]) -> str:
    """Return a tensor of metadata for people: `image FP32[-1, 1, 8, 8]`."""
    return f"{spec['name']} {spec['datatype']}{'[*]' if spec.get('any_rank') else spec['shape']}"


def ranges(numbers: list[int]) -> str:
    """Return numbers for people: `1-3, 5`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def other_aliases(state: ModelState) -> str:
    """Return the aliases beside `live` and the versions they name."""
    return ", ".join(f"{alias} {version}" for alias, version in sorted(state.aliases.items()) if alias != "live")


def silence(state: ModelState) -> str:
    """Return one line on a model of which no version answers."""
    return f"{state.name} does not answer" + (f": {state.reason}" if state.reason else "")


def _state(state: ModelState) -> str:
    problems = [f"config.toml is not followed: {state.config_error}"] if state.config_error else []
    answering, named = state.answering.get("live"), state.aliases.get("live")
    if not state.ready:
        return "; ".join([f"not ready: {state.reason}" if state.reason else "not ready", *problems])
    if answering != named:
        problems.insert(0, f"version {answering} answers until {named} is loaded")
    return "; ".join(["ready", *problems])
