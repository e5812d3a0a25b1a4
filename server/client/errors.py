"""What a client raises. A server's refusal is told in the server's own sentence."""

from __future__ import annotations

import httpx


class ClientError(Exception):
    """The server could not be reached, its answer not be understood, or what was asked cannot be sent."""


class Unreachable(ClientError):
    """No server answers at the address."""

    def __init__(self, url: str, cause: str) -> None:
        super().__init__(f"no server answers at {url}: {cause}")
        self.url = url


class ApiError(ClientError):
    """The server refused: the HTTP status, the error's code (empty if it has none), when to come back in seconds."""

    def __init__(self, status: int, code: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after


def refusal(response: httpx.Response, call: str) -> ApiError:
    """Return the error that an answer other than success stands for; ``call`` names the request."""
    code, message = "", f"{call}: HTTP {response.status_code}"
    try:
        failure = response.json()
        code, message = failure.get("code", ""), failure["error"]
    except (ValueError, KeyError, AttributeError):
        pass  # a proxy's page, say
    return ApiError(response.status_code, code, message, retry_after(response))


def retry_after(response: httpx.Response) -> float | None:
    """Return the seconds after which a refused request may be repeated; None if the answer does not say it."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() else None
