"""``lathe serve``: one server process, from its settings to its end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from server.cli_model import Threads
from server.terminal import fail

if TYPE_CHECKING:
    from server.settings import Settings

EXTRAS = {"grpc": "grpc", "jwt": "jwt", "opentelemetry": "otel"}  # which extra brings a package


def serve(
    model_repo: Annotated[
        Path | None, typer.Option(help="Folder of the models, empty at first. Default: model_repo.", metavar="FOLDER")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1, this machine alone.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; 0 picks a free one. Default: 8080.", min=0, max=65535)
    ] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Port for gRPC. Default: none.", min=0, max=65535)] = None,
    threads: Threads = None,
    device: Annotated[str | None, typer.Option(help="Where models run: cpu, cuda, cuda:1. Default: cpu.")] = None,
    keys_file: Annotated[
        Path | None, typer.Option(help="File of API keys, as `lathe keys add` writes it.", metavar="FILE")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Certificate chain (PEM): the server speaks TLS only.", metavar="FILE")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="Its private key (PEM), if --tls-cert does not hold it.", metavar="FILE")
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            help="Certificates (PEM) that must have signed the clients'; other clients are refused.", metavar="FILE"
        ),
    ] = None,
) -> None:
    """Serve the models of a folder over HTTP.

    Each option is also a variable of the environment: --model-repo is LATHE_MODEL_REPO, and an option wins over its
    variable. The other settings are variables only; docs/configuration.md lists them. Ctrl-C ends the server as soon as
    the requests under way are answered.

    \b
    A certificate for tests, signed by itself; clients trust it with --ca server.pem:
      openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=localhost \\
        -addext subjectAltName=DNS:localhost -keyout server.key -out server.pem

    \b
    Examples:
      lathe serve --model-repo models
      lathe serve --model-repo models --host 0.0.0.0 --keys-file keys.json --tls-cert server.pem --tls-key server.key
    """
    from server.environment import BadSettings, read_settings
    from server.preflight import NotReady, check

    given: dict[str, Any] = {"model_repo": model_repo, "host": host, "port": port, "threads": threads}
    given |= {"grpc_port": grpc_port, "device": device, "keys_file": keys_file}
    given |= {"tls_cert": tls_cert, "tls_key": tls_key, "tls_client_ca": tls_client_ca}
    try:
        settings = read_settings({name: value for name, value in given.items() if value is not None})
        check(settings)
    except (BadSettings, NotReady) as error:
        raise fail(str(error)) from error
    _run(settings)


def _run(settings: Settings) -> None:
    """Serve until a signal; what is heavy is imported only now that the settings are good."""
    from core.errors import UnsupportedError
    from core.runtime.devices import find_device
    from core.runtime.memory import keep_freed, share_heaps
    from server import descriptors
    from server.access.keys import DamagedKeys
    from server.app import create_app
    from server.serve import HEAPS, MESSAGE, make_server
    from server.telemetry.logs import configure

    share_heaps(HEAPS)
    if settings.grpc_port is not None:
        keep_freed(MESSAGE)
    try:
        find_device(settings.device)
    except UnsupportedError as error:
        raise fail(str(error)) from error
    configure(settings.log_format, settings.log_level)
    try:
        settings = descriptors.fit(settings)
        server = make_server(create_app(settings), settings)
    except (OSError, DamagedKeys) as error:
        files = [str(file) for file in (settings.keys_file, settings.jwt_keys) if file]
        raise fail(f"keys ({', '.join(files)}) or repository: {error}") from error
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        raise fail(f"{extra} needs the extra that brings it: pip install 'lathe[{extra}]'") from error
    server.run()
    if not server.started:
        raise typer.Exit(1)
