"""Selects columns and splits rows as a recipe says, and checks that a model fits the data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from lathe.core.errors import DataError
from lathe.core.ir.graph import Graph
from lathe.core.ir.types import DType, TensorType
from lathe.core.train.data import Column, Dataset, Examples, Split, open_dataset, select, split
from lathe.core.train.recipe.parent_model import Parent
from lathe.core.train.recipe.recipe import Data, Names

_CHUNK_ROWS = 1 << 14  # rows that are checked together


def dataset_for(data: Data, path: Path) -> Dataset:
    """The dataset in a file or folder, opened as `data` says. DataError if it cannot be read."""
    return open_dataset(path, data.format, image_size=data.image_size)


def examples_for(data: Data, dataset: Dataset, parent: Parent | None = None, *, cast: bool = True) -> Examples:
    """The examples that `data` selects from `dataset`, with the class names of `parent` if it has any.

    Without `data.inputs` the inputs are the default of `select`; if that is one input and the parent has one, too, it
    gets the name of the parent's. With `cast` rows get the dtypes and shapes of the parent's inputs, unless one of them
    has a symbolic dimension after the batch. DataError if columns do not fit `data`, if the names of the inputs differ
    from the parent's, or if rows cannot be cast.
    """
    examples = _select(data, dataset, data.inputs, parent)
    if parent is None:
        return examples
    expected = {value.name for value in parent.model.inputs}
    if data.inputs is None and len(expected) == len(examples.features) == 1:
        (feature,) = examples.features.values()
        examples = _select(data, dataset, dict.fromkeys(expected, feature.origin), parent)
    if (names := set(examples.features)) != expected:
        raise DataError(f"inputs are {sorted(names)}, but the model takes {sorted(expected)}", file=dataset.name)
    rows = row_types_of(parent.model)
    return examples.like(rows) if cast and rows is not None else examples


def split_of(data: Data, examples: Examples) -> Split:
    """The split of the rows into training, validation and test, as `data` says. DataError if no rows train."""
    return split(examples, data.held_out, data.validation, data.stratified, data.seed)


def row_types_of(model: Graph) -> dict[str, Column] | None:
    """The type of a row of each input of a model; None if any has a symbolic dimension after the batch."""
    rows = {}
    for value in model.inputs:
        sizes = tuple(size for size in value.shape[1:] if isinstance(size, int))
        if len(sizes) != len(value.shape) - 1:
            return None
        rows[value.name] = Column(value.name, value.dtype, sizes)
    return rows


def check_classes(output: TensorType, examples: Examples) -> None:
    """DataError if the model's output has fewer classes (axis 1) than the data; a symbolic axis passes.

    An output of rank 1 counts as one class, and data without classes pass.
    """
    classes, outputs = examples.classes, output.dims[1] if output.rank > 1 else 1
    if classes is not None and isinstance(outputs, int) and outputs < len(classes):
        message = f"has {len(classes)} classes, but the model's output {output} has {outputs}"
        raise DataError(message, file=examples.dataset.name, column=examples.target.name)


def with_all_classes(examples: Examples, model: Graph) -> Examples:
    """The examples with a class name for each output of the model, if the data have fewer classes than outputs.

    Additional classes are named by their index.
    """
    classes, output = examples.classes, model.outputs[0].tensor
    outputs = output.dims[1] if output.rank > 1 else 1
    if classes is None or not isinstance(outputs, int) or outputs <= len(classes):
        return examples
    names = (*classes, *map(str, range(len(classes), outputs)))
    return replace(examples, target=replace(examples.target, classes=names))


def check_tokens(examples: Examples, vocabulary: int) -> None:
    """DataError if an int32 or int64 input has a value that is not from 0 to `vocabulary` - 1.

    Reads all rows of these inputs.
    """
    tokens = [feature for feature in examples.features.values() if feature.column.dtype in (DType.INT64, DType.INT32)]
    for feature in tokens:
        for start in range(0, len(examples), _CHUNK_ROWS):
            rows = np.arange(start, min(start + _CHUNK_ROWS, len(examples)))
            values = feature.take(examples.dataset, rows)
            wrong = np.argwhere((values < 0) | (values >= vocabulary))
            if wrong.size:
                message = f"the token is {values[tuple(wrong[0])]}, expected 0 to {vocabulary - 1}"
                raise examples.dataset.error(message, feature.origin[0], int(rows[wrong[0][0]]))


def _select(data: Data, dataset: Dataset, inputs: dict[str, str | Names] | None, parent: Parent | None) -> Examples:
    return select(
        dataset,
        inputs,
        data.target,
        task=data.task,
        classes=parent.classes if parent else None,
        shapes=data.shapes,
        layouts=data.layouts,
    )
