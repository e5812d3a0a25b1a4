"""The kinds of jobs: the module that runs in the child process, and the check of the recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from lathe.server.errors import BadRequest

if TYPE_CHECKING:
    from pydantic import BaseModel

    from lathe.core.train.recipe.recipe import Recipe

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of job. `check` raises ValueError, naming the field, for an invalid recipe."""

    module: str  # run as: module FOLDER --dataset PATH [--parent FILE] [--threads K] [--keep-free BYTES]
    check: Callable[[Mapping[str, Any]], None]
    form: Callable[[], type[BaseModel]]  # the schema of its recipes, for the OpenAPI document
    needs_model: bool = False
    can_distil: bool = False  # from a version: the recipe may have `distil.teacher = "parent"`
    can_publish: bool = True
    input_check: str | None = (
        None  # run as: module check RECIPE DATASET MODEL, before a job is kept; see input_check.py
    )

    def reads_model(self, recipe: Mapping[str, Any]) -> bool:
        """Return whether a job with this recipe reads a version: to start from it, or as a teacher."""
        return self.needs_model or (self.can_distil and has_version_as_teacher(recipe))


def has_version_as_teacher(recipe: Mapping[str, Any]) -> bool:
    """Return whether a recipe, checked or not, distils from the version that the job names."""
    distil = recipe.get("distil")
    return isinstance(distil, Mapping) and distil.get("teacher") == "parent"


def _check_training(recipe: Mapping[str, Any]) -> None:
    """Check a recipe that trains a new model; raises ValueError."""
    parsed = _read_recipe(recipe)
    _check_teacher(parsed)
    if not hasattr(parsed.model, "architecture"):
        raise ValueError("model: expected an architecture; a job of kind finetune continues from a published version")


def _check_finetuning(recipe: Mapping[str, Any]) -> None:
    """Check a recipe that continues from a version; raises ValueError."""
    parsed = _read_recipe(recipe)
    _check_teacher(parsed)
    if not hasattr(parsed.model, "parent"):
        raise ValueError("model: expected `parent = true`: the job trains its `model`")


def _check_teacher(recipe: Recipe) -> None:
    """Raises ValueError for a teacher that is a file: a job has none beside its recipe."""
    from lathe.core.train.recipe.training_compression import PARENT

    if recipe.distil is not None and recipe.distil.teacher != PARENT:
        raise ValueError(f"distil.teacher: expected {PARENT!r}, the job's `model`; got {recipe.distil.teacher[:40]!r}")


def _check_evaluation(recipe: Mapping[str, Any]) -> None:
    from lathe.core.train.run.evaluation import from_json

    _with_value_error(lambda: from_json(orjson.dumps(recipe)))


def _check_sweep(recipe: Mapping[str, Any]) -> None:
    from lathe.core.train.recipe.sweep_space import from_json

    _with_value_error(lambda: from_json(orjson.dumps(recipe)))


def _check_compression(recipe: Mapping[str, Any]) -> None:
    from lathe.core.train.recipe.compression import from_json

    _with_value_error(lambda: from_json(orjson.dumps(recipe)))


def _read_recipe(recipe: Mapping[str, Any]) -> Recipe:
    from lathe.core.train.recipe.recipe import (
        from_values,
    )  # not before the first job: it imports the training side of the compiler

    return _with_value_error(lambda: from_values(recipe))


def _with_value_error(read: Callable[[], T]) -> T:
    """Return the result of `read`, with RecipeError translated to ValueError."""
    from lathe.core.train.recipe.recipe import RecipeError

    try:
        return read()
    except RecipeError as error:
        raise ValueError(str(error)) from error


def _recipe_schema() -> type[BaseModel]:
    from lathe.core.train.recipe.recipe import Recipe

    return Recipe


def _sweep_schema() -> type[BaseModel]:
    from lathe.core.train.recipe.sweep_space import Sweep

    return Sweep


def _evaluation_schema() -> type[BaseModel]:
    from lathe.core.train.run.evaluation import EvaluationRequest

    return EvaluationRequest


def _compression_schema() -> type[BaseModel]:
    from lathe.core.train.recipe.compression import Compression

    return Compression


KINDS: dict[str, Kind] = {
    "train": Kind("lathe.core.train.run.training_process", _check_training, _recipe_schema, can_distil=True),
    "finetune": Kind("lathe.core.train.run.training_process", _check_finetuning, _recipe_schema, needs_model=True),
    "sweep": Kind("lathe.core.train.run.sweep_process", _check_sweep, _sweep_schema),
    "evaluate": Kind(
        "lathe.core.train.run.evaluation_process",
        _check_evaluation,
        _evaluation_schema,
        needs_model=True,
        can_publish=False,
    ),
    "compress": Kind(
        "lathe.core.train.run.compression_process",
        _check_compression,
        _compression_schema,
        needs_model=True,
        input_check="lathe.core.train.run.compression_check",
    ),
}


class Kinds:
    """The kinds of jobs that a server runs, by name."""

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        self._kinds = kinds

    def get(self, name: str) -> Kind:
        """Return the kind of this name; raises BadRequest if the server does not run it."""
        if (kind := self._kinds.get(name)) is None:
            raise BadRequest(f"kind: expected one of {', '.join(self._kinds)}, got {name[:40]!r}")
        return kind
