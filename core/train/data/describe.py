"""Describes the content of a dataset and finds its problems; reads all values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lathe.core.errors import DataError
from lathe.core.train.data.budget import DEFAULT_MAX_BYTES
from lathe.core.train.data.dataset import Column, Dataset, Rows, Values
from lathe.core.train.data.examples import default_target
from lathe.core.train.data.formats import DOCUMENT_FORMATS, Format, open_dataset
from lathe.core.train.data.targets import class_targets

_MAX_PROBLEMS = 20
_MAX_CLASSES = 1000
_MAX_NAME_LENGTH = 200  # most characters of a class name
_MAX_COLUMNS = 1000  # most columns that are listed
_CHUNK_BYTES = 16 << 20


def describe(
    path: str | Path, format: Format | None = None, *, name: str | None = None, memory: int = DEFAULT_MAX_BYTES
) -> dict[str, Any]:
    """A description as a JSON object: rows, format, columns, parts, default target, its classes, digest, problems.

    `classes` is None if the target is no class (see `_classes`). At most 1000 columns and 20 problems are listed.
    Problems concern single columns only, such as missing numbers or classes without rows. DataError if the file or one
    of its columns cannot be read, or if columns need more than `memory` bytes.
    """
    dataset = open_dataset(path, format, name=name, memory=memory)
    problems = _problems(dataset)  # first, since it reads in chunks and so finds out early that memory does not suffice
    target = default_target(dataset)
    classes, empty_classes = _classes(dataset, target)
    return {
        "rows": len(dataset),
        "format": dataset.format,
        "columns": [_column(column) for column in list(dataset.columns.values())[:_MAX_COLUMNS]],
        "parts": {part: len(rows) for part, rows in dataset.parts.items()},
        "target": target,
        "classes": classes,
        "digest": dataset.digest,
        "problems": (problems + empty_classes)[:_MAX_PROBLEMS],
    }


def _column(column: Column) -> dict[str, Any]:
    result: dict[str, Any] = {"name": column.name, "dtype": str(column.dtype), "shape": list(column.shape)}
    if column.layout:
        result["layout"] = column.layout
    return result | ({"note": column.note} if column.note else {})


def _problems(dataset: Dataset) -> list[str]:
    """A sentence for each column that is left out, and for the first 20 columns with missing or infinite values.

    Reads all values; DataError if one cannot be read.
    """
    if dataset.format in DOCUMENT_FORMATS:
        return []  # opening them has read and checked each document
    left_out = [f"column '{column}' is left out: it {reason}" for column, reason in dataset.left_out.items()]
    missing = [values for column in dataset.columns.values() if (values := _missing_values(dataset, column)).rows]
    return left_out + [_text(dataset, values) for values in missing[:_MAX_PROBLEMS]]


class _MissingValues(NamedTuple):
    """The number of rows of a column with a missing or infinite value, and the first of these rows."""

    column: Column
    rows: int
    first: int


def _missing_values(dataset: Dataset, column: Column) -> _MissingValues:
    count, first = 0, 0
    for rows, values in _chunks(dataset, column):
        invalid = _invalid_rows(column, values)
        first = first if count or not invalid.any() else int(rows[invalid.argmax()])
        count += int(invalid.sum())
    return _MissingValues(column, count, first)


def _text(dataset: Dataset, missing: _MissingValues) -> str:
    what = "missing or infinite numbers" if missing.column.is_number else "missing text"
    return (
        f"column '{missing.column.name}': {missing.rows} rows have {what}, {dataset.place(missing.first)} is the first"
    )


def _chunks(dataset: Dataset, column: Column) -> Iterator[tuple[Rows, Values]]:
    size = max(_CHUNK_BYTES // max(column.row_bytes, 1), 1)
    for start in range(0, len(dataset), size):
        rows = np.arange(start, min(start + size, len(dataset)))
        yield rows, dataset.take(rows, [column.name])[column.name]


def _invalid_rows(column: Column, values: Values) -> Values:
    """bool [rows]: which rows have a missing value, a NaN or an infinite number."""
    if values.dtype.kind == "f":
        return np.logical_not(np.isfinite(values).reshape(len(values), -1).all(axis=1))
    if values.dtype.kind != "O":
        return np.zeros(len(values), np.bool_)
    if column.is_number:
        return np.array([not np.isfinite(row).all() for row in values], np.bool_)
    return np.array([value is None for value in values], np.bool_)


def _classes(dataset: Dataset, target: str) -> tuple[list[str] | None, list[str]]:
    """The class names of the default target, and a problem for each class that has no rows.

    The names are None if the target is no class, if it has more distinct values than `_MAX_CLASSES` or than half of the
    rows (two are always allowed), or if a value has more than `_MAX_NAME_LENGTH` characters.
    """
    if dataset.format in DOCUMENT_FORMATS or dataset.columns[target].dtype.is_float:
        return None, []
    if dataset.columns[target].is_sequence:
        return None, []
    try:
        names, indices = class_targets(dataset, target, None)
    except DataError:
        return None, []
    if len(names) > min(_MAX_CLASSES, max(len(dataset) // 2, 2)) or max(map(len, names)) > _MAX_NAME_LENGTH:
        return None, []  # more likely quantities or free text than classes
    counts = np.bincount(indices.ravel(), minlength=len(names))
    empty = [name for name, count in zip(names, counts, strict=True) if not count]
    return list(names), [f"column '{target}': class '{name}' has no rows" for name in empty]
