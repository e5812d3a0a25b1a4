"""What every request's head must say rightly before anything looks at it: the protocol's version, and one Host."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from server.access.authority import LOOPBACK, Mode
from server.errors import BadRequest, Misdirected, UnsupportedProtocol

# A name, an IPv4 address or an IPv6 address in brackets, and perhaps a port (RFC 9110, section 7.2; RFC 3986).
_HOST = re.compile(rb"([a-zA-Z0-9._~%!$&'()*+,;=-]*|\[[0-9a-fA-F:.]+\])(?::[0-9]{0,5})?")
_VERSIONS = ("1.0", "1.1")
_ANY = "*"
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def served_names(listed: str, address: str, mode: Mode) -> frozenset[str]:
    """Return the lower-case names that a server on ``address`` answers to; none: to all.

    ``listed``: the setting, names with commas between them. Without it a server on a loopback address where everybody
    may do everything answers to loopback names: a browser's user does reach it, and any page's name can be made to
    point to it (DNS rebinding).
    """
    names = frozenset(name.strip().lower() for name in listed.split(",") if name.strip())
    if _ANY in names:
        return frozenset()
    return names or (_LOOPBACK_NAMES if mode is Mode.OPEN and address in LOOPBACK else names)


def check_host(version: str, headers: Iterable[tuple[bytes, bytes]], served: Collection[str]) -> None:
    """Check a head. ``served``: lower-case names that the server answers to; none: it answers to all. HTTP/1.0 need
    not name any, which no browser does.

    Raises UnsupportedProtocol for a version that is not HTTP/1, BadRequest where there is not one well-formed Host,
    Misdirected for a name that is not served: a page whose name was made to point here must not reach us.
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
