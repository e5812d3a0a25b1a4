"""How a command reaches its server: the address, the API key, the certificates. All commands share these options."""

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

from server.terminal import fail

if TYPE_CHECKING:
    from server.client import Client, ClientError

P = ParamSpec("P")
DEFAULT_URL = "http://127.0.0.1:8080"
_PANEL = "Server"


def _option(*names: str, text: str, variable: str, shows: str) -> Any:
    return typer.Option(*names, help=text, envvar=variable, metavar=shows, rich_help_panel=_PANEL)


Url = Annotated[str, _option("--url", text="The server's address.", variable="LATHE_URL", shows="URL")]
ApiKey = Annotated[
    str | None,
    _option(
        "--api-key",
        text="The API key. Prefer LATHE_KEY: other users of this machine can read options.",
        variable="LATHE_KEY",
        shows="KEY",
    ),
]
Ca = Annotated[
    Path | None,
    _option(
        "--ca",
        text="Certificates (PEM) to trust, if the system does not trust the server's.",
        variable="LATHE_CA",
        shows="FILE",
    ),
]
Cert = Annotated[
    Path | None,
    _option(
        "--cert", text="Your certificate (PEM), for a server that asks for one.", variable="LATHE_CERT", shows="FILE"
    ),
]
CertKey = Annotated[
    Path | None,
    _option(
        "--cert-key",
        text="Its private key (PEM), if --cert does not hold it.",
        variable="LATHE_CERT_KEY",
        shows="FILE",
    ),
]


@dataclass(frozen=True, slots=True)
class Connection:
    """A server to ask, and how: one field for each option that :func:`asks_server` adds to a command."""

    url: Url = DEFAULT_URL
    api_key: ApiKey = None
    ca: Ca = None
    cert: Cert = None
    cert_key: CertKey = None

    @contextmanager
    def client(self, model: str | None = None) -> Iterator[Client]:
        """Yield a client of the server; what goes wrong with it is one line and ends the command.

        ``model``: what the command is about; if there is no such model, the error names the nearest one.
        """
        from server.client import ApiError, Client, ClientError

        _check_url(self.url)
        with Client(self.url, api_key=self.api_key, verify=self._trust()) as client:
            try:
                yield client
            except ApiError as error:
                text = str(error).replace("allow_signature_change=true", "--allow-signature-change")
                raise fail(text + _nearest(client, model, error)) from error
            except ClientError as error:
                raise fail(self.unreached(error)) from error

    def _trust(self) -> ssl.SSLContext | bool:
        """Return whose certificates to accept and which one to show."""
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

    def unreached(self, error: ClientError, url: str = "") -> str:
        """Say in one line why no answer came from a server, this one unless told."""
        import httpx

        url = url or self.url
        cause = error.__cause__
        text = str(cause or error)
        if "CERTIFICATE_VERIFY_FAILED" in text:
            why = text.partition("certificate verify failed: ")[2].partition(" (")[0] or text
            return f"{url}: the server's certificate is not trusted ({why}); name who signed it (--ca, LATHE_CA)"
        if "WRONG_VERSION_NUMBER" in text or "record layer failure" in text.lower():
            return f"{url}: no TLS is spoken there; use http:// instead of https://"
        if isinstance(cause, httpx.ConnectError):
            return f"no server answers at {url}: start one (lathe serve), or name another (--url, LATHE_URL)"
        if isinstance(cause, httpx.TimeoutException):
            return f"the server at {url} did not answer in time"
        if isinstance(cause, httpx.TransportError):
            asks = (
                "ask for a certificate of yours (--cert, LATHE_CERT)" if url.startswith("https") else "expect https://"
            )
            return f"the server at {url} ended the connection without an answer; does it {asks}?"
        return str(error)


def asks_server(command: Callable[Concatenate[Connection, P], None]) -> Callable[..., None]:
    """Give a command the options that say which server it asks; its first argument becomes the Connection."""
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    options = list(inspect.signature(Connection, eval_str=True).parameters.values())

    @functools.wraps(command)
    def run(**given: Any) -> None:
        connection = Connection(**{option.name: given.pop(option.name) for option in options})
        command(connection, **given)  # type: ignore[call-arg]

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


def is_typed(context: typer.Context, name: str) -> bool:
    """Say whether an option stands on the command line."""
    return _source(context, name) == "COMMANDLINE"


def is_given(context: typer.Context, name: str) -> bool:
    """Say whether an option stands on the command line or in the environment."""
    return _source(context, name) in {"COMMANDLINE", "ENVIRONMENT"}


def _source(context: typer.Context, name: str) -> str:
    source = context.get_parameter_source(name)
    return source.name if source is not None else ""


def _nearest(client: Client, model: str | None, error: Any) -> str:
    """Return what to add to an error if there is no such model: the nearest name, else all there are."""
    from server.client import ClientError

    if model is None or error.status != 404:
        return ""
    try:
        names = sorted(state.name for state in client.models())
    except ClientError:
        return ""  # this key may not see the list
    if model in names:
        return ""
    close = difflib.get_close_matches(model, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; models: {', '.join(names[:20])}" if names else "; there are no models yet"


def _reason(error: OSError) -> str:
    """Return what the system says, without the file's name and OpenSSL's places."""
    return error.strerror or str(error)
