"""Makes the recipe of `fit` from a file, tables or nothing, and from arguments that override single fields."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from lathe.core.train.recipe import recipe as recipes
from lathe.core.train.recipe.choices import OPTIMIZERS
from lathe.core.train.recipe.recipe import Recipe, RecipeError
from lathe.core.train.training_step.optimizers import Optimizer

RecipeArgument: TypeAlias = "Recipe | Mapping[str, Any] | str | os.PathLike[str] | None"

_DEFAULT_OPTIMIZER = "adam"  # if neither the recipe nor the arguments name one


def tables_of(recipe: RecipeArgument) -> dict[str, Any]:
    """The unvalidated tables of a recipe: those of a file or mapping, the set fields of a `Recipe`; empty for None.

    RecipeError for an invalid file or a value of another type, OSError for a file that cannot be read.
    """
    if recipe is None:
        return {}
    if isinstance(recipe, Recipe):
        tables: dict[str, Any] = json.loads(recipe.model_dump_json(exclude_unset=True))
        return tables
    if isinstance(recipe, Mapping):
        return dict(recipe)
    if isinstance(recipe, str | os.PathLike):
        return recipes.read_tables(Path(recipe))
    raise RecipeError(f"recipe: expected a file or a mapping, got {type(recipe).__name__}")


def complete_recipe(
    tables: Mapping[str, Any],
    epochs: int | None,
    batch: int | None,
    optimizer: Optimizer | Mapping[str, Any] | str | None,
    rate: float | None,
) -> Recipe:
    """The recipe in `tables`, with the arguments that are not None in place of its fields.

    `optimizer` replaces the whole table; `rate` replaces the rate of the optimizer. The default optimizer is Adam.
    RecipeError names every invalid field.
    """
    values = dict(tables)
    values |= {name: value for name, value in (("epochs", epochs), ("batch", batch)) if value is not None}
    if optimizer is not None:
        values["optimizer"] = _optimizer_table(optimizer)
    values.setdefault("optimizer", {"kind": _DEFAULT_OPTIMIZER})
    if rate is not None and isinstance(values["optimizer"], Mapping):
        values["optimizer"] = {**values["optimizer"], "rate": rate}
    return recipes.from_values(values)


def _optimizer_table(optimizer: Optimizer | Mapping[str, Any] | str) -> Any:
    """The table of an optimizer, from its name, a table, or an object of `training_step.optimizers`.

    RecipeError for anything else.
    """
    if isinstance(optimizer, str):
        return {"kind": optimizer}
    if isinstance(optimizer, Mapping):
        return dict(optimizer)
    for kind, part in OPTIMIZERS.items():
        if type(optimizer) is part.target:
            settings = {name: getattr(optimizer, name) for name in part.model_fields if name != "kind"}
            return {"kind": kind, **settings}
    expected = f"one of {', '.join(OPTIMIZERS)}, a table, or an object of lathe.core.train.training_step.optimizers"
    raise RecipeError(f"optimizer: expected {expected}, got {type(optimizer).__qualname__}")
