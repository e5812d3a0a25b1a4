"""What a dataset holds, for the one who uploaded it: every value is looked at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import DataError
from core.train.data.dataset import Column, Dataset, Rows, Values
from core.train.data.examples import default_target
from core.train.data.given import MOST_BYTES
from core.train.data.opening import Format, open_dataset
from core.train.data.targets import MOST_CLASSES, class_targets

_MOST_PROBLEMS = 20
_MOST_COLUMNS = 1000  # that are listed
_CHUNK_BYTES = 16 << 20


def describe(
    path: str | Path, format: Format | None = None, *, name: str | None = None, memory: int = MOST_BYTES
) -> dict[str, Any]:
    """Rows, format, columns, parts, the default target and its classes, digest, and the first problems, as JSON has it.

    A problem matters only to those who use that column: numbers that are missing, classes without rows. DataError for
    what makes the file useless: it cannot be read, or a column cannot.
    """
    dataset = open_dataset(path, format, name=name, memory=memory)
    problems = [f"column '{column}' is left out: it {reason}" for column, reason in dataset.left_out.items()]
    for column in dataset.columns.values():
        problems += _problems(dataset, column)
    target = default_target(dataset)
    classes, gaps = _classes(dataset, target)
    return {
        "rows": len(dataset),
        "format": dataset.format,
        "columns": [_column(column) for column in list(dataset.columns.values())[:_MOST_COLUMNS]],
        "parts": {part: len(rows) for part, rows in dataset.parts.items()},
        "target": target,
        "classes": classes,
        "digest": dataset.digest,
        "problems": (problems + gaps)[:_MOST_PROBLEMS],
    }


def _column(column: Column) -> dict[str, Any]:
    found: dict[str, Any] = {"name": column.name, "dtype": str(column.dtype), "shape": list(column.shape)}
    if column.layout:
        found["layout"] = column.layout
    return found | ({"note": column.note} if column.note else {})


def _problems(dataset: Dataset, column: Column) -> list[str]:
    """Numbers that are none. Reading every value also finds what cannot be read."""
    count, first = 0, 0
    for rows, values in _pieces(dataset, column):
        odd = _odd(column, values)
        first = first if count or not odd.any() else int(rows[odd.argmax()])
        count += int(odd.sum())
    if not count:
        return []
    what = "missing or infinite numbers" if column.is_number else "missing texts"
    return [f"column '{column.name}': {count} rows have {what}, {dataset.place(first)} is the first"]


def _pieces(dataset: Dataset, column: Column) -> Iterator[tuple[Rows, Values]]:
    size = max(_CHUNK_BYTES // max(column.row_bytes, 1), 1)
    for start in range(0, len(dataset), size):
        rows = np.arange(start, min(start + size, len(dataset)))
        yield rows, dataset.take(rows, [column.name])[column.name]


def _odd(column: Column, values: Values) -> Values:
    """Which rows have something that nobody can learn from."""
    if values.dtype.kind == "f":
        return np.logical_not(np.isfinite(values).reshape(len(values), -1).all(axis=1))
    if values.dtype.kind != "O":
        return np.zeros(len(values), np.bool_)
    if column.is_number:
        return np.array([not np.isfinite(row).all() for row in values], np.bool_)
    return np.array([value is None for value in values], np.bool_)


def _classes(dataset: Dataset, target: str) -> tuple[list[str] | None, list[str]]:
    """The classes of the default target, where it has some, and those without rows."""
    if dataset.columns[target].dtype.is_float or dataset.columns[target].is_sequence:
        return None, []
    try:
        names, indices = class_targets(dataset, target, None)
    except DataError:
        return None, []
    if len(names) > min(MOST_CLASSES, max(len(dataset) // 2, 2)):
        return None, []  # numbers, rather
    counts = np.bincount(indices.ravel(), minlength=len(names))
    empty = [name for name, count in zip(names, counts, strict=True) if not count]
    return list(names), [f"column '{target}': class '{name}' has no rows" for name in empty]
