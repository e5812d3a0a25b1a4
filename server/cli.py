"""The command line: ``lathe serve | run | inspect | push | rollback | canary | keys | bench``."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from server import cli_canary, cli_keys
from server.terminal import DEFAULT_URL, Url, connected, console, fail

if TYPE_CHECKING:
    from core import Session

app = typer.Typer(help="Serve ONNX models, compiled to native code.", no_args_is_help=True, add_completion=False)
app.add_typer(cli_canary.app, name="canary")
app.add_typer(cli_keys.app, name="keys")

ModelFile = Annotated[Path, typer.Argument(help="An ONNX file.", exists=True, dir_okay=False, readable=True)]
Threads = Annotated[int | None, typer.Option(help="Threads of the compute team; all there are without it.", min=1)]


@app.command()
def serve(
    model_repo: Annotated[Path | None, typer.Option(help="The model repository's folder.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.", min=0, max=65535)] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Port for gRPC; none without it.", min=0, max=65535)] = None,
    threads: Threads = None,
) -> None:
    """Serve a model repository. Every other setting is an environment variable, LATHE_<NAME>."""
    from pydantic import ValidationError

    from server.access.keys import DamagedKeys
    from server.app import create_app
    from server.serve import make_server
    from server.settings import Settings

    given: dict[str, Any] = {"model_repo": model_repo, "host": host, "port": port, "threads": threads}
    given["grpc_port"] = grpc_port
    try:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise fail(str(error)) from error
    if not settings.model_repo.is_dir():
        raise fail(f"model repository {settings.model_repo}: no such folder")
    try:
        server = make_server(create_app(settings), settings)
    except (OSError, DamagedKeys) as error:
        what = f"file of keys {settings.keys_file}" if settings.keys_file else f"repository {settings.model_repo}"
        raise fail(f"{what}: {error}") from error
    except ModuleNotFoundError as error:
        if error.name != "grpc":
            raise
        raise fail("gRPC needs the extra that brings it: pip install 'lathe[grpc]'") from error
    server.run()
    if not server.started:
        raise typer.Exit(1)


@app.command()
def run(
    model: ModelFile,
    inputs: Annotated[Path | None, typer.Option(help="An .npz file with an array per input.", exists=True)] = None,
    batch: Annotated[int, typer.Option(help="Rows of the random input that stands in for a file.", min=1)] = 1,
    threads: Threads = None,
) -> None:
    """Compile a model and run it once."""
    import numpy as np

    with _model_errors(), _compiled(model, threads, batch) as session:
        feeds = dict(np.load(inputs, allow_pickle=False)) if inputs else _random_feeds(session, batch)
        started = time.perf_counter()
        outputs = session.run(feeds)
        elapsed = time.perf_counter() - started
    table = Table("output", "dtype", "shape", "values")
    for name, array in outputs.items():
        values = np.array2string(np.ravel(array)[:8], precision=4, separator=", ")
        table.add_row(name, str(array.dtype), str(list(array.shape)), values + (" ..." if array.size > 8 else ""))
    console.print(table)
    console.print(f"{elapsed * 1e3:.3f} ms")


@app.command()
def inspect(
    model: ModelFile,
    explain: Annotated[bool, typer.Option("--explain", help="Compile it, and say what runs each node.")] = False,
) -> None:
    """Say what a model takes, gives, and is made of."""
    import core

    with _model_errors():
        graph = core.load(model)
        table = Table("", "name", "type")
        for side, values in (("input", graph.inputs), ("output", graph.outputs)):
            for value in values:
                table.add_row(side, value.name, str(value.type))
        console.print(table)
        counts = Counter(node.op for node in graph.nodes)
        console.print(", ".join(f"{op} x{count}" for op, count in counts.most_common()))
        if explain:
            with _compiled(model, None, 32) as session:
                console.print(session.explain())


@app.command()
def push(
    name: Annotated[str, typer.Argument(help="The model's name on the server.")],
    model: ModelFile,
    promote: Annotated[bool, typer.Option("--promote", help="Go live at once.")] = False,
    allow_signature_change: Annotated[
        bool, typer.Option("--allow-signature-change", help="Even with other inputs or outputs.")
    ] = False,
    key: Annotated[str | None, typer.Option(help="Idempotency key: repeating the push is harmless.")] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Upload a version: the server compiles it, and makes it live if asked."""
    with _progress() as progress, connected(url) as client:
        task = progress.add_task("uploading", total=model.stat().st_size)

        def sent(done: int, total: int) -> None:
            progress.update(task, completed=done, description="compiling" if done == total else "uploading")

        published = client.upload(
            name, model, promote=promote, allow_signature_change=allow_signature_change, key=key, progress=sent
        )
    where = "live" if published.live else "not live yet: lathe push --promote, or move the alias"
    console.print(f"{name} version {published.version} is {published.state}, {where}")


@app.command()
def rollback(
    name: Annotated[str, typer.Argument(help="The model's name on the server.")],
    alias: Annotated[str, typer.Option(help="The alias to take back.")] = "live",
    to: Annotated[int | None, typer.Option(help="A version on its history; the one before without it.")] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Take a model back to an earlier version."""
    with connected(url) as client:
        state = client.rollback(name, alias=alias, to=to)
    console.print(f"{name} {alias} is version {state.version}")


@app.command()
def bench(
    model: ModelFile,
    batches: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,8,32",
    seconds: Annotated[float, typer.Option(help="Time per batch size.", min=0.01)] = 1.0,
    threads: Threads = None,
) -> None:
    """Time a model in this process."""
    sizes = _batch_sizes(batches)
    table = Table("batch", "median", "p99", "rows/s")
    with _model_errors(), _compiled(model, threads, max(sizes)) as session:
        for size in sizes:
            times = _times(session, size, seconds)
            median = statistics.median(times)
            p99 = sorted(times)[int(len(times) * 0.99)]
            table.add_row(str(size), f"{median * 1e3:.3f} ms", f"{p99 * 1e3:.3f} ms", f"{size / median:,.0f}")
    console.print(table)


def _batch_sizes(text: str) -> list[int]:
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"batches {text!r}: expected numbers separated by commas") from error
    if min(sizes) < 1:
        raise typer.BadParameter(f"batches {text!r}: expected numbers from 1 on")
    return sizes


def _times(session: Session, size: int, seconds: float) -> list[float]:
    feeds = _random_feeds(session, size)
    session.run(feeds)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        started = time.perf_counter()
        session.run(feeds)
        times.append(time.perf_counter() - started)
    return times


def _random_feeds(session: Session, rows: int) -> dict[str, Any]:
    """Return inputs between 0 and 1 (0 and 8 for integers); the batch axis has ``rows``, other free axes 1."""
    import numpy as np

    from core.ir.types import TensorType

    random = np.random.default_rng(0)
    feeds: dict[str, Any] = {}
    for name, type_ in session.inputs.items():
        if not isinstance(type_, TensorType) or type_.shape is None or type_.dtype.numpy.kind == "O":
            raise fail(f"input {name!r} is {type_}: give it with --inputs")
        sizes = dict.fromkeys(type_.symbols, 1) | {session.batching.symbol or "": rows}
        shape, dtype = type_.evaluate(sizes), type_.dtype.numpy
        values = random.integers(0, 9, shape) if dtype.kind in "iub" else random.random(shape)
        feeds[name] = values.astype(dtype)
    return feeds


@contextmanager
def _compiled(model: Path, threads: int | None, max_batch: int) -> Iterator[Session]:
    import core

    with console.status("compiling"):
        session = core.compile(model, threads=threads, max_batch=max(32, max_batch))
    with session:
        yield session


@contextmanager
def _model_errors() -> Iterator[None]:
    """Turn what the compiler refuses into one line and an exit status."""
    from core.errors import LatheError

    try:
        yield
    except LatheError as error:
        raise fail(str(error)) from error


@contextmanager
def _progress() -> Iterator[Progress]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield progress
