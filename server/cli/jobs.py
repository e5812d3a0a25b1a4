"""`lathe jobs list | show | watch | logs | report | cancel | delete`: manages training jobs on the server."""

from __future__ import annotations

import json
import tomllib
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from lathe.server.cli.command_group import Commands
from lathe.server.cli.connection import Connection, with_connection
from lathe.server.cli.model import model_errors
from lathe.server.cli.terminal import console, error_console, fail, transfer_progress

if TYPE_CHECKING:
    from lathe.server.api.management.job_responses import JobDetail, JobSummary
    from lathe.server.client import Client

app = Commands("List, follow and cancel training jobs on the server.")

JobId = Annotated[str, typer.Argument(help="The job's id, from `lathe jobs list`.", metavar="JOB")]


@app.command("list")
@with_connection
def list_jobs(
    server: Connection,
    state: Annotated[str | None, typer.Option(help="Show only jobs in this state, such as running.")] = None,
) -> None:
    """List the jobs, newest first."""
    with server.client() as client:
        jobs = client.jobs(state=state)
    number = Column("job", no_wrap=True, min_width=20)  # never truncated, since the id is an argument of other commands
    table = Table(number, "kind", "state", "owner", "dataset", "model", "submitted", "seconds")
    for each in jobs:
        model = _published_version(each) or each.publish or ""
        row = (each.id, each.kind, each.state, each.owner, each.dataset.name, model, each.submitted[:19])
        table.add_row(*row, f"{each.ran:.1f}")
    console.print(table)


@app.command()
@with_connection
def show(server: Connection, job: JobId) -> None:
    """Show a job's state, dataset, run time, result and metrics."""
    with server.client() as client:
        print_job(client.job(job))


@app.command()
@with_connection
def watch(
    server: Connection,
    job: JobId,
    curves: Annotated[bool, typer.Option("--curves", help="Also draw the curves of loss and metrics.")] = False,
) -> None:
    """Follow a job until it ends; exit with status 1 unless it succeeded. Ctrl-C does not stop the job."""
    with server.client() as client:
        watch_job(client, job, curves)


@app.command()
@with_connection
def logs(server: Connection, job: JobId) -> None:
    """Print the log of a job: its epochs or trials, and the errors of its process; at most the last 64 KiB."""
    with server.client() as client:
        log = client.job_log(job)
        has_started = log or client.job(job).attempts
    console.print(log, end="", soft_wrap=True)
    if not log:
        what = "has written nothing to its log" if has_started else "has not started yet, and has no log"
        error_console.print(f"job {job} {what}")


@app.command()
@with_connection
def report(
    server: Connection,
    job: JobId,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write this file. Default: JOB.html in this folder.")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Also open the page in a browser.")] = False,
) -> None:
    """Write the report of a job to a file: one self-contained HTML page."""
    with server.client() as client:
        page = client.job_report(job)
    path = output or Path(f"{job}.html")
    with model_errors():
        path.write_text(page, encoding="utf-8")
    console.print(f"wrote {path}", soft_wrap=True)
    if show and not webbrowser.open(path.resolve().as_uri()):
        raise fail(f"--open: no browser was found to open {path}")


@app.command()
@with_connection
def cancel(server: Connection, job: JobId) -> None:
    """Cancel a job."""
    with server.client() as client:
        found = client.cancel_job(job)
    console.print(f"job {job} is {'being cancelled' if found.cancelling else found.state}")


@app.command()
@with_connection
def delete(server: Connection, job: JobId) -> None:
    """Delete a finished job and its files. Versions that it published are kept."""
    with server.client() as client:
        client.delete_job(job)
    console.print(f"job {job} is deleted")


def watch_job(client: Client, job: str, curves: bool = False) -> None:
    """Show a job's progress until it ends, then its facts; raises typer.Exit(1) unless it succeeded."""
    from lathe.core.train.run.terminal_view import TrainingView

    with TrainingView(console, curves) as view:
        for event in client.job_events(job):
            if event.kind == "state":
                console.print(f"job {job}: {event.data.get('state')}")
            elif event.kind != "failed":  # `print_job` prints the error
                view.see(event.kind, event.data)
    found = client.job(job)
    print_job(found)
    if found.state != "succeeded":
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class ServerTraining:
    """The options of `lathe train` for a training on a server, without the recipe."""

    data: Path | None  # the dataset to upload
    dataset: str | None  # the name of a dataset on the server
    publish: str | None
    promote: bool
    begin_with: str | None  # MODEL or MODEL:VERSION
    gate: str | None = None  # JSON

    def body(self, kind: str, dataset: str) -> dict[str, Any]:
        """Return the fields of the job request, without the recipe; `dataset` is a name or a digest.

        `kind` is "train" or "sweep", and becomes "finetune" for a training that starts from a version (`begin_with`).
        """
        body: dict[str, Any] = {"kind": "finetune" if self.begin_with else kind, "dataset": dataset}
        if self.publish is not None:
            body["publish"] = {"model": self.publish, "promote": self.promote}
            if self.gate is not None:
                body["publish"]["gate"] = _gate(self.gate)
        if self.begin_with is not None:
            name, _, version = self.begin_with.partition(":")
            body["model"] = {"name": name, "version": version or "live"}
        return body


def train_on_server(server: Connection, recipe: Path, wanted: ServerTraining, curves: bool) -> None:
    """Upload the dataset if it is a local one, submit the recipe as a job, and follow the job."""
    document = _read_recipe(recipe)
    if (wanted.data is None) == (wanted.dataset is None):
        raise fail("expected either --data with a file or folder to upload, or --dataset with a name")
    if wanted.data is not None and "format" not in document.get("recipe", document).get("data", {}):
        from lathe.core.train.data.formats import check_format

        with model_errors():
            check_format(wanted.data)
    with server.client() as client:
        name = wanted.dataset or recipe.stem
        if wanted.data is not None:
            with transfer_progress("uploading", "checking") as on_progress:
                name = client.upload_dataset(name, wanted.data, progress=on_progress).digest
        job = client.submit_job(document, **wanted.body("sweep" if "space" in document else "train", name))
        console.print(f"job {job.id}: `lathe jobs watch {job.id}` follows it as well", soft_wrap=True)
        watch_job(client, job.id, curves)


def _gate(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise fail(f"--gate: expected JSON: {error}") from error


def _read_recipe(recipe: Path) -> dict[str, Any]:
    """Return the parsed TOML or JSON of a recipe or sweep; an invalid one ends the command before any upload."""
    from lathe.core.train.recipe import recipe as recipes
    from lathe.core.train.recipe import sweep_space as space

    try:
        text = recipe.read_text()
        document: dict[str, Any] = json.loads(text) if recipe.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise fail(f"{recipe}: {error}") from error
    with model_errors():
        if "space" in document:
            space.from_json(json.dumps(document))
        else:
            recipes.read(recipe)
    return document


def print_job(job: JobDetail) -> None:
    """Print a job's facts and metrics."""
    facts = {
        "state": job.state.value + (": " + job.error if job.error else ""),
        "kind": job.kind,
        "dataset": f"{job.dataset.name} ({job.dataset.digest[:12]})",
        "from": f"{job.model.name} version {job.model.version}" if job.model else "",
        "ran": _run_time(job),
        "result": _published_version(job),
        **{name: _format_number(value) for name, value in _metrics(job).items()},
    }
    console.print(f"job {job.id}")
    for name, value in facts.items():
        if value:
            console.print(f"  {name:<10} {value}", soft_wrap=True)


def _published_version(job: JobSummary) -> str:
    result = job.result
    if result is None or result.version is None:
        return ""
    return f"{result.model} version {result.version}{', live' if result.moved_alias else ', not live'}"


def _run_time(job: JobDetail) -> str:
    """Return the run time of all attempts, with their number if there were several; empty before the first."""
    attempts = f", {job.attempts} attempts" if job.attempts > 1 else ""
    return f"{job.ran:.1f} s{attempts}" if job.attempts else ""


def _metrics(job: JobDetail) -> dict[str, Any]:
    """Return the numeric metrics of the result."""
    found = job.metrics.get("metrics", job.metrics)
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def _format_number(value: float) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
