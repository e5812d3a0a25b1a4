"""The errors that clients raise. The message of an ApiError is the server's, except for a missing or wrong key."""

from __future__ import annotations

import httpx


class ClientError(Exception):
    """Base of the clients' errors: the request is invalid or cannot be sent, or its answer is missing or malformed."""


class Unreachable(ClientError):
    """No server answers at the address."""

    def __init__(self, url: str, cause: str) -> None:
        super().__init__(f"no server answers at {url}: {cause}")
        self.url = url


class ApiError(ClientError):
    """The server answered with an error.

    It has the HTTP status, the error's code (empty if the answer has none), and the seconds after which to retry.
    """

    def __init__(self, status: int, code: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after


def refusal(response: httpx.Response, call: str) -> ApiError:
    """Return the error of an unsuccessful response; `call` names the request, for answers without a message."""
    code, message = "", f"{call}: HTTP {response.status_code}"
    try:
        failure = response.json()
        if isinstance(failure, dict) and isinstance(failure.get("error"), str):
            code, message = str(failure.get("code", "")), failure["error"]
    except (ValueError, RecursionError):
        pass  # not an answer of Lathe, but for example an error page of a proxy
    if response.status_code == 401 and message.startswith("header authorization"):
        message = _key_message(was_sent="authorization" in response.request.headers)
    return ApiError(response.status_code, code, message, retry_after(response))


def _key_message(*, was_sent: bool) -> str:
    """Return the message that replaces the server's one about the `Authorization` header: what to do about the key."""
    if was_sent:
        return "the server does not know the API key or token, or it has expired: api_key=, LATHE_KEY"
    return "the server requires an API key or a token: api_key=, LATHE_KEY"


def retry_after(response: httpx.Response) -> float | None:
    """Return the seconds in the Retry-After header; None if it is absent or no whole number, such as a date."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() else None
