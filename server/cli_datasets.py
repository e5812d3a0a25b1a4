"""``lathe datasets push | list | show | delete``: what jobs learn from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Table

from server.cli_group import Commands
from server.connection import Connection, asks_server
from server.terminal import console, transfer

if TYPE_CHECKING:
    from server.api.dataset_schemas import DatasetDetail

app = Commands("Manage the datasets that jobs train on.")

Name = Annotated[str, typer.Argument(help="The dataset's name on the server.", metavar="DATASET")]


@app.command()
@asks_server
def push(
    server: Connection,
    name: Name,
    content: Annotated[Path, typer.Argument(help="The file or folder to upload.", metavar="PATH", exists=True)],
) -> None:
    """Upload a dataset: .npz, CSV, Parquet, a folder of IDX files, or a folder of images per class."""
    with server.client() as client, transfer("uploading", "checking") as progress:
        dataset = client.upload_dataset(name, content, progress=progress)
    console.print(f"{name} has {dataset.rows} rows of {_columns(dataset)}; sha256 {dataset.digest}", soft_wrap=True)


@app.command("list")
@asks_server
def list_datasets(server: Connection) -> None:
    """List the datasets of a server."""
    table = Table("name", "rows", "format", "size", "created", "sha256")
    with server.client() as client:
        for dataset in client.datasets():
            size = decimal(dataset.bytes)
            table.add_row(
                dataset.name, str(dataset.rows), dataset.format, size, dataset.created[:19], dataset.digest[:12]
            )
    console.print(table)


@app.command()
@asks_server
def show(server: Connection, name: Name) -> None:
    """Show the columns of a dataset, and the earlier contents of its name."""
    with server.client() as client:
        dataset = client.dataset(name)
    console.print(f"{name}: {dataset.rows} rows, {dataset.format}, {decimal(dataset.bytes)}, sha256 {dataset.digest}")
    columns = Table("column", "type", "row's shape")
    for column in dataset.columns:
        columns.add_row(str(column.get("name")), str(column.get("dtype")), str(column.get("shape")))
    console.print(columns)
    if dataset.classes:
        console.print(f"{len(dataset.classes)} classes: {', '.join(dataset.classes[:20])}", soft_wrap=True)
    history = Table("since", "by", "sha256")
    for naming in dataset.history:
        history.add_row(naming.time, naming.actor, naming.digest)
    console.print(history)


@app.command()
@asks_server
def delete(
    server: Connection,
    name: Name,
    digest: Annotated[str | None, typer.Option(help="Delete only the content with this sha256.")] = None,
) -> None:
    """Delete a dataset and the earlier contents of its name. Refused while a job needs it."""
    with server.client() as client:
        removed = client.delete_dataset(name, digest=digest)
    console.print(f"{name} is gone, and with it {len(removed.digests)} file(s)")


def _columns(dataset: DatasetDetail) -> str:
    return ", ".join(_column(column) for column in dataset.columns)


def _column(column: dict[str, Any]) -> str:
    return f"{column.get('name')}: {column.get('dtype')}{column.get('shape')}"
