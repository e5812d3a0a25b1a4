"""`Feature`: where an input of a model gets its numbers from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from core.errors import DataError
from core.train.data.dataset import Column, Dataset, Row, Rows, Values, layout_of

PADDING = 0  # fills up sequences: as a token, what models are told to look past


@dataclass(frozen=True)
class Feature:
    """One input: a column as it is, the numbers of several side by side, or sequences brought to one length.

    `column` is what comes out. Sequences that are shorter are filled up with `PADDING`, longer ones are cut.
    """

    column: Column
    origin: tuple[str, ...]
    ragged: bool = False

    def like(self, name: str, row: Row, file: str) -> Feature:
        """The same numbers as rows of another type. DataError when they are not as many or would lose digits."""
        fits = math.prod(row.shape) == math.prod(self.column.shape) or (self.ragged and len(row.shape) == 1)
        if not fits or not (row.dtype.is_float or np.can_cast(self.column.dtype.numpy, row.dtype.numpy, "safe")):
            shape = ",".join(map(str, row.shape))
            message = f"rows of input '{name}' are {self.column}, but the model takes {row.dtype}[{shape}]"
            raise DataError(message, file=file)
        layout = self.column.layout if self.column.shape == row.shape else layout_of(row.shape)
        return replace(self, column=replace(self.column, dtype=row.dtype, shape=tuple(row.shape), layout=layout))

    def take(self, dataset: Dataset, rows: Rows) -> Values:
        """The rows: [rows, *column.shape]. DataError for a number that is infinite or none at all."""
        columns = [self._cast(dataset, name, rows) for name in self.origin]
        joined = columns[0] if len(columns) == 1 else np.stack(columns, axis=1)
        return joined.reshape(len(rows), *self.column.shape)

    def _cast(self, dataset: Dataset, name: str, rows: Rows) -> Values:
        values = dataset.sources[name].take(rows)
        if self.ragged:
            values = padded(values, self.column.shape[0])
        with np.errstate(over="ignore"):  # what is too large for float32 is infinite, and found below
            values = values.astype(self.column.dtype.numpy, copy=False)
        _check_finite(values, dataset, name, rows)
        return values


def padded(sequences: Values, length: int) -> Values:
    """Arrays of numbers, or rows of one length, as [rows, length]."""
    result = np.full((len(sequences), length), PADDING, sequences[0].dtype if len(sequences) else np.int64)
    for row, sequence in enumerate(sequences):
        result[row, : len(sequence)] = sequence[:length]
    return result


def longest(dataset: Dataset, column: str) -> int:
    """The length of the longest sequence. DataError when one is empty: there is nothing to learn from."""
    lengths = np.array([len(sequence) for sequence in dataset.sources[column].take(np.arange(len(dataset)))])
    if not lengths.all():
        raise dataset.error("the sequence is empty", column, int(lengths.argmin()))
    return int(lengths.max())


def _check_finite(values: Values, dataset: Dataset, column: str, rows: Rows) -> None:
    if values.dtype.kind != "f" or np.isfinite(values).all():
        return
    place = np.argwhere(~np.isfinite(values))[0].tolist()
    number = values[tuple(place)]
    message = "the number is missing or nan" if np.isnan(number) else f"the number is {number}"
    raise dataset.error(f"{message}, expected a finite one", column, int(rows[place[0]]))
