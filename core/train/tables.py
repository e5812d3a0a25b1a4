"""The recipe that `fit` is asked for: a file, tables or nothing, and arguments that take the place of their fields."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from core.train import recipe as recipes
from core.train.choices import OPTIMIZERS
from core.train.optimizers import Optimizer
from core.train.recipe import Recipe, RecipeError

Asked: TypeAlias = "Recipe | Mapping[str, Any] | str | os.PathLike[str] | None"

_OPTIMIZER = "adam"  # where neither recipe nor arguments name one


def tables_of(recipe: Asked) -> dict[str, Any]:
    """The tables of a recipe. RecipeError for a file that is none, and for other values."""
    if recipe is None:
        return {}
    if isinstance(recipe, Recipe):
        found: dict[str, Any] = json.loads(recipe.model_dump_json(exclude_unset=True))
        return found
    if isinstance(recipe, Mapping):
        return dict(recipe)
    if isinstance(recipe, str | os.PathLike):
        return recipes.tables(Path(recipe))
    raise RecipeError(f"recipe: expected a file or a mapping, got {type(recipe).__name__}")


def completed(
    tables: Mapping[str, Any],
    epochs: int | None,
    batch: int | None,
    optimizer: Optimizer | Mapping[str, Any] | str | None,
    rate: float | None,
) -> Recipe:
    """The recipe with the arguments in it. RecipeError naming every field at fault."""
    values = dict(tables)
    values |= {name: value for name, value in (("epochs", epochs), ("batch", batch)) if value is not None}
    if optimizer is not None:
        values["optimizer"] = _optimizer(optimizer)
    values.setdefault("optimizer", {"kind": _OPTIMIZER})
    if rate is not None and isinstance(values["optimizer"], Mapping):
        values["optimizer"] = {**values["optimizer"], "rate": rate}
    return recipes.from_values(values)


def _optimizer(optimizer: Optimizer | Mapping[str, Any] | str) -> Any:
    """The table of an optimizer: its name alone, the table itself, or an object of `core.train.optimizers`."""
    if isinstance(optimizer, str):
        return {"kind": optimizer}
    if isinstance(optimizer, Mapping):
        return dict(optimizer)
    for kind, part in OPTIMIZERS.items():
        if type(optimizer) is part.target:
            settings = {name: getattr(optimizer, name) for name in part.model_fields if name != "kind"}
            return {"kind": kind, **settings}
    expected = f"one of {', '.join(OPTIMIZERS)}, a table, or an object of core.train.optimizers"
    raise RecipeError(f"optimizer: expected {expected}, got {type(optimizer).__qualname__}")
