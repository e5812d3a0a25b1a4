"""Which columns a model takes and which rows are kept from training, as a recipe says; whether a model fits them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from core.errors import DataError
from core.ir.graph import Graph
from core.ir.types import DType, TensorType
from core.train.data import Column, Dataset, Examples, Split, open_dataset, select, split
from core.train.parent import Parent
from core.train.recipe import Data, Names

_BLOCK = 1 << 14  # rows looked at together


def dataset_for(data: Data, path: Path) -> Dataset:
    """The dataset in a file or folder, opened as a recipe says. DataError for what cannot be read."""
    return open_dataset(path, data.format, image_size=data.image_size)


def examples_for(data: Data, dataset: Dataset, parent: Parent | None = None, *, cast: bool = True) -> Examples:
    """The columns that a recipe chooses; by default, those that a given model takes, with `cast` as it takes them.

    DataError for other inputs than the model's, and for rows that do not fit.
    """
    examples = _chosen(data, dataset, data.inputs, parent)
    if parent is None:
        return examples
    wanted = {value.name for value in parent.model.inputs}
    if data.inputs is None and len(wanted) == len(examples.features) == 1:
        (feature,) = examples.features.values()
        examples = _chosen(data, dataset, dict.fromkeys(wanted, feature.origin), parent)
    if (given := set(examples.features)) != wanted:
        raise DataError(f"inputs are {sorted(given)}, but the model takes {sorted(wanted)}", file=dataset.name)
    rows = rows_of(parent.model)
    return examples.like(rows) if cast and rows is not None else examples


def split_of(data: Data, examples: Examples) -> Split:
    """Which rows are for what."""
    return split(examples, data.held_out, data.validation, data.stratified, data.seed)


def rows_of(model: Graph) -> dict[str, Column] | None:
    """The rows that a model takes; None where their sizes are not known."""
    found = {}
    for value in model.inputs:
        sizes = tuple(size for size in value.shape[1:] if isinstance(size, int))
        if len(sizes) != len(value.shape) - 1:
            return None
        found[value.name] = Column(value.name, value.dtype, sizes)
    return found


def check_classes(output: TensorType, examples: Examples) -> None:
    """DataError when a model tells fewer classes than the data have."""
    classes, answers = examples.classes, output.dims[1] if output.rank > 1 else 1
    if classes is not None and isinstance(answers, int) and answers < len(classes):
        message = f"counts {len(classes)} classes, the model's output {output} tells {answers}"
        raise DataError(message, file=examples.dataset.name, column=examples.target.name)


def check_tokens(examples: Examples, vocabulary: int) -> None:
    """DataError for a whole number among the inputs that is no token: 0 to `vocabulary` - 1 are."""
    tokens = [feature for feature in examples.features.values() if feature.column.dtype in (DType.INT64, DType.INT32)]
    for feature in tokens:
        for start in range(0, len(examples), _BLOCK):
            rows = np.arange(start, min(start + _BLOCK, len(examples)))
            taken = feature.take(examples.dataset, rows)
            wrong = np.argwhere((taken < 0) | (taken >= vocabulary))
            if wrong.size:
                message = f"the token is {taken[tuple(wrong[0])]}, expected 0 to {vocabulary - 1}"
                raise examples.dataset.error(message, feature.origin[0], int(rows[wrong[0][0]]))


def _chosen(data: Data, dataset: Dataset, inputs: dict[str, str | Names] | None, parent: Parent | None) -> Examples:
    return select(
        dataset,
        inputs,
        data.target,
        task=data.task,
        classes=parent.classes if parent else None,
        shapes=data.shapes,
        layouts=data.layouts,
    )
