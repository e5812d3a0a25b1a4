"""Parquet files, read with pyarrow: columns of numbers, booleans, text, and lists of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lathe.core.ir.types import DType
from lathe.core.train.data.dataset import ArraySource, Column, Dataset, LazySource, Source, Values
from lathe.core.train.data.members import DAMAGE_ERRORS
from lathe.core.train.data.optional_packages import arrow
from lathe.core.train.data.tables import TableFile

_BATCH = 1 << 16  # rows per chunk
_TEXT_OVERHEAD = 64  # approximate bytes of a Python string besides its characters


def read_parquet(file: TableFile) -> Dataset:
    """A dataset of the columns that models can take; the others are in `left_out`, with the reason.

    Columns of lists are read immediately, others on first use. DataError if the file is damaged, has two columns of one
    name, a missing list or a missing number in a list, or no column that models can take. A missing value is NaN in a
    column of floats; in one of integers or booleans it is a DataError on first use.
    """
    table = _Parquet.of(file)
    sources: dict[str, Source] = {}
    left_out = dict[str, str]()
    for name, kind in table.columns.items():
        source = table.source(name, kind)
        if isinstance(source, str):
            left_out[name] = source
        else:
            sources[name] = source
    if not sources:
        text = "; ".join(f"column '{name}' {reason}" for name, reason in left_out.items())
        raise file.location.error(text or "there are no columns")
    return Dataset(file.location.name, sources, file.location.digest, "parquet", left_out=left_out)


@dataclass
class _Parquet:
    file: TableFile
    columns: dict[str, Any]  # Arrow types by name; for dictionaries the type of their values
    rows: int

    @classmethod
    def of(cls, file: TableFile) -> _Parquet:
        try:
            with file.seekable() as stream:
                reader = arrow().parquet.ParquetFile(stream)
                schema, rows = reader.schema_arrow, reader.metadata.num_rows
        except (arrow().ArrowException, *DAMAGE_ERRORS) as error:
            raise file.location.error(f"cannot be read: {error}") from None
        if len(set(schema.names)) < len(schema.names):
            raise file.location.error("two columns have the same name")
        types = {each.name: each.type for each in schema}
        values = {name: kind.value_type if arrow().types.is_dictionary(kind) else kind for name, kind in types.items()}
        return cls(file, values, rows)

    def source(self, name: str, kind: Any) -> Source | str:
        """The source of a column of the Arrow type `kind`; or a text that says why models cannot take it."""
        types = arrow().types
        if types.is_string(kind) or types.is_large_string(kind):
            return LazySource(Column(name, DType.STRING), self.rows, partial(self._text, name))
        lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        number = kind.value_type if lists else kind
        if not (types.is_integer(number) or types.is_floating(number) or types.is_boolean(number)):
            return f"has type {kind}, expected numbers, text or lists of numbers"
        dtype = DType.from_numpy(np.dtype(number.to_pandas_dtype()))
        if lists:
            return self._lists(name, dtype)
        return LazySource(Column(name, dtype), self.rows, partial(self._numbers, name, dtype))

    def _lists(self, name: str, dtype: DType) -> Source:
        """A column of lists: a vector per row if all have the same length, otherwise sequences.

        It is read immediately, since finding the lengths takes as long as reading. DataError for a missing list or
        number.
        """
        lengths, chunks = [np.empty(0, np.int64)], [np.empty(0, dtype.numpy)]
        for start, chunk in self._chunks(name):
            self._check_no_missing(chunk, name, start)
            lengths.append(arrow().compute.list_value_length(chunk).to_numpy().astype(np.int64))
            chunks.append(self._flat(chunk, name, start, dtype))
        flat, sizes = np.concatenate(chunks), np.concatenate(lengths)
        if len(sizes) and (sizes == sizes[0]).all():
            return ArraySource(Column(name, dtype, (int(sizes[0]),)), flat.reshape(len(sizes), -1))
        rows = np.empty(len(sizes), object)
        rows[:] = np.split(flat, np.cumsum(sizes)[:-1])
        return ArraySource(Column(name, dtype, (-1,)), rows)

    def _flat(self, chunk: Any, name: str, start: int, dtype: DType) -> Values:
        """The concatenated numbers of the lists in a chunk whose first row is `start`.

        DataError if a number is missing, or if memory does not suffice.
        """
        values = chunk.flatten()
        if values.null_count:
            raise self.file.location.error(
                f"a list in this or the next {len(chunk)} rows has a missing number", name, start
            )
        self.file.location.spend(len(values) * dtype.itemsize, name)
        found: Values = values.to_numpy(zero_copy_only=False)
        return found

    def _numbers(self, name: str, dtype: DType) -> Values:
        """The values of a column of numbers, [rows]. A missing value is NaN in a float column, otherwise DataError."""
        self.file.location.spend(self.rows * dtype.itemsize, name)
        found = np.empty(self.rows, dtype.numpy)
        for start, chunk in self._chunks(name):
            if not dtype.is_float:
                self._check_no_missing(chunk, name, start)
            found[start : start + len(chunk)] = chunk.to_numpy(zero_copy_only=False)
        return found

    def _text(self, name: str) -> Values:
        found = np.empty(self.rows, object)
        for start, chunk in self._chunks(name):
            self.file.location.spend(chunk.nbytes + _TEXT_OVERHEAD * len(chunk), name)
            try:
                found[start : start + len(chunk)] = chunk.to_pylist()
            except UnicodeDecodeError as error:
                raise self.file.location.error(f"text is not valid UTF-8: {error}", name, start) from None
        return found

    def _chunks(self, name: str) -> Iterator[tuple[int, Any]]:
        """The chunks of a column in order, each with the number of its first row.

        DataError unless they have as many rows as the file's metadata says.
        """
        start = 0
        try:
            with self.file.seekable() as stream:
                for batch in arrow().parquet.ParquetFile(stream).iter_batches(_BATCH, columns=[name]):
                    values = batch.column(0)
                    yield start, values.dictionary_decode() if hasattr(values, "dictionary_decode") else values
                    start += len(values)
        except (arrow().ArrowException, *DAMAGE_ERRORS) as error:
            raise self.file.location.error(f"cannot be read: {error}", name) from None
        if start != self.rows:
            raise self.file.location.error(f"{start} rows, but the file says {self.rows}", name)

    def _check_no_missing(self, chunk: Any, name: str, start: int) -> None:
        if chunk.null_count:
            row = start + chunk.is_null().index(True).as_py()
            raise self.file.location.error("the value is missing", name, row)
