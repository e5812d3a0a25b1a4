"""Which pages of other origins may call the server."""

from __future__ import annotations

import re

from server.errors import Forbidden

ANY = "*"
READING = frozenset({"GET", "HEAD", "OPTIONS"})  # methods that change nothing: a browser keeps the answer from the page
_OWN = frozenset({"same-origin", "none"})  # Sec-Fetch-Site: of a page of this server, or of the browser's user
_PORT = {"http": ":80", "https": ":443"}  # which a Host or an origin need not name
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._~-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")


def origins_of(text: str) -> frozenset[str]:
    """Return the origins of a list with commas between them."""
    return frozenset(part.strip() for part in text.split(",") if part.strip())


def checked_origins(text: str) -> str:
    """Return the list; raises ValueError for what no browser would send as an origin."""
    for origin in origins_of(text):
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"expected * or origins such as https://app.example.org (lower case, without a path), got {origin!r}"
            )
    return text


def check_page(method: str, host: str, origin: str, site: str, listed: frozenset[str]) -> None:
    """Refuse what a page of an origin that is not ``listed`` asks to be done (cross-site request forgery).

    ``host``, ``origin`` and ``site`` are the headers Host, Origin and Sec-Fetch-Site, empty where there is none. A
    browser sends a form, or text, without asking first; but it says whose page it is, which no page can change. What
    has neither header comes from no page. Raises Forbidden.
    """
    if method in READING or ANY in listed or origin in listed:
        return
    if (site not in _OWN) if site else (origin and not _is_of(origin, host)):
        raise Forbidden(
            "headers: Origin, Sec-Fetch-Site: a page of another origin may not ask for this; LATHE_CORS_ORIGINS lists "
            "the origins that may"
        )


def _is_of(origin: str, host: str) -> bool:
    scheme, _, name = origin.lower().partition("://")
    port = _PORT.get(scheme, ":")
    return bool(name) and name.removesuffix(port) == host.lower().removesuffix(port)
