"""CSV files, read in chunks by pyarrow.

A first pass over the file counts its rows and infers the types of its columns (whole numbers, numbers or text), so that
the memory for values is known before they are read. Values are read on first use, and all numeric columns in one pass,
since a file of pixels has hundreds.
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

from lathe.core.errors import DataError
from lathe.core.ir.types import DType
from lathe.core.train.data.dataset import Column, Dataset, LazySource, Values
from lathe.core.train.data.members import DAMAGE_ERRORS
from lathe.core.train.data.optional_packages import arrow
from lathe.core.train.data.tables import TableFile

_BLOCK = 8 << 20  # bytes per chunk; also the most bytes of a line
_MAX_COLUMNS = 1 << 16
_TEXT_OVERHEAD = 64  # approximate bytes of a Python string besides its characters
_DELIMITERS = ",;\t"
_MISSING = ("", "NA", "N/A", "null", "NULL", "None")
_WRONG_FIELDS = re.compile(
    r"Row #(?P<row>\d+): Expected (?P<wanted>\d+) columns, got (?P<came>\d+): (?P<text>.*)", re.S
)
_TOO_LONG = "a line is longer than {} bytes, or a quotation mark is not closed"
_BOM = b"\xef\xbb\xbf"
_WHOLE, _NUMBER, _TEXT = range(3)  # kinds of columns; each kind can hold the values of the kinds before it


def read_csv(file: TableFile) -> Dataset:
    """A dataset of the columns: whole numbers are int64, other numbers float64, other values text.

    Whole numbers with missing values are float64, too; a missing number is NaN, a missing text None. A column without
    any value is text. Reads the whole file once for the types; `take` reads it again. DataError for a file that cannot
    be read or has no rows, a line with too many or too few fields, a line of more than 8 MiB, or a header that
    `_header` refuses.
    """
    table = _Csv(file, *_header(file))
    columns = table.scan()
    sources = {column.name: LazySource(column, table.rows, partial(table.values, column.name)) for column in columns}
    return Dataset(file.location.name, sources, file.location.digest, "csv", line_of=table.line_of)


@dataclass
class _Inference:
    """The inferred type of a column from its values so far."""

    kind: int = _WHOLE
    text: tuple[int, str] | None = None  # row and value of the first value that is not a number
    missing: int | None = None  # row of the first missing value
    some: bool = False  # whether any value is present
    least: int = 0
    most: int = 0

    def update(self, values: Any, start: int) -> None:
        """Take further values of the column into account.

        `values`: an Arrow array of strings, in which missing values are null. `start`: the row of its first element.
        """
        if self.missing is None and values.null_count:
            self.missing = start + values.is_null().index(True).as_py()
        self.some |= values.null_count < len(values)
        while self.kind < _TEXT and not self._fits(values):
            self.kind += 1
            if self.kind == _TEXT:
                self.text = _first_text(values, start)

    def _fits(self, values: Any) -> bool:
        """Whether all present values are numbers of the kind inferred so far. Updates the range of whole numbers."""
        numbers = _cast(values, self.kind)
        if numbers is None:
            return False
        if self.kind == _WHOLE and numbers.null_count < len(numbers):
            ends = arrow().compute.min_max(numbers).as_py()
            self.least, self.most = min(self.least, ends["min"]), max(self.most, ends["max"])
        return True

    @property
    def stored_dtype(self) -> np.dtype[np.generic]:
        """The dtype of the array in memory: of int64 columns the smallest that fits, such as uint8 for pixels."""
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
    """A file whose first line with text is the line `first_line`, counted from 1."""

    file: TableFile
    names: list[str]
    has_header: bool
    delimiter: str
    first_line: int
    rows: int = 0
    _inferred: dict[str, _Inference] = field(default_factory=dict)
    _numbers: dict[str, Values] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def scan(self) -> list[Column]:
        """Infer the types of the columns in one pass over all values. Returns the columns, and counts the rows."""
        self._inferred = {name: _Inference() for name in self.names}
        for batch in self._batches(dict.fromkeys(self.names, arrow().string())):
            for inference, values in zip(self._inferred.values(), batch.columns, strict=True):
                inference.update(values, self.rows)
            self.rows += batch.num_rows
        return [
            Column(name, inference.dtype, note=note)
            for (name, inference), note in zip(self._inferred.items(), self._notes(), strict=True)
        ]

    def values(self, name: str) -> Values:
        """All values of a column [rows]. The first call for a numeric column reads and keeps all numeric columns."""
        if self._inferred[name].dtype is DType.STRING:
            return self._text(name)
        with self._lock:
            self._numbers = self._numbers or self._read_numbers()
        return self._numbers[name]

    def line_of(self, row: int) -> int:
        """The line number of a row, counted from 1. Reads the file up to that line."""
        return self._lines([row]).get(row, row + 1)

    def _read_numbers(self) -> dict[str, Values]:
        """The values of all numeric columns, read in one pass."""
        stored = {
            name: inference.stored_dtype
            for name, inference in self._inferred.items()
            if inference.dtype is not DType.STRING
        }
        self.file.location.spend(self.rows * sum(dtype.itemsize for dtype in stored.values()), "")
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
            self.file.location.spend(batch.nbytes + _TEXT_OVERHEAD * batch.num_rows, name)
            found[start : start + batch.num_rows] = _trim(batch.column(0)).to_pylist()
            start += batch.num_rows
        return found

    def _batches(self, types: Mapping[str, Any]) -> Iterator[Any]:
        """Arrow record batches of the columns in `types`, converted to these types. Blanks around numbers are ignored.

        DataError for a file that cannot be read or parsed.
        """
        pa = arrow()
        parse = pa.csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True)
        options = pa.csv.ReadOptions(
            column_names=self.names, skip_rows=self._skipped_lines, block_size=_BLOCK, use_threads=False
        )
        convert = pa.csv.ConvertOptions(
            column_types=types, include_columns=list(types), strings_can_be_null=True, null_values=_MISSING
        )
        try:
            with self.file.stream() as stream:
                yield from pa.csv.open_csv(stream, options, parse, convert)
        except (pa.ArrowInvalid, *DAMAGE_ERRORS) as error:
            raise self._error(str(error)) from None

    @property
    def _skipped_lines(self) -> int:
        """The number of lines up to the header, which pyarrow skips; blank lines among them count for it."""
        return self.first_line if self.has_header else 0

    def _error(self, reason: str) -> DataError:
        """The DataError for a failure of pyarrow; it names the line if the message `reason` names a row."""
        if "straddl" in reason:
            return self.file.location.error(_TOO_LONG.format(_BLOCK))
        fault = _WRONG_FIELDS.search(reason)
        if fault is None:
            return self.file.location.error(f"cannot be read: {reason}")
        row = int(fault["row"]) - 1 - self._skipped_lines
        message = f"{fault['came']} fields, expected {fault['wanted']}: {fault['text'][:60]!r}"
        return self.file.location.error(message, line=self._lines([row]).get(row))

    def _notes(self) -> list[str]:
        """For each column why it is text, or where its first missing value is; "" without either."""
        rows = [inference.text[0] if inference.text else inference.missing for inference in self._inferred.values()]
        lines = self._lines([row for row in rows if row is not None])
        notes = []
        for inference, row in zip(self._inferred.values(), rows, strict=True):
            where = "" if row is None else f"line {lines.get(row, row + 1)}"
            notes.append(
                f"{where}: {inference.text[1][:40]!r} is not a number"
                if inference.text
                else where and f"{where} is empty"
            )
        return notes

    def _lines(self, rows: Sequence[int]) -> dict[int, int]:
        """The line number of each of these rows, counted from 1. Blank lines are no rows. Left out are rows not found.

        Lines are taken to end at each line feed, so line feeds within quotation marks shift the numbers.
        """
        wanted = {row + self.has_header for row in rows}
        found = dict[int, int]()
        with self.file.stream() as stream:
            filled = (number for number, line in enumerate(_short_lines(stream), start=1) if not _is_blank(line))
            for count, number in enumerate(filled):
                if count in wanted:
                    found[count - self.has_header] = number
                if len(found) == len(wanted):
                    break
        return found


def _short_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """The lines of a stream; a line of more than `_BLOCK` bytes is split."""
    while line := stream.readline(_BLOCK):
        yield line


def _is_blank(line: bytes) -> bool:
    return not line.removeprefix(_BOM).strip(b"\r\n")


def _header(file: TableFile) -> tuple[list[str], bool, str, int]:
    """Reads the first line with text; returns the columns' names, whether it is a header, its delimiter and its number.

    A first line with a number in it is data, not a header, unless it numbers the columns 0, 1, 2 and so on. Columns
    without a name are called `column0`, `column1` and so on. DataError for an empty or unreadable file, a line that is
    too long, too many columns, or two of the same name.
    """
    try:
        with file.stream() as stream:
            lines = enumerate(_short_lines(stream), start=1)
            number, first = next((found for found in lines if not _is_blank(found[1])), (0, b""))
        line = first.decode("utf-8-sig").rstrip("\r\n")
        if not line or len(first) >= _BLOCK:
            raise file.location.error(_TOO_LONG.format(_BLOCK) if line else "is empty")
        delimiter = max(_DELIMITERS, key=line.count)
        fields = [field.strip() for field in next(csv.reader([line], delimiter=delimiter))]
    except (*DAMAGE_ERRORS, csv.Error) as error:
        raise file.location.error(f"cannot be read: {error}") from None
    if len(fields) > _MAX_COLUMNS:
        raise file.location.error(f"expected at most {_MAX_COLUMNS} columns, got {len(fields)}")
    counted = fields == [str(i) for i in range(len(fields))]
    header = counted or not any(map(_is_number, fields))
    names = [(header and field) or f"column{i}" for i, field in enumerate(fields)]
    ((commonest, count),) = Counter(names).most_common(1)
    if count > 1:
        raise file.location.error(f"{count} columns are named '{commonest}'", line=number)
    return names, header, delimiter, number


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _cast(values: Any, kind: int) -> Any:
    """The strings, trimmed of blanks, as an Arrow array of numbers of the kind; None if one is no such number."""
    target_type = arrow().int64() if kind == _WHOLE else arrow().float64()
    for text in (values, _trim(values)):
        try:
            return text.cast(target_type)
        except arrow().ArrowInvalid:
            continue
    return None


def _trim(values: Any) -> Any:
    return arrow().compute.utf8_trim_whitespace(values)


def _first_text(values: Any, start: int) -> tuple[int, str]:
    """The row and the value of the first string that is no number. `start`: the row of the first value.

    There must be such a string.
    """
    texts = ((row, text) for row, text in enumerate(values.to_pylist()) if text is not None)
    row, text = next((row, text) for row, text in texts if _cast(values.slice(row, 1), _NUMBER) is None)
    return start + row, text
