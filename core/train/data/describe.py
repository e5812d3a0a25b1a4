"""What a dataset holds, for the one who uploaded it: every value is looked at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from core.errors import DataError
from core.train.data.dataset import Column, Dataset, Rows, Values
from core.train.data.examples import default_target
from core.train.data.given import MOST_BYTES
from core.train.data.opening import Format, open_dataset
from core.train.data.targets import class_targets

_MOST_PROBLEMS = 20
_MOST_CLASSES = 1000
_LONGEST_NAME = 200  # characters, of a class
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
    problems = _problems(dataset)  # first: what takes too much memory is found piece by piece
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


def _problems(dataset: Dataset) -> list[str]:
    """Columns that are left out, and numbers that are none. Reading every value also finds what cannot be read."""
    left_out = [f"column '{column}' is left out: it {reason}" for column, reason in dataset.left_out.items()]
    lacking = [found for column in dataset.columns.values() if (found := _lacking(dataset, column)).rows]
    return left_out + [_text(dataset, found) for found in lacking[:_MOST_PROBLEMS]]


class _Lacking(NamedTuple):
    """How many rows of a column lack something, and which is the first."""

    column: Column
    rows: int
    first: int


def _lacking(dataset: Dataset, column: Column) -> _Lacking:
    count, first = 0, 0
    for rows, values in _pieces(dataset, column):
        odd = _odd(column, values)
        first = first if count or not odd.any() else int(rows[odd.argmax()])
        count += int(odd.sum())
    return _Lacking(column, count, first)


def _text(dataset: Dataset, found: _Lacking) -> str:
    what = "missing or infinite numbers" if found.column.is_number else "missing texts"
    return f"column '{found.column.name}': {found.rows} rows have {what}, {dataset.place(found.first)} is the first"


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
    if len(names) > min(_MOST_CLASSES, max(len(dataset) // 2, 2)) or max(map(len, names)) > _LONGEST_NAME:
        return None, []  # quantities or texts, rather
    counts = np.bincount(indices.ravel(), minlength=len(names))
    empty = [name for name, count in zip(names, counts, strict=True) if not count]
    return list(names), [f"column '{target}': class '{name}' has no rows" for name in empty]
