"""Prints the settings of a server: `lathe serve --settings`."""

from __future__ import annotations

from typing import Any

from lathe.core.byte_sizes import format_bytes
from lathe.server.cli.terminal import console, make_table
from lathe.server.environment import variable
from lathe.server.settings import Settings

_LARGE = 1 << 20  # from here on a default of a size is shown with its unit, too


def print_settings() -> None:
    """Print each setting's variable, default and meaning."""
    table = make_table("variable", "default", "meaning")
    for name, field in Settings.model_fields.items():
        table.add_row(variable(name), _default(field.default), field.description or "")
    console.print(table)
    console.print("Sizes are in bytes and times in seconds, unless the name says otherwise.")


def _default(value: Any) -> str:
    if value is None or value in ((), {}):
        return ""
    if type(value) is int and value >= _LARGE and value % _LARGE == 0:
        return f"{value} ({format_bytes(value)})"
    return str(value)
