"""Which columns a model takes, and what it calls the classes it tells: from a recipe, the data and the model itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.errors import DataError
from core.ir.graph import Graph, Value
from core.ir.types import DType
from core.train.data import Dataset, Examples, select
from core.train.recipe import Data, RecipeError

LINEAGE = "lineage.json"  # beside a published model
METRICS = "metrics.json"  # beside the model of a training's result


@dataclass(frozen=True)
class RowType:
    """What one row of a model's input is."""

    dtype: DType
    shape: tuple[int, ...]


def examples_for(
    data: Data, dataset: Dataset, model: Graph | None = None, classes: Sequence[str] | None = None
) -> Examples:
    """The columns that a recipe chooses, as ``model`` takes them; `classes` are those it tells, matched by name.

    An only input without a choice goes by the name that the model has for it. RecipeError for other inputs than the
    model's, DataError for rows that do not fit.
    """
    examples = select(dataset, data.inputs, data.target, task=data.task, classes=classes)
    if model is None:
        return examples
    if data.inputs is None and len(model.inputs) == len(examples.features) == 1:
        (feature,) = examples.features.values()
        inputs = {model.inputs[0].name: feature.origin}
        examples = select(dataset, inputs, data.target, task=data.task, classes=classes)
    given, wanted = set(examples.features), {value.name for value in model.inputs}
    if given != wanted:
        raise RecipeError(f"data.inputs: expected {_names(wanted)}, which the model has, got {_names(given)}")
    return examples.like({value.name: _row(value, examples) for value in model.inputs})


def class_names(model: Path) -> tuple[str, ...] | None:
    """What a model that was trained here calls the classes it tells, as the file beside it says; None without one."""
    for name in (LINEAGE, METRICS):
        try:
            found = json.loads((model.parent / name).read_bytes()).get("classes")
        except FileNotFoundError:
            continue
        except (ValueError, AttributeError):
            raise DataError("expected a JSON object", file=name) from None
        return tuple(map(str, found)) if found else None
    return None


def _row(value: Value, examples: Examples) -> RowType:
    """What a row of an input is; sizes that the model leaves open are the column's."""
    sizes = value.tensor.dims[1:]
    column = examples.inputs.get(value.name)
    open_sizes = column.shape if column is not None and len(column.shape) == len(sizes) else (-1,) * len(sizes)
    shape = tuple(size if isinstance(size, int) else other for size, other in zip(sizes, open_sizes, strict=True))
    return RowType(value.dtype, shape)


def _names(names: set[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names)) or "none"
