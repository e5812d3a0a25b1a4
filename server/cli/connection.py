"""The options by which all client commands reach their server: address, API key, certificates."""

from __future__ import annotations

import functools
import inspect
import shlex
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec

import typer

from lathe.server.cli.terminal import fail

if TYPE_CHECKING:
    from lathe.server.client import Client, ClientError

P = ParamSpec("P")
DEFAULT_URL = "http://127.0.0.1:8080"
_PANEL = "Server"
_NO_OPTIONS: Mapping[str, str] = {}


def _option(*names: str, text: str, variable: str, metavar: str) -> Any:
    return typer.Option(*names, help=text, envvar=variable, metavar=metavar, rich_help_panel=_PANEL)


Url = Annotated[str, _option("--url", text="Call the server at this URL.", variable="LATHE_URL", metavar="URL")]
ApiKey = Annotated[
    str | None,
    _option(
        "--api-key",
        text="Authenticate with this API key. Prefer LATHE_KEY: other users of this machine can read options.",
        variable="LATHE_KEY",
        metavar="KEY",
    ),
]
Ca = Annotated[
    Path | None,
    _option(
        "--ca",
        text="Trust the CA certificates (PEM) in this file, if the system does not trust the server's certificate.",
        variable="LATHE_CA",
        metavar="FILE",
    ),
]
Cert = Annotated[
    Path | None,
    _option(
        "--cert",
        text="Present this client certificate (PEM), for servers that require one.",
        variable="LATHE_CERT",
        metavar="FILE",
    ),
]
CertKey = Annotated[
    Path | None,
    _option(
        "--cert-key",
        text="Read the private key (PEM) of --cert from this file, if --cert does not contain it.",
        variable="LATHE_CERT_KEY",
        metavar="FILE",
    ),
]


@dataclass(frozen=True, slots=True)
class Connection:
    """How to reach a server: its URL, an API key, and certificates.

    Each field is an option that the decorator `with_connection` adds to a command.
    """

    url: Url = DEFAULT_URL
    api_key: ApiKey = None
    ca: Ca = None
    cert: Cert = None
    cert_key: CertKey = None

    @property
    def url_option(self) -> str:
        """The option `--url` for a suggested command, with a blank before it; empty for the default URL."""
        return "" if self.url == DEFAULT_URL else f" --url {shlex.quote(self.url)}"

    @contextmanager
    def client(self, model: str | None = None, options: Mapping[str, str] = _NO_OPTIONS) -> Iterator[Client]:
        """Yield a client of the server; a failed call prints one line and ends the command with status 1.

        `model` and `options` are those of `refusal_text`.
        """
        from lathe.server.cli.refusals import name_options, refusal_text
        from lathe.server.client import ApiError, Client, ClientError

        _check_url(self.url)
        names = {"api_key": "--api-key, LATHE_KEY", **options}
        try:
            with Client(self.url, api_key=self.api_key, verify=self._trust()) as client:
                try:
                    yield client
                except ApiError as error:
                    raise fail(refusal_text(error, client, model, options)) from error
        except ClientError as error:
            raise fail(name_options(self.failure_text(error), names)) from error

    def _trust(self) -> ssl.SSLContext | bool:
        """Return the TLS configuration: a context with the CA and client certificates, True for the system's trust."""
        if self.ca is None and self.cert is None:
            if self.cert_key is not None:
                raise fail("--cert-key: expected --cert with it")
            return True
        from lathe.server.client.tls_errors import file_text

        try:
            context = ssl.create_default_context(cafile=self.ca)
        except OSError as error:
            raise fail(f"--ca {self.ca}: {file_text(error)}") from error
        if self.cert is not None:
            try:
                context.load_cert_chain(self.cert, self.cert_key)
            except OSError as error:
                files = f"--cert {self.cert}" + (f", --cert-key {self.cert_key}" if self.cert_key else "")
                raise fail(f"{files}: {file_text(error)}") from error
        return context

    def failure_text(self, error: ClientError, url: str = "") -> str:
        """Return one line that says why no answer came from the server at `url` (default: that of this connection)."""
        import httpx

        from lathe.server.client.tls_errors import is_tls_error

        url = url or self.url
        cause = error.__cause__
        if is_tls_error(str(cause)):
            return str(error).replace("ca=,", "--ca,").replace("cert=,", "--cert,")
        if isinstance(cause, httpx.ConnectError):
            return f"no server answers at {url}: start one (lathe serve), or name another (--url, LATHE_URL)"
        if isinstance(cause, httpx.TimeoutException):
            return f"the server at {url} did not answer in time"
        if isinstance(cause, httpx.TransportError):
            needs = (
                "require a client certificate (--cert, LATHE_CERT)" if url.startswith("https") else "expect https://"
            )
            return f"the server at {url} closed the connection without an answer; does it {needs}?"
        return str(error)


def with_connection(command: Callable[Concatenate[Connection, P], None]) -> Callable[..., None]:
    """Decorator: adds the options of `Connection` to a command, which gets the Connection as its first argument."""
    return _with_options(command, list(inspect.signature(Connection, eval_str=True).parameters.values()))


def with_optional_connection(
    url_text: str, default: str
) -> Callable[[Callable[Concatenate[Connection, P], None]], Callable[..., None]]:
    """Decorator like `with_connection`, for a command that calls another server, or none, without `--url`.

    `url_text` is the help of `--url`, and `default` says what the command does without it.
    """
    url, *others = inspect.signature(Connection, eval_str=True).parameters.values()
    option = _option("--url", text=url_text, variable="LATHE_URL", metavar="URL")
    option.show_default = default
    options = [url.replace(annotation=Annotated[str, option]), *others]
    return lambda command: _with_options(command, options)


def _with_options(
    command: Callable[Concatenate[Connection, P], None], options: list[inspect.Parameter]
) -> Callable[..., None]:
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        connection = Connection(**{option.name: arguments.pop(option.name) for option in options})
        command(connection, **arguments)  # type: ignore[call-arg]

    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *options)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _check_url(url: str) -> None:
    import httpx

    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise fail(f"--url {url!r}: expected an address such as {DEFAULT_URL} ({error})") from error
    if parts.scheme not in ("http", "https") or not parts.host:
        raise fail(f"--url {url!r}: expected an address such as {DEFAULT_URL}")


def is_on_command_line(context: typer.Context, name: str) -> bool:
    """Whether an option is given on the command line."""
    return _source(context, name) == "COMMANDLINE"


def is_set(context: typer.Context, name: str) -> bool:
    """Whether an option is given on the command line or by its environment variable."""
    return _source(context, name) in {"COMMANDLINE", "ENVIRONMENT"}


def _source(context: typer.Context, name: str) -> str:
    source = context.get_parameter_source(name)
    return source.name if source is not None else ""
