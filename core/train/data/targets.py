"""Classification targets: class names, and the class index of every row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lathe.core.ir.types import DType
from lathe.core.train.data.dataset import Dataset, Rows, Values

MAX_CLASSES = 1 << 16


def class_targets(dataset: Dataset, column: str, expected: Sequence[str] | None) -> tuple[tuple[str, ...], Rows]:
    """The class names, and the class index of each row: int64 in the shape of the column.

    The classes of a text column are its distinct values in code point order. Whole numbers are class indices from 0,
    with the names of the column if it has any, otherwise "0", "1" and so on. `expected` are the class names of a model,
    None without one: they replace the names, and names of text or of the column are matched with them.

    DataError for a missing class, a number that is not a class index, more than 65,536 classes, a name that is not in
    `expected`, or class indices for which the memory of the dataset does not suffice.
    """
    values = dataset.sources[column].take(np.arange(len(dataset)))
    names = dataset.columns[column].classes
    if values.dtype.kind == "O":
        names, indices = _text_classes(dataset, column, values)
    else:
        indices = _whole_numbers(dataset, column, values)
    if names is None:
        top = len(expected) if expected is not None else int(indices.max()) + 1
        hint = '; `task = "numbers"` selects regression' if expected is None else ""
        _check_range(dataset, column, indices, min(top, MAX_CLASSES), hint)
        return tuple(expected) if expected is not None else tuple(map(str, range(top))), indices
    _check_range(dataset, column, indices, len(names))
    if expected is None:
        return names, indices
    return tuple(expected), _match_names(dataset, column, names, indices, expected)


def _text_classes(dataset: Dataset, column: str, values: Values) -> tuple[tuple[str, ...], Rows]:
    missing = [row for row, value in enumerate(values) if not isinstance(value, str)]
    if missing:
        raise dataset.error("the class is missing", column, missing[0])
    names = tuple(sorted(set(values.tolist())))
    if len(names) > MAX_CLASSES:
        raise dataset.error(f"expected at most {MAX_CLASSES} classes, got {len(names)}", column)
    codes = {name: code for code, name in enumerate(names)}
    return names, np.array([codes[value] for value in values.tolist()], np.int64)


def _whole_numbers(dataset: Dataset, column: str, values: Values) -> Rows:
    """The numbers as int64. DataError unless all are whole numbers, and floating-point ones below 2**31."""
    if values.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            odd = np.argwhere(~(np.isfinite(values) & (values == np.floor(values)) & (abs(values) < 2**31)))
        if odd.size:
            message = f"the class is {values[tuple(odd[0])]}, expected a whole number"
            raise dataset.error(message, column, int(odd[0][0]))
    if values.dtype.kind not in "biuf":
        raise dataset.error(f"expected class indices, got {values.dtype}", column)
    numbers = dataset.empty(values.shape, DType.INT64, column)
    numbers[...] = values
    return numbers


def _check_range(dataset: Dataset, column: str, indices: Rows, count: int, hint: str = "") -> None:
    wrong = np.argwhere((indices < 0) | (indices >= count))
    if wrong.size:
        message = f"the class is {indices[tuple(wrong[0])]}, expected 0 to {max(count, 1) - 1}{hint}"
        raise dataset.error(message, column, int(wrong[0][0]))


def _match_names(dataset: Dataset, column: str, names: Sequence[str], indices: Rows, expected: Sequence[str]) -> Rows:
    """Convert indices into `names` to indices into `expected`. DataError for a name that `expected` lacks."""
    codes = {name: code for code, name in enumerate(expected)}
    table = np.array([codes.get(name, -1) for name in names], np.int64)
    unknown = np.argwhere(table[indices] < 0)
    if unknown.size:
        name = names[int(indices[tuple(unknown[0])])]
        known = ", ".join(repr(one) for one in list(expected)[:20])
        message = f"class {name!r} is not one of the model's classes: {known}"
        raise dataset.error(message, column, int(unknown[0][0]))
    return table[indices]
