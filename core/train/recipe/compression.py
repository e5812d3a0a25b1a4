"""`Compression`: the recipe of a job that compresses a published version, and the data that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod

import numpy as np
from pydantic import Field

from lathe.core.compress.recipe import Method
from lathe.core.errors import DataError
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import TensorType
from lathe.core.section import Section
from lathe.core.train.data import Dataset, Examples, Rows, default_target, select_inputs
from lathe.core.train.data.philox import RowRandoms
from lathe.core.train.recipe.data_selection import (
    check_classes,
    examples_for,
    row_types_of,
    split_of,
    with_all_classes,
)
from lathe.core.train.recipe.parent_model import Parent
from lathe.core.train.recipe.recipe import Data, Names, parse_section

_MOST_ROWS = 32  # per run by default: larger batches are hardly faster
_MOST_BYTES = 512 << 20  # of intermediate values in a run by default; the calibration reads most of them after the run
_CALIBRATION_STREAM = 0xCA11B  # the stream of random numbers that chooses the calibration rows

SIZE, LATENCY, OUTPUT_ERROR = "size_ratio", "latency_ratio", "output_error"
ACCURACY, ACCURACY_DROP = "accuracy", "accuracy_drop"
RMSE, RMSE_RATIO = "rmse", "rmse_ratio"
_OF_CLASSES = (ACCURACY, ACCURACY_DROP, "precision", "recall", "f1", "log_loss", "top5", "auc")
_AGAINST_SOURCE = (SIZE, LATENCY, OUTPUT_ERROR, ACCURACY_DROP, RMSE_RATIO)
_OF_NUMBERS = (RMSE, RMSE_RATIO, "mae", "r2")


class Compression(Section):
    """How a published version is compressed: the method, and the rows to calibrate and to compare on."""

    method: Method = Field(description="The method and its settings.")
    data: Data = Field(
        default=Data(),
        description="Columns and split of the data. Calibration reads rows of the training part, the comparison those "
        "of the test part. By default the inputs are the columns with the names of the model's inputs.",
    )
    rows: int = Field(default=512, ge=1, le=1 << 20, description="Most rows of the calibration.")
    batch: int | None = Field(
        default=None,
        ge=1,
        le=1 << 16,
        description="Rows per run, for models that take any number of rows. By default 32, or fewer, so that the "
        "intermediate values of a run stay below 512 MiB.",
    )
    timed_rows: int = Field(
        default=1, ge=1, le=1 << 12, description="Rows per timed run, for models that take any number of rows."
    )


def from_json(text: bytes | str) -> Compression:
    """The recipe from JSON. RecipeError for text that is no JSON; otherwise it names every invalid field."""
    return parse_section(Compression, text)


@dataclass(frozen=True)
class CompressionData:
    """The rows that a compression reads. `data` is the recipe's, with the columns that were chosen.

    `batch` and `timed_rows` are the rows per run: the recipe's, or the number of rows that the model always takes.
    """

    examples: Examples
    data: Data
    calibration: Rows
    test: Rows
    batch: int
    timed_rows: int

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics that the comparison can measure."""
        if not len(self.test):
            return (SIZE, LATENCY)
        names = (_OF_CLASSES if self.examples.classes else _OF_NUMBERS) if self.examples.has_target else ()
        return (*names, OUTPUT_ERROR, SIZE, LATENCY)

    @property
    def comparable_metrics(self) -> tuple[str, ...]:
        """The metrics that an evaluation of any version can measure on the test rows."""
        return tuple(name for name in self.metrics if name not in _AGAINST_SOURCE)


def select_data(recipe: Compression, dataset: Dataset, parent: Parent) -> CompressionData:
    """Choose columns and rows. DataError if columns, types or shapes do not fit the model, or no row is left."""
    _check_inputs(parent.model)
    data = _with_columns(recipe.data, dataset, parent.model)
    if data.target is None:
        examples = _without_target(data, dataset, parent.model)
    else:
        examples = examples_for(data, dataset, parent)
        check_classes(parent.model.outputs[0].tensor, examples)
        examples = with_all_classes(examples, parent.model)
    parts, fixed = split_of(data, examples), _fixed_rows(parent.model)
    calibration = RowRandoms(data.seed, 0, parts.train).order(_CALIBRATION_STREAM)[: recipe.rows]
    step = fixed or 1
    calibration, test = (rows[: len(rows) // step * step] for rows in (np.sort(calibration), parts.test))
    if not len(calibration):
        raise DataError(
            f"expected at least the {step} rows of a run of the model for the calibration", file=dataset.name
        )
    batch = fixed or recipe.batch or _rows_per_run(parent.model)
    return CompressionData(examples, data, calibration, test, batch, fixed or recipe.timed_rows)


def _with_columns(data: Data, dataset: Dataset, model: Graph) -> Data:
    """The section `data` with the columns of the inputs and of the target; the target is None without one.

    The inputs stay None if neither the names of columns nor a single column show which column is which input.
    """
    names = [value.name for value in model.inputs]
    inputs: Mapping[str, str | Names] | None = data.inputs
    if inputs is None and dataset.columns.keys() >= set(names):
        inputs = {name: name for name in names}
    if inputs is None and len(names) == len(dataset.columns) == 1:
        inputs = {names[0]: next(iter(dataset.columns))}
    target = data.target or _free_target(dataset, inputs)
    return data.model_copy(update={"inputs": inputs, "target": target})


def _free_target(dataset: Dataset, inputs: Mapping[str, str | Names] | None) -> str | None:
    """The default column of the target; None if it is the column of an input."""
    columns = [[column] if isinstance(column, str) else column for column in (inputs or {}).values()]
    target = default_target(dataset)
    return None if target in chain.from_iterable(columns) else target


def _without_target(data: Data, dataset: Dataset, model: Graph) -> Examples:
    names = sorted(value.name for value in model.inputs)
    if data.inputs is None or sorted(data.inputs) != names:
        got = sorted(data.inputs or dataset.columns)
        raise DataError(f"inputs are {got}, but the model takes {names}", file=dataset.name)
    examples, rows = select_inputs(dataset, data.inputs, shapes=data.shapes, layouts=data.layouts), row_types_of(model)
    return examples.like(rows) if rows is not None else examples


def _fixed_rows(model: Graph) -> int | None:
    """The number of rows that a model always takes; None if it takes any number."""
    sizes = {value.shape[0] for value in model.inputs if value.shape and isinstance(value.shape[0], int)}
    if len(sizes) > 1:
        raise DataError(f"the model's inputs take different numbers of rows: {', '.join(map(str, sorted(sizes)))}")
    return next(iter(sizes), None)


def _rows_per_run(model: Graph) -> int:
    """The default number of rows per run; symbolic dimensions, other than that of the rows, count as 1."""
    types = [value.type for node in model.nodes for value in node.outputs]
    known = [each for each in types if isinstance(each, TensorType) and each.shape is not None]
    sizes = (prod(size for size in each.dims if isinstance(size, int)) * each.dtype.itemsize for each in known)
    return max(1, min(_MOST_ROWS, _MOST_BYTES // max(sum(sizes), 1)))


def _check_inputs(model: Graph) -> None:
    """DataError for an input that has no rows: no tensor, or one of rank 0 or of unknown rank."""
    for value in model.inputs:
        if not isinstance(value.type, TensorType) or not value.type.shape:
            raise DataError(f"input '{value.name}' of the model is {value.type}, expected a tensor with rows")
