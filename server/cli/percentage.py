"""Percentages on the command line."""

from __future__ import annotations

from lathe.server.cli.terminal import fail


def read_percentage(option: str, text: str, allows_zero: bool = False) -> float:
    """Return the share that a percentage such as "1%" means (0.01).

    A text that is none, or not above 0, ends the command; `allows_zero` permits 0.
    """
    try:
        share = float(text.removesuffix("%")) / 100 if text.endswith("%") else -1.0
    except ValueError:
        share = -1.0
    if not (0 < share < float("inf") or (allows_zero and share == 0)):
        bound = "of at least 0" if allows_zero else "above 0"
        raise fail(f"{option}: expected a percentage {bound} such as 1%, got {text!r}")
    return share
