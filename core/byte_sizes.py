"""Numbers of bytes as text for people."""

from __future__ import annotations

_UNITS = ("KiB", "MiB", "GiB", "TiB")


def format_bytes(nbytes: float) -> str:
    """Return a number of bytes in a unit that suits it: `312 bytes`, `1.5 KiB`, `20 MiB`, `3.2 GiB`."""
    if nbytes < 1024:
        return f"{nbytes:.0f} byte{'' if round(nbytes) == 1 else 's'}"
    size, unit = float(nbytes), ""
    for unit in _UNITS:  # noqa: B007 (read after the loop)
        size /= 1024
        if round(size, 1) < 1024:
            break
    return f"{size:,.1f}".removesuffix(".0") + f" {unit}"
