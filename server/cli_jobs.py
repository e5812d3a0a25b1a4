"""``lathe jobs list | show | watch | logs | report | cancel | delete``: what the server trains."""

from __future__ import annotations

import json
import tomllib
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from server.cli_group import Commands
from server.cli_model import model_errors
from server.connection import Connection, asks_server
from server.terminal import console, fail, transfer

if TYPE_CHECKING:
    from server.api.job_answers import JobDetail, JobSummary
    from server.client import Client

app = Commands("List, follow and cancel trainings on the server.")

JobId = Annotated[str, typer.Argument(help="The job's id, from `lathe jobs list`.", metavar="JOB")]


@app.command("list")
@asks_server
def list_jobs(
    server: Connection,
    state: Annotated[str | None, typer.Option(help="Show only jobs in this state, such as running.")] = None,
) -> None:
    """List the jobs, newest first."""
    with server.client() as client:
        jobs = client.jobs(state=state)
    number = Column("job", no_wrap=True, min_width=20)  # whole, in however narrow a terminal: other commands take it
    table = Table(number, "kind", "state", "owner", "dataset", "model", "submitted", "seconds")
    for each in jobs:
        made = _made(each) or each.publish or ""
        row = (each.id, each.kind, each.state, each.owner, each.dataset.name, made, each.submitted[:19])
        table.add_row(*row, f"{each.ran:.1f}")
    console.print(table)


@app.command()
@asks_server
def show(server: Connection, job: JobId) -> None:
    """Show a job: its state, how far it is, its result."""
    with server.client() as client:
        print_job(client.job(job))


@app.command()
@asks_server
def watch(
    server: Connection,
    job: JobId,
    curves: Annotated[bool, typer.Option("--curves", help="Also draw the curves of loss and metrics.")] = False,
) -> None:
    """Follow a job until it has ended; status 1 if it failed. Ctrl-C stops following, not the job."""
    with server.client() as client:
        watch_job(client, job, curves)


@app.command()
@asks_server
def logs(server: Connection, job: JobId) -> None:
    """Print the log of a job."""
    with server.client() as client:
        console.print(client.job_log(job), end="", soft_wrap=True)


@app.command()
@asks_server
def report(
    server: Connection,
    job: JobId,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write. Default: JOB.html in this folder.")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Also open the page in a browser.")] = False,
) -> None:
    """Write the report of a job into a file: one page that needs no server and no key."""
    with server.client() as client:
        page = client.job_report(job)
    path = output or Path(f"{job}.html")
    with model_errors():
        path.write_text(page, encoding="utf-8")
    console.print(f"wrote {path}", soft_wrap=True)
    if show and not webbrowser.open(path.resolve().as_uri()):
        raise fail(f"there is no browser to open {path} with")


@app.command()
@asks_server
def cancel(server: Connection, job: JobId) -> None:
    """Cancel a job."""
    with server.client() as client:
        found = client.cancel_job(job)
    console.print(f"job {job} is {'being cancelled' if found.cancelling else found.state}")


@app.command()
@asks_server
def delete(server: Connection, job: JobId) -> None:
    """Delete a job that has ended, and its files. Versions that it published stay."""
    with server.client() as client:
        client.delete_job(job)
    console.print(f"job {job} is deleted")


def watch_job(client: Client, job: str, curves: bool = False) -> None:
    """Show a job's training until it has ended, then what became of it; exit status 1 unless it succeeded."""
    from core.train.view import TrainingView

    with TrainingView(console, curves) as view:
        for event in client.job_events(job):
            if event.kind == "state":
                console.print(f"job {job}: {event.data.get('state')}")
            elif event.kind != "failed":  # which is told with what became of the job
                view.see(event.kind, event.data)
    found = client.job(job)
    print_job(found)
    if found.state != "succeeded":
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What `lathe train` asks a server for beside the recipe."""

    data: Path | None  # to upload
    dataset: str | None  # there already
    publish: str | None
    promote: bool
    begin_with: str | None  # MODEL or MODEL:VERSION
    gate: str | None = None  # JSON

    def body(self, kind: str, dataset: str) -> dict[str, Any]:
        """Return the fields of the API's body that go with a recipe."""
        body: dict[str, Any] = {"kind": "finetune" if self.begin_with else kind, "dataset": dataset}
        if self.publish is not None:
            body["publish"] = {"model": self.publish, "promote": self.promote}
            if self.gate is not None:
                body["publish"]["gate"] = _gate(self.gate)
        if self.begin_with is not None:
            name, _, version = self.begin_with.partition(":")
            body["model"] = {"name": name, "version": version or "live"}
        return body


def train_there(server: Connection, recipe: Path, wanted: Wanted, curves: bool) -> None:
    """Upload the data if they are here, submit the recipe as a job, and follow it."""
    document = _document(recipe)
    if (wanted.data is None) == (wanted.dataset is None):
        raise fail("expected either --data with a file or folder to upload, or --dataset with a name")
    if wanted.data is not None and "format" not in document.get("recipe", document).get("data", {}):
        from core.train.data.opening import check_format

        with model_errors():
            check_format(wanted.data)
    with server.client() as client:
        name = wanted.dataset or recipe.stem
        if wanted.data is not None:
            with transfer("uploading", "checking") as sent:
                name = client.upload_dataset(name, wanted.data, progress=sent).digest
        job = client.submit_job(document, **wanted.body("sweep" if "space" in document else "train", name))
        console.print(f"job {job.id}: `lathe jobs watch {job.id}` follows it as well", soft_wrap=True)
        watch_job(client, job.id, curves)


def _gate(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise fail(f"--gate: expected JSON: {error}") from error


def _document(recipe: Path) -> dict[str, Any]:
    """Read a recipe, or a sweep, as the server shall have it; one that is none is told of here already."""
    from core.train import recipe as recipes
    from core.train import space

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
        "ran": _ran(job),
        "result": _made(job),
        **{name: _number(value) for name, value in _metrics(job).items()},
    }
    console.print(f"job {job.id}")
    for name, value in facts.items():
        if value:
            console.print(f"  {name:<10} {value}", soft_wrap=True)


def _made(job: JobSummary) -> str:
    result = job.result
    if result is None or result.version is None:
        return ""
    return f"{result.model} version {result.version}{', live' if result.moved_alias else ', not live'}"


def _ran(job: JobDetail) -> str:
    """For how long it ran, and how often it began if that was more than once."""
    again = f", begun {job.attempts} times" if job.attempts > 1 else ""
    return f"{job.ran:.1f} s{again}" if job.attempts else ""


def _metrics(job: JobDetail) -> dict[str, Any]:
    """The numbers of the result's metrics."""
    found = job.metrics.get("metrics", job.metrics)
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def _number(value: float) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
