"""How a message is framed, and what its head may say only once: what two readers could understand differently is
refused (RFC 9112, section 11.2). A proxy that reads the first of two lines must not let past what we find in the last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from server.errors import BadRequest, ServerError, Unsupported, UnsupportedProtocol

Headers = Sequence[tuple[bytes, bytes]]  # names in lower case

# What we act on, or a proxy in front may have acted on; `host` is looked at in `server.api.hosts`.
ONCE = frozenset(
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
    """Check a head for what must be there once at most, and for a body in a form that we read.

    Raises BadRequest, and Unsupported for a transfer coding besides `chunked`.
    """
    once = [name for name, _ in headers if name in ONCE]
    if len(once) != len(set(once)):
        twice = next(name for name in once if once.count(name) > 1).decode()
        raise BadRequest(f"headers: {twice}: expected one at most, got {once.count(twice.encode())}")
    if b"transfer-encoding" in once:
        _check_codings(version, next(value for name, value in headers if name == b"transfer-encoding"), once)
    if version == "1.0":
        _check_persistence(headers)


def _check_persistence(headers: Headers) -> None:
    """Refuse what the parser lets a connection of HTTP/1.0 stay for, and other readers do not: it takes
    `proxy-connection` for `connection`, and `keep-alive` beside `close` for more than that (RFC 9112, section 9.3)."""
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
    """Check the request line's target: a path; `*` for OPTIONS; or a whole URL, as a proxy is asked, whose host is the
    one that the Host header names. Raises BadRequest."""
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
    if any(_bare(host, scheme) != _bare(match[1], scheme) for host in hosts) or not match[1]:
        raise BadRequest(f"request line: expected the host that the Host header names, got {_shown(match[1])}")


def _bare(host: bytes, scheme: bytes) -> bytes:
    """Return a host as names are compared: in lower case, without the scheme's own port."""
    return host.lower().removesuffix(_DEFAULT_PORT[scheme])


def malformed(reason: str, received: bytes, headers: Headers, *, in_head: bool) -> ServerError:
    """Return the refusal of what the parser does not read, ``reason`` being the parser's own; ``received``: the bytes
    among which it was found, ``headers``: those before it."""
    if not in_head:
        return BadRequest(f"body: {reason}")
    if reason == "Pause on PRI/Upgrade" or reason.startswith("Expected HTTP/2"):
        return UnsupportedProtocol("expected HTTP/1.1 or HTTP/1.0, got HTTP/2")
    if headers or "header" in reason.lower():
        return BadRequest(f"headers: {reason}")
    if received.startswith(b"\x16\x03"):
        return BadRequest("expected HTTP, got TLS: this port speaks http://, not https://")
    return BadRequest(f"request line: expected HTTP/1.1, got something else ({reason})")


def _shown(value: bytes) -> str:
    return repr(value[:40].decode("latin-1"))
