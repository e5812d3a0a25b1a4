"""``lathe canary start | watch | cancel``: try a version on a share of the requests."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.table import Table

from server.terminal import DEFAULT_URL, Url, connected, console

if TYPE_CHECKING:
    from server.api.canary_schemas import CanaryState
    from server.api.schemas import AuditEntry

app = typer.Typer(help="Try a version on a share of the requests.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The model's name on the server.")]


@app.command()
def start(
    name: Name,
    version: Annotated[int, typer.Argument(help="The candidate.", min=1)],
    weight: Annotated[float, typer.Option(help="Share of the requests that name no version.", min=0, max=0.5)] = 0.1,
    shadow: Annotated[float, typer.Option(help="Share of requests it answers unseen, to compare.", min=0, max=1)] = 0.0,
    rtol: Annotated[float, typer.Option(help="Relative tolerance of a comparison.", min=0)] = 1e-3,
    atol: Annotated[float, typer.Option(help="Absolute tolerance of a comparison.", min=0)] = 1e-5,
    tolerated: Annotated[float, typer.Option(help="Share of comparisons that may differ.")] = 0.005,
    promote: Annotated[bool, typer.Option(help="Go live by itself once it has passed.")] = True,
    url: Url = DEFAULT_URL,
) -> None:
    """Begin a trial; the server promotes the candidate or rolls it back by itself."""
    with connected(url) as client:
        state = client.start_canary(
            name, version, weight=weight, shadow=shadow, rtol=rtol, atol=atol, tolerated=tolerated, promote=promote
        )
    console.print(f"{name} version {state.version} is tried against version {state.live}")


@app.command()
def watch(
    name: Name,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.01)] = 1.0,
    url: Url = DEFAULT_URL,
) -> None:
    """Show the evidence until the trial has ended, then how."""
    from server.client import ApiError

    with connected(url) as client, Live(console=console, refresh_per_second=4) as display:
        state = client.canary(name)
        try:
            while True:
                display.update(evidence_table(name, state))
                time.sleep(interval)
                state = client.canary(name)
        except ApiError as error:
            if error.status != 404:
                raise
        ended = next(entry for entry in client.audit(name) if entry.generation > state.generation and _ends(entry))
    reason = f": {ended.reason}" if ended.reason else ""
    console.print(f"{name} version {state.version}: {ended.action}{reason}", soft_wrap=True)


@app.command()
def cancel(name: Name, url: Url = DEFAULT_URL) -> None:
    """End a trial; the live version answers everything again."""
    with connected(url) as client:
        ended = client.cancel_canary(name)
    console.print(f"{name} version {ended.version} is not tried any more")


def _ends(entry: AuditEntry) -> bool:
    return (
        entry.action in {"promoted", "rolled_back", "cancelled"} or entry.alias == "live" or entry.action == "publish"
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
