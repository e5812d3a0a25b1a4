"""Prints the keys of a recipe: `lathe train --keys` and `lathe compress --keys`."""

from __future__ import annotations

from lathe.core.section import Section
from lathe.core.train.recipe.key_reference import Choice, Key, Table, recipe_keys, recipe_tables
from lathe.core.train.recipe.recipe import Recipe
from lathe.server.cli.terminal import console, make_table


def print_recipe_keys(recipe: type[Section] = Recipe) -> None:
    """Print the keys of a recipe with their defaults and meanings, then those of its tables."""
    console.print("A recipe is a file in TOML or JSON with these keys:")
    _print_keys(recipe_keys(recipe))
    for table in recipe_tables(recipe):
        console.print(f"\n{table.name}: {table.meaning}")
        if table.choices:
            _print_choices(table)
        else:
            _print_keys(table.keys)


def _print_keys(keys: tuple[Key, ...]) -> None:
    rows = make_table("key", "default", "meaning")
    for key in keys:
        rows.add_row(key.name, _default(key), key.meaning)
    console.print(rows)


def _print_choices(table: Table) -> None:
    choices = make_table("table", "meaning", "settings")
    for choice in table.choices:
        choices.add_row(f"{choice.tag} = {choice.value}", choice.meaning, _settings(choice))
    console.print(choices)
    if table.settings:
        settings = make_table("setting", "meaning")
        for key in table.settings:
            settings.add_row(key.name, key.meaning)
        console.print(settings)


def _settings(choice: Choice) -> str:
    """Return the settings of a choice, each with its default: `rate = 0.01, clip`."""
    return ", ".join(f"{key.name} {_default(key) and f'= {_default(key)}'}".strip() for key in choice.settings)


def _default(key: Key) -> str:
    return {"": "required", "-": ""}.get(key.default, key.default)
