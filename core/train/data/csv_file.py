"""CSV files, read in pieces by pyarrow.

A first pass finds what the columns are (whole numbers, numbers or text), so that memory is bounded and errors can name
the line. Values are read when they are asked for, all numbers together: a file of pixels has hundreds of columns.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import IO, Any

import numpy as np

from core.errors import DataError
from core.ir.types import DType
from core.train.data.dataset import Column, Dataset, LazySource, Values
from core.train.data.extra import arrow
from core.train.data.members import DAMAGE
from core.train.data.tables import TableFile

_BLOCK = 8 << 20  # bytes; also the longest line
_MOST_COLUMNS = 1 << 16
_TEXT_OVERHEAD = 64  # bytes that a piece of text takes besides its characters
_DELIMITERS = ",;\t"
_MISSING = ("", "NA", "N/A", "null", "NULL", "None")
_WRONG_FIELDS = re.compile(
    r"Row #(?P<row>\d+): Expected (?P<wanted>\d+) columns, got (?P<came>\d+): (?P<text>.*)", re.S
)
_TOO_LONG = "a line is longer than {} bytes, or quotation marks are not closed"
_WHOLE, _NUMBER, _TEXT = range(3)  # what a column holds; every kind can hold what those before it can


def read_csv(file: TableFile) -> Dataset:
    """A dataset of the columns. DataError for lines with too many or too few fields, or that are too long."""
    table = _Csv(file, *_header(file))
    columns = table.scan()
    sources = {column.name: LazySource(column, table.rows, partial(table.values, column.name)) for column in columns}
    return Dataset(file.given.name, sources, file.given.digest, "csv", line_of=table.line_of)


@dataclass
class _Seen:
    """What a column has held so far, and where that began."""

    kind: int = _WHOLE
    text: tuple[int, str] | None = None  # row and value of the first that is no number
    missing: int | None = None  # row
    some: bool = False
    least: int = 0
    most: int = 0

    def look(self, values: Any, start: int) -> None:
        """At strings, the first of them in row `start`."""
        if self.missing is None and values.null_count:
            self.missing = start + values.is_null().index(True).as_py()
        self.some |= values.null_count < len(values)
        while self.kind < _TEXT and not self._fits(values):
            self.kind += 1
            if self.kind == _TEXT:
                self.text = _first_text(values, start)

    def _fits(self, values: Any) -> bool:
        """Whether all values are numbers of the kind; of whole ones the range is noted."""
        numbers = _cast(values, self.kind)
        if numbers is None:
            return False
        if self.kind == _WHOLE and numbers.null_count < len(numbers):
            ends = arrow().compute.min_max(numbers).as_py()
            self.least, self.most = min(self.least, ends["min"]), max(self.most, ends["max"])
        return True

    @property
    def stored(self) -> np.dtype[np.generic]:
        """What holds the values in memory: pixels need a byte each."""
        if self.dtype is not DType.INT64:
            return self.dtype.numpy
        return np.result_type(np.min_scalar_type(self.least), np.min_scalar_type(self.most))

    @property
    def dtype(self) -> DType:
        if self.kind == _TEXT or not self.some:
            return DType.STRING
        return DType.INT64 if self.kind == _WHOLE and self.missing is None else DType.FLOAT64


@dataclass
class _Csv:
    file: TableFile
    names: list[str]
    has_header: bool
    delimiter: str
    rows: int = 0
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _numbers: dict[str, Values] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def scan(self) -> list[Column]:
        """What the columns are: one look at every value."""
        self._seen = {name: _Seen() for name in self.names}
        for batch in self._batches(dict.fromkeys(self.names, arrow().string())):
            for seen, values in zip(self._seen.values(), batch.columns, strict=True):
                seen.look(values, self.rows)
            self.rows += batch.num_rows
        return [
            Column(name, seen.dtype, note=note)
            for (name, seen), note in zip(self._seen.items(), self._notes(), strict=True)
        ]

    def values(self, name: str) -> Values:
        """All values of a column."""
        if self._seen[name].dtype is DType.STRING:
            return self._text(name)
        with self._lock:
            self._numbers = self._numbers or self._read_numbers()
        return self._numbers[name]

    def line_of(self, row: int) -> int:
        """The line of a row, counted from 1."""
        return self._lines([row]).get(row, row + 1)

    def _read_numbers(self) -> dict[str, Values]:
        """All columns of numbers."""
        stored = {name: seen.stored for name, seen in self._seen.items() if seen.dtype is not DType.STRING}
        self.file.given.spend(self.rows * sum(dtype.itemsize for dtype in stored.values()), "")
        columns = {name: np.empty(self.rows, dtype) for name, dtype in stored.items()}
        types = {name: arrow().float64() if dtype.kind == "f" else arrow().int64() for name, dtype in stored.items()}
        start = 0
        for batch in self._batches(types):
            for array, values in zip(columns.values(), batch.columns, strict=True):
                array[start : start + len(values)] = values.to_numpy(zero_copy_only=False)
            start += batch.num_rows
        return columns

    def _text(self, name: str) -> Values:
        found = np.empty(self.rows, object)
        start = 0
        for batch in self._batches({name: arrow().string()}):
            self.file.given.spend(batch.nbytes + _TEXT_OVERHEAD * batch.num_rows, name)
            found[start : start + batch.num_rows] = _trimmed(batch.column(0)).to_pylist()
            start += batch.num_rows
        return found

    def _batches(self, types: Mapping[str, Any]) -> Iterator[Any]:
        """Record batches of the columns, as these types; blanks around numbers do not matter."""
        pa = arrow()
        parse = pa.csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True)
        options = pa.csv.ReadOptions(
            column_names=self.names, skip_rows=int(self.has_header), block_size=_BLOCK, use_threads=False
        )
        convert = pa.csv.ConvertOptions(
            column_types=types, include_columns=list(types), strings_can_be_null=True, null_values=_MISSING
        )
        try:
            with self.file.stream() as stream:
                yield from pa.csv.open_csv(stream, options, parse, convert)
        except (pa.ArrowInvalid, *DAMAGE) as error:
            raise self._refused(str(error)) from None

    def _refused(self, reason: str) -> DataError:
        """pyarrow's reason as a complaint that names the line."""
        if "straddl" in reason:
            return self.file.given.error(_TOO_LONG.format(_BLOCK))
        fault = _WRONG_FIELDS.search(reason)
        if fault is None:
            return self.file.given.error(f"cannot be read: {reason}")
        row = int(fault["row"]) - 1 - self.has_header
        message = f"{fault['came']} fields, expected {fault['wanted']}: {fault['text'][:60]!r}"
        return self.file.given.error(message, line=self._lines([row]).get(row))

    def _notes(self) -> list[str]:
        """Why columns are not numbers, and where one is missing."""
        rows = [seen.text[0] if seen.text else seen.missing for seen in self._seen.values()]
        lines = self._lines([row for row in rows if row is not None])
        notes = []
        for seen, row in zip(self._seen.values(), rows, strict=True):
            where = "" if row is None else f"line {lines.get(row, row + 1)}"
            notes.append(f"{where}: {seen.text[1][:40]!r} is no number" if seen.text else where and f"{where} is empty")
        return notes

    def _lines(self, rows: Sequence[int]) -> dict[int, int]:
        """Lines of rows, as far as lines end in a line feed: blank ones do not count as rows."""
        wanted = {row + self.has_header for row in rows}
        found = dict[int, int]()
        with self.file.stream() as stream:
            filled = (number for number, line in enumerate(_short_lines(stream), start=1) if line.strip(b"\r\n"))
            for count, number in enumerate(filled):
                if count in wanted:
                    found[count - self.has_header] = number
                if len(found) == len(wanted):
                    break
        return found


def _short_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Lines, or what fits into memory of them."""
    while line := stream.readline(_BLOCK):
        yield line


def _header(file: TableFile) -> tuple[list[str], bool, str]:
    """Names of the columns, whether they stand in the first line, and what separates fields.

    A first line with a number in it is no header, unless it counts the columns: 0, 1, 2 and so on.
    """
    try:
        with file.stream() as stream:
            first = next((line for line in _short_lines(stream) if line.strip(b"\r\n")), b"")
        line = first.decode("utf-8-sig").rstrip("\r\n")
        if not line or len(first) >= _BLOCK:
            raise file.given.error(_TOO_LONG.format(_BLOCK) if line else "is empty")
        delimiter = max(_DELIMITERS, key=line.count)
        fields = [field.strip() for field in next(csv.reader([line], delimiter=delimiter))]
    except (*DAMAGE, csv.Error) as error:
        raise file.given.error(f"cannot be read: {error}") from None
    if len(fields) > _MOST_COLUMNS:
        raise file.given.error(f"{len(fields)} columns, at most {_MOST_COLUMNS}")
    counted = fields == [str(i) for i in range(len(fields))]
    header = counted or not any(map(_is_number, fields))
    names = [(header and field) or f"column{i}" for i, field in enumerate(fields)]
    ((commonest, count),) = Counter(names).most_common(1)
    if count > 1:
        raise file.given.error(f"{count} columns are called '{commonest}'", line=1)
    return names, header, delimiter


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _cast(values: Any, kind: int) -> Any:
    """Strings as numbers, or None when one is none."""
    wanted = arrow().int64() if kind == _WHOLE else arrow().float64()
    for text in (values, _trimmed(values)):
        try:
            return text.cast(wanted)
        except arrow().ArrowInvalid:
            continue
    return None


def _trimmed(values: Any) -> Any:
    return arrow().compute.utf8_trim_whitespace(values)


def _first_text(values: Any, start: int) -> tuple[int, str]:
    """Row and value of the first string that is no number, of strings among which there is one."""
    texts = ((row, text) for row, text in enumerate(values.to_pylist()) if text is not None)
    row, text = next((row, text) for row, text in texts if _cast(values.slice(row, 1), _NUMBER) is None)
    return start + row, text
