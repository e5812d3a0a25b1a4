"""Parses TOML of users: every document that cannot be read is a `NotToml` with the reason."""

from __future__ import annotations

import tomllib
from typing import Any


class NotToml(ValueError):
    """Content that is no TOML document, or one beyond Python's limits; the message gives the reason."""


def parse_toml(content: bytes) -> dict[str, Any]:
    """Return the document; raises NotToml.

    `tomllib` raises RecursionError where lists or tables are nested too deeply, and a plain ValueError for decimal
    numbers of more than 4300 digits.
    """
    try:
        return tomllib.loads(content.decode())
    except RecursionError:
        raise NotToml("lists or tables are nested too deeply") from None
    except ValueError as error:
        raise NotToml(str(error)) from error
