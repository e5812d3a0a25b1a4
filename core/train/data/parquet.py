"""Parquet files, through pyarrow: numbers, truth values, text, and lists of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from core.ir.types import DType
from core.train.data.dataset import ArraySource, Column, Dataset, LazySource, Source, Values
from core.train.data.extra import arrow
from core.train.data.members import DAMAGE
from core.train.data.tables import TableFile

_BATCH = 1 << 16  # rows
_TEXT_OVERHEAD = 64  # bytes that a piece of text takes besides its characters


def read_parquet(file: TableFile) -> Dataset:
    """A dataset of the columns that models can take. DataError for a file that is damaged or has none."""
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
        raise file.given.error(text or "there are no columns")
    return Dataset(file.given.name, sources, file.given.digest, "parquet", left_out=left_out)


@dataclass
class _Parquet:
    file: TableFile
    columns: dict[str, Any]  # types by name; those of dictionaries are their values'
    rows: int

    @classmethod
    def of(cls, file: TableFile) -> _Parquet:
        try:
            with file.seekable() as stream:
                reader = arrow().parquet.ParquetFile(stream)
                schema, rows = reader.schema_arrow, reader.metadata.num_rows
        except (arrow().ArrowException, *DAMAGE) as error:
            raise file.given.error(f"cannot be read: {error}") from None
        if len(set(schema.names)) < len(schema.names):
            raise file.given.error("two columns have the same name")
        types = {each.name: each.type for each in schema}
        values = {name: kind.value_type if arrow().types.is_dictionary(kind) else kind for name, kind in types.items()}
        return cls(file, values, rows)

    def source(self, name: str, kind: Any) -> Source | str:
        """A column, read when it is asked for; or why models cannot take it."""
        types = arrow().types
        if types.is_string(kind) or types.is_large_string(kind):
            return LazySource(Column(name, DType.STRING), self.rows, partial(self._text, name))
        lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        number = kind.value_type if lists else kind
        if not (types.is_integer(number) or types.is_floating(number) or types.is_boolean(number)):
            return f"is {kind}, expected numbers, text or lists of numbers"
        dtype = DType.from_numpy(np.dtype(number.to_pandas_dtype()))
        if lists:
            return self._lists(name, dtype)
        return LazySource(Column(name, dtype), self.rows, partial(self._numbers, name, dtype))

    def _lists(self, name: str, dtype: DType) -> Source:
        """Lists that are all of one length are rows of that shape; others are sequences. They are read at once: finding
        their lengths takes as long."""
        lengths, pieces = [np.empty(0, np.int64)], [np.empty(0, dtype.numpy)]
        for start, chunk in self._chunks(name):
            self._present(chunk, name, start)
            lengths.append(arrow().compute.list_value_length(chunk).to_numpy().astype(np.int64))
            pieces.append(self._flat(chunk, name, start, dtype))
        flat, sizes = np.concatenate(pieces), np.concatenate(lengths)
        if len(sizes) and (sizes == sizes[0]).all():
            return ArraySource(Column(name, dtype, (int(sizes[0]),)), flat.reshape(len(sizes), -1))
        rows = np.empty(len(sizes), object)
        rows[:] = np.split(flat, np.cumsum(sizes)[:-1])
        return ArraySource(Column(name, dtype, (-1,)), rows)

    def _flat(self, chunk: Any, name: str, start: int, dtype: DType) -> Values:
        """The numbers of lists, one list after the other."""
        values = chunk.flatten()
        if values.null_count:
            raise self.file.given.error(f"a list in this or the next {len(chunk)} rows lacks a number", name, start)
        self.file.given.spend(len(values) * dtype.itemsize, name)
        found: Values = values.to_numpy(zero_copy_only=False)
        return found

    def _numbers(self, name: str, dtype: DType) -> Values:
        """Missing numbers are NaN, where there is such a thing."""
        self.file.given.spend(self.rows * dtype.itemsize, name)
        found = np.empty(self.rows, dtype.numpy)
        for start, chunk in self._chunks(name):
            if not dtype.is_float:
                self._present(chunk, name, start)
            found[start : start + len(chunk)] = chunk.to_numpy(zero_copy_only=False)
        return found

    def _text(self, name: str) -> Values:
        found = np.empty(self.rows, object)
        for start, chunk in self._chunks(name):
            self.file.given.spend(chunk.nbytes + _TEXT_OVERHEAD * len(chunk), name)
            try:
                found[start : start + len(chunk)] = chunk.to_pylist()
            except UnicodeDecodeError as error:
                raise self.file.given.error(f"text is no UTF-8: {error}", name, start) from None
        return found

    def _chunks(self, name: str) -> Iterator[tuple[int, Any]]:
        """First row and values of pieces of a column, in order; they make up all the rows."""
        start = 0
        try:
            with self.file.seekable() as stream:
                for batch in arrow().parquet.ParquetFile(stream).iter_batches(_BATCH, columns=[name]):
                    values = batch.column(0)
                    yield start, values.dictionary_decode() if hasattr(values, "dictionary_decode") else values
                    start += len(values)
        except (arrow().ArrowException, *DAMAGE) as error:
            raise self.file.given.error(f"cannot be read: {error}", name) from None
        if start != self.rows:
            raise self.file.given.error(f"{start} rows, but the file says {self.rows}", name)

    def _present(self, chunk: Any, name: str, start: int) -> None:
        if chunk.null_count:
            row = start + chunk.is_null().index(True).as_py()
            raise self.file.given.error("there is no value", name, row)
