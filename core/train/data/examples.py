"""`Examples`: which columns of a dataset a model takes, and which it learns to tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from core.errors import DataError
from core.ir.types import DType
from core.train.data.dataset import Column, Dataset, Layout, Row, Rows, Values
from core.train.data.features import Feature, joined, longest
from core.train.data.targets import class_targets

Inputs: TypeAlias = Mapping[str, str | Sequence[str]]
Task: TypeAlias = Literal["auto", "classes", "numbers"]

TARGET = "target"
_DEFAULT_INPUT = "x"
_TARGETS = ("y", "target", "label", "labels")  # what a target is called when nobody says


@dataclass(frozen=True)
class Examples:
    """Rows of named inputs and a target.

    Targets are classes (int64, below `len(classes)`) or numbers (float32, of rank 1 at least: [k]). Inputs are as the
    dataset has them (pixels of uint8 stay that), but float64, and what is joined from several columns, is float32, and
    short sequences are filled up with zeros.
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
    def parts(self) -> Mapping[str, range]:
        return self.dataset.parts

    @property
    def digest(self) -> str:
        return self.dataset.digest

    def like(self, rows: Mapping[str, Row]) -> Examples:
        """The same examples for a model that takes such rows: numbers are cast to its floating-point types, or widened,
        and reshaped where they are as many. DataError for inputs that are missing, superfluous or do not fit."""
        if rows.keys() != self.features.keys():
            message = f"inputs are {sorted(self.features)}, but the model takes {sorted(rows)}"
            raise DataError(message, file=self.dataset.name)
        fitted = {name: self.features[name].like(name, rows[name], self.dataset.name) for name in rows}
        return replace(self, features=fitted)

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, rows: Rows) -> dict[str, Values]:
        """The rows as a training step takes them: inputs by name, and `target`. DataError for what cannot be read."""
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
    """Choose inputs and target among the columns.

    `inputs` maps names of model inputs to a column or to several, whose numbers are joined. By default everything but
    the target goes in: a single column as `x`; many columns of one number each joined as `x`; else each by its own
    name. The target is by default called y, target, label or labels, or is the last column. `task` says whether it
    counts classes: on "auto", text, truth values and whole numbers do. `classes` are those of a model that is to go on
    learning: targets are matched by name. `shapes` gives rows of an input another shape (784 numbers as [28, 28], say),
    or sequences a length other than the longest one's; `layouts` says how rows are images where their shape does not.

    DataError for columns that do not exist or do not fit.
    """
    target = dataset.column(target or default_target(dataset)).name
    chosen = inputs if inputs is not None else _default_inputs(dataset, target)
    if not chosen or TARGET in chosen:
        raise dataset.error(f"inputs are {list(chosen)}, expected at least one, none called '{TARGET}'")
    features = {name: _feature(dataset, name, columns) for name, columns in chosen.items()}
    features = _shaped(dataset, features, shapes or {}, layouts or {})
    _check_sizes(dataset, features)
    if _counts_classes(dataset, target, task):
        names, indices = class_targets(dataset, target, classes)
        return Examples(dataset, features, Column(TARGET, DType.INT64, indices.shape[1:], classes=names), indices)
    column = dataset.columns[target]
    if not column.is_number or column.is_sequence:
        raise dataset.error(f"is {column}, expected numbers to learn", target)
    numbers = Feature(Column(TARGET, DType.FLOAT32, column.shape or (1,)), (target,), dataset.sources[target])
    return Examples(dataset, features, numbers.column, numbers.take(dataset, np.arange(len(dataset))))


def _counts_classes(dataset: Dataset, target: str, task: Task) -> bool:
    if task != "auto":
        return task == "classes"
    column = dataset.columns[target]
    return not column.dtype.is_float


def default_target(dataset: Dataset) -> str:
    return next((name for name in _TARGETS if name in dataset.columns), list(dataset.columns)[-1])


def _default_inputs(dataset: Dataset, target: str) -> Inputs:
    rest = [name for name in dataset.columns if name != target]
    if not rest:
        raise dataset.error(f"the only column is '{target}', the target; there is nothing to learn from")
    if len(rest) == 1 or all(dataset.columns[name].shape == () for name in rest):
        return {_DEFAULT_INPUT: rest}
    return {name: name for name in rest}


def _shaped(
    dataset: Dataset,
    features: dict[str, Feature],
    shapes: Mapping[str, Sequence[int]],
    layouts: Mapping[str, Layout],
) -> dict[str, Feature]:
    """The features with the shapes and layouts asked for."""
    unknown = (shapes.keys() | layouts.keys()) - features.keys()
    if unknown:
        raise dataset.error(f"shape or layout of '{min(unknown)}', which is no input")
    for name, shape in shapes.items():
        row = replace(features[name].column, shape=tuple(shape))
        features[name] = features[name].like(name, row, dataset.name)
    for name, layout in layouts.items():
        column = features[name].column
        if layout and len(layout) != len(column.shape):
            raise dataset.error(f"input '{name}' is {column}, which is no image {layout}")
        features[name] = replace(features[name], column=replace(column, layout=layout))
    return features


def _check_sizes(dataset: Dataset, features: Mapping[str, Feature]) -> None:
    for name, feature in features.items():
        if 0 in feature.column.shape:
            raise dataset.error(
                f"is {feature.column}: rows hold nothing that input '{name}' could take", feature.origin[0]
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
        source = dataset.sources[first.name] if len(found) == 1 else joined(dataset, origin)
        return Feature(Column(name, DType.FLOAT32, (len(found),)), origin, source)
    dtype, source = DType.FLOAT32 if first.dtype is DType.FLOAT64 else first.dtype, dataset.sources[first.name]
    if first.is_sequence:
        return Feature(Column(name, dtype, (longest(dataset, first.name),)), origin, source, ragged=True)
    return Feature(Column(name, dtype, first.shape, first.layout), origin, source)
