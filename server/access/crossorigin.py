"""Cross-origin requests: which web pages of other origins may call the server (CORS, CSRF)."""

from __future__ import annotations

import re

from lathe.server.errors import Forbidden

ANY = "*"
SAFE_METHODS = frozenset(
    {"GET", "HEAD", "OPTIONS"}
)  # safe methods: they change nothing, and the page cannot read the answer
_OWN = frozenset({"same-origin", "none"})  # Sec-Fetch-Site: a page of this server, or the user (address bar)
_PORT = {"http": ":80", "https": ":443"}  # default ports, which Host and Origin may omit
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._~-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")


def origins_of(text: str) -> frozenset[str]:
    """Return the origins in a list separated by commas."""
    return frozenset(part.strip() for part in text.split(",") if part.strip())


def validate_origins(text: str) -> str:
    """Return `text`, a list of origins separated by commas, unchanged.

    Raises ValueError if an origin is neither `*` nor in the form in which browsers send origins.
    """
    for origin in origins_of(text):
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"expected * or origins such as https://app.example.org (lower case, without a path), got {origin!r}"
            )
    return text


def check_origin(method: str, host: str, origin: str, site: str, listed: frozenset[str]) -> None:
    """Raise Forbidden for an unsafe request from a page of another origin that is not `listed` (CSRF).

    `host`, `origin` and `site` are the headers Host, Origin and Sec-Fetch-Site, empty if absent. Sec-Fetch-Site says
    whether the origin is another one; without it, Origin is compared with Host. A browser sends forms and plain text
    without a preflight request, but sets Origin or Sec-Fetch-Site, which pages cannot change. A request with neither
    header does not come from a page, and is allowed. `*` in `listed` allows all origins.
    """
    if method in SAFE_METHODS or ANY in listed or origin in listed:
        return
    if (site not in _OWN) if site else (origin and not _is_of(origin, host)):
        raise Forbidden(
            "headers: Origin, Sec-Fetch-Site: a page of another origin may not make this request; LATHE_CORS_ORIGINS "
            "lists the allowed origins"
        )


def _is_of(origin: str, host: str) -> bool:
    scheme, _, name = origin.lower().partition("://")
    port = _PORT.get(scheme, ":")
    return bool(name) and name.removesuffix(port) == host.lower().removesuffix(port)
