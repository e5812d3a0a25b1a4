"""`lathe status` summarizes a server for people; `lathe health` is a health check for containers."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from lathe.server.cli.connection import Connection, is_set, with_connection, with_optional_connection
from lathe.server.cli.models import canary_text, not_ready_text
from lathe.server.cli.terminal import Json, console, fail, print_json

if TYPE_CHECKING:
    from lathe.server.api.management.schemas import ModelState
    from lathe.server.client import Client
    from lathe.server.settings import Settings

_TIMEOUT = 5.0  # seconds
_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}  # the address to call for a wildcard address


@with_connection
def status(server: Connection, as_json: Json = False) -> None:
    """Show whether a server is ready, its version, models and jobs, and its problems."""
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


@with_optional_connection("Call the server at this URL.", default="the server on this machine")
def health(server: Connection, context: typer.Context) -> None:
    """Exit with status 0 if the server is ready for requests, otherwise 1: for the health checks of containers.

    Without --url and LATHE_URL it calls the server on this machine, by the settings LATHE_HOST, LATHE_PORT and
    LATHE_TLS_CERT. If that server requires a client certificate, set LATHE_CERT and LATHE_CERT_KEY.
    """
    from lathe.server.client import ClientError

    has_url = is_set(context, "url")
    url = server.url if has_url else local_url()
    try:
        with server.client() if has_url else _local_client(server, url) as client:
            ready = client.ready()
    except ClientError as error:
        raise fail(server.failure_text(error, url)) from error
    if not ready:
        raise fail(f"{url} is not ready")
    console.print(f"{url} is ready", soft_wrap=True)


def local_url() -> str:
    """Return the URL of the server that this machine's settings describe."""
    settings = _settings()
    host = _LOOPBACK_OF.get(settings.host, settings.host)
    return f"{'https' if settings.tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}:{settings.port}"


def _local_client(server: Connection, url: str) -> Client:
    """Return a client of the server on this machine, with a Host header that the server accepts.

    The server's certificate need not name the loopback address: only the CA of `server`, or without one the certificate
    in the settings, is trusted.
    """
    from lathe.server.client import Client
    from lathe.server.client.host_transport import HostTransport
    from lathe.server.client.tls_errors import file_text

    settings = _settings()
    trust: ssl.SSLContext | bool = True
    if settings.tls_cert is not None:
        try:
            trust = ssl.create_default_context(cafile=server.ca or settings.tls_cert)
            if server.cert is not None:
                trust.load_cert_chain(server.cert, server.cert_key)
        except OSError as error:
            raise fail(f"LATHE_TLS_CERT, LATHE_CERT: {file_text(error)}") from error
        trust.check_hostname = False
        trust.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    host = _first_host(settings.served_hosts)
    return Client(url, timeout=_TIMEOUT, transport=HostTransport(host, trust) if host else None, verify=trust)


def _first_host(served_hosts: str) -> str:
    """Return the first host name in a list separated by commas; empty if the list is empty or has `*` (all)."""
    names = [name.strip() for name in served_hosts.split(",") if name.strip()]
    return "" if "*" in names else next(iter(names), "")


def _settings() -> Settings:
    from lathe.server.environment import BadSettings, read_settings

    try:
        return read_settings({})
    except BadSettings as error:
        raise fail(str(error)) from error


def _facts(client: Client, url: str) -> dict[str, Any]:
    from lathe.server.client import ApiError

    models = client.models()
    facts: dict[str, Any] = {
        "server": url,
        "version": client.server()["version"],
        "ready": "yes" if client.ready() else "no",
        "models": f"{len(models)}, of which {sum(model.ready for model in models)} answer",
        "canaries": "; ".join(f"{model.name} {text}" for model in models if (text := canary_text(model))) or "none",
    }
    try:
        jobs = [job.state.value for job in client.jobs()]
        facts["jobs"] = ", ".join(f"{jobs.count(state)} {state}" for state in dict.fromkeys(jobs)) or "none"
    except ApiError as error:
        facts["jobs"] = f"not shown: {error}"
    facts["metrics"] = f"{url.rstrip('/')}/metrics"
    facts["problems"] = [problem for model in models for problem in _problems(model)]
    return facts


def _problems(model: ModelState) -> Iterator[str]:
    if not model.ready:
        yield not_ready_text(model)
    if model.config_error:
        yield f"{model.name}: config.toml is not followed: {model.config_error}"
