"""Asking a server by another name than its address, as a health check beside it does."""

from __future__ import annotations

import ssl

import httpx


class NamedTransport(httpx.HTTPTransport):
    """Sends requests with this ``Host``."""

    def __init__(self, host: str, verify: ssl.SSLContext | bool) -> None:
        super().__init__(verify=verify)
        self._host = host

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request."""
        request.headers["host"] = self._host
        return super().handle_request(request)
