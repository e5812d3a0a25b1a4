"""`Feature`: where an input of a model gets its numbers from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from core.errors import DataError
from core.ir.types import DType
from core.train.data.dataset import Column, Dataset, LazySource, Row, Rows, Source, Values, layout_of

PADDING = 0  # fills up sequences: as a token, what models are told to look past


@dataclass(frozen=True)
class Feature:
    """One input: a column as it is, the numbers of several side by side, or sequences brought to one length.

    `column` is what comes out. Sequences that are shorter are filled up with `PADDING`, longer ones are cut.
    """

    column: Column
    origin: tuple[str, ...]
    source: Source
    ragged: bool = False

    def like(self, name: str, row: Row, file: str) -> Feature:
        """The same numbers as rows of another type. DataError when they are not as many, in another order (images
        channels first and last) or would lose digits."""
        fits = _same_order(self.column.shape, row.shape) or (self.ragged and len(row.shape) == 1)
        if not fits or not (row.dtype.is_float or np.can_cast(self.column.dtype.numpy, row.dtype.numpy, "safe")):
            shape = ",".join(map(str, row.shape))
            message = f"rows of input '{name}' are {self.column}, but the model takes {row.dtype}[{shape}]"
            raise DataError(message, file=file)
        layout = self.column.layout if self.column.shape == row.shape else layout_of(row.shape)
        return replace(self, column=replace(self.column, dtype=row.dtype, shape=tuple(row.shape), layout=layout))

    def take(self, dataset: Dataset, rows: Rows) -> Values:
        """The rows: [rows, *column.shape]. DataError for a number that is infinite or none at all."""
        values = self.source.take(rows)
        if self.ragged:
            values = padded(values, self.column.shape[0], self.source.column.dtype)
        with np.errstate(over="ignore"):  # what is too large for float32 is infinite, and found below
            values = values.astype(self.column.dtype.numpy, copy=False)
        self._check_finite(values, dataset, rows)
        return values.reshape(len(rows), *self.column.shape)

    def _check_finite(self, values: Values, dataset: Dataset, rows: Rows) -> None:
        if values.dtype.kind != "f" or np.isfinite(values).all():
            return
        place = np.argwhere(~np.isfinite(values))[0].tolist()
        number = values[tuple(place)]
        message = "the number is missing or nan" if np.isnan(number) else f"the number is {number}"
        column = self.origin[place[1] if len(self.origin) > 1 else 0]
        raise dataset.error(f"{message}, expected a finite one", column, int(rows[place[0]]))


def _same_order(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether rows of one shape are rows of the other read in the same order, as far as shapes can tell."""
    if math.prod(one) != math.prod(other):
        return False
    long, wide = ([size for size in shape if size != 1] for shape in (one, other))
    return long == wide or min(len(long), len(wide)) < 2


def joined(dataset: Dataset, origin: Sequence[str]) -> Source:
    """The numbers of several columns side by side, float32 [k]: put together once, as rows are asked for ever again."""

    def load() -> Values:
        block = np.empty((len(dataset), len(origin)), np.float32)
        everything = np.arange(len(dataset))
        with np.errstate(over="ignore"):
            for place, name in enumerate(origin):
                block[:, place] = dataset.sources[name].take(everything)
        return block

    return LazySource(Column("", DType.FLOAT32, (len(origin),)), len(dataset), load)


def padded(sequences: Values, length: int, dtype: DType) -> Values:
    """Arrays of numbers as [rows, length]."""
    result = np.full((len(sequences), length), PADDING, dtype.numpy)
    for row, sequence in enumerate(sequences):
        result[row, : len(sequence)] = sequence[:length]
    return result


def longest(dataset: Dataset, column: str) -> int:
    """The length of the longest sequence. DataError when one is empty: there is nothing to learn from."""
    lengths = np.array([len(sequence) for sequence in dataset.sources[column].take(np.arange(len(dataset)))])
    if not lengths.all():
        raise dataset.error("the sequence is empty", column, int(lengths.argmin()))
    return int(lengths.max())
