"""A transport with its own Host header, for health checks that call a server by its loopback address."""

from __future__ import annotations

import ssl

import httpx


class HostTransport(httpx.HTTPTransport):
    """Sends requests with a fixed `Host` header."""

    def __init__(self, host: str, verify: ssl.SSLContext | bool) -> None:
        super().__init__(verify=verify)
        self._host = host

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request."""
        request.headers["host"] = self._host
        return super().handle_request(request)
