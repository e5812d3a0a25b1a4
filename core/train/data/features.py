"""`Feature`: reads one input of a model from one or several columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lathe.core.errors import DataError
from lathe.core.ir.types import DType
from lathe.core.train.data.dataset import Column, Dataset, LazySource, Row, Rows, Source, Values, layout_of

PADDING = 0  # pads sequences; as a token it should be masked by the model


@dataclass(frozen=True)
class Feature:
    """One input: a column, the concatenated numbers of several columns, or sequences of one length.

    `column` is the type of the result, `origin` the names of the columns that `source` reads. `ragged`: the rows of
    `source` are sequences of varying length; shorter ones are padded with `PADDING`, longer ones are truncated.
    """

    column: Column
    origin: tuple[str, ...]
    source: Source
    ragged: bool = False

    def like(self, name: str, row: Row, file: str) -> Feature:
        """The same numbers as rows of the type `row`; `name` and `file` are for messages.

        DataError if the shapes have different counts of numbers or order them differently (channels first or last), or
        if an integer type cannot hold the numbers. Sequences may get another length.
        """
        fits = has_same_order(self.column.shape, row.shape) or (self.ragged and len(row.shape) == 1)
        if not fits or not (row.dtype.is_float or np.can_cast(self.column.dtype.numpy, row.dtype.numpy, "safe")):
            shape = ",".join(map(str, row.shape))
            message = f"rows of input '{name}' are {self.column}, but the model takes {row.dtype}[{shape}]"
            raise DataError(message, file=file)
        layout = self.column.layout if self.column.shape == row.shape else layout_of(row.shape)
        return replace(self, column=replace(self.column, dtype=row.dtype, shape=tuple(row.shape), layout=layout))

    def take(self, dataset: Dataset, rows: Rows) -> Values:
        """The given rows of `dataset`, in the type `column`: [rows, *column.shape].

        DataError for a row that cannot be read, and for a floating-point number that is missing, NaN or infinite after
        the cast.
        """
        values = self.source.take(rows)
        if self.ragged:
            values = pad_sequences(values, self.column.shape[0], self.source.column.dtype)
        with np.errstate(over="ignore"):  # float32 overflows to infinity, which is an error below
            values = values.astype(self.column.dtype.numpy, copy=False)
        self._check_finite(values, dataset, rows)
        return values.reshape(len(rows), *self.column.shape)

    def _check_finite(self, values: Values, dataset: Dataset, rows: Rows) -> None:
        if values.dtype.kind != "f" or np.isfinite(values).all():
            return
        place = np.argwhere(~np.isfinite(values))[0].tolist()
        number = values[tuple(place)]
        message = "the number is missing or NaN" if np.isnan(number) else f"the number is {number}"
        column = self.origin[place[1] if len(self.origin) > 1 else 0]
        raise dataset.error(f"{message}, expected a finite one", column, int(rows[place[0]]))


def has_same_order(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether a reshape between two shapes keeps the meaning of each number.

    True if they have equally many elements, and differ only in axes of extent 1 or one of them is a vector.
    """
    if math.prod(one) != math.prod(other):
        return False
    long, wide = ([size for size in shape if size != 1] for shape in (one, other))
    return long == wide or min(len(long), len(wide)) < 2


def concat_columns(dataset: Dataset, origin: Sequence[str]) -> Source:
    """A source of rows with one number of each column: float32 [len(origin)]. The first `take` reads the columns.

    A number beyond the range of float32 becomes infinite. `take` raises DataError if the memory of the dataset does not
    suffice for the numbers.
    """

    def load() -> Values:
        block = dataset.empty((len(dataset), len(origin)), DType.FLOAT32)
        everything = np.arange(len(dataset))
        with np.errstate(over="ignore"):
            for place, name in enumerate(origin):
                block[:, place] = dataset.sources[name].take(everything)
        return block

    return LazySource(Column("", DType.FLOAT32, (len(origin),)), len(dataset), load)


def pad_sequences(sequences: Values, length: int, dtype: DType) -> Values:
    """Sequences as one `dtype` array [rows, length]: shorter ones are padded with `PADDING`, longer ones truncated."""
    result = np.full((len(sequences), length), PADDING, dtype.numpy)
    for row, sequence in enumerate(sequences):
        result[row, : len(sequence)] = sequence[:length]
    return result


def longest_sequence(dataset: Dataset, column: str) -> int:
    """The length of the longest sequence in a column. DataError if a sequence is empty."""
    lengths = np.array([len(sequence) for sequence in dataset.sources[column].take(np.arange(len(dataset)))])
    if not lengths.all():
        raise dataset.error("the sequence is empty", column, int(lengths.argmin()))
    return int(lengths.max())
