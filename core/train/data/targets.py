"""Targets that count classes: names of the classes, and the class of every row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core.train.data.dataset import Dataset, Rows, Values

MOST_CLASSES = 1 << 16


def class_targets(dataset: Dataset, column: str, expected: Sequence[str] | None) -> tuple[tuple[str, ...], Rows]:
    """Names of the classes, and the class of each row (int64).

    Text has its different values as classes, in the order of their code points; whole numbers are classes themselves,
    0 being the first. `expected` are the classes of a model: names are matched with it. DataError for a number that is
    no class, or a name that is not expected.
    """
    values = dataset.sources[column].take(np.arange(len(dataset)))
    names = dataset.columns[column].classes
    if values.dtype.kind == "O":
        names, indices = _of_text(dataset, column, values)
    else:
        indices = _whole(dataset, column, values)
    if names is None:
        top = len(expected) if expected is not None else int(indices.max()) + 1
        hint = '; `task = "numbers"` learns quantities' if expected is None else ""
        _check(dataset, column, indices, min(top, MOST_CLASSES), hint)
        return tuple(expected) if expected is not None else tuple(map(str, range(top))), indices
    _check(dataset, column, indices, len(names))
    if expected is None:
        return names, indices
    return tuple(expected), _matched(dataset, column, names, indices, expected)


def _of_text(dataset: Dataset, column: str, values: Values) -> tuple[tuple[str, ...], Rows]:
    missing = [row for row, value in enumerate(values) if not isinstance(value, str)]
    if missing:
        raise dataset.error("the class is missing", column, missing[0])
    names = tuple(sorted(set(values.tolist())))
    if len(names) > MOST_CLASSES:
        raise dataset.error(f"{len(names)} different classes, at most {MOST_CLASSES}", column)
    codes = {name: code for code, name in enumerate(names)}
    return names, np.array([codes[value] for value in values.tolist()], np.int64)


def _whole(dataset: Dataset, column: str, values: Values) -> Rows:
    """The numbers as int64; those of a floating-point column must be whole."""
    if values.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            odd = np.argwhere(~(np.isfinite(values) & (values == np.floor(values)) & (abs(values) < 2**31)))
        if odd.size:
            message = f"the class is {values[tuple(odd[0])]}, expected a whole number"
            raise dataset.error(message, column, int(odd[0][0]))
    if values.dtype.kind not in "biuf":
        raise dataset.error(f"{values.dtype} does not count classes", column)
    return values.astype(np.int64)


def _check(dataset: Dataset, column: str, indices: Rows, count: int, hint: str = "") -> None:
    wrong = np.argwhere((indices < 0) | (indices >= count))
    if wrong.size:
        message = f"the class is {indices[tuple(wrong[0])]}, expected 0 to {max(count, 1) - 1}{hint}"
        raise dataset.error(message, column, int(wrong[0][0]))


def _matched(dataset: Dataset, column: str, names: Sequence[str], indices: Rows, expected: Sequence[str]) -> Rows:
    """`indices` into `names` as indices into `expected`."""
    codes = {name: code for code, name in enumerate(expected)}
    table = np.array([codes.get(name, -1) for name in names], np.int64)
    unknown = np.argwhere(table[indices] < 0)
    if unknown.size:
        name = names[int(indices[tuple(unknown[0])])]
        known = ", ".join(repr(one) for one in list(expected)[:20])
        message = f"class {name!r} is none of the model's classes: {known}"
        raise dataset.error(message, column, int(unknown[0][0]))
    return table[indices]
