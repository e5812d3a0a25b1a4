"""Which pages of other origins a browser lets call the server."""

from __future__ import annotations

import re

ANY = "*"
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
