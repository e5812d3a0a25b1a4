"""``lathe status`` and ``lathe health``: how a server is doing, for people and for what watches containers."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from server.cli_models import silence
from server.connection import Connection, asks_server, is_given
from server.terminal import Json, console, fail, print_json

if TYPE_CHECKING:
    from server.api.schemas import ModelState
    from server.client import Client
    from server.settings import Settings

_PATIENCE = 5.0  # seconds
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}  # what one asks where a server listens everywhere


@asks_server
def status(server: Connection, as_json: Json = False) -> None:
    """Show whether a server is ready, its version, its models and jobs, and what is wrong."""
    with server.client() as client:
        facts = _facts(client, server.url)
    if as_json:
        print_json(facts)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in facts.items():
        if name != "problems":
            table.add_row(name, str(value))
    console.print(table)
    for problem in facts["problems"]:
        console.print(f"problem: {problem}", soft_wrap=True)


@asks_server
def health(server: Connection, context: typer.Context) -> None:
    """End with status 0 if the server is ready for requests, else 1: for the health checks of containers.

    Without --url and LATHE_URL it asks the server that this machine's settings (LATHE_HOST, LATHE_PORT, LATHE_TLS_CERT)
    describe. If that one wants clients to show a certificate, name one (LATHE_CERT, LATHE_CERT_KEY).
    """
    from server.client import ClientError

    named = is_given(context, "url")
    url = server.url if named else url_here()
    with server.client() if named else _client_here(server, url) as client:
        try:
            ready = client.ready()
        except ClientError as error:
            raise fail(server.unreached(error, url)) from error
    if not ready:
        raise fail(f"{url} is not ready")
    console.print(f"{url} is ready", soft_wrap=True)


def url_here() -> str:
    """Return the address of the server that the settings of this machine describe."""
    settings = _settings()
    host = _ANYWHERE.get(settings.host, settings.host)
    return f"{'https' if settings.tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}:{settings.port}"


def _client_here(server: Connection, url: str) -> Client:
    """A client of the server here, by a name that it answers to. Its certificate need not be for that address: it is
    compared whole."""
    from server.client import Client
    from server.client.named import NamedTransport

    settings = _settings()
    trust: ssl.SSLContext | bool = True
    if settings.tls_cert is not None:
        try:
            trust = ssl.create_default_context(cafile=server.ca or settings.tls_cert)
            if server.cert is not None:
                trust.load_cert_chain(server.cert, server.cert_key)
        except OSError as error:
            raise fail(f"LATHE_TLS_CERT, LATHE_CERT: {error}") from error
        trust.check_hostname = False
        trust.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    host = _name_of(settings.served_hosts)
    return Client(url, timeout=_PATIENCE, transport=NamedTransport(host, trust) if host else None, verify=trust)


def _name_of(served: str) -> str:
    """Return the first of the names that the server answers to, empty where it answers to all."""
    names = [name.strip() for name in served.split(",") if name.strip()]
    return "" if "*" in names else next(iter(names), "")


def _settings() -> Settings:
    from server.environment import BadSettings, read_settings

    try:
        return read_settings({})
    except BadSettings as error:
        raise fail(str(error)) from error


def _facts(client: Client, url: str) -> dict[str, Any]:
    from server.client import ApiError

    models = client.models()
    facts: dict[str, Any] = {
        "server": url,
        "version": client.server()["version"],
        "ready": "yes" if client.ready() else "no",
        "models": f"{len(models)}, of which {sum(model.ready for model in models)} answer",
    }
    try:
        jobs = [job.state.value for job in client.jobs()]
        facts["jobs"] = ", ".join(f"{jobs.count(state)} {state}" for state in dict.fromkeys(jobs)) or "none"
    except ApiError as error:
        facts["jobs"] = f"not shown: {error}"
    facts["problems"] = [problem for model in models for problem in _problems(model)]
    return facts


def _problems(model: ModelState) -> Iterator[str]:
    if not model.ready:
        yield silence(model)
    if model.config_error:
        yield f"{model.name}: config.toml is not followed: {model.config_error}"
