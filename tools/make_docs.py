"""Writes the generated pages of docs/: `python -m tools.make_docs` (or `make docs`). A test compares them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lathe.core.codegen.cpus import FEATURES
from lathe.server.repository.model_config import ModelConfig
from lathe.server.settings import Settings
from tools import make_architecture, make_coverage, make_walkthrough
from tools.recipe_docs import RECIPES, recipes

CONFIGURATION = Path("docs/configuration.md")

HEAD = """\
# Configuration

<!-- Written by `make docs` from server/settings.py and server/repository/model_config.py; a test holds it true. -->

Every setting has a default that suits one machine. Set it by its environment variable, below. `lathe serve --help`
lists the settings that also have a flag; a flag overrides the variable. Sizes are in bytes and times in seconds, unless
the name says otherwise. If a value is out of range, the server does not start.

| Variable | Default | Meaning |
|---|---|---|
"""

COMPILER = """
The compiler reads one variable of its own, in every process:

| Variable | Default | Meaning |
|---|---|---|
| `LATHE_TARGET` | - | {target} |
"""
TARGET = (
    "The CPU to compile for, if it has fewer features than this machine: {names}. A machine that lacks one of its "
    "instructions refuses it, as it refuses code that was compiled for another CPU."
)

MODEL_HEAD = """
## One model

These are the keys of the file `config.toml` in a model's folder, beside its versions. All keys are optional. They have
the names of Triton's `config.pbtxt`, where that has the same setting. The server reads the file again when it changes,
without a restart. If it is invalid, the previous configuration stays in force, and the error is in the log and in
`GET /api/v1/models/NAME` (`config_error`).

| Key | Default | Meaning |
|---|---|---|
"""

UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"))


def configuration() -> str:
    """The text of docs/configuration.md, from the settings classes."""
    prefix = Settings.model_config["env_prefix"]
    rows = (row(f"{prefix}{name}".upper(), field) for name, field in Settings.model_fields.items())
    keys = (model_row(name, field) for name, field in model_keys(ModelConfig))
    names = ", ".join(f"`{name}`" for name in ("plain", *FEATURES))
    return HEAD + "".join(rows) + COMPILER.format(target=TARGET.format(names=names)) + MODEL_HEAD + "".join(keys)


def model_keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """The keys of a model's configuration, prefixed with their sections, and their fields."""
    for name, field in section.model_fields.items():
        if isinstance(field.default, BaseModel):
            yield from model_keys(type(field.default), f"{prefix}{name}.")
        else:
            yield prefix + name, field


def model_row(name: str, field: FieldInfo) -> str:
    return f"| `{name}` | {shown(field.default)} | {field.description} |\n"


def row(variable: str, field: FieldInfo) -> str:
    return f"| `{variable}` | {shown(field.default)} | {field.description} |\n"


def shown(default: Any) -> str:
    """A default as Markdown, with a unit for round sizes: `67108864` (64 MiB)."""
    if default is None or default in ((), {}):
        return "-"
    if type(default) is int and default > 0:
        for size, unit in UNITS:
            if default % size == 0:
                return f"`{default}` ({default // size} {unit})"
    return f"`{default}`"


def main() -> None:
    CONFIGURATION.write_text(configuration())
    RECIPES.write_text(recipes())
    make_architecture.main()
    make_coverage.main()
    make_walkthrough.main()


if __name__ == "__main__":
    main()
