"""How a client connects: URL, API key, certificates, timeouts, with defaults from environment variables."""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from lathe.server.client.call import Call, OpenedCall
from lathe.server.client.errors import ClientError, Unreachable
from lathe.server.client.retry_policy import RetryPolicy
from lathe.server.client.tls_errors import connection_text, file_text, is_tls_error

_API_KEY = re.compile(r"[\x21-\x7e]*")
DEFAULT_URL = "http://127.0.0.1:8080"


@dataclass(frozen=True, slots=True)
class Connection:
    """The connection arguments of both clients, which `Client` describes, with their defaults filled in."""

    url: str
    timeout: float
    upload_timeout: float
    patience: float
    api_key: str
    verify: ssl.SSLContext | bool

    @classmethod
    def of(
        cls,
        url: str | None,
        timeout: float,
        upload_timeout: float,
        patience: float,
        api_key: str | None,
        ca: Path | str | None,
        cert: Path | str | None,
        cert_key: Path | str | None,
        verify: ssl.SSLContext | bool,
    ) -> Connection:
        """Fill in defaults from the environment and, for https, read the certificates.

        Raises ClientError for certificates that cannot be used, for a URL that is not valid or neither http nor https,
        and for an API key that a header cannot have.
        """
        chosen = url or os.environ.get("LATHE_URL") or DEFAULT_URL
        try:
            scheme = httpx.URL(chosen).scheme
        except httpx.InvalidURL as error:
            raise ClientError(f"url {chosen!r}: {error}") from error
        if scheme not in ("http", "https"):
            raise ClientError(f"url {chosen!r}: expected http://... or https://...")
        key = os.environ.get("LATHE_KEY", "") if api_key is None else api_key
        if _API_KEY.fullmatch(key) is None:
            raise ClientError("api_key: expected visible ASCII characters without blanks, got others")
        if verify is True:
            ca, cert = ca or os.environ.get("LATHE_CA") or None, cert or os.environ.get("LATHE_CERT") or None
            cert_key = cert_key or os.environ.get("LATHE_CERT_KEY") or None
        if cert_key and not cert:
            raise ClientError("cert_key: expected cert with it")
        if scheme == "http":
            verify = False  # nothing to verify; reading the system's certificates would take 25 ms
        elif ca or cert:
            verify = _context(ca, cert, cert_key)
        return cls(chosen, timeout, upload_timeout, patience, key, verify)

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `httpx.Client` and `httpx.AsyncClient`: URL, timeout, API key, TLS."""
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else None
        return {"base_url": self.url, "timeout": self.timeout, "headers": headers, "verify": self.verify}

    def options(self, call: Call[Any], outgoing: OpenedCall, content: Any) -> dict[str, Any]:
        """Return the keyword arguments of httpx's `request` for one call, with `content` as its body."""
        options = {"params": dict(call.query) or None, "headers": dict(outgoing.headers), "content": content}
        timeout = self.upload_timeout if call.is_long else call.timeout
        return options if timeout is None else {**options, "timeout": timeout}

    def retry_policy(self, call: Call[Any], has_answered: bool) -> RetryPolicy:
        """Return the retry policy of one call, which waits for at most `patience` seconds, or its shorter timeout.

        `has_answered`: the server has answered an earlier call of this client.
        """
        seconds = min(self.patience, call.timeout or self.patience)
        return RetryPolicy(seconds, is_repeatable=call.is_repeatable, has_answered=has_answered)

    def failure(self, call: object, error: httpx.HTTPError | httpx.InvalidURL) -> ClientError:
        """Return the error if there was no answer: Unreachable if no connection was made, except for TLS errors."""
        cause = str(error) or type(error).__name__
        if is_tls_error(cause):
            return ClientError(connection_text(self.url, cause))
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return Unreachable(self.url, cause)
        return ClientError(f"{call}: {cause}")


def _context(ca: Path | str | None, cert: Path | str | None, cert_key: Path | str | None) -> ssl.SSLContext:
    """Return a TLS context that trusts `ca` (default: the system's CAs) and presents the client certificate."""
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ClientError(f"ca {ca}: {file_text(error)}") from error
    if cert is not None:
        try:
            context.load_cert_chain(cert, cert_key)
        except OSError as error:
            raise ClientError(f"cert {cert}, cert_key {cert_key or cert}: {file_text(error)}") from error
    return context
