"""`Sweep`: a hyper-parameter search, as a sweep's recipe.json describes it: a recipe and the space to search."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from lathe.core.section import Section
from lathe.core.train.recipe import recipe
from lathe.core.train.recipe.recipe import ParentModel, Recipe, RecipeError, Seed

Values: TypeAlias = Mapping[str, Any]  # by the path of the field, such as optimizer.rate


class Between(Section):
    """A range of numbers, of whole numbers if both bounds are whole numbers. Both bounds are included."""

    low: int | float = Field(description="Lower bound.")
    high: int | float = Field(description="Upper bound.")
    log: bool = Field(default=False, description="Sample uniformly on a logarithmic scale.")

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"expected `low` below `high`, got {self.low} and {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"expected `low` above 0 for `log`, got {self.low}")
        return self

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def examples(self) -> tuple[Any, ...]:
        return (self.low, self.high)

    def holds(self, value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and self.low <= value <= self.high and (isinstance(value, int) or not self.is_whole)


class Choices(Section):
    """A list of values that the field can have."""

    choices: Annotated[tuple[Any, ...], Field(strict=False)] = Field(
        min_length=1, max_length=32, description="The values to choose from."
    )

    @property
    def examples(self) -> tuple[Any, ...]:
        return self.choices

    def holds(self, value: Any) -> bool:
        return value in self.choices


class Latency(Section):
    """A limit on the time of a run of the trained model, on one thread of this machine."""

    limit_ms: float = Field(gt=0, description="Most milliseconds of a run.")
    batch: int = Field(default=1, ge=1, le=1 << 12, description="Rows of a run.")
    finalists: int = Field(
        default=3, ge=1, le=32, description="Number of the best trials within the limit that train with further seeds."
    )
    seeds: int = Field(
        default=3, ge=1, le=16, description="Further trainings of each finalist, with seeds after that of the recipe."
    )


class Sweep(Section):
    """A search for the settings that are best on validation rows.

    The first trial has the recipe's own values, unless one of them lies outside the space (see `default`).
    """

    recipe: dict[str, Any] = Field(description="The recipe of each trial, apart from the fields of `space`.")
    space: dict[str, Between | Choices] = Field(
        min_length=1, max_length=32, description="Ranges or choices by field: `optimizer.rate`, `augment.0.degrees`."
    )
    trials: int = Field(default=20, ge=1, le=10_000, description="Number of trials.")
    parallel: int = Field(default=2, ge=1, le=64, description="Trials at a time, which share the job's threads.")
    sampler: Literal["tpe", "random", "evolution"] = Field(
        default="tpe",
        description="How values are chosen: by Parzen estimators, at random, or by regularised evolution.",
    )
    pruner: Literal["median", "hyperband", "none"] = Field(
        default="median",
        description="How bad trials are pruned: below the median of the others, or by successive halving.",
    )
    patience: int = Field(default=3, ge=0, description="Epochs before a trial can be pruned (`median`).")
    seed: Seed = Field(default=0, description="Seed of the sampler.")
    latency: Latency | None = Field(
        default=None, description="Limit on the time of a run. Trials that are predicted to exceed it are not trained."
    )

    @field_validator("recipe")
    @classmethod
    def _check_recipe(cls, values: dict[str, Any]) -> dict[str, Any]:
        base = _read(values)
        if isinstance(base.model, ParentModel) or hasattr(base.model, "onnx"):
            raise ValueError("model: expected an architecture")
        if base.distil is not None:
            raise ValueError("distil: not expected in a search, whose trials have no teacher")
        if not base.data.validation:
            raise ValueError("data.validation: expected a share above 0, since trials are compared on validation rows")
        return values

    @model_validator(mode="after")
    def _check_space(self) -> Self:
        for path, span in self.space.items():
            for value in span.examples:
                self._check_value(path, value)
        return self

    @model_validator(mode="after")
    def _check_latency(self) -> Self:
        if self.latency is not None:
            tables = {*self.recipe, *(path.partition(".")[0] for path in self.space)}
            if compressing := tables & {"quantize", "prune"}:
                table = min(compressing)
                raise ValueError(f"latency: expected no table `{table}`: untrained models tell nothing about its times")
        return self

    def _check_value(self, path: str, value: Any) -> None:
        try:
            _read(self.at({path: value}))
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"space: '{path}' = {json.dumps(value)}: {error}") from None

    @property
    def default(self) -> dict[str, Any] | None:
        """The recipe's own values of the fields in `space`, by path; None if one lies outside its range or choices."""
        values = {path: _get(self._with_defaults, path) for path in self.space}
        return values if all(self.space[path].holds(value) for path, value in values.items()) else None

    def at(self, values: Values) -> dict[str, Any]:
        """The tables of the recipe with these values of fields by path, such as `optimizer.rate`.

        Fields are not checked; an unknown one is refused when the recipe is parsed (`trial`). LookupError for an index
        beyond a list, TypeError for a path through a value that is no table or list.
        """
        changed, whole = copy.deepcopy(self.recipe), copy.deepcopy(self._with_defaults)
        for path, value in values.items():
            _set(changed, whole, path, value)
        return changed

    @cached_property
    def _with_defaults(self) -> Any:
        """The tables of the recipe with the default of every field that it leaves out."""
        return json.loads(_read(self.recipe).model_dump_json())

    def trial(self, values: Values) -> Recipe:
        """The recipe of the trial with these values of fields. RecipeError if they do not fit together."""
        return recipe.from_values(self.at(values))


def from_json(text: bytes | str) -> Sweep:
    """A sweep from JSON. RecipeError for text that is no JSON; otherwise it names every invalid field."""
    return recipe.parse_section(Sweep, text)


def _read(values: Mapping[str, Any]) -> Recipe:
    try:
        return recipe.from_values(values)
    except RecipeError as error:
        raise ValueError(str(error)) from None


def _set(table: Any, whole: Any, path: str, value: Any) -> None:
    """Set the field at `path` in `table`.

    A list on the way that `table` lacks is taken from `whole`, the recipe with its defaults. A table on the way that it
    lacks is created.
    """
    *parents, last = _path_steps(path)
    for step in parents:
        whole = _get(whole, str(step))
        if isinstance(table, dict) and step not in table:
            table[step] = whole if isinstance(whole, list) else {}
        table = table[step]
    table[last] = value


def _get(table: Any, path: str) -> Any:
    for step in _path_steps(path):
        try:
            table = table[step]
        except (LookupError, TypeError):
            return None
    return table


def _path_steps(path: str) -> Iterator[str | int]:
    return (int(part) if part.isdecimal() else part for part in path.split("."))
