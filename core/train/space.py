"""`Sweep`: a recipe, and the fields of it to search through, as a sweep's recipe.json has them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from core.train import recipe
from core.train.recipe import ParentModel, Recipe, RecipeError, Seed
from core.train.section import Section

Values: TypeAlias = Mapping[str, Any]  # by the path of the field: optimizer.rate


class Between(Section):
    """A number between two others; a whole one where both are."""

    low: int | float = Field(description="The least.")
    high: int | float = Field(description="The most.")
    log: bool = Field(default=False, description="Evenly over orders of magnitude.")

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
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
    """One of some values, of any kind that the field can have."""

    choices: Annotated[tuple[Any, ...], Field(strict=False)] = Field(
        min_length=1, max_length=32, description="The values."
    )

    @property
    def examples(self) -> tuple[Any, ...]:
        return self.choices

    def holds(self, value: Any) -> bool:
        return value in self.choices


class Sweep(Section):
    """A search for the settings that are best on validation rows. The first trial is the recipe as it is."""

    recipe: dict[str, Any] = Field(description="What a trial trains, but for the fields of `space`.")
    space: dict[str, Between | Choices] = Field(
        min_length=1, max_length=32, description="Ranges or choices by field: `optimizer.rate`, `augment.0.degrees`."
    )
    trials: int = Field(default=20, ge=1, le=10_000, description="Trainings in all.")
    parallel: int = Field(default=2, ge=1, le=64, description="Trainings at once, which share the job's threads.")
    pruner: Literal["median", "hyperband", "none"] = Field(
        default="median", description="What ends trials that fall behind: below the median of the others, or by halves."
    )
    patience: int = Field(default=3, ge=0, description="Epochs that a trial gets before it can be ended (`median`).")
    seed: Seed = Field(default=0, description="Of what is tried.")

    @field_validator("recipe")
    @classmethod
    def _is_a_recipe(cls, values: dict[str, Any]) -> dict[str, Any]:
        base = _read(values)
        if isinstance(base.model, ParentModel) or hasattr(base.model, "onnx"):
            raise ValueError("model: expected an architecture")
        if not base.data.validation:
            raise ValueError("data.validation: trials are compared on rows set apart for it, expected a share above 0")
        return values

    @model_validator(mode="after")
    def _has_the_fields(self) -> Self:
        for path, span in self.space.items():
            for value in span.examples:
                self._try(path, value)
        return self

    def _try(self, path: str, value: Any) -> None:
        try:
            _read(self.at({path: value}))
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"space: '{path}' = {json.dumps(value)}: {error}") from None

    @property
    def default(self) -> dict[str, Any] | None:
        """The values that the recipe itself has; None where one lies outside its range."""
        found = {path: _get(self._whole, path) for path in self.space}
        return found if all(self.space[path].holds(value) for path, value in found.items()) else None

    def at(self, values: Values) -> dict[str, Any]:
        """The recipe with other values; raises LookupError for a path that leads nowhere."""
        changed, whole = copy.deepcopy(self.recipe), copy.deepcopy(self._whole)
        for path, value in values.items():
            _set(changed, whole, path, value)
        return changed

    @cached_property
    def _whole(self) -> Any:
        """The recipe with all its defaults."""
        return json.loads(_read(self.recipe).model_dump_json())

    def trial(self, values: Values) -> Recipe:
        """What one trial trains. RecipeError where values do not go together."""
        return recipe.from_values(self.at(values))


def from_json(text: bytes | str) -> Sweep:
    """A sweep from JSON. RecipeError names every field at fault."""
    return recipe.checked(Sweep, text)


def _read(values: Mapping[str, Any]) -> Recipe:
    try:
        return recipe.from_values(values)
    except RecipeError as error:
        raise ValueError(str(error)) from None


def _set(table: Any, whole: Any, path: str, value: Any) -> None:
    """Set a field; lists and tables on the way that are not written down come from the `whole` recipe, or are made."""
    *above, last = _steps(path)
    for step in above:
        whole = _get(whole, str(step))
        if isinstance(table, dict) and step not in table:
            table[step] = whole if isinstance(whole, list) else {}
        table = table[step]
    table[last] = value


def _get(table: Any, path: str) -> Any:
    for step in _steps(path):
        try:
            table = table[step]
        except (LookupError, TypeError):
            return None
    return table


def _steps(path: str) -> Iterator[str | int]:
    return (int(part) if part.isdecimal() else part for part in path.split("."))
