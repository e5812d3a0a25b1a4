"""Checks of every request before it is routed: the HTTP version and the Host header (DNS rebinding protection)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from lathe.server.access.authority import LOOPBACK, Mode
from lathe.server.errors import BadRequest, Misdirected, UnsupportedProtocol

# A name, an IPv4 address or an IPv6 address in brackets, and perhaps a port (RFC 9110, section 7.2; RFC 3986).
_HOST = re.compile(rb"([a-zA-Z0-9._~%!$&'()*+,;=-]*|\[[0-9a-fA-F:.]+\])(?::[0-9]{0,5})?")
_VERSIONS = ("1.0", "1.1")
_ANY = "*"
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def served_names(listed: str, address: str, mode: Mode) -> frozenset[str]:
    """The lower-case host names that a server on `address` answers to; empty: all.

    `listed`: the setting, a comma-separated list; `*` in it: all. If the list is empty, a server answers to all names,
    but on a loopback address without access control to loopback names only: a web page could otherwise reach such a
    server from the user's browser, by pointing the page's own name to it (DNS rebinding).
    """
    names = frozenset(name.strip().lower() for name in listed.split(",") if name.strip())
    if _ANY in names:
        return frozenset()
    return names or (_LOOPBACK_NAMES if mode is Mode.OPEN and address in LOOPBACK else names)


def check_host(version: str, headers: Iterable[tuple[bytes, bytes]], served: Collection[str]) -> None:
    """Check the version and the Host header of a request. `served`: host names in lower case; empty: all are served.

    UnsupportedProtocol for a version other than 1.0 and 1.1, BadRequest without exactly one well-formed Host,
    Misdirected for a name that is not served. HTTP/1.0 requests may omit Host: no browser sends them.
    """
    if version not in _VERSIONS:
        raise UnsupportedProtocol(f"expected HTTP/1.1 or HTTP/1.0, got HTTP/{version}")
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise BadRequest(f"headers: expected one Host, got {len(hosts)}")
    match = _HOST.fullmatch(hosts[0]) if hosts else None
    if hosts and match is None:
        raise BadRequest("headers: Host: expected a name or address, and perhaps a port")
    if served and match is not None and match[1].decode().lower() not in served:
        raise Misdirected(
            "headers: Host: this server does not answer to that name; LATHE_SERVED_HOSTS lists the names it answers to"
        )
