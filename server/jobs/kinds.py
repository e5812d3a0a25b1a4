"""The kinds of jobs, a row each: which module runs in the child process, and what it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from server.errors import BadRequest

if TYPE_CHECKING:
    from pydantic import BaseModel

    from core.train.recipe import Recipe

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind. ``check`` raises ValueError, naming the field, for a recipe it cannot run."""

    module: str  # run as: module FOLDER --dataset PATH [--parent FILE] [--threads K] [--keep-free BYTES]
    check: Callable[[Mapping[str, Any]], None]
    form: Callable[[], type[BaseModel]]  # what its recipes look like, for those who read the API's description
    needs_model: bool = False
    publishes: bool = True


def _trains(recipe: Mapping[str, Any]) -> None:
    """A training that makes its model."""
    what = _read_recipe(recipe)
    if hasattr(what.model, "parent") or hasattr(what.model, "onnx"):
        raise ValueError("model: expected an architecture; a job of kind finetune goes on from a published version")


def _goes_on(recipe: Mapping[str, Any]) -> None:
    """A training that begins with a version."""
    if not hasattr(_read_recipe(recipe).model, "parent"):
        raise ValueError("model: expected `parent = true`, for the job's model is what learns")


def _judges(recipe: Mapping[str, Any]) -> None:
    from core.train.judging import from_json

    _told(lambda: from_json(orjson.dumps(recipe)))


def _searches(recipe: Mapping[str, Any]) -> None:
    from core.train.space import from_json

    _told(lambda: from_json(orjson.dumps(recipe)))


def _read_recipe(recipe: Mapping[str, Any]) -> Recipe:
    from core.train.recipe import from_values  # with the first job: it brings the compiler's training side

    return _told(lambda: from_values(recipe))


def _told(read: Callable[[], T]) -> T:
    """What `read` returns; raises ValueError in place of RecipeError."""
    from core.train.recipe import RecipeError

    try:
        return read()
    except RecipeError as error:
        raise ValueError(str(error)) from error


def _recipe() -> type[BaseModel]:
    from core.train.recipe import Recipe

    return Recipe


def _sweep() -> type[BaseModel]:
    from core.train.space import Sweep

    return Sweep


def _judgement() -> type[BaseModel]:
    from core.train.judging import Judgement

    return Judgement


KINDS: dict[str, Kind] = {
    "train": Kind("core.train.run", _trains, _recipe),
    "finetune": Kind("core.train.run", _goes_on, _recipe, needs_model=True),
    "sweep": Kind("core.train.sweep", _searches, _sweep),
    "evaluate": Kind("core.train.evaluate", _judges, _judgement, needs_model=True, publishes=False),
}


class Kinds:
    """The kinds that a server runs."""

    def __init__(self, rows: Mapping[str, Kind]) -> None:
        self._rows = rows

    def get(self, name: str) -> Kind:
        """Return a kind; raises BadRequest."""
        if (kind := self._rows.get(name)) is None:
            raise BadRequest(f"kind: expected one of {', '.join(self._rows)}, got {name[:40]!r}")
        return kind
