"""Generates docs/recipes.md from the schema that validates recipes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lathe.core.train.recipe.compression import Compression
from lathe.core.train.recipe.key_reference import Choice, Key, Table, recipe_keys, recipe_tables

RECIPES = Path("docs/recipes.md")

HEAD = """\
# Recipes

<!-- Written by `make docs` from the tables in core/train/recipe and core/compress/recipe.py; a test holds it true. -->

A recipe holds the settings of a [training](training.md), but neither the path of the data nor the number of threads.
`lathe train` reads it from a TOML or JSON file. A [job](jobs.md) of kind `train` or `finetune` has it in the field
`recipe`, with the same keys. `lathe train --keys` prints the keys, too. The recipe of a
[compression](#recipes-of-compressions) has other keys.

Every invalid value and every unknown key is an error that names the key. The same recipe, data, release of Lathe and
number of threads give the same weights, bit for bit, on CPUs of the same kind.

```toml
{example}```

Below, an empty default means that the key is required, and `-` that you may leave the key out. Some keys hold one of
several kinds of TOML tables, such as `[optimizer]` with `kind = "adamw"`. For these keys, the column *Table* has the
key and value that choose the kind. The column *Settings* has the other keys of that kind, each with its default. You
may leave out a setting without a default, too, unless `(required)` follows.

| Key | Default | Meaning |
|---|---|---|
"""

COMPRESSION_HEAD = """
## Recipes of compressions

A job of kind `compress` and `lathe compress --recipe` read a recipe with these keys ([Compression](compression.md)).
`lathe.compress` reads the table `method` alone.

```toml
rows = 256
[method]
kind = "static"
calibration = "mse"
[data]
held_out = 0.3
```

| Key | Default | Meaning |
|---|---|---|
"""
EXAMPLE = Path("docs/recipes/digits-lenet5.toml")


def recipes() -> str:
    """The text of docs/recipes.md."""
    return "".join(_page())


def _page() -> Iterator[str]:
    tables = {table.name: table for table in recipe_tables()}
    yield HEAD.replace("{example}", EXAMPLE.read_text())
    for key in recipe_keys():
        yield _key_row(key, f"[`{key.name}`](#{key.name})" if key.name in tables else f"`{key.name}`")
    for table in tables.values():
        yield f"\n## {table.name}\n\n{table.meaning}\n\n"
        yield from _choices(table) if table.choices else _keys(table)
    yield COMPRESSION_HEAD
    links = {"data": "[`data`](#data)", "method": "[`method`](#method)"}
    for key in recipe_keys(Compression):
        yield _key_row(key, links.get(key.name, f"`{key.name}`"))
    (method,) = (table for table in recipe_tables(Compression) if table.name == "method")
    yield f"\n## method\n\n{method.meaning}\n\n"
    yield from _choices(method)


def _keys(table: Table) -> Iterator[str]:
    """A Markdown table of the keys of a TOML table without alternatives."""
    yield "| Key | Default | Meaning |\n|---|---|---|\n"
    for key in table.keys:
        yield _key_row(key, f"`{key.name}`")


def _key_row(key: Key, name: str) -> str:
    return f"| {name} | {_default(key)} | {key.meaning} |\n"


def _choices(table: Table) -> Iterator[str]:
    """A Markdown table of alternative TOML tables with their settings, then the meaning of each setting once."""
    yield "| Table | Meaning | Settings |\n|---|---|---|\n"
    for choice in table.choices:
        yield f"| `{choice.tag} = {choice.value}` | {choice.meaning} | {_settings(choice) or '-'} |\n"
    if table.settings:
        yield "\n| Setting | Meaning |\n|---|---|\n"
        yield from (f"| `{key.name}` | {key.meaning} |\n" for key in table.settings)


def _settings(choice: Choice) -> str:
    return ", ".join(f"`{key.name}` {_default(key) or '(required)'}".removesuffix(" -") for key in choice.settings)


def _default(key: Key) -> str:
    return key.default if key.default in ("", "-") else f"`{key.default}`"
