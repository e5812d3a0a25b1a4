"""`lathe canary start | watch | cancel`: tests a version on a share of the requests."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table

from lathe.server.cli.command_group import Commands
from lathe.server.cli.connection import Connection, with_connection
from lathe.server.cli.models import Name
from lathe.server.cli.terminal import console, fail

if TYPE_CHECKING:
    from lathe.server.api.management.canary_schemas import CanaryState
    from lathe.server.api.management.schemas import AuditEntry
    from lathe.server.client import Client

app = Commands("Test a version on a share of the requests (canary).")

_STEP = re.compile(r"([0-9.]+)(%?):([0-9.]+)([smhd]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


@app.command()
@with_connection
def start(
    server: Connection,
    name: Name,
    version: Annotated[int, typer.Argument(help="The version to test: the candidate.", metavar="VERSION", min=1)],
    weight: Annotated[
        float | None,
        typer.Option(help="Send this share of the requests to the candidate. Default: 0.1.", min=0, max=0.5),
    ] = None,
    shadow: Annotated[
        float,
        typer.Option(help="Mirror this share of the live requests to the candidate, only to compare.", min=0, max=1),
    ] = 0.0,
    rtol: Annotated[float, typer.Option(help="Compare answers with this relative tolerance.", min=0)] = 1e-3,
    atol: Annotated[float, typer.Option(help="Compare answers with this absolute tolerance.", min=0)] = 1e-5,
    tolerated: Annotated[float, typer.Option(help="Let this share of the compared answers differ.")] = 0.005,
    promote: Annotated[bool, typer.Option(help="Make the candidate live once it has passed.")] = True,
    step: Annotated[
        list[str] | None,
        typer.Option(help="Add a step, a share and its duration such as 1%:10m, instead of --weight; repeatable."),
    ] = None,
    start_at: Annotated[
        str | None, typer.Option(help="Start at this local time, such as 2026-01-31T02:00. Default: now.")
    ] = None,
) -> None:
    """Send a share of the requests to a version; the server promotes it if it passes, and rolls it back if it fails.

    \b
    Examples:
      lathe canary start digits 3
      lathe canary start digits 3 --weight 0.2 --shadow 0.2
      lathe canary start digits 3 --step 1%:10m --step 10%:30m --step 50%:1h
    """
    body: dict[str, Any] = {"shadow": shadow, "rtol": rtol, "atol": atol, "tolerated": tolerated, "promote": promote}
    body |= {"weight": weight} if weight is not None else {}
    body |= {"steps": [parse_step(text) for text in step]} if step else {}
    body |= {"start_at": parse_time(start_at)} if start_at else {}
    with server.client(name) as client:
        state = client.start_canary(name, version, **body)
    when = f", from {state.start_at} on" if state.step < 0 else ""
    against = f"against version {state.live}" if state.live else "against the live version"
    console.print(f"{name} version {state.version} is tested {against}{when}", soft_wrap=True)


@app.command()
@with_connection
def watch(
    server: Connection,
    name: Name,
    interval: Annotated[float, typer.Option(help="Wait this many seconds between two updates.", min=0.01)] = 1.0,
) -> None:
    """Show a canary until it ends, then its outcome. Without a running canary, show the outcome of the last one."""
    with server.client(name) as client:
        if (state := _running_canary(client, name)) is None:
            console.print(_last_outcome(client, name), soft_wrap=True)
            return
        began = state.generation
        with Live(console=console, refresh_per_second=4) as display:
            while state is not None:
                schedule = [schedule_table(state)] if state.steps else []
                display.update(Group(*schedule, evidence_table(name, state)))
                time.sleep(interval)
                state = _running_canary(client, name)
        console.print(_outcome(name, began, client.audit(name)), soft_wrap=True)


@app.command()
@with_connection
def cancel(server: Connection, name: Name) -> None:
    """Cancel a canary: the live version answers all requests again."""
    with server.client(name) as client:
        ended = client.cancel_canary(name)
    console.print(f"{name}: the canary of version {ended.version} is cancelled")


def parse_step(text: str) -> dict[str, float]:
    """Parse a step such as `1%:10m` or `0.01:600`; prints an error and raises typer.Exit if it is malformed."""
    found = _STEP.fullmatch(text.strip())
    try:
        if found is None:
            raise ValueError
        weight, seconds = float(found[1]) / (100 if found[2] else 1), float(found[3]) * _SECONDS[found[4]]
    except ValueError:
        raise fail(f"--step: expected a share and a duration such as 1%:10m or 0.01:600, got {text!r}") from None
    return {"weight": weight, "seconds": seconds}


def parse_time(text: str) -> str:
    """Parse an ISO 8601 time, local unless it names a zone, and return it with its zone; raises typer.Exit."""
    try:
        return datetime.fromisoformat(text).astimezone().isoformat()
    except (ValueError, OverflowError):
        raise fail(f"--start-at: expected a time such as 2026-01-31T02:00, got {text!r}") from None


def schedule_table(state: CanaryState) -> Table:
    """Return the steps of a canary's schedule, with the current step and its remaining time."""
    begins = f"begins at {state.start_at}, in {_duration(state.remaining or 0.0)}" if state.step < 0 else ""
    title = begins or f"step {state.step + 1} of {len(state.steps)} since {state.since}"
    table = Table("step", "share", "for", "requests", "state", title=title, title_justify="left")
    for number, step in enumerate(state.steps):
        word = "done" if number < state.step else _current_step(state) if number == state.step else "to come"
        time, requests = _duration(step.seconds) if step.seconds else "", str(step.requests or "")
        table.add_row(str(number + 1), f"{step.weight * 100:.3g}%", time, requests, word)
    return table


def _current_step(state: CanaryState) -> str:
    """Return the remaining time of the current step, afterwards the condition that it still waits for."""
    if state.remaining:
        return f"{_duration(state.remaining)} left"
    last = state.step == len(state.steps) - 1
    return "goes live once it has passed" if last else f"{state.requests} requests so far"


def _duration(seconds: float) -> str:
    """Return a duration as text: `90 s`, `1.5 h`."""
    unit = next((unit for unit in "dhm" if seconds >= 2 * _SECONDS[unit]), "s")
    return f"{seconds / _SECONDS[unit]:.3g} {unit if unit != 'm' else 'min'}"


def _running_canary(client: Client, name: str) -> CanaryState | None:
    """Return the model's running or scheduled canary, None if there is none; raises ApiError for an unknown model."""
    from lathe.server.client import ApiError

    try:
        return client.canary(name)
    except ApiError as error:
        if error.status != 404 or not client.model(name):  # `model` raises if the model itself is unknown
            raise
        return None


def _last_outcome(client: Client, name: str) -> str:
    """Return how the last canary of a model ended; raises typer.Exit if there was none."""
    changes = client.audit(name)
    trials = [entry.generation for entry in changes if entry.action == "canary"]
    if not trials:
        raise fail(f"{name} has had no canary yet: lathe canary start {name} VERSION")
    return f"no canary is running; the last one: {_outcome(name, trials[-1], changes)}"


def _outcome(name: str, generation: int, changes: list[AuditEntry]) -> str:
    """Return how the canary ended that started with the change of this generation."""
    began = next(entry for entry in changes if entry.generation == generation)
    ended = _end_of(began, changes)
    reason = f": {ended.reason}" if ended.reason else ""
    return f"{name} version {began.version}: {ended.action}{reason}"


def _end_of(began: AuditEntry, changes: list[AuditEntry]) -> AuditEntry:
    """Return the change that ended a canary: its verdict, its cancellation, or a move of the live alias."""
    return next(
        entry
        for entry in changes
        if entry.generation > began.generation
        and (
            entry.action in {"promoted", "rolled_back", "cancelled"}
            or entry.aliases.get("live") != began.aliases.get("live")
        )
    )


def evidence_table(name: str, state: CanaryState) -> Table:
    """Return the statistical tests of a candidate: rates of both versions, and the evidence for and against."""
    title = f"{name}: version {state.version} against {state.live}, {state.requests} requests, {state.verdict}"
    table = Table(
        "question", "live", "candidate", "requests", "against", "in favour", title=title, title_justify="left"
    )
    for found in state.evidence:
        live = "" if found.stable is None else f"{found.stable:.2%}"
        table.add_row(
            found.question,
            live,
            f"{found.candidate:.2%}",
            str(found.requests),
            f"{max(found.against, 0):.0%}",
            f"{max(found.in_favour, 0):.0%}",
        )
    return table
