"""`Dataset`: named columns of equal length, each from a `Source` that gives the rows asked for."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from core.errors import DataError
from core.ir.types import DType

Rows: TypeAlias = NDArray[np.int64]
Values: TypeAlias = NDArray[Any]
Layout: TypeAlias = Literal["", "HW", "CHW", "HWC"]

_LONGEST_NAME = 1000  # characters, of a column


@dataclass(frozen=True)
class Column:
    """One row of a column: its element type and shape, how an image lies in it, the names of the classes it counts.

    A dimension of -1 is the length of a sequence, which differs from row to row.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...] = ()
    layout: Layout = ""
    classes: tuple[str, ...] | None = None
    note: str = field(default="", compare=False)  # what was found when it was opened: why it is text, say

    @property
    def is_number(self) -> bool:
        return self.dtype is not DType.STRING

    @property
    def is_sequence(self) -> bool:
        return -1 in self.shape

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory, a sequence of any length counting as one element."""
        return math.prod(map(abs, self.shape)) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join('*' if size < 0 else str(size) for size in self.shape)}]"


class Row(Protocol):
    """The type of one row, as a model's input or a column has it."""

    @property
    def dtype(self) -> DType: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class Source(Protocol):
    """Where the rows of one column come from. `take` may be called from several threads at once."""

    @property
    def column(self) -> Column: ...

    def __len__(self) -> int: ...

    def take(self, rows: Rows) -> Values:
        """The rows stacked: [rows, *column.shape]; ragged sequences are an object array of arrays."""
        ...


@dataclass(frozen=True)
class ArraySource:
    """A column that lies in memory, or in a mapped file."""

    column: Column
    array: Values

    def __len__(self) -> int:
        return len(self.array)

    def take(self, rows: Rows) -> Values:
        taken = self.array[rows]
        return taken if taken.dtype.kind == "O" else taken.astype(self.column.dtype.numpy, copy=False)


class LazySource:
    """A column that is read, once, when its first rows are asked for."""

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


class Joined:
    """Several sources of columns that are `alike`, one after the other; numbers have a type that holds them all."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)
        dtype = np.result_type(*(source.column.dtype.numpy for source in sources))
        self.column = replace(sources[0].column, dtype=DType.from_numpy(dtype))
        self.ends = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def take(self, rows: Rows) -> Values:
        which = np.searchsorted(self.ends, rows, side="right")
        shape, dtype = (
            ((), np.dtype(object)) if self.column.is_sequence else (self.column.shape, self.column.dtype.numpy)
        )
        taken = np.empty((len(rows), *shape), dtype)
        for part in np.unique(which).tolist():
            taken[which == part] = self._from(part, rows[which == part])
        return taken

    def _from(self, part: int, rows: Rows) -> Values:
        return self.sources[part].take(rows - (int(self.ends[part - 1]) if part else 0))


@dataclass(frozen=True)
class Dataset:
    """Columns of equal length. `parts` are ranges of rows that the files themselves set apart: train, validation, test.

    `digest` is the sha256 of the content: of the file, or of the names and digests of a folder's files.
    """

    name: str
    sources: Mapping[str, Source]
    fingerprint: Callable[[], str]
    format: str = "arrays"
    parts: Mapping[str, range] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)  # columns that models cannot take, and why
    line_of: Callable[[int], int] | None = None  # of a text file: the line of a row, counted from 1

    def __post_init__(self) -> None:
        lengths = {name: len(source) for name, source in self.sources.items()}
        if not lengths:
            raise DataError("there are no columns", file=self.name)
        if (longest := max(map(len, lengths))) > _LONGEST_NAME:
            raise DataError(f"a column's name has {longest} characters, at most {_LONGEST_NAME}", file=self.name)
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
        """Names of the classes, where one column says so."""
        return next((column.classes for column in self.columns.values() if column.classes), None)

    @cached_property
    def digest(self) -> str:
        return self.fingerprint()

    def __len__(self) -> int:
        return len(next(iter(self.sources.values())))

    def alike(self, other: Dataset) -> bool:
        """Whether rows of another dataset may follow: the same columns, numbers being as good as other numbers."""

        def essence(column: Column) -> Column:
            return replace(column, dtype=DType.FLOAT64 if column.is_number else column.dtype)

        ours, theirs = self.columns.values(), other.columns.values()
        return list(map(essence, ours)) == list(map(essence, theirs))

    def text(self) -> str:
        """The columns and their types."""
        return ", ".join(f"'{name}' {column}" for name, column in self.columns.items())

    def column(self, name: str) -> Column:
        """DataError when there is no such column."""
        if name in self.columns:
            return self.columns[name]
        if name in self.left_out:
            raise self.error(self.left_out[name], name)
        there = ", ".join(f"'{column}'" for column in list(self.columns)[:20])
        raise self.error(f"there is no such column, only {there}", name)

    def error(self, message: str, column: str = "", row: int | None = None) -> DataError:
        """A complaint about this dataset, which names the line where rows are lines."""
        line = self.line_of(row) if self.line_of and row is not None else None
        return DataError(message, file=self.name, column=column, row=row, line=line)

    def place(self, row: int) -> str:
        """What people call a row: its line, or its number."""
        return f"line {self.line_of(row)}" if self.line_of else f"row {row}"

    def take(self, rows: Rows, columns: Iterable[str] | None = None) -> dict[str, Values]:
        """The given rows of all columns, or of some. DataError for a value that cannot be read."""
        names = list(self.sources if columns is None else columns)
        return {name: self.sources[name].take(rows) for name in names}


def from_arrays(arrays: Mapping[str, Values], name: str = "arrays") -> Dataset:
    """A dataset of arrays in memory, their first axis counting rows."""
    sources = {key: ArraySource(column_of(key, array, name), np.asarray(array)) for key, array in arrays.items()}
    return Dataset(name, sources, lambda: _digest_of_arrays(arrays))


def column_of(name: str, array: Values, file: str) -> Column:
    """The column that an array makes. DataError for one without rows or of a type that models cannot take."""
    if array.ndim == 0:
        raise DataError("the array has rank 0, expected rows", file=file, column=name)
    if array.dtype.kind not in "biufUO":
        raise DataError(f"arrays of {array.dtype} are not read, expected numbers or text", file=file, column=name)
    shape = tuple(array.shape[1:])
    return Column(name, DType.from_numpy(array.dtype.newbyteorder("=")), shape, layout_of(shape))


def layout_of(shape: tuple[int, ...]) -> Layout:
    """How rows of this shape may be images: [H, W], or three axes of which one counts 1, 3 or 4 channels."""
    if len(shape) == 2:
        return "HW"
    if len(shape) == 3:
        return "CHW" if shape[0] in (1, 3, 4) else "HWC" if shape[2] in (1, 3, 4) else ""
    return ""


def joined(name: str, parts: Mapping[str, Dataset], fingerprint: Callable[[], str]) -> Dataset:
    """One dataset of parts that their files set apart; one part alone is the dataset. DataError when columns differ."""
    first, *others = parts.values()
    if not others:
        return first
    for part, other in zip(list(parts)[1:], others, strict=True):
        if not first.alike(other):
            message = f"part '{part}' has {other.text()}, but part '{next(iter(parts))}' {first.text()}"
            raise DataError(message, file=name)
    sources: dict[str, Source] = {key: Joined([part.sources[key] for part in parts.values()]) for key in first.sources}
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
    """sha256 of a file; of a folder, that of its files' relative names and digests in the order of their names."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    files = sorted((file.relative_to(path).as_posix(), file) for file in path.rglob("*") if file.is_file())
    lines = [f"{digest_of_path(file)}  {name}\n" for name, file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
