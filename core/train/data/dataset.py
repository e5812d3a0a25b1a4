"""`Dataset`: named columns of equal length, each with a `Source` from which rows are read."""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import DataError
from lathe.core.ir.types import DType
from lathe.core.train.data.budget import Budget

Rows: TypeAlias = NDArray[np.int64]
Values: TypeAlias = NDArray[Any]
Layout: TypeAlias = Literal["", "HW", "CHW", "HWC"]

_MAX_NAME_LENGTH = 1000  # most characters of a column's name


@dataclass(frozen=True)
class Column:
    """The type of a column's rows: element type, shape, image layout, and class names if the values are class indices.

    A dimension of -1 is the length of a sequence, which varies between rows.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...] = ()
    layout: Layout = ""
    classes: tuple[str, ...] | None = None
    note: str = field(default="", compare=False)  # a finding from opening the file, such as why the column is text

    @property
    def is_number(self) -> bool:
        return self.dtype is not DType.STRING

    @property
    def is_sequence(self) -> bool:
        return -1 in self.shape

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory. A sequence of variable length counts as one element."""
        return math.prod(map(abs, self.shape)) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join('*' if size < 0 else str(size) for size in self.shape)}]"


class Row(Protocol):
    """The type of one row of a column or of a model's input."""

    @property
    def dtype(self) -> DType: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class Source(Protocol):
    """Reads the rows of one column. `take` is thread-safe."""

    @property
    def column(self) -> Column: ...

    def __len__(self) -> int: ...

    def take(self, rows: Rows) -> Values:
        """The rows with these numbers, as a new array [rows, *column.shape] of the column's dtype.

        Text is an object array of `str`, with None for a missing one. Sequences of variable length are an object array
        of arrays. DataError for a value that cannot be read.
        """
        ...


@dataclass(frozen=True)
class ArraySource:
    """A column in memory or in a memory-mapped file."""

    column: Column
    array: Values

    def __len__(self) -> int:
        return len(self.array)

    def take(self, rows: Rows) -> Values:
        values = self.array[rows]
        return values if values.dtype.kind == "O" else values.astype(self.column.dtype.numpy, copy=False)


class LazySource:
    """A column that is read into memory by the first `take`."""

    def __init__(self, column: Column, length: int, load: Callable[[], Values]) -> None:
        self.column = column
        self._length = length
        self._load = load
        self._lock = Lock()
        self._loaded: ArraySource | None = None

    def __len__(self) -> int:
        return self._length

    def take(self, rows: Rows) -> Values:
        with self._lock:
            if self._loaded is None:
                self._loaded = ArraySource(self.column, self._load())
        return self._loaded.take(rows)


class ConcatSource:
    """The rows of several sources one after the other; their columns may differ in the numeric type only.

    The dtype of the result is NumPy's common type of all sources (`np.result_type`).
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)
        dtype = np.result_type(*(source.column.dtype.numpy for source in sources))
        self.column = replace(sources[0].column, dtype=DType.from_numpy(dtype))
        self.ends = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def take(self, rows: Rows) -> Values:
        source_of_row = np.searchsorted(self.ends, rows, side="right")
        shape, dtype = (
            ((), np.dtype(object)) if self.column.is_sequence else (self.column.shape, self.column.dtype.numpy)
        )
        values = np.empty((len(rows), *shape), dtype)
        for part in np.unique(source_of_row).tolist():
            values[source_of_row == part] = self._from(part, rows[source_of_row == part])
        return values

    def _from(self, part: int, rows: Rows) -> Values:
        return self.sources[part].take(rows - (int(self.ends[part - 1]) if part else 0))


@dataclass(frozen=True)
class Dataset:
    """Columns of equal length.

    `parts` are the ranges of rows of a split that the files define themselves: `train`, `validation`, `test`; empty if
    they define none. `digest`, which `fingerprint` computes on first use, is the SHA-256 of the content: of the file,
    of the names and digests of a folder's files, or of the names, types and elements of arrays.

    DataError without columns, without rows, for columns of different lengths, or for a column's name of more than 1000
    characters.
    """

    name: str
    sources: Mapping[str, Source]
    fingerprint: Callable[[], str]
    format: str = "arrays"
    parts: Mapping[str, range] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)  # columns that models cannot take: name and reason
    line_of: Callable[[int], int] | None = None  # in a text file the line of a row, counted from 1
    budget: Budget | None = None  # of the memory of columns; None is unlimited

    def __post_init__(self) -> None:
        lengths = {name: len(source) for name, source in self.sources.items()}
        if not lengths:
            raise DataError("columns: expected at least one, got none", file=self.name)
        if (longest := max(map(len, lengths))) > _MAX_NAME_LENGTH:
            message = f"a column's name has {longest} characters, expected at most {_MAX_NAME_LENGTH}"
            raise DataError(message, file=self.name)
        if len(set(lengths.values())) > 1:
            text = ", ".join(f"'{name}' {length}" for name, length in lengths.items())
            raise DataError(f"columns differ in their number of rows: {text}", file=self.name)
        if not len(self):
            raise DataError("there are no rows", file=self.name)

    @cached_property
    def columns(self) -> dict[str, Column]:
        return {name: source.column for name, source in self.sources.items()}

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The class names of the first column that has any; None without one."""
        return next((column.classes for column in self.columns.values() if column.classes), None)

    @cached_property
    def digest(self) -> str:
        return self.fingerprint()

    def __len__(self) -> int:
        return len(next(iter(self.sources.values())))

    def has_same_columns(self, other: Dataset) -> bool:
        """Whether `other` has the same columns in the same order, so that its rows can be appended.

        Numeric types may differ; shapes, layouts and class names may not.
        """

        def comparable(column: Column) -> Column:
            return replace(column, dtype=DType.FLOAT64 if column.is_number else column.dtype)

        own, others = self.columns.values(), other.columns.values()
        return list(map(comparable, own)) == list(map(comparable, others))

    def text(self) -> str:
        """The columns and their types, for messages."""
        return ", ".join(f"'{name}' {column}" for name, column in self.columns.items())

    def column(self, name: str) -> Column:
        """The column of this name. DataError if there is none, or if it was left out, with the reason."""
        if name in self.columns:
            return self.columns[name]
        if name in self.left_out:
            raise self.error(self.left_out[name], name)
        known = ", ".join(f"'{column}'" for column in list(self.columns)[:20])
        raise self.error(f"there is no such column, only {known}", name)

    def error(self, message: str, column: str = "", row: int | None = None) -> DataError:
        """An error about this dataset. It names the line of the row if the file is a text file."""
        line = self.line_of(row) if self.line_of and row is not None else None
        return DataError(message, file=self.name, column=column, row=row, line=line)

    def place(self, row: int) -> str:
        """The place of a row for messages: `line 7` in a text file, otherwise `row 5`."""
        return f"line {self.line_of(row)}" if self.line_of else f"row {row}"

    def empty(self, shape: tuple[int, ...], dtype: DType, column: str = "") -> Values:
        """An uninitialized array for values of a column; until it is freed, its bytes count towards the budget.

        DataError if less memory is left.
        """
        size = math.prod(shape) * dtype.itemsize
        if self.budget is None:
            return np.empty(shape, dtype.numpy)
        if refusal := self.budget.spend(size):
            raise self.error(refusal, column)
        array = np.empty(shape, dtype.numpy)
        weakref.finalize(array, self.budget.give_back, size).atexit = False
        return array

    def take(self, rows: Rows, columns: Iterable[str] | None = None) -> dict[str, Values]:
        """The given rows of `columns`, by default of all, as arrays by name.

        DataError for a value that cannot be read.
        """
        names = list(self.sources if columns is None else columns)
        return {name: self.sources[name].take(rows) for name in names}


def from_arrays(arrays: Mapping[str, Values], name: str = "arrays") -> Dataset:
    """A dataset of arrays in memory, whose first axis is the rows. The arrays are not copied.

    `name` is the dataset's name in error messages. DataError for an array that `column_of` refuses, and as for
    `Dataset`.
    """
    sources = {key: ArraySource(column_of(key, array, name), np.asarray(array)) for key, array in arrays.items()}
    return Dataset(name, sources, lambda: _digest_of_arrays(arrays))


def column_of(name: str, array: Values, file: str) -> Column:
    """The column of an array [rows, ...]. DataError for rank 0, or if elements are no numbers, booleans or text."""
    if array.ndim == 0:
        raise DataError("the array has rank 0, expected an axis of rows", file=file, column=name)
    if array.dtype.kind not in "biufUO":
        raise DataError(f"expected numbers or text, got an array of {array.dtype}", file=file, column=name)
    shape = tuple(array.shape[1:])
    return Column(name, DType.from_numpy(array.dtype.newbyteorder("=")), shape, layout_of(shape))


def layout_of(shape: tuple[int, ...]) -> Layout:
    """The image layout of rows of this shape: HW, or CHW or HWC with 1, 3 or 4 channels; empty if it is no image."""
    if len(shape) == 2:
        return "HW"
    if len(shape) == 3:
        return "CHW" if shape[0] in (1, 3, 4) else "HWC" if shape[2] in (1, 3, 4) else ""
    return ""


def join_parts(name: str, parts: Mapping[str, Dataset], fingerprint: Callable[[], str]) -> Dataset:
    """The dataset of the rows of several parts, whose ranges are its `parts`; a single part is returned as it is.

    A single part has no `parts` then, even if it is called `train`. DataError if the columns of the parts differ.
    `fingerprint` computes the digest of the whole.
    """
    first, *others = parts.values()
    if not others:
        return first
    for part, other in zip(list(parts)[1:], others, strict=True):
        if not first.has_same_columns(other):
            message = f"part '{part}' has {other.text()}, but part '{next(iter(parts))}' has {first.text()}"
            raise DataError(message, file=name)
    sources: dict[str, Source] = {
        key: ConcatSource([part.sources[key] for part in parts.values()]) for key in first.sources
    }
    ends = np.cumsum([0, *(len(part) for part in parts.values())]).tolist()
    ranges = {part: range(start, end) for part, start, end in zip(parts, ends[:-1], ends[1:], strict=True)}
    return replace(first, name=name, sources=sources, fingerprint=fingerprint, parts=ranges)


def _digest_of_arrays(arrays: Mapping[str, Values]) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(
            repr(array.tolist()).encode() if array.dtype.kind == "O" else np.ascontiguousarray(array).tobytes()
        )
    return digest.hexdigest()


def digest_of_path(path: Path) -> str:
    """The SHA-256 of a file; for a folder, of its files' relative names and digests in the order of names."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    files = sorted((file.relative_to(path).as_posix(), file) for file in path.rglob("*") if file.is_file())
    lines = [f"{digest_of_path(file)}  {name}\n" for name, file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
