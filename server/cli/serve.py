"""`lathe serve`: runs one server process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lathe.server.cli.model import Threads
from lathe.server.cli.terminal import fail

if TYPE_CHECKING:
    from lathe.server.settings import Settings

EXTRAS = {"grpc": "grpc", "jwt": "jwt", "opentelemetry": "otel"}  # the extra that installs each package


def _print_settings(wanted: bool) -> None:
    """Print the settings and exit, if the option is given."""
    if wanted:
        from lathe.server.cli.settings_list import print_settings

        print_settings()
        raise typer.Exit


def serve(
    model_repo: Annotated[
        Path | None,
        typer.Option(
            help="Serve the models in this folder, which must exist and may be empty. Default: model_repo.",
            metavar="FOLDER",
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Listen on this address. Default: 127.0.0.1, reachable from this machine only.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Listen on this port; 0 picks a free port. Default: 8080.", min=0, max=65535)
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(help="Listen on this port for gRPC. Default: no gRPC.", min=0, max=65535)
    ] = None,
    threads: Threads = None,
    device: Annotated[
        str | None, typer.Option(help="Run models on this device: cpu, cuda, cuda:1. Default: cpu.")
    ] = None,
    keys_file: Annotated[
        Path | None,
        typer.Option(help="Require API keys from this file, which `lathe keys add` writes.", metavar="FILE"),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Accept TLS only, with this certificate chain (PEM).", metavar="FILE")
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(
            help="Read the private key (PEM) from this file, if --tls-cert does not contain it.", metavar="FILE"
        ),
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(help="Require client certificates signed by a CA in this file (PEM).", metavar="FILE"),
    ] = None,
    settings_list: Annotated[
        bool,
        typer.Option("--settings", help="Print all settings.", callback=_print_settings, is_eager=True),
    ] = False,
) -> None:
    """Serve the models of a folder over HTTP.

    Each option is also an environment variable: --model-repo is LATHE_MODEL_REPO, and an option takes precedence over
    its variable. The other settings are variables only: --settings lists all of them. Ctrl-C stops the server after the
    accepted requests are answered.

    Metrics in Prometheus' format are at GET /metrics, the description of all routes at GET /openapi.json and /docs.

    \b
    Make a self-signed certificate for tests; clients trust it with --ca server.pem:
      openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=localhost \\
        -addext subjectAltName=DNS:localhost,IP:127.0.0.1 \\
        -keyout server.key -out server.pem

    \b
    Examples:
      lathe serve --model-repo models
      lathe serve --model-repo models --keys-file keys.json
      lathe serve --model-repo models --host 0.0.0.0 --keys-file keys.json \\
        --tls-cert server.pem --tls-key server.key
    """
    from lathe.server.environment import BadSettings, read_settings
    from lathe.server.preflight import CannotStart, check

    options: dict[str, Any] = {"model_repo": model_repo, "host": host, "port": port, "threads": threads}
    options |= {"grpc_port": grpc_port, "device": device, "keys_file": keys_file}
    options |= {"tls_cert": tls_cert, "tls_key": tls_key, "tls_client_ca": tls_client_ca}
    try:
        settings = read_settings({name: value for name, value in options.items() if value is not None})
        check(settings)
    except (BadSettings, CannotStart) as error:
        raise fail(str(error)) from error
    _run(settings)


def _run(settings: Settings) -> None:
    """Serve until a signal. The server's modules are imported here, so that wrong settings are reported at once."""
    from lathe.core.errors import UnsupportedError
    from lathe.core.runtime.device.devices import find_device
    from lathe.core.runtime.host.memory import keep_freed, machine_bytes, share_heaps, touch_heap
    from lathe.server.access.keys import DamagedKeys
    from lathe.server.app import create_app
    from lathe.server.processes import descriptors
    from lathe.server.serve import KEPT_BLOCK, MALLOC_ARENAS, block_of_messages, make_server
    from lathe.server.telemetry.logs import configure

    share_heaps(MALLOC_ARENAS)
    if settings.grpc_port is not None:
        keep_freed(KEPT_BLOCK)
        touch_heap(block_of_messages(settings, machine_bytes()))
    try:
        find_device(settings.device)
    except UnsupportedError as error:
        raise fail(str(error)) from error
    configure(settings.log_format, settings.log_level)
    try:
        settings = descriptors.fit_connections(settings)
        server = make_server(create_app(settings), settings)
    except (OSError, DamagedKeys) as error:
        files = [str(file) for file in (settings.keys_file, settings.jwt_keys) if file]
        raise fail(f"keys ({', '.join(files)}) or repository: {error}") from error
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        raise fail(f"{error.name} is not installed: pip install '.[{extra}]'") from error
    server.run()
    if not server.started:
        raise typer.Exit(1)
