"""Writes the generated pages of docs/, and core/ops/COVERAGE.md: `python -m tools.make_docs` (or `make docs`).

A test compares the pages with the code.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
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

<!-- Written by `make docs` from server/settings.py and server/repository/model_config.py; a test compares them. -->

Every setting has a default that suits one machine. You change a setting by its environment variable, below. For some
settings `lathe serve` also has an option, which overrides the variable: `lathe serve --help` lists the options, and
`lathe serve --settings` prints this table. Sizes are in bytes and times in seconds, unless the name says otherwise. The
server does not start if a value is out of range, or if a variable that begins with `LATHE_` is unknown.

| Variable | Default | Meaning |
|---|---|---|
"""

COMPILER = """
Every process that compiles also reads this variable:

| Variable | Default | Meaning |
|---|---|---|
| `LATHE_TARGET` | - | Name of the CPU to compile for, if it has fewer instructions than this machine. |

{names}
"""
NAMES = (
    "The names are {names}. Lathe refuses the name of a CPU if this machine lacks one of the CPU's instructions. It "
    "also refuses code that was compiled for such a CPU."
)

MODEL_HEAD = """
## One model

These are the keys of the file `config.toml` in a model's folder, beside its versions. All keys are optional. A key has
the name that Triton's `config.pbtxt` gives to the same setting, if Triton has the setting. The server reads the file
again when the file changes, without a restart. If the file is invalid, the previous configuration stays in force; at
the server's start the defaults apply. The error is in the log and in `GET /api/v1/models/NAME` (`config_error`).

After a new value of a key of `compile`, the server compiles the versions in memory again; the old code answers
meanwhile. If the compilation fails, the old code stays, and `config_error` gives the reason. The server tries again
when the version's folder or `config.toml` changes, at a load call, and every 15 seconds after a transient error, such
as a full disk.

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
    return (
        HEAD
        + "".join(rows)
        + COMPILER.format(names=fill(NAMES.format(names=names), 120, break_on_hyphens=False))
        + MODEL_HEAD
        + "".join(keys)
    )


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
