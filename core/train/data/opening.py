"""`open_dataset`: which format a file or folder has, and its reader."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from core.errors import DataError
from core.train.data import idx, images, tables
from core.train.data.csv_file import read_csv
from core.train.data.dataset import Dataset
from core.train.data.given import MOST_BYTES, Budget, Given
from core.train.data.members import DAMAGE, Members, members_of
from core.train.data.npz import open_npz
from core.train.data.parquet import read_parquet

Format: TypeAlias = Literal["npz", "idx", "csv", "parquet", "images"]

_MAGIC = {b"PAR1": "parquet", b"\x1f\x8b": "csv"}
# Endings of files that text in them makes a table. Uploads have none.
_TABLES = frozenset({"", ".csv", ".tsv", ".tab", ".txt", ".text", ".data", ".dat", ".test", ".train"})
_TEXT = 1 << 16  # bytes that are looked at to see whether a file is text


def open_dataset(
    path: str | Path,
    format: Format | None = None,
    *,
    name: str | None = None,
    image_size: tuple[int, int] | None = None,
    memory: int = MOST_BYTES,
) -> Dataset:
    """Open a file or folder; its content decides the format when none is given.

    `name` is what errors call it, `image_size` (height, width) what image files are brought to. `memory` bounds the
    bytes that columns may take when they are read. DataError, naming file, row and column, for what cannot be read.
    """
    path = Path(path)
    given = Given(path, name or path.name, Budget(memory), image_size)
    if not path.exists():
        raise given.error(f"there is no file or folder {path}")
    if format is not None and format not in get_args(Format):
        raise given.error(f"format '{format}' is unknown, expected one of {', '.join(get_args(Format))}")
    try:
        return _READERS[format or _guess(given)](given)
    except DAMAGE as error:
        raise given.error(f"cannot be read: {error}") from None


def _guess(given: Given) -> str:
    """The format, by content: names of files in folders and archives, the first bytes of others."""
    if given.path.is_dir() or zipfile.is_zipfile(given.path):
        return _guess_members(given, members_of(given.path))
    with given.path.open("rb") as file:
        head = file.read(_TEXT)
    for magic, format in _MAGIC.items():
        if head.startswith(magic):
            return format
    if given.path.suffix.lower() not in _TABLES:
        raise _unknown(given, f'; `format = "csv"` in a recipe\'s [data] reads a {given.path.suffix} file as CSV')
    if head and b"\0" not in head:
        return "csv"
    raise _unknown(given)


def _guess_members(given: Given, members: Members) -> str:
    if given.path.is_file() and all(name.endswith(".npy") for name in members.names):
        return "npz"
    if idx.is_idx(members):
        return "idx"
    if images.is_images(members):
        return "images"
    table = tables.format_of(members)
    if table is None:
        raise _unknown(given)
    return table


def check_format(path: Path) -> None:
    """Raise DataError for a file or folder that is of no known format as it is uploaded: a folder as an archive, which
    makes .npz of .npy files. Its values are not looked at."""
    names = members_of(path).names if path.is_dir() else ()
    if not names or not all(name.endswith(".npy") for name in names):
        _guess(Given(path, path.name, Budget(MOST_BYTES)))


def _unknown(given: Given, hint: str = "") -> DataError:
    known = "NumPy arrays (.npz), IDX files, CSV, Parquet, folders of images"
    return given.error(f"is of none of the formats that are read: {known}{hint}")


def _with_members(reader: Callable[[Given, Members], Dataset]) -> Callable[[Given], Dataset]:
    return lambda given: reader(given, members_of(given.path))


_READERS: dict[str, Callable[[Given], Dataset]] = {
    "npz": open_npz,
    "idx": _with_members(idx.open_idx),
    "images": _with_members(images.open_images),
    "csv": lambda given: tables.open_tables(given, read_csv),
    "parquet": lambda given: tables.open_tables(given, read_parquet),
}
