"""The options by which all client commands reach their server: address, API key, certificates."""

from __future__ import annotations

import difflib
import functools
import inspect
import ssl
from collections.abc import Callable, Iterator
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
    """How to reach a server: one field for each option that `with_connection` adds to a command."""

    url: Url = DEFAULT_URL
    api_key: ApiKey = None
    ca: Ca = None
    cert: Cert = None
    cert_key: CertKey = None

    @contextmanager
    def client(self, model: str | None = None) -> Iterator[Client]:
        """Yield a client of the server; a failed call prints one line and ends the command with status 1.

        `model` is the name of the command's model: if the server has none of this name, the error suggests the nearest.
        """
        from lathe.server.client import ApiError, Client, ClientError

        _check_url(self.url)
        with Client(self.url, api_key=self.api_key, verify=self._trust()) as client:
            try:
                yield client
            except ApiError as error:
                text = str(error).replace("allow_signature_change=true", "--allow-signature-change")
                raise fail(text + _nearest(client, model, error)) from error
            except ClientError as error:
                raise fail(self.failure_text(error)) from error

    def _trust(self) -> ssl.SSLContext | bool:
        """Return the TLS configuration: a context with the CA and client certificates, True for the system's trust."""
        if self.ca is None and self.cert is None:
            if self.cert_key is not None:
                raise fail("--cert-key: expected --cert with it")
            return True
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except OSError as error:
            raise fail(f"--ca {self.ca}: {_reason(error)}") from error
        if self.cert is not None:
            try:
                context.load_cert_chain(self.cert, self.cert_key)
            except OSError as error:
                files = f"--cert {self.cert}" + (f", --cert-key {self.cert_key}" if self.cert_key else "")
                raise fail(f"{files}: {_reason(error)}") from error
        return context

    def failure_text(self, error: ClientError, url: str = "") -> str:
        """Return one line that says why no answer came from the server at `url` (default: that of this connection)."""
        import httpx

        url = url or self.url
        cause = error.__cause__
        text = str(cause or error)
        if "CERTIFICATE_VERIFY_FAILED" in text:
            why = text.partition("certificate verify failed: ")[2].partition(" (")[0] or text
            return (
                f"{url}: the server's certificate is not trusted ({why}); name the CA that signed it (--ca, LATHE_CA)"
            )
        if "WRONG_VERSION_NUMBER" in text or "record layer failure" in text.lower():
            return f"{url}: the server does not use TLS; use http:// instead of https://"
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
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    options = list(inspect.signature(Connection, eval_str=True).parameters.values())

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


def _nearest(client: Client, model: str | None, error: Any) -> str:
    """Return a suggestion to append to a 404: the nearest model name, otherwise the first 20 names.

    Empty if the error is not about the model's name, or the API key may not list models.
    """
    from lathe.server.client import ClientError

    if model is None or error.status != 404:
        return ""
    try:
        names = sorted(state.name for state in client.models())
    except ClientError:
        return ""  # this key may not list models
    if model in names:
        return ""
    close = difflib.get_close_matches(model, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; models: {', '.join(names[:20])}" if names else "; there are no models yet"


def _reason(error: OSError) -> str:
    """Return the system's error text, without the file's name and OpenSSL's source positions."""
    return error.strerror or str(error)
