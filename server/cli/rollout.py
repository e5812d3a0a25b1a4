"""`lathe rollout watch`: a live view of one model's versions, traffic, canary and latest changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lathe.server.cli.canary_view import canary_view, percent
from lathe.server.cli.command_group import Commands
from lathe.server.cli.connection import Connection, with_connection
from lathe.server.cli.models import Name, changes_table
from lathe.server.cli.terminal import Interval, Rounds, live_view, make_table, ticks
from lathe.server.cli.top import ACTIVITY, MetricsSnapshot, VersionCounters, activity_cells, fetch_metrics

if TYPE_CHECKING:
    from lathe.server.api.management.canary_schemas import CanaryState
    from lathe.server.api.management.schemas import AuditEntry, ModelState, VersionState
    from lathe.server.client import Client

app = Commands("Watch a model's versions, their traffic and a canary.")

CHANGES = 5  # the number of latest changes shown


class Rollout(NamedTuple):
    """The state of one model at one time; `look` holds the server's metrics."""

    model: ModelState
    versions: list[VersionState]
    trial: CanaryState | None
    changes: list[AuditEntry]
    look: MetricsSnapshot


@app.command()
@with_connection
def watch(
    server: Connection,
    name: Name,
    interval: Interval = 1.0,
    rounds: Rounds = None,
) -> None:
    """Show a model's versions, aliases, traffic, canary and latest changes, until Ctrl-C."""
    with server.client(name) as client, live_view() as show:
        before = fetch_metrics(client)
        for _ in ticks(interval, rounds):
            now = fetch_rollout(client, name)
            show(rollout_view(now, before))
            before = now.look


def fetch_rollout(client: Client, name: str) -> Rollout:
    """Fetch the state of a model and the metrics from a server; raises ClientError."""
    from lathe.server.client import ApiError

    try:
        trial = client.canary(name)
    except ApiError as error:
        if error.status != 404:
            raise
        trial = None
    model, versions, changes = client.model(name), client.versions(name), client.audit(name)[-CHANGES:]
    return Rollout(model, versions, trial, changes, fetch_metrics(client))


def rollout_view(now: Rollout, before: MetricsSnapshot) -> Group:
    """Return the tables for a model, with the traffic of its versions since the metrics `before`."""
    parts: list[RenderableType] = [_versions(now, before)]
    if now.trial is not None:
        parts.append(canary_view(now.model.name, now.trial))
    if now.changes:
        parts.append(changes_table(now.changes))
    problem = [Text(f"config.toml is not followed: {now.model.config_error}")] if now.model.config_error else []
    return Group(*parts, *problem)


def _versions(now: Rollout, before: MetricsSnapshot) -> Table:
    ready = "ready" if now.model.ready else "not ready"
    title = f"{now.model.name}: {ready}, {now.model.generation} changes so far"
    table = make_table("version", "state", "answers as", *ACTIVITY, title=title)
    seconds = now.look.at - before.at
    for version in now.versions:
        page = (now.model.name, str(version.version))
        cells = activity_cells(
            now.look.pages.get(page, VersionCounters()), before.pages.get(page, VersionCounters()), seconds
        )
        state = f"{version.state}: {version.reason}" if version.reason else version.state
        table.add_row(str(version.version), state, _roles(now, version), *cells)
    return table


def _roles(now: Rollout, version: VersionState) -> str:
    """Return the roles of a version: the aliases that it answers for, and its share as the candidate of a canary.

    An alias that points to this version while another still answers for it is marked `(soon)`.
    """
    answering = now.model.answering
    names = [alias for alias, number in sorted(answering.items()) if number == version.version]
    names += [f"{alias} (soon)" for alias in sorted(version.aliases) if answering.get(alias) != version.version]
    if now.trial is not None and now.trial.version == version.version:
        names.append(f"candidate for {percent(now.trial.weight)}" if now.trial.step >= 0 else "candidate (soon)")
    return ", ".join(names)
