"""``lathe canary start | watch | cancel``: try a version on a share of the requests."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table

from server.cli_group import Commands
from server.cli_models import Name
from server.connection import Connection, asks_server
from server.terminal import console, fail

if TYPE_CHECKING:
    from server.api.canary_schemas import CanaryState
    from server.api.schemas import AuditEntry
    from server.client import Client

app = Commands("Try a version on a share of the requests (canary).")

_STEP = re.compile(r"([0-9.]+)(%?):([0-9.]+)([smhd]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


@app.command()
@asks_server
def start(
    server: Connection,
    name: Name,
    version: Annotated[int, typer.Argument(help="The version to try: the candidate.", metavar="VERSION", min=1)],
    weight: Annotated[
        float | None,
        typer.Option(help="Share of the requests that the candidate answers. Default: 0.1.", min=0, max=0.5),
    ] = None,
    shadow: Annotated[
        float, typer.Option(help="Share of requests it answers too, only to compare.", min=0, max=1)
    ] = 0.0,
    rtol: Annotated[float, typer.Option(help="Relative tolerance when answers are compared.", min=0)] = 1e-3,
    atol: Annotated[float, typer.Option(help="Absolute tolerance when answers are compared.", min=0)] = 1e-5,
    tolerated: Annotated[float, typer.Option(help="Share of the compared answers that may differ.")] = 0.005,
    promote: Annotated[bool, typer.Option(help="Make the candidate live once it has passed.")] = True,
    step: Annotated[
        list[str] | None,
        typer.Option(help="A share and its time, such as 1%:10m, in place of --weight; repeat for more."),
    ] = None,
    start_at: Annotated[
        str | None, typer.Option(help="When to begin, such as 2026-01-31T02:00, local time. Default: now.")
    ] = None,
) -> None:
    """Send a share of the requests to a version: the server promotes it if it does well, and rolls it back if not.

    \b
    Examples:
      lathe canary start digits 3
      lathe canary start digits 3 --weight 0.2 --shadow 0.2
      lathe canary start digits 3 --step 1%:10m --step 10%:30m --step 50%:1h
    """
    asked: dict[str, Any] = {"shadow": shadow, "rtol": rtol, "atol": atol, "tolerated": tolerated, "promote": promote}
    asked |= {"weight": weight} if weight is not None else {}
    asked |= {"steps": [read_step(text) for text in step]} if step else {}
    asked |= {"start_at": read_time(start_at)} if start_at else {}
    with server.client(name) as client:
        state = client.start_canary(name, version, **asked)
    when = f", from {state.start_at} on" if state.step < 0 else ""
    against = f"against version {state.live}" if state.live else "against the live version"
    console.print(f"{name} version {state.version} is tried {against}{when}", soft_wrap=True)


@app.command()
@asks_server
def watch(
    server: Connection,
    name: Name,
    interval: Annotated[float, typer.Option(help="Seconds between two updates.", min=0.01)] = 1.0,
) -> None:
    """Show a trial until it has ended, and how it ended. If there is none, say how the last one ended."""
    with server.client(name) as client:
        if (state := _under_way(client, name)) is None:
            console.print(_last(client, name), soft_wrap=True)
            return
        began = state.generation
        with Live(console=console, refresh_per_second=4) as display:
            while state is not None:
                schedule = [schedule_table(state)] if state.steps else []
                display.update(Group(*schedule, evidence_table(name, state)))
                time.sleep(interval)
                state = _under_way(client, name)
        console.print(_outcome(name, began, client.audit(name)), soft_wrap=True)


@app.command()
@asks_server
def cancel(server: Connection, name: Name) -> None:
    """End a trial: the live version answers all requests again."""
    with server.client(name) as client:
        ended = client.cancel_canary(name)
    console.print(f"{name} version {ended.version} is not tried any more")


def read_step(text: str) -> dict[str, float]:
    """Read a step such as 1%:10m, or 0.01:600."""
    found = _STEP.fullmatch(text.strip())
    try:
        if found is None:
            raise ValueError
        weight, seconds = float(found[1]) / (100 if found[2] else 1), float(found[3]) * _SECONDS[found[4]]
    except ValueError:
        raise fail(f"--step: expected a share and a time such as 1%:10m or 0.01:600, got {text!r}") from None
    return {"weight": weight, "seconds": seconds}


def read_time(text: str) -> str:
    """Read a time, local where it names no zone."""
    try:
        return datetime.fromisoformat(text).astimezone().isoformat()
    except (ValueError, OverflowError):
        raise fail(f"--start-at: expected a time such as 2026-01-31T02:00, got {text!r}") from None


def schedule_table(state: CanaryState) -> Table:
    """Return the steps of a roll-out, which one it is in, and for how much longer."""
    begins = f"begins at {state.start_at}, in {_span(state.remaining or 0.0)}" if state.step < 0 else ""
    title = begins or f"step {state.step + 1} of {len(state.steps)} since {state.since}"
    table = Table("step", "share", "for", "requests", "state", title=title, title_justify="left")
    for number, step in enumerate(state.steps):
        word = "done" if number < state.step else _present(state) if number == state.step else "to come"
        time, requests = _span(step.seconds) if step.seconds else "", str(step.requests or "")
        table.add_row(str(number + 1), f"{step.weight * 100:.3g}%", time, requests, word)
    return table


def _present(state: CanaryState) -> str:
    """What the present step waits for."""
    if state.remaining:
        return f"{_span(state.remaining)} left"
    last = state.step == len(state.steps) - 1
    return "goes live once it has passed" if last else f"{state.requests} requests so far"


def _span(seconds: float) -> str:
    """Return a time for people: 90 s, 1.5 h."""
    unit = next((unit for unit in "dhm" if seconds >= 2 * _SECONDS[unit]), "s")
    return f"{seconds / _SECONDS[unit]:.3g} {unit if unit != 'm' else 'min'}"


def _under_way(client: Client, name: str) -> CanaryState | None:
    from server.client import ApiError

    try:
        return client.canary(name)
    except ApiError as error:
        if error.status != 404 or not client.model(name):  # raises where the model is what there is not
            raise
        return None


def _last(client: Client, name: str) -> str:
    """Return how the last trial of a model ended."""
    changes = client.audit(name)
    trials = [entry.generation for entry in changes if entry.action == "canary"]
    if not trials:
        raise fail(f"no version of {name} has been tried yet: lathe canary start {name} VERSION")
    return f"no trial is under way; the last one: {_outcome(name, trials[-1], changes)}"


def _outcome(name: str, generation: int, changes: list[AuditEntry]) -> str:
    """Return how the trial ended that began with that change."""
    began = next(entry for entry in changes if entry.generation == generation)
    ended = _end_of(began, changes)
    reason = f": {ended.reason}" if ended.reason else ""
    return f"{name} version {began.version}: {ended.action}{reason}"


def _end_of(began: AuditEntry, changes: list[AuditEntry]) -> AuditEntry:
    """Return the change that ended a trial: a verdict, or whatever moved the live alias."""
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
    """Return the questions put to a candidate, and how far each is answered."""
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
