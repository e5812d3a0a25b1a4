"""docs/recipes.md, from the schema that recipes are checked against."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from core.train.recipe import Recipe

RECIPES = Path("docs/recipes.md")

HEAD = """\
# Recipes

<!-- Written by `make docs` from core/train/recipe.py; a test holds it true. -->

A recipe says everything that decides what is [trained](training.md), and how. It is a TOML file for `lathe train`, and
the field `recipe` of a job; JSON has the same names. Every mistake in it is named, and nothing unknown is passed over.
The same recipe, data and number of threads give the same weights, bit by bit, on machines of one kind.

```toml
{example}```

| Key | Default | Meaning |
|---|---|---|
"""

EXAMPLE = Path("docs/recipes/digits-lenet5.toml")
_TAGS = ("kind", "architecture", "onnx", "parent")  # the keys by which tables that exclude each other differ

Schema = Mapping[str, Any]


def recipes() -> str:
    """The whole page."""
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
    """A table that has no alternative: its keys."""
    yield "| Key | Default | Meaning |\n|---|---|---|\n"
    for name, field in table["properties"].items():
        yield f"| `{name}` | {_default(name, field, table)} | {_meaning(field)} |\n"


def _choices(tables: list[Schema], definitions: Schema) -> Iterator[str]:
    """Tables of which one is chosen, with their settings; what these mean stands once for all."""
    yield "| Table | Meaning | Settings |\n|---|---|---|\n"
    meanings: dict[str, str] = {}
    for table in tables:
        tag, field = next((tag, table["properties"][tag]) for tag in _TAGS if tag in table["properties"])
        settings = {name: other for name, other in table["properties"].items() if name != tag}
        shown = ", ".join(_setting(name, other, table) for name, other in settings.items())
        yield f"| `{tag} = {_chosen(field)}` | {_meaning(field)} | {shown or '-'} |\n"
        meanings |= {name: _meaning(other, definitions) for name, other in settings.items() if name not in meanings}
    if meanings:
        yield "\n| Setting | Meaning |\n|---|---|\n"
        yield from (f"| `{name}` | {meaning} |\n" for name, meaning in meanings.items())


def _setting(name: str, field: Schema, table: Schema) -> str:
    default = _default(name, field, table)
    return f"`{name}`" if default in ("-", "") else f"`{name}` {default}"


def _chosen(field: Schema) -> str:
    return json.dumps(field["const"]) if "const" in field else '"..."'


def _default(name: str, field: Schema, table: Schema) -> str:
    if name in table.get("required", ()):
        return ""
    default = field.get("default")
    return "-" if default is None or default in ([], {}) or isinstance(default, dict) else f"`{json.dumps(default)}`"


def _meaning(field: Schema, definitions: Schema | None = None) -> str:
    """A field's description; of one that is a small table of its own, with that table's keys."""
    text: str = field.get("description", "")
    tables = _tables(field, definitions) if definitions else []
    if len(tables) == 1:
        keys = ", ".join(f"`{name}` ({_meaning(other).rstrip('.')})" for name, other in tables[0]["properties"].items())
        return f"{text} Its keys: {keys}."
    return text


def _tables(field: Schema, definitions: Schema) -> list[Schema]:
    """The tables that a field may be."""
    if "$ref" in field:
        found = definitions[field["$ref"].rpartition("/")[2]]
        return [found] if found.get("type") == "object" else _tables(found, definitions)
    parts = [*field.get("anyOf", ()), *field.get("oneOf", ()), *field.get("allOf", ())]
    if "items" in field:
        parts.append(field["items"])
    return [table for part in parts for table in _tables(part, definitions)]
