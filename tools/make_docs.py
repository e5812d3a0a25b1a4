"""Writes the generated pages of docs/ again: `python -m tools.make_docs` (or `make docs`). A test holds them true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from server.settings import Settings
from tools import make_coverage

CONFIGURATION = Path("docs/configuration.md")

HEAD = """\
# Configuration

<!-- Written by `make docs` from server/settings.py; a test fails when the two differ. -->

Every setting has a default that suits one machine. Set it in the environment as below; `lathe serve --help` lists those
that have a flag, and a flag wins. Sizes are bytes, times are seconds, unless the name says otherwise. A value that is
out of range stops the server before it listens.

| Variable | Default | Meaning |
|---|---|---|
"""

UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"))


def configuration() -> str:
    """The page, from the settings themselves."""
    prefix = Settings.model_config["env_prefix"]
    rows = (row(f"{prefix}{name}".upper(), field) for name, field in Settings.model_fields.items())
    return HEAD + "".join(rows)


def row(variable: str, field: FieldInfo) -> str:
    return f"| `{variable}` | {shown(field.default)} | {field.description} |\n"


def shown(default: Any) -> str:
    """A default as people read it: `67108864` (64 MiB)."""
    if default is None:
        return "-"
    if type(default) is int and default > 0:
        for size, unit in UNITS:
            if default % size == 0:
                return f"`{default}` ({default // size} {unit})"
    return f"`{default}`"


def main() -> None:
    CONFIGURATION.write_text(configuration())
    make_coverage.main()


if __name__ == "__main__":
    main()
