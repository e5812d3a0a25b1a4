"""Numbers of bytes as text for people."""

from __future__ import annotations

_UNITS = ("KiB", "MiB", "GiB", "TiB")


def format_bytes(nbytes: float) -> str:
    """Return a number of bytes in a unit that suits it: `312 bytes`, `1.5 KiB`, `20 MiB`, `3.2 GiB`."""
    if nbytes < 1024:
        return f"{nbytes:.0f} byte{'' if round(nbytes) == 1 else 's'}"
    power = 1
    while power < len(_UNITS) and round(nbytes / 1024**power, 1) >= 1024:
        power += 1
    return f"{nbytes / 1024**power:,.1f}".removesuffix(".0") + f" {_UNITS[power - 1]}"
