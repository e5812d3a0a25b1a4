"""`lathe datasets push | describe | list | show | delete`: manages the datasets of training jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from lathe.server.cli.command_group import Commands
from lathe.server.cli.connection import Connection, with_connection
from lathe.server.cli.model import model_errors
from lathe.server.cli.terminal import (
    Json,
    console,
    filled_table,
    local_time,
    make_table,
    print_json,
    time_column,
    transfer_progress,
)

if TYPE_CHECKING:
    from lathe.server.api.management.dataset_schemas import DatasetDetail

app = Commands("Manage the datasets that jobs train on.")

Name = Annotated[str, typer.Argument(help="The dataset's name on the server.", metavar="DATASET")]


@app.command()
@with_connection
def push(
    server: Connection,
    name: Name,
    content: Annotated[Path, typer.Argument(help="The file or folder to upload.", metavar="PATH", exists=True)],
) -> None:
    """Upload a dataset: .npz, CSV, Parquet, a folder of IDX files, or a folder of images per class."""
    _check_format(content)
    with server.client() as client, transfer_progress("uploading", "checking") as on_progress:
        dataset = client.upload_dataset(name, content, progress=on_progress)
    console.print(f"{name} has {dataset.rows} rows of {_columns(dataset)}; sha256 {dataset.digest}", soft_wrap=True)


@app.command()
def describe(
    content: Annotated[Path, typer.Argument(help="A file or folder on this machine.", metavar="PATH", exists=True)],
    as_json: Json = False,
) -> None:
    """Show what training would read from a local file or folder: rows, columns, classes, problems."""
    from lathe.core.train.data.describe import describe as describe_content

    with model_errors():
        found = describe_content(content)
    if as_json:
        print_json(found)
        return
    console.print(f"{content}: {found['rows']} rows, {found['format']}, sha256 {found['digest']}", soft_wrap=True)
    _print_columns(found["columns"], found["classes"])
    console.print(f"target: {found['target']}")
    for problem in found["problems"]:
        console.print(f"problem: {problem}", soft_wrap=True)


@app.command("list")
@with_connection
def list_datasets(server: Connection) -> None:
    """List the datasets of a server."""
    table = make_table("name", "rows", "format", "size", time_column("created"), "sha256")
    with server.client() as client:
        for dataset in client.datasets():
            size = decimal(dataset.bytes)
            created = local_time(dataset.created)
            table.add_row(dataset.name, str(dataset.rows), dataset.format, size, created, dataset.digest[:12])
    console.print(table)


@app.command()
@with_connection
def show(server: Connection, name: Name) -> None:
    """Show the columns of a dataset and the earlier uploads under its name."""
    with server.client() as client:
        dataset = client.dataset(name)
    console.print(f"{name}: {dataset.rows} rows, {dataset.format}, {decimal(dataset.bytes)}, sha256 {dataset.digest}")
    _print_columns(dataset.columns, dataset.classes)
    rows = [(local_time(naming.time), naming.actor, naming.digest) for naming in dataset.history]
    console.print(filled_table((time_column("since"), "by", "sha256"), rows))


@app.command()
@with_connection
def delete(
    server: Connection,
    name: Name,
    digest: Annotated[str | None, typer.Option(help="Delete only the content with this sha256.")] = None,
) -> None:
    """Delete a dataset and the earlier uploads under its name. Refused while a job needs it."""
    with server.client() as client:
        removed = client.delete_dataset(name, digest=digest)
    console.print(f"{name} is deleted, with {len(removed.digests)} file(s)")


def _check_format(content: Path) -> None:
    """Refuse a file or folder that is no dataset, by its name and first bytes. The server does not get the name."""
    from lathe.core.train.data.formats import check_format

    with model_errors():
        check_format(content)


def _print_columns(columns: Sequence[Mapping[str, Any]], classes: Sequence[str] | None) -> None:
    table = make_table("column", "type", "shape of a row")
    for column in columns:
        table.add_row(str(column.get("name")), str(column.get("dtype")), str(column.get("shape")))
    console.print(table)
    if classes:
        console.print(f"{len(classes)} classes: {', '.join(classes[:20])}", soft_wrap=True)


def _columns(dataset: DatasetDetail) -> str:
    return ", ".join(_column(column) for column in dataset.columns)


def _column(column: dict[str, Any]) -> str:
    return f"{column.get('name')}: {column.get('dtype')}{column.get('shape')}"
