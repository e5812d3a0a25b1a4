"""`open_dataset`: detects the format of a file or folder and opens it with the reader for the format."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from lathe.core.errors import DataError
from lathe.core.train.data import idx, images, tables
from lathe.core.train.data.budget import DEFAULT_MAX_BYTES, Budget
from lathe.core.train.data.csv_file import read_csv
from lathe.core.train.data.dataset import Dataset
from lathe.core.train.data.location import Location
from lathe.core.train.data.members import DAMAGE_ERRORS, Members, members_of
from lathe.core.train.data.npz import open_npz
from lathe.core.train.data.parquet import read_parquet
from lathe.core.train.data.text_file import (
    LINES_SUFFIXES,
    TEXT_SUFFIXES,
    is_documents,
    is_json_lines,
    open_json_lines,
    open_text,
)

Format: TypeAlias = Literal["npz", "idx", "csv", "parquet", "images", "text", "jsonl"]

DOCUMENT_FORMATS = frozenset({"text", "jsonl"})  # their rows are documents, which only language models learn from

_MAGIC = {b"PAR1": "parquet", b"\x1f\x8b": "csv"}
# Text files with these suffixes are taken as CSV. Uploads have no suffix.
_TEXT_SUFFIXES = frozenset({"", ".csv", ".tsv", ".tab", ".txt", ".text", ".data", ".dat", ".test", ".train"})
_SNIFFED_BYTES = 1 << 16  # bytes that are searched for zero bytes to decide whether a file is text


def open_dataset(
    path: str | Path,
    format: Format | None = None,
    *,
    name: str | None = None,
    image_size: tuple[int, int] | None = None,
    memory: int = DEFAULT_MAX_BYTES,
) -> Dataset:
    """Open a file or folder. Without `format` the format is detected from the content.

    A missing number is NaN in a column of floating-point numbers (of CSV also one of whole numbers), a missing text
    None. In Parquet a missing integer or boolean is a DataError when its column is first read, a missing list at once.

    `name` is the name of the dataset in messages, by default that of the file. Image files are resized to `image_size`
    (height, width). `memory` bounds the bytes of columns in memory; values are mostly read later, by `take`, and a
    bound that is exceeded is a DataError there. DataError if the data cannot be read; the message names the file and,
    where known, row and column.
    """
    path = Path(path)
    location = Location(path, name or path.name, Budget(memory), image_size)
    if not path.exists():
        raise location.error(f"there is no file or folder {path}")
    if format is not None and format not in get_args(Format):
        raise location.error(f"format: expected one of {', '.join(get_args(Format))}, got '{format}'")
    try:
        return replace(_READERS[format or _detect(location)](location), budget=location.budget)
    except DAMAGE_ERRORS as error:
        raise location.error(f"cannot be read: {error}") from None


def _detect(location: Location) -> str:
    """The format by content: the names of the files in a folder or archive, the first bytes of another file.

    DataError if it is unknown, or if a text file has a suffix that is not one of a table.
    """
    if location.path.is_dir() or zipfile.is_zipfile(location.path):
        return _detect_members(location, members_of(location.path))
    with location.path.open("rb") as file:
        head = file.read(_SNIFFED_BYTES)
    for magic, format in _MAGIC.items():
        if head.startswith(magic):
            return format
    suffix = location.path.suffix.lower()
    if suffix in LINES_SUFFIXES or (not suffix and is_json_lines(head)):
        return "jsonl"
    if suffix in TEXT_SUFFIXES and suffix not in _TEXT_SUFFIXES:
        return "text"
    if suffix not in _TEXT_SUFFIXES:
        raise _unknown(location, f'; `format = "csv"` in a recipe\'s [data] reads a {location.path.suffix} file as CSV')
    if head and b"\0" not in head:
        return "csv"
    raise _unknown(location)


def _detect_members(location: Location, members: Members) -> str:
    if location.path.is_file() and all(name.endswith(".npy") for name in members.names):
        return "npz"
    if idx.is_idx(members):
        return "idx"
    if images.is_images(members):
        return "images"
    if documents := is_documents(members):
        return documents
    table = tables.format_of(members)
    if table is None:
        raise _unknown(location)
    return table


def check_format(path: Path) -> None:
    """Check that the format of a file or folder is known, without reading values; otherwise DataError.

    A folder is uploaded as an archive, so a folder of .npy files counts as .npz. OSError or BadZipFile for a path that
    cannot be read.
    """
    names = members_of(path).names if path.is_dir() else ()
    if not names or not all(name.endswith(".npy") for name in names):
        _detect(Location(path, path.name, Budget(DEFAULT_MAX_BYTES)))


def _unknown(location: Location, hint: str = "") -> DataError:
    known = "NumPy arrays (.npz), IDX files, CSV, Parquet, JSON Lines, folders of images or text files"
    return location.error(f"unknown format, expected {known}{hint}")


def _with_members(reader: Callable[[Location, Members], Dataset]) -> Callable[[Location], Dataset]:
    return lambda location: reader(location, members_of(location.path))


_READERS: dict[str, Callable[[Location], Dataset]] = {
    "npz": open_npz,
    "idx": _with_members(idx.open_idx),
    "images": _with_members(images.open_images),
    "csv": lambda location: tables.open_tables(location, read_csv),
    "parquet": lambda location: tables.open_tables(location, read_parquet),
    "text": open_text,
    "jsonl": open_json_lines,
}
