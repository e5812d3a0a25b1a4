"""The head of one HTTP request, as the parser has read it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from lathe.server.api.codec.call_head import is_infer_path
from lathe.server.api.connection.framing import check_framing, check_target
from lathe.server.api.connection.hosts import check_host

_PAGE_HEADERS = (b"origin", b"sec-fetch-site")  # only browsers send them


@dataclass(slots=True)
class RequestHead:
    """The request line and the headers of one request."""

    method: bytes
    target: bytes
    version: str
    headers: list[tuple[bytes, bytes]]  # names in lower case
    keep_alive: bool  # the client lets the connection stay open
    expects_continue: bool  # the client waits for 100 Continue before it sends the body
    raw: bytes  # the head as it was received; empty if its first byte was not the first of a read

    def check(self, hosts: Collection[str]) -> None:
        """Check version, Host, framing and target; ServerError if one is refused. `hosts`: the served names."""
        check_host(self.version, self.headers, hosts)
        check_framing(self.version, self.headers)
        check_target(self.method, self.target, self.headers)

    @property
    def is_direct(self) -> bool:
        """Whether this is an inference request that needs no ASGI.

        The application may refuse requests of a web page, or answer with more headers, so those go through ASGI.
        """
        return self.method == b"POST" and is_infer_path(self.target) and self.version == "1.1" and not self._is_page()

    def _is_page(self) -> bool:
        return any(name in _PAGE_HEADERS for name, _ in self.headers)
