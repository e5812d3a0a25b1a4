"""Errors of other libraries as one line: they come with advice, colours and stack traces, on many lines."""

from __future__ import annotations

import re

LONGEST = 600  # characters: what a conflict of PyTorch's shapes takes to be understood
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def one_line(text: str) -> str:
    """Return a text without colours and on one line, its end left out where it is long."""
    plain = " ".join(_COLOUR.sub("", text).split())
    return plain if len(plain) <= LONGEST else plain[: LONGEST - 3] + "..."
