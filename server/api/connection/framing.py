"""Protection against request smuggling: refuses heads that two parsers could read differently (RFC 9112, section 11.2).

For example, if a header occurs twice, a proxy may act on the first value and this server on the last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from lathe.server.errors import BadRequest, ServerError, Unsupported, UnsupportedProtocol

Headers = Sequence[tuple[bytes, bytes]]  # names in lower case

# Headers that may occur at most once, because this server or a proxy acts on them. `host` is checked in hosts.py.
SINGLE_HEADERS = frozenset(
    {
        b"authorization",
        b"content-digest",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"expect",
        b"idempotency-key",
        b"inference-header-content-length",
        b"lathe-sticky-key",
        b"origin",
        b"sec-fetch-site",
        b"traceparent",
        b"transfer-encoding",
        b"upgrade",
    }
)
_ABSOLUTE = re.compile(rb"https?://([^/?#@]*)(?:[/?].*)?", re.IGNORECASE | re.DOTALL)
_DEFAULT_PORT = {b"http": b":80", b"https": b":443"}


def check_framing(version: str, headers: Headers) -> None:
    """Check that the headers of `SINGLE_HEADERS` occur at most once, and that the body has a supported framing.

    BadRequest if not, and for an HTTP/1.0 head that leaves open whether the connection closes. Unsupported for another
    transfer coding before `chunked`, such as `gzip, chunked`. `version`: of HTTP, such as "1.1".
    """
    once = [name for name, _ in headers if name in SINGLE_HEADERS]
    if len(once) != len(set(once)):
        twice = next(name for name in once if once.count(name) > 1).decode()
        raise BadRequest(f"headers: {twice}: expected one at most, got {once.count(twice.encode())}")
    if b"transfer-encoding" in once:
        _check_codings(version, next(value for name, value in headers if name == b"transfer-encoding"), once)
    if version == "1.0":
        _check_persistence(headers)


def _check_persistence(headers: Headers) -> None:
    """BadRequest for HTTP/1.0 heads for which the parser keeps the connection open, and other parsers close it.

    The parser reads `proxy-connection` like `connection`, and lets `keep-alive` win over `close` (RFC 9112, section
    9.3).
    """
    if any(name == b"proxy-connection" for name, _ in headers):
        raise BadRequest("headers: proxy-connection: expected connection in a request of HTTP/1.0")
    values = b",".join(value for name, value in headers if name == b"connection").lower()
    if {option.strip(b" \t") for option in values.split(b",")} >= {b"close", b"keep-alive"}:
        raise BadRequest("headers: connection: expected close or keep-alive, got both")


def _check_codings(version: str, value: bytes, present: Iterable[bytes]) -> None:
    if b"content-length" in present:
        raise BadRequest("headers: expected content-length or transfer-encoding, got both")
    if version == "1.0":
        raise BadRequest("headers: transfer-encoding: HTTP/1.0 has none, expected content-length")
    codings = [coding.strip(b" \t").lower() for coding in value.split(b",")]
    if codings[-1] != b"chunked" or codings.count(b"chunked") > 1:
        raise BadRequest(f"headers: transfer-encoding: expected chunked, got {_shown(value)}")
    if len(codings) > 1:
        raise Unsupported(f"headers: transfer-encoding: only chunked is understood, got {_shown(value)}")


def check_target(method: bytes, target: bytes, headers: Headers) -> None:
    """Check the request target; BadRequest if it is invalid.

    Valid are a path, `*` for OPTIONS, and an absolute URL (as sent to a proxy) whose host equals the Host header,
    if there is one.
    """
    if target.startswith(b"/"):
        if b"#" in target:
            raise BadRequest("request line: expected a path and perhaps a query, got a fragment (#)")
        return
    if target == b"*" and method == b"OPTIONS":
        return
    match = _ABSOLUTE.fullmatch(target)
    if match is None or b"#" in target:
        raise BadRequest(f"request line: expected a path that begins with /, got {_shown(target)}")
    scheme = target.partition(b":")[0].lower()
    hosts = [value for name, value in headers if name == b"host"]
    if (
        any(_without_default_port(host, scheme) != _without_default_port(match[1], scheme) for host in hosts)
        or not match[1]
    ):
        raise BadRequest(f"request line: expected the host that the Host header names, got {_shown(match[1])}")


def _without_default_port(host: bytes, scheme: bytes) -> bytes:
    """The host in lower case and without the default port of the scheme, for comparison."""
    return host.lower().removesuffix(_DEFAULT_PORT[scheme])


def parser_error(reason: str, received: bytes, headers: Headers, *, in_head: bool) -> ServerError:
    """The error for input that the HTTP parser rejects.

    `reason`: the parser's message; `received`: the bytes that contain the error; `headers`: those parsed before it;
    `in_head`: the error is in the head rather than the body. UnsupportedProtocol for HTTP/2, otherwise BadRequest.
    """
    if not in_head:
        return BadRequest(f"body: {reason}")
    if reason == "Pause on PRI/Upgrade" or reason.startswith("Expected HTTP/2"):
        return UnsupportedProtocol("expected HTTP/1.1 or HTTP/1.0, got HTTP/2")
    if headers or "header" in reason.lower():
        return BadRequest(f"headers: {reason}")
    if received.startswith(b"\x16\x03"):
        return BadRequest("expected HTTP, got TLS: this port speaks http://, not https://")
    return BadRequest(f"request line: not valid HTTP/1.1 ({reason})")


def _shown(value: bytes) -> str:
    return repr(value[:40].decode("latin-1"))
