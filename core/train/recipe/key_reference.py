"""The keys of a recipe with their defaults and meanings, from the schema that validates recipes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lathe.core.section import Section
from lathe.core.train.recipe.recipe import Recipe

_TAGS = ("kind", "architecture", "onnx", "pretrained", "parent")  # keys that tell alternative tables apart

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Key:
    """One key. `default` is JSON; empty: the key is required, `-`: it may be left out, and has no simple default.

    In `Table.settings` all defaults are empty, since alternative tables can have different ones.
    """

    name: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Choice:
    """One of several tables that a key may hold: the key and value that choose it, and its other keys (`settings`).

    `value` is JSON; `"..."` stands for any text.
    """

    tag: str
    value: str
    meaning: str
    settings: tuple[Key, ...]


@dataclass(frozen=True)
class Table:
    """The table that a key of the recipe holds: its `keys`, or the `choices` among several tables.

    With `choices`, `settings` has the meaning of each setting once.
    """

    name: str
    meaning: str
    keys: tuple[Key, ...] = ()
    choices: tuple[Choice, ...] = ()
    settings: tuple[Key, ...] = ()


def recipe_keys(recipe: type[Section] = Recipe) -> tuple[Key, ...]:
    """Return the keys of a recipe, by default of a training's."""
    return tuple(_keys(recipe.model_json_schema()))


def recipe_tables(recipe: type[Section] = Recipe) -> tuple[Table, ...]:
    """Return one `Table` for each key of a recipe that holds a table."""
    schema = recipe.model_json_schema()
    definitions = schema["$defs"]
    fields = {name: (field, _tables(field, definitions)) for name, field in schema["properties"].items()}
    return tuple(_table(name, field, tables, definitions) for name, (field, tables) in fields.items() if tables)


def _table(name: str, field: Schema, tables: list[Schema], definitions: Schema) -> Table:
    if len(tables) == 1:
        return Table(name, _meaning(field), tuple(_keys(tables[0])))
    choices = tuple(_choice(table) for table in tables)
    return Table(name, _meaning(field), choices=choices, settings=tuple(_settings(tables, definitions)))


def _keys(table: Schema) -> Iterator[Key]:
    for name, field in table["properties"].items():
        yield Key(name, _default(name, field, table), _meaning(field))


def _choice(table: Schema) -> Choice:
    tag, field = _tag(table)
    settings = tuple(key for key in _keys(table) if key.name != tag)
    return Choice(tag, _tag_value(field), _meaning(field), settings)


def _settings(tables: list[Schema], definitions: Schema) -> Iterator[Key]:
    """Yield each setting of alternative tables once. If its meanings differ, each follows the tags of its tables."""
    meanings: dict[str, dict[str, list[str]]] = {}  # by setting: each meaning with the tables that give it
    for table in tables:
        tag, field = _tag(table)
        for name, other in table["properties"].items():
            if name != tag:
                meanings.setdefault(name, {}).setdefault(_meaning(other, definitions), []).append(_label(tag, field))
    for name, by_table in meanings.items():
        yield Key(name, "", _joined(by_table))


def _tag(table: Schema) -> tuple[str, Schema]:
    return next((tag, table["properties"][tag]) for tag in _TAGS if tag in table["properties"])


def _joined(by_table: Mapping[str, Sequence[str]]) -> str:
    if len(by_table) == 1:
        return next(iter(by_table))
    return " ".join(f"{', '.join(f'`{tag}`' for tag in tags)}: {meaning}" for meaning, tags in by_table.items())


def _label(tag: str, field: Schema) -> str:
    """Return the value of a tag that names a kind of table; the tag with its value if that alone says nothing."""
    value = _tag_value(field)
    return f"{tag} = {value}" if value in ("true", '"..."') else value


def _tag_value(field: Schema) -> str:
    return json.dumps(field["const"]) if "const" in field else '"..."'


def _default(name: str, field: Schema, table: Schema) -> str:
    if name in table.get("required", ()):
        return ""
    default = field.get("default")
    return "-" if default is None or default in ([], {}) or isinstance(default, dict) else json.dumps(default)


def _meaning(field: Schema, definitions: Schema | None = None) -> str:
    """Return a field's description. With `definitions`, the keys of a field that holds one table follow."""
    text: str = field.get("description", "")
    tables = _tables(field, definitions) if definitions else []
    if len(tables) == 1:
        keys = ", ".join(f"`{name}` ({_meaning(other).rstrip('.')})" for name, other in tables[0]["properties"].items())
        return f"{text} Its keys: {keys}."
    return text


def _tables(field: Schema, definitions: Schema) -> list[Schema]:
    """Return the schemas of the TOML tables that a field may hold."""
    if "$ref" in field:
        found = definitions[field["$ref"].rpartition("/")[2]]
        return [found] if found.get("type") == "object" else _tables(found, definitions)
    parts = [*field.get("anyOf", ()), *field.get("oneOf", ()), *field.get("allOf", ())]
    if "items" in field:
        parts.append(field["items"])
    return [table for part in parts for table in _tables(part, definitions)]
