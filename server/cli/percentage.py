"""Percentages on the command line."""

from __future__ import annotations

from lathe.server.cli.terminal import fail


def read_percentage(option: str, text: str) -> float:
    """Return the share that a percentage such as "1%" means (0.01); exits with a message unless it is above 0."""
    try:
        share = float(text.removesuffix("%")) / 100 if text.endswith("%") else 0.0
    except ValueError:
        share = 0.0
    if not 0 < share < float("inf"):
        raise fail(f"{option}: expected a percentage above 0 such as 1%, got {text!r}")
    return share
