"""`lathe jobs list | show | watch | logs | report | cancel | delete`: manages training jobs on the server."""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lathe.server.cli.command_group import Commands
from lathe.server.cli.connection import Connection, with_connection
from lathe.server.cli.model import model_errors
from lathe.server.cli.terminal import (
    console,
    error_console,
    fail,
    filled_table,
    local_time,
    print_facts,
    time_column,
    transfer_progress,
    whole_column,
)

if TYPE_CHECKING:
    from lathe.server.api.management.job_responses import JobDetail, JobResult, JobSummary
    from lathe.server.client import Client

app = Commands("List, follow and cancel training jobs on the server.")

_GATE_EXAMPLE = """'{"min": {"accuracy": 0.97}}'"""
JobId = Annotated[str, typer.Argument(help="The id of the job, as `lathe jobs list` shows it.", metavar="JOB")]


@app.command("list")
@with_connection
def list_jobs(
    server: Connection,
    state: Annotated[str | None, typer.Option(help="Show only jobs in this state, such as running.")] = None,
) -> None:
    """List the jobs, newest first."""
    with server.client() as client:
        jobs = client.jobs(state=state)
    kinds = {job.kind for job in jobs}
    rows = [(job.id, job.kind if kinds != {"train"} else "", *_summary(job)) for job in jobs]
    columns = (
        whole_column("job"),
        "kind",
        whole_column("state"),
        "owner",
        "dataset",
        "result",
        time_column("submitted"),
    )
    console.print(filled_table((*columns, "ran"), rows))


@app.command()
@with_connection
def show(server: Connection, job: JobId) -> None:
    """Show a job's state, dataset, run time, result and metrics."""
    with server.client() as client:
        print_job(client.job(job), server.url_option)


@app.command()
@with_connection
def watch(
    server: Connection,
    job: JobId,
    curves: Annotated[bool, typer.Option("--curves", help="Also draw the curves of loss and metrics.")] = False,
) -> None:
    """Follow a job until it ends; exit with status 1 unless it succeeded. Ctrl-C does not stop the job."""
    with server.client() as client:
        watch_job(client, job, curves, server.url_option)


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


def watch_job(client: Client, job: str, curves: bool = False, url_option: str = "") -> None:
    """Show a job's progress until it ends, then its facts (`print_job`); raises typer.Exit(1) unless it succeeded."""
    from lathe.core.train.run.terminal_view import TrainingView

    with TrainingView(console, curves) as view:
        for event in client.job_events(job):
            if event.kind == "state":
                console.print(f"job {job}: {event.data.get('state')}")
            elif event.kind != "failed":  # `print_job` prints the error
                view.see(event.kind, event.data)
    found = client.job(job)
    print_job(found, url_option)
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

        `kind` is "train", "finetune" or "sweep".
        """
        body: dict[str, Any] = {"kind": kind, "dataset": dataset}
        if self.publish is not None:
            body["publish"] = {"model": self.publish, "promote": self.promote}
            if self.gate is not None:
                body["publish"]["gate"] = read_gate(self.gate)
        if self.begin_with is not None:
            name, _, version = self.begin_with.partition(":")
            body["model"] = {"name": name, "version": version or "live"}
        return body


def _kind_of(recipe: Mapping[str, Any], wanted: ServerTraining) -> str:
    """The kind of a training's job; the version that it names is where it starts, or a new model's teacher."""
    from lathe.server.jobs.kinds import has_version_as_teacher

    model = recipe.get("model")
    is_new = has_version_as_teacher(recipe) and isinstance(model, Mapping) and "parent" not in model
    if wanted.begin_with is not None and not is_new:
        return "finetune"
    return "sweep" if "space" in recipe else "train"


def train_on_server(server: Connection, recipe: Path, wanted: ServerTraining, curves: bool) -> None:
    """Upload the dataset if it is a local one, submit the recipe as a job, and follow the job."""
    document = _read_recipe(recipe)
    if (wanted.data is None) == (wanted.dataset is None):
        raise fail("expected either --data with a file or folder to upload, or --dataset with a name")
    if wanted.data is not None and "format" not in document.get("recipe", document).get("data", {}):
        from lathe.core.train.data.formats import check_format

        with model_errors():
            check_format(wanted.data)
    body = wanted.body(_kind_of(document, wanted), wanted.dataset or recipe.stem)
    options = {"publish.gate": "--gate", "publish.model": "--publish", "dataset": "--dataset", "recipe": str(recipe)}
    with server.client(options={**options, "model": "--from"}) as client:
        if wanted.data is not None:
            with transfer_progress("uploading", "checking") as on_progress:
                body["dataset"] = client.upload_dataset(recipe.stem, wanted.data, progress=on_progress).digest
        job = client.submit_job(document, **body)
        again = f"lathe jobs watch {job.id}{server.url_option}"
        console.print(f"job {job.id} is submitted; Ctrl-C ends this view, not the job: `{again}`", soft_wrap=True)
        watch_job(client, job.id, curves, server.url_option)


def read_gate(text: str) -> Any:
    """Return the JSON of the option --gate; other text ends the command."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise fail(f"--gate: expected JSON such as {_GATE_EXAMPLE}, got {text!r}") from error


def _read_recipe(recipe: Path) -> dict[str, Any]:
    """Return the parsed TOML or JSON of a recipe or sweep; an invalid one ends the command before any upload."""
    from lathe.core.train.recipe import recipe as recipes
    from lathe.core.train.recipe import sweep_space as space

    with model_errors():
        document = recipes.read_tables(recipe)
        if "space" in document:
            space.from_json(json.dumps(document, default=str))  # TOML has dates
        else:
            recipes.read(recipe)
    return document


def print_job(job: JobDetail, url_option: str = "") -> None:
    """Print a job's facts and metrics and, if its version is not live, the command that makes it live.

    `url_option` is the end of that command.
    """
    facts = {
        "state": job.state.value + (": " + job.error if job.error else ""),
        "kind": job.kind,
        "dataset": _dataset(job),
        "from": f"{job.model.name} version {job.model.version}" if job.model else "",
        "submitted": local_time(job.submitted),
        "ran": _run_time(job),
        "result": _published_version(job),
        "gate": _refusal(job.result),
        **{name: _format_number(value) for name, value in _metrics(job).items()},
        "next": _next_command(job, url_option),
    }
    console.print(f"job {job.id}")
    print_facts((name, value) for name, value in facts.items() if value)


def _summary(job: JobSummary) -> tuple[str, ...]:
    """Return the cells of a job in the list: from its state to its running time."""
    result = _published_version(job).replace(" version", "") or job.publish or ""
    ran = f"{job.ran:.1f} s" if job.attempts else ""
    return job.state, job.owner, _dataset(job), result, local_time(job.submitted), ran


def _dataset(job: JobSummary) -> str:
    """Return the name of a job's dataset; the beginning of its digest if it has none."""
    return job.dataset.digest[:12] if job.dataset.name == job.dataset.digest else job.dataset.name


def _refusal(result: JobResult | None) -> str:
    """Return why the gate refused a result; empty if it did not."""
    checks = result.decision.get("checks", []) if result is not None else []
    failed = "; ".join(check["text"] for check in checks if not check["passed"])
    return f"refused: {failed}" if failed else ""


def _next_command(job: JobDetail, url_option: str) -> str:
    """Return the command that makes a job's version live.

    Empty without a version, if an alias moved to it, or if the gate refused it.
    """
    result = job.result
    if result is None or result.version is None or result.moved_alias or _refusal(result):
        return ""
    return f"lathe promote {result.model} {result.version}{url_option}"


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
