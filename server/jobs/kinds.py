"""The kinds of jobs, a row each: which module runs in the child process, and what it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from server.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind. ``check`` raises ValueError, naming the field, for a recipe it cannot run."""

    module: str  # run as: module FOLDER --dataset PATH [--parent FILE] [--threads K]
    check: Callable[[Mapping[str, Any]], None]
    needs_model: bool = False
    publishes: bool = True


def _trains(recipe: Mapping[str, Any]) -> None:
    from core.train.recipe import RecipeError, from_values  # with the first job: it brings the compiler's training side

    try:
        from_values(recipe)
    except RecipeError as error:
        raise ValueError(str(error)) from error


KINDS: dict[str, Kind] = {
    "train": Kind("core.train.run", _trains),
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
