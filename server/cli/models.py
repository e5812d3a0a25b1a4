"""`lathe models`, `lathe versions`, `lathe audit`: list models, their versions and their history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Table

from lathe.server.cli.connection import Connection, with_connection
from lathe.server.cli.terminal import WIDE, Json, console, filled_table, local_time, print_json, time_column

if TYPE_CHECKING:
    from lathe.server.api.management.schemas import AuditEntry, ModelState, VersionDetail


_CHANGES = {  # actions of the API -> the words of the commands
    "publish": "push",
    "adopt": "copied into the folder",
    "canary": "canary start",
    "step": "canary step",
    "promoted": "canary passed",
    "rolled_back": "canary failed",
    "cancelled": "canary cancel",
    "void": "undone after a crash",
}

_MOST_CHANGES = 10_000  # of one answer; the server keeps the last 2,000 changes of a model
_SERVERS_OWN = {"adopt", "step", "promoted", "rolled_back", "void"}  # actions that the server takes by itself


def complete_model_name(context: typer.Context, incomplete: str) -> list[str]:
    """Return the server's models whose names start with `incomplete`, for shell completion; [] on any error."""
    from lathe.server.client import Client, ClientError

    connection: dict[str, Any] = {
        option: context.params.get(option) for option in ("url", "api_key", "ca", "cert", "cert_key")
    }
    try:
        with Client(**connection, timeout=1.0, patience=0.0) as client:
            return [state.name for state in client.models() if state.name.startswith(incomplete)]
    except (ClientError, OSError, ValueError):
        return []  # an error message would appear in the middle of the user's input


Name = Annotated[
    str, typer.Argument(help="The model's name on the server.", metavar="MODEL", autocompletion=complete_model_name)
]


@with_connection
def models(server: Connection, as_json: Json = False) -> None:
    """List the models of a server with their live version, all versions, aliases and problems."""
    with server.client() as client:
        found = client.models()
    if as_json:
        print_json([state.model_dump() for state in found])
        return
    rows = [
        (state.name, str(state.aliases.get("live", "")), format_ranges(state.versions), other_aliases(state),
         canary_text(state), _state(state))
        for state in found
    ]  # fmt: skip
    console.print(filled_table(("model", "live", "versions", "other aliases", "canary", "state"), rows))


@with_connection
def versions(server: Connection, name: Name, as_json: Json = False) -> None:
    """List the versions of a model with their state, aliases, origin, size and types, and why a version failed."""
    with server.client(name) as client:
        found = [client.version(name, state.version) for state in client.versions(name)]
        model = client.model(name)
    if as_json:
        print_json([version.model_dump() for version in found])
        return
    columns = ("version", "state", "aliases", time_column("created"), "origin", "size", "sha256", "inputs -> outputs")
    console.print(filled_table(columns, (_version_cells(version, model) for version in found)))


def _version_cells(version: VersionDetail, model: ModelState) -> tuple[str, ...]:
    """Return the cells of a version; a narrow terminal has no room for its digest."""
    state = f"{version.state}: {version.reason}" if version.reason else version.state
    is_candidate = model.canary is not None and model.canary.version == version.version
    roles = ", ".join([*version.aliases, *(["candidate"] if is_candidate else [])])
    digest = (version.digest or "")[:12] if console.width >= WIDE else ""
    created = local_time(version.created)
    origin = origin_of(version)
    return str(version.version), state, roles, created, origin, size_of(version), digest, signature_of(version)


def origin_of(version: VersionDetail) -> str:
    """Return the kind of job that made a version, and the version from which it started; empty for an upload."""
    lineage = ((version.manifest or {}).get("metadata") or {}).get("lineage")
    if not isinstance(lineage, dict) or "kind" not in lineage:
        return ""
    parent = lineage.get("parent")
    return f"{lineage['kind']}, from {parent['model']} {parent['version']}" if parent else str(lineage["kind"])


@with_connection
def audit(
    server: Connection,
    name: Name,
    last: Annotated[int | None, typer.Option(help="Show only this many of the latest changes.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """List the changes of a model, oldest first, with their time, actor and reason."""
    with server.client(name) as client:
        changes = client.audit(name, limit=min(last or _MOST_CHANGES, _MOST_CHANGES))
    if as_json:
        print_json([entry.model_dump() for entry in changes])
        return
    console.print(changes_table(changes))


def changes_table(changes: list[AuditEntry]) -> Table:
    """Return the table of a model's changes, in their order."""
    columns = (time_column("time"), "change", "version", "live then", "by", "reason")
    return filled_table(columns, map(_change_cells, changes))


def _change_cells(entry: AuditEntry) -> tuple[str, ...]:
    actor = "the server" if entry.action in _SERVERS_OWN else entry.actor
    live = str(entry.aliases.get("live", ""))
    return local_time(entry.time), _change(entry), str(entry.version), live, actor, entry.reason


def _change(entry: AuditEntry) -> str:
    """Return what a change did, in the words of the commands, with its alias unless that is `live`."""
    if (entry.action, entry.alias) == ("alias", "live"):
        return "promote"
    alias = f" {entry.alias}" if entry.alias not in (None, "live") else ""
    return _CHANGES.get(entry.action, entry.action) + alias


def size_of(version: VersionDetail) -> str:
    """Return the size of a version's files as text; empty if its manifest is not known."""
    files = (version.manifest or {}).get("files", {})
    return decimal(sum(int(file["size"]) for file in files.values())) if files else ""


def signature_of(version: VersionDetail) -> str:
    """Return a version's inputs and outputs in one line, `inputs -> outputs`; empty if its manifest has none."""
    manifest = version.manifest or {}
    sides = ([format_tensor(spec) for spec in manifest.get(side, ())] for side in ("inputs", "outputs"))
    return " -> ".join(", ".join(side) for side in sides) if "inputs" in manifest else ""


def format_tensor(spec: dict[str, object]) -> str:
    """Return the text of a tensor in a model's metadata: `image FP32[-1, 1, 8, 8]`."""
    return f"{spec['name']} {spec['datatype']}{'[*]' if spec.get('any_rank') else spec['shape']}"


def format_ranges(numbers: list[int]) -> str:
    """Return numbers as ranges: `1-3, 5`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def other_aliases(state: ModelState) -> str:
    """Return the aliases other than `live` with their versions as text: `staging 3, test 4`; empty without any."""
    return ", ".join(f"{alias} {version}" for alias, version in sorted(state.aliases.items()) if alias != "live")


def canary_text(state: ModelState) -> str:
    """Return the candidate of a model's canary with its share: `version 2, 10%`; empty without a canary."""
    return f"version {state.canary.version}, {state.canary.weight * 100:.3g}%" if state.canary else ""


def not_ready_text(state: ModelState) -> str:
    """Return one line about a model that is not ready, with the reason if there is one."""
    return f"{state.name} does not answer" + (f": {state.reason}" if state.reason else "")


def _state(state: ModelState) -> str:
    problems = [f"config.toml is not followed: {state.config_error}"] if state.config_error else []
    answering, named = state.answering.get("live"), state.aliases.get("live")
    if not state.ready:
        return "; ".join([f"not ready: {state.reason}" if state.reason else "not ready", *problems])
    if answering != named:
        problems.insert(0, f"version {answering} answers until {named} is loaded")
    return "; ".join(["ready", *problems])
