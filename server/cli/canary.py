"""`lathe canary start | watch | cancel`: tests a version on a share of the requests."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lathe.server.canary.steps import MAX_SECONDS, MAX_WEIGHT
from lathe.server.cli.canary_view import canary_of, canary_view, outcome, plan_facts, progress_key, progress_line
from lathe.server.cli.command_group import Commands
from lathe.server.cli.connection import Connection, with_connection
from lathe.server.cli.models import Name
from lathe.server.cli.terminal import console, fail, live_view, local_time, print_facts

if TYPE_CHECKING:
    from lathe.server.api.management.canary_schemas import CanaryState
    from lathe.server.client import Client

app = Commands("Test a version on a share of the requests (canary).")

_OPTIONS = {  # fields of the request's body -> options
    "weight": "--weight", "shadow": "--shadow", "rtol": "--rtol", "atol": "--atol", "tolerated": "--tolerated",
    "steps": "--step", "start_at": "--start-at",
}  # fmt: skip
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def share_parser(low: float, high: float) -> Callable[[str], float]:
    """Return a parser of shares from `low` to `high`, such as `0.1` or `10%`; it raises typer.BadParameter."""

    def parse(text: str) -> float:
        found = re.fullmatch(r"([0-9.]+(?:e-?[0-9]+)?)(%?)", text.strip())
        try:
            share = float(found[1]) / (100 if found[2] else 1) if found else -1.0
        except ValueError:
            share = -1.0
        if not low <= share <= high:
            raise typer.BadParameter(f"expected a share from {low:g} to {high:g}, such as 0.1 or 10%, got {text!r}")
        return share

    return parse


def parse_step(text: str) -> dict[str, float]:
    """Return the weight and the seconds of a step such as `1%:10m` or `0.01:600`; raises typer.BadParameter."""
    share, _, length = text.strip().partition(":")
    found = re.fullmatch(r"([0-9.]+)([smhd]?)", length)
    try:
        seconds = float(found[1]) * _SECONDS[found[2]] if found else -1.0
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_SECONDS:
        raise typer.BadParameter(
            f"expected a share and a duration of at most 30 days, such as 1%:10m or 0.01:600, got {text!r}"
        )
    return {"weight": share_parser(0, MAX_WEIGHT)(share), "seconds": seconds}


def parse_time(text: str) -> str:
    """Return an ISO 8601 time, local unless it names a zone, in the local zone; raises typer.BadParameter."""
    try:
        return datetime.fromisoformat(text).astimezone().isoformat()
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"expected a time such as 2026-01-31T02:00, got {text!r}") from None


@app.command()
@with_connection
def start(
    server: Connection,
    name: Name,
    version: Annotated[int, typer.Argument(help="The version to test: the candidate.", metavar="VERSION", min=1)],
    weight: Annotated[
        float | None,
        typer.Option(
            help="Send this share of the requests to the candidate, at most 50%. Above 20% it begins with 20%, until "
            "the candidate has answered 1,000 requests; --step begins with any share. Default: 10%.",
            parser=share_parser(0, MAX_WEIGHT),
            metavar="SHARE",
        ),
    ] = None,
    shadow: Annotated[
        float | None,
        typer.Option(
            help="Let the candidate also run this share of the live version's requests, and compare the answers. "
            "Clients do not see the candidate's. Without this option, answers are not compared.",
            parser=share_parser(0, 1),
            metavar="SHARE",
        ),
    ] = None,
    rtol: Annotated[
        float | None,
        typer.Option(help="With --shadow: compare numbers with this relative tolerance. Default: 0.001.", min=0),
    ] = None,
    atol: Annotated[
        float | None,
        typer.Option(help="With --shadow: compare numbers with this absolute tolerance. Default: 0.00001.", min=0),
    ] = None,
    tolerated: Annotated[
        float | None,
        typer.Option(
            help="With --shadow: let this share of the compared answers differ. Default: 0.5%.",
            parser=share_parser(1e-4, 0.5),
            metavar="SHARE",
        ),
    ] = None,
    promote: Annotated[bool, typer.Option(help="Make the candidate live when it has passed.")] = True,
    step: Annotated[
        list[Any] | None,
        typer.Option(
            help="Instead of --weight: add a step, a share and its duration such as 1%:10m. Repeat the option for "
            "growing shares.",
            parser=parse_step,
            metavar="SHARE:TIME",
        ),
    ] = None,
    start_at: Annotated[
        str | None,
        typer.Option(
            help="Start at this local time, such as 2026-01-31T02:00. Default: now.",
            parser=parse_time,
            metavar="TIME",
        ),
    ] = None,
) -> None:
    """Send a share of the requests to a version; the server promotes it if it passes, and rolls it back if it fails.

    The server compares the candidate with the live version: failed requests, NaN and infinity in outputs, and latency.
    It compares the answers themselves only with --shadow.

    The candidate passes when it is no worse in enough requests: about 600 of its own if nothing bad happens, and
    several thousand if the live version itself fails now and then. It goes live then, but not before the last --step is
    over. A canary needs requests from clients: time alone does not end it. The candidate fails when it is worse, or if
    it is undecided after 50,000 requests.

    \b
    Examples:
      lathe canary start digits 3
      lathe canary start digits 3 --weight 20% --shadow 20%
      lathe canary start digits 3 --step 1%:10m --step 10%:30m --step 50%:1h
    """
    _check_together(shadow, {"--rtol": rtol, "--atol": atol, "--tolerated": tolerated}, weight, step)
    given: dict[str, Any] = {"weight": weight, "shadow": shadow, "rtol": rtol, "atol": atol, "tolerated": tolerated}
    given |= {"steps": step or None, "start_at": start_at}
    body: dict[str, Any] = {field: value for field, value in given.items() if value is not None}
    with server.client(name, _OPTIONS) as client:
        state = client.start_canary(name, version, promote=promote, **body)
    when = f", from {local_time(state.start_at)} on" if state.step < 0 else ""
    against = f"against version {state.live}" if state.live else "against the live version"
    console.print(f"{name} version {state.version} is tested {against}{when}", soft_wrap=True)
    print_facts([*plan_facts(state), ("next", f"lathe canary watch {name}{server.url_option}")])


@app.command()
@with_connection
def watch(
    server: Connection,
    name: Name,
    interval: Annotated[float, typer.Option(help="Wait this many seconds between two updates.", min=0.01)] = 1.0,
) -> None:
    """Show a canary until it ends, then its outcome. Without a running canary, show the outcome of the last one.

    Outside a terminal it prints a line for each step, and for each tenth of the evidence that the candidate needs.
    """
    with server.client(name) as client:
        if (state := _running_canary(client, name)) is None:
            console.print(_last_outcome(client, name), soft_wrap=True)
            return
        follow = _show_tables if console.is_terminal else _print_lines
        follow(name, _states(client, name, state, interval))
        console.print(outcome(name, state.generation, client.audit(name)), soft_wrap=True)


@app.command()
@with_connection
def cancel(server: Connection, name: Name) -> None:
    """Cancel a canary: the live version answers all requests again."""
    with server.client(name) as client:
        ended = client.cancel_canary(name)
    console.print(f"{name}: the canary of version {ended.version} is cancelled")


def _check_together(
    shadow: float | None, comparison: dict[str, float | None], weight: float | None, step: list[Any] | None
) -> None:
    """Raise typer.Exit for options that would have no effect, after printing which."""
    if step and weight is not None:
        raise fail("--weight: expected none together with --step, which has shares of its own")
    for option, value in comparison.items():
        if value is not None and not shadow:
            raise fail(f"{option}: expected --shadow with it, otherwise answers are not compared")


def _states(client: Client, name: str, state: CanaryState | None, interval: float) -> Iterator[CanaryState]:
    """Yield a canary's states, from `state` on, `interval` seconds apart, until it ends."""
    generation = state.generation if state else 0
    while state is not None and state.generation == generation:
        yield state
        time.sleep(interval)
        state = _running_canary(client, name)


def _show_tables(name: str, states: Iterator[CanaryState]) -> None:
    """Show the tables of a canary in place, and leave the last ones on the terminal."""
    last = None
    with live_view() as show:
        for last in states:
            show(canary_view(name, last))
        if last is not None:
            show(canary_view(name, last, is_last=True))


def _print_lines(name: str, states: Iterator[CanaryState]) -> None:
    """Print a line whenever a canary has made progress. Evidence that falls and rises again prints nothing."""
    printed = set()
    for state in states:
        if (key := progress_key(state)) not in printed:
            console.print(progress_line(name, state), soft_wrap=True)
            printed.add(key)


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
    if (generation := canary_of(changes)) is None:
        raise fail(f"{name} has had no canary yet: lathe canary start {name} VERSION")
    return f"no canary is running; the last one: {outcome(name, generation, changes)}"
