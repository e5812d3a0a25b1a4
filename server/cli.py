"""The command line: ``lathe --help`` lists the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from server import cli_canary, cli_datasets, cli_jobs, cli_kernels, cli_keys, cli_model, cli_rollout, cli_top, cli_train
from server.cli_model import Threads
from server.terminal import DEFAULT_URL, Url, connected, console, fail, transfer

app = typer.Typer(help="Serve ONNX models, compiled to native code.", no_args_is_help=True, add_completion=False)
app.add_typer(cli_canary.app, name="canary")
app.add_typer(cli_datasets.app, name="datasets")
app.add_typer(cli_jobs.app, name="jobs")
app.add_typer(cli_keys.app, name="keys")
app.add_typer(cli_rollout.app, name="rollout")
app.command()(cli_top.top)
app.command()(cli_train.train)
for command in (
    cli_model.compile,
    cli_model.run,
    cli_model.inspect,
    cli_model.profile,
    cli_model.bench,
    cli_kernels.kernels,
    cli_kernels.load_kernels,
):
    app.command()(command)


@app.command()
def serve(
    model_repo: Annotated[Path | None, typer.Option(help="The model repository's folder.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.", min=0, max=65535)] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Port for gRPC; none without it.", min=0, max=65535)] = None,
    threads: Threads = None,
    device: Annotated[str | None, typer.Option(help="Where models run: cpu, cuda, cuda:1.")] = None,
) -> None:
    """Serve a model repository. Every other setting is an environment variable, LATHE_<NAME>."""
    from pydantic import ValidationError

    from core.errors import UnsupportedError
    from core.runtime.devices import find_device
    from core.runtime.memory import share_heaps
    from server.access.keys import DamagedKeys
    from server.app import create_app
    from server.serve import HEAPS, make_server
    from server.settings import Settings
    from server.telemetry.logs import configure

    share_heaps(HEAPS)
    given: dict[str, Any] = {"model_repo": model_repo, "host": host, "port": port, "threads": threads}
    given |= {"grpc_port": grpc_port, "device": device}
    try:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise fail(str(error)) from error
    try:
        find_device(settings.device)
    except UnsupportedError as error:
        raise fail(str(error)) from error
    configure(settings.log_format, settings.log_level)
    if not settings.model_repo.is_dir():
        raise fail(f"model repository {settings.model_repo}: no such folder")
    try:
        server = make_server(create_app(settings), settings)
    except (OSError, DamagedKeys) as error:
        files = [str(file) for file in (settings.keys_file, settings.jwt_keys) if file]
        raise fail(f"keys ({', '.join(files)}) or repository: {error}") from error
    except ModuleNotFoundError as error:
        extra = {"grpc": "grpc", "jwt": "jwt", "opentelemetry": "otel"}.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        raise fail(f"{extra} needs the extra that brings it: pip install 'lathe[{extra}]'") from error
    server.run()
    if not server.started:
        raise typer.Exit(1)


@app.command()
def push(
    name: Annotated[str, typer.Argument(help="The model's name on the server.")],
    model: Annotated[
        Path, typer.Argument(help="An ONNX file, or a `pipeline.toml`.", exists=True, dir_okay=False, readable=True)
    ],
    promote: Annotated[bool, typer.Option("--promote", help="Go live at once.")] = False,
    allow_signature_change: Annotated[
        bool, typer.Option("--allow-signature-change", help="Even with other inputs or outputs.")
    ] = False,
    key: Annotated[str | None, typer.Option(help="Idempotency key: repeating the push is harmless.")] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Upload a version: the server compiles it, and makes it live if asked. Files it names go along."""
    with cli_model.model_errors(), transfer("uploading", "compiling") as sent, connected(url) as client:
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
