"""``lathe rollout watch``: one model's versions, who answers, the candidate on trial, and what was changed last."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from server.cli_canary import evidence_table, schedule_table
from server.cli_group import Commands
from server.cli_models import Name
from server.cli_top import Look, Page, activity, read
from server.connection import Connection, asks_server
from server.terminal import Interval, Rounds, console, looks

if TYPE_CHECKING:
    from server.api.canary_schemas import CanaryState
    from server.api.schemas import AuditEntry, ModelState, VersionState
    from server.client import Client

app = Commands("Watch a model's versions, their traffic and a canary.")

CHANGES = 5  # of the latest that are shown


class Rollout(NamedTuple):
    """One model at one time; ``look``: its server's counters."""

    model: ModelState
    versions: list[VersionState]
    trial: CanaryState | None
    changes: list[AuditEntry]
    look: Look


@app.command()
@asks_server
def watch(
    server: Connection,
    name: Name,
    interval: Interval = 1.0,
    rounds: Rounds = None,
) -> None:
    """Show a model's versions, aliases, traffic, its canary, and the latest changes, until Ctrl-C."""
    with server.client(name) as client, Live(console=console, auto_refresh=False) as display:
        before = read(client.metrics(), time.monotonic())
        for _ in looks(interval, rounds):
            now = look(client, name)
            display.update(view(now, before), refresh=True)
            before = now.look


def look(client: Client, name: str) -> Rollout:
    """Ask a server what it says of a model; raises ApiError."""
    from server.client import ApiError

    try:
        trial = client.canary(name)
    except ApiError as error:
        if error.status != 404:
            raise
        trial = None
    model, versions, changes = client.model(name), client.versions(name), client.audit(name)[-CHANGES:]
    return Rollout(model, versions, trial, changes, read(client.metrics(), time.monotonic()))


def view(now: Rollout, before: Look) -> Group:
    """Return what is shown of a model, and what its versions did since the look before."""
    parts = [_versions(now, before)]
    if now.trial is not None and now.trial.steps:
        parts.append(schedule_table(now.trial))
    if now.trial is not None:
        parts.append(evidence_table(now.model.name, now.trial))
    if now.changes:
        parts.append(_changes(now.changes))
    problem = [Text(f"config.toml is not followed: {now.model.config_error}")] if now.model.config_error else []
    return Group(*parts, *problem)


def _versions(now: Rollout, before: Look) -> Table:
    ready = "ready" if now.model.ready else "not ready"
    title = f"{now.model.name}: {ready}, generation {now.model.generation}"
    table = Table("version", "state", "answers as", "requests/s", "failed/s", "p50", "p99", title=title)
    table.title_justify = "left"
    seconds = now.look.at - before.at
    for version in now.versions:
        page = (now.model.name, str(version.version))
        shown = activity(now.look.pages.get(page, Page()), before.pages.get(page, Page()), seconds)
        state = f"{version.state}: {version.reason}" if version.reason else version.state
        table.add_row(str(version.version), state, _names(now, version), *shown)
    return table


def _names(now: Rollout, version: VersionState) -> str:
    """The aliases it answers for; one that has moved elsewhere, or not yet here, is told with where it is now."""
    answering = now.model.answering
    names = [alias for alias, number in sorted(answering.items()) if number == version.version]
    names += [f"{alias} (soon)" for alias in sorted(version.aliases) if answering.get(alias) != version.version]
    if now.trial is not None and now.trial.version == version.version:
        names.append(f"candidate for {now.trial.weight * 100:.3g}%" if now.trial.step >= 0 else "candidate (soon)")
    return ", ".join(names)


def _changes(changes: list[AuditEntry]) -> Table:
    table = Table("when", "what", "version", "alias", "who", "why")
    for entry in reversed(changes):
        table.add_row(entry.time, entry.action, str(entry.version), entry.alias or "", entry.actor, entry.reason)
    return table
