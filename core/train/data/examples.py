"""`Examples`: the columns of a dataset that are the inputs and the target of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from lathe.core.errors import DataError
from lathe.core.ir.types import DType
from lathe.core.train.data.dataset import Column, Dataset, Layout, Row, Rows, Values
from lathe.core.train.data.features import Feature, concat_columns, longest_sequence
from lathe.core.train.data.targets import class_targets

Inputs: TypeAlias = Mapping[str, str | Sequence[str]]
Task: TypeAlias = Literal["auto", "classes", "numbers"]

TARGET = "target"
_CHUNK_ROWS = 1 << 14  # rows of a target that are read together
_DEFAULT_INPUT = "x"
_TARGETS = ("y", "target", "label", "labels")  # default names of the target column
_NO_TARGET = Column(TARGET, DType.FLOAT32, (0,))


@dataclass(frozen=True)
class Examples:
    """Rows of named inputs and a target.

    Targets are class indices (int64, below `len(classes)`, usually one per row) or numbers (float32, rank 1 or more per
    row). Inputs keep the element type of the dataset, such as uint8 for pixels, with two exceptions: float64 becomes
    float32, and k columns of one number per row become float32 [k], also for k = 1. Sequences are padded with zeros or
    truncated to one length.
    """

    dataset: Dataset
    features: Mapping[str, Feature]
    target: Column
    targets: Values

    @property
    def inputs(self) -> dict[str, Column]:
        return {name: replace(feature.column, name=name) for name, feature in self.features.items()}

    @property
    def classes(self) -> tuple[str, ...] | None:
        return self.target.classes

    @property
    def has_target(self) -> bool:
        """Whether there is a target; `select_inputs` makes examples without one."""
        return self.target != _NO_TARGET

    @property
    def parts(self) -> Mapping[str, range]:
        return self.dataset.parts

    @property
    def digest(self) -> str:
        return self.dataset.digest

    def like(self, rows: Mapping[str, Row]) -> Examples:
        """The same examples, whose inputs have the row types in `rows`, by name of the input.

        A cast must be to a floating-point type or to a wider integer type. A reshape must keep the number of elements
        and the order of channels; sequences may get another length. DataError if names of inputs differ, or if a cast
        or reshape is not possible.
        """
        if rows.keys() != self.features.keys():
            message = f"inputs are {sorted(self.features)}, but the model takes {sorted(rows)}"
            raise DataError(message, file=self.dataset.name)
        features = {name: self.features[name].like(name, rows[name], self.dataset.name) for name in rows}
        return replace(self, features=features)

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, rows: Rows) -> dict[str, Values]:
        """A batch for a training step: arrays [len(rows), ...] by name, the inputs and `target`.

        DataError for a row that cannot be read, or for a number that is missing, NaN or infinite.
        """
        batch = {name: feature.take(self.dataset, rows) for name, feature in self.features.items()}
        return {**batch, TARGET: self.targets[rows]}


def select(
    dataset: Dataset,
    inputs: Inputs | None = None,
    target: str | None = None,
    *,
    task: Task = "auto",
    classes: Sequence[str] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    layouts: Mapping[str, Layout] | None = None,
) -> Examples:
    """Select the inputs and the target among the columns.

    `inputs` maps names of model inputs to a column, or to several columns whose numbers are concatenated. By default
    all columns but the target are inputs: a single column as `x`; columns of one number each concatenated as `x`;
    otherwise each column under its own name. The default target is the column y, target, label or labels, otherwise the
    last one.

    `task` is "classes" (classification), "numbers" (regression) or "auto", which takes text, booleans and whole numbers
    as classes. `classes` are the class names of a model to fine-tune, with which targets are matched by name. `shapes`
    reshapes the rows of an input, such as 784 numbers to [28, 28], or sets the length of sequences, by default that of
    the longest one. `layouts` gives the image layout of inputs whose shape is ambiguous.

    The whole target is read. DataError for columns that do not exist, inputs of text, shapes and layouts that do not
    fit, targets that are no classes or numbers, and targets that are too large for the memory of the dataset.
    """
    target = dataset.column(target or default_target(dataset)).name
    chosen = inputs if inputs is not None else _default_inputs(dataset, target)
    features = _features(dataset, chosen, shapes or {}, layouts or {})
    if _is_classification(dataset, target, task):
        names, indices = class_targets(dataset, target, classes)
        return Examples(dataset, features, Column(TARGET, DType.INT64, indices.shape[1:], classes=names), indices)
    column = dataset.columns[target]
    if not column.is_number or column.is_sequence:
        raise dataset.error(f"expected a target of numbers, got {column}", target)
    numbers = Feature(Column(TARGET, DType.FLOAT32, column.shape or (1,)), (target,), dataset.sources[target])
    return Examples(dataset, features, numbers.column, _read_all(dataset, numbers))


def select_inputs(
    dataset: Dataset,
    inputs: Inputs,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    layouts: Mapping[str, Layout] | None = None,
) -> Examples:
    """Examples without a target: the arguments are those of `select`, and the targets have no elements.

    DataError for columns that do not exist, inputs of text, and shapes and layouts that do not fit.
    """
    features = _features(dataset, inputs, shapes or {}, layouts or {})
    return Examples(dataset, features, _NO_TARGET, np.zeros((len(dataset), *_NO_TARGET.shape), np.float32))


def _features(
    dataset: Dataset, inputs: Inputs, shapes: Mapping[str, Sequence[int]], layouts: Mapping[str, Layout]
) -> dict[str, Feature]:
    if not inputs or TARGET in inputs:
        raise dataset.error(f"inputs: expected at least one, none called '{TARGET}', got {list(inputs)}")
    features = {name: _feature(dataset, name, columns) for name, columns in inputs.items()}
    features = _reshape(dataset, features, shapes, layouts)
    _check_sizes(dataset, features)
    return features


def _read_all(dataset: Dataset, feature: Feature) -> Values:
    """All rows of a feature. DataError for a wrong value, or if the memory of the dataset does not suffice."""
    values = dataset.empty((len(dataset), *feature.column.shape), feature.column.dtype, feature.origin[0])
    for start in range(0, len(dataset), _CHUNK_ROWS):
        rows = np.arange(start, min(start + _CHUNK_ROWS, len(dataset)))
        values[start : start + len(rows)] = feature.take(dataset, rows)
    return values


def _is_classification(dataset: Dataset, target: str, task: Task) -> bool:
    if task != "auto":
        return task == "classes"
    column = dataset.columns[target]
    return not column.dtype.is_float


def default_target(dataset: Dataset) -> str:
    """The name of the default target: the column y, target, label or labels, otherwise the last one."""
    return next((name for name in _TARGETS if name in dataset.columns), list(dataset.columns)[-1])


def _default_inputs(dataset: Dataset, target: str) -> Inputs:
    rest = [name for name in dataset.columns if name != target]
    if not rest:
        raise dataset.error(f"the only column is the target '{target}', expected a column for the input")
    if len(rest) == 1 or all(dataset.columns[name].shape == () for name in rest):
        return {_DEFAULT_INPUT: rest}
    return {name: name for name in rest}


def _reshape(
    dataset: Dataset,
    features: dict[str, Feature],
    shapes: Mapping[str, Sequence[int]],
    layouts: Mapping[str, Layout],
) -> dict[str, Feature]:
    """The features by name, those in `shapes` and `layouts` with these shapes and layouts.

    DataError for a name that is no input, or if a shape or layout does not fit.
    """
    unknown = (shapes.keys() | layouts.keys()) - features.keys()
    if unknown:
        raise dataset.error(f"shapes or layouts name '{min(unknown)}', which is not an input")
    for name, shape in shapes.items():
        row = replace(features[name].column, shape=tuple(shape))
        features[name] = features[name].like(name, row, dataset.name)
    for name, layout in layouts.items():
        column = features[name].column
        if layout and len(layout) != len(column.shape):
            raise dataset.error(f"input '{name}' is {column}, which is not an image {layout}")
        features[name] = replace(features[name], column=replace(column, layout=layout))
    return features


def _check_sizes(dataset: Dataset, features: Mapping[str, Feature]) -> None:
    for name, feature in features.items():
        if 0 in feature.column.shape:
            raise dataset.error(
                f"rows are empty ({feature.column}), which input '{name}' cannot take", feature.origin[0]
            )


def _feature(dataset: Dataset, name: str, columns: str | Sequence[str]) -> Feature:
    origin = (columns,) if isinstance(columns, str) else tuple(columns)
    if not origin:
        raise dataset.error(f"input '{name}' names no column")
    found = [dataset.column(column) for column in origin]
    for column in found:
        if not column.is_number:
            why = f" ({column.note})" if column.note else ""
            raise dataset.error(f"is text, which input '{name}' cannot take{why}", column.name)
        if len(found) > 1 and column.shape != ():
            message = f"is {column}, but input '{name}' joins columns of one number each"
            raise dataset.error(message, column.name)
    first = found[0]
    if first.shape == ():
        source = dataset.sources[first.name] if len(found) == 1 else concat_columns(dataset, origin)
        return Feature(Column(name, DType.FLOAT32, (len(found),)), origin, source)
    dtype, source = DType.FLOAT32 if first.dtype is DType.FLOAT64 else first.dtype, dataset.sources[first.name]
    if first.is_sequence:
        return Feature(Column(name, dtype, (longest_sequence(dataset, first.name),)), origin, source, ragged=True)
    return Feature(Column(name, dtype, first.shape, first.layout), origin, source)
