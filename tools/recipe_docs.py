"""Generates docs/recipes.md from the schema that validates recipes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lathe.core.train.recipe.recipe import Recipe

RECIPES = Path("docs/recipes.md")

HEAD = """\
# Recipes

<!-- Written by `make docs` from core/train/recipe/recipe.py; a test holds it true. -->

A recipe holds the settings of a [training](training.md), without the path of the data and the number of threads.
`lathe train` reads it from a TOML or JSON file. A [job](jobs.md) has it in the field `recipe`, with the same keys.
Every invalid value and every unknown key is an error that names it. The same recipe, data, release of Lathe and number
of threads give the same weights, bit for bit, on machines of the same kind.

```toml
{example}```

An empty default means that the key is required, `-` that it may be left out.

| Key | Default | Meaning |
|---|---|---|
"""

EXAMPLE = Path("docs/recipes/digits-lenet5.toml")
_TAGS = ("kind", "architecture", "onnx", "parent")  # keys that tell alternative tables apart

Schema = Mapping[str, Any]


def recipes() -> str:
    """The text of docs/recipes.md."""
    schema = Recipe.model_json_schema()
    return "".join(_page(schema, schema["$defs"]))


def _page(schema: Schema, definitions: Schema) -> Iterator[str]:
    yield HEAD.replace("{example}", EXAMPLE.read_text())
    for name, field in schema["properties"].items():
        link = f"[`{name}`](#{name})" if _tables(field, definitions) else f"`{name}`"
        yield f"| {link} | {_default(name, field, schema)} | {_meaning(field)} |\n"
    for name, field in schema["properties"].items():
        tables = _tables(field, definitions)
        if tables:
            yield f"\n## {name}\n\n{_meaning(field)}\n\n"
            yield from _choices(tables, definitions) if len(tables) > 1 else _keys(tables[0])


def _keys(table: Schema) -> Iterator[str]:
    """A Markdown table of the keys of a TOML table without alternatives."""
    yield "| Key | Default | Meaning |\n|---|---|---|\n"
    for name, field in table["properties"].items():
        yield f"| `{name}` | {_default(name, field, table)} | {_meaning(field)} |\n"


def _choices(tables: list[Schema], definitions: Schema) -> Iterator[str]:
    """A Markdown table of alternative TOML tables with their settings, then the meaning of each setting once."""
    yield "| Table | Meaning | Settings |\n|---|---|---|\n"
    meanings: dict[str, dict[str, list[str]]] = {}  # by setting: each meaning with the tables that give it
    for table in tables:
        tag, field = next((tag, table["properties"][tag]) for tag in _TAGS if tag in table["properties"])
        settings = {name: other for name, other in table["properties"].items() if name != tag}
        shown = ", ".join(_setting(name, other, table) for name, other in settings.items())
        yield f"| `{tag} = {_tag_value(field)}` | {_meaning(field)} | {shown or '-'} |\n"
        for name, other in settings.items():
            meanings.setdefault(name, {}).setdefault(_meaning(other, definitions), []).append(_tag_value(field))
    if meanings:
        yield "\n| Setting | Meaning |\n|---|---|\n"
        yield from (f"| `{name}` | {_joined(by_table)} |\n" for name, by_table in meanings.items())


def _joined(by_table: Mapping[str, Sequence[str]]) -> str:
    """The meaning of a setting; if tables give it different meanings, each with its tables."""
    if len(by_table) == 1:
        return next(iter(by_table))
    return " ".join(f"{', '.join(f'`{tag}`' for tag in tags)}: {meaning}" for meaning, tags in by_table.items())


def _setting(name: str, field: Schema, table: Schema) -> str:
    default = _default(name, field, table)
    return f"`{name}` {default or '(required)'}".removesuffix(" -")


def _tag_value(field: Schema) -> str:
    return json.dumps(field["const"]) if "const" in field else '"..."'


def _default(name: str, field: Schema, table: Schema) -> str:
    if name in table.get("required", ()):
        return ""
    default = field.get("default")
    return "-" if default is None or default in ([], {}) or isinstance(default, dict) else f"`{json.dumps(default)}`"


def _meaning(field: Schema, definitions: Schema | None = None) -> str:
    """A field's description. If the field is a small table of its own, its keys follow."""
    text: str = field.get("description", "")
    tables = _tables(field, definitions) if definitions else []
    if len(tables) == 1:
        keys = ", ".join(f"`{name}` ({_meaning(other).rstrip('.')})" for name, other in tables[0]["properties"].items())
        return f"{text} Its keys: {keys}."
    return text


def _tables(field: Schema, definitions: Schema) -> list[Schema]:
    """The schemas of the TOML tables that a field may hold."""
    if "$ref" in field:
        found = definitions[field["$ref"].rpartition("/")[2]]
        return [found] if found.get("type") == "object" else _tables(found, definitions)
    parts = [*field.get("anyOf", ()), *field.get("oneOf", ()), *field.get("allOf", ())]
    if "items" in field:
        parts.append(field["items"])
    return [table for part in parts for table in _tables(part, definitions)]
