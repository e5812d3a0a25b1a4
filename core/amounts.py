"""Amounts of bytes as people read them."""

from __future__ import annotations

_UNITS = ("KiB", "MiB", "GiB", "TiB")


def amount(nbytes: float) -> str:
    """Return an amount in the unit that suits its size: `312 bytes`, `1.5 KiB`, `20 MiB`, `3.2 GiB`."""
    if nbytes < 1024:
        return f"{nbytes:.0f} byte{'' if round(nbytes) == 1 else 's'}"
    size, unit = float(nbytes), ""
    for unit in _UNITS:  # noqa: B007 (the last one counts)
        size /= 1024
        if round(size, 1) < 1024:
            break
    return f"{size:,.1f}".removesuffix(".0") + f" {unit}"
