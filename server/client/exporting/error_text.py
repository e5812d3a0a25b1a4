"""Shortens error messages of other libraries, which have many lines, colours and stack traces, to one line."""

from __future__ import annotations

import re

LONGEST = 600  # characters, enough to understand PyTorch's message on a conflict of shapes
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def one_line(text: str) -> str:
    """Return a text on one line, without colours, truncated to `LONGEST` characters."""
    plain = " ".join(_COLOUR.sub("", text).split())
    return plain if len(plain) <= LONGEST else plain[: LONGEST - 3] + "..."
