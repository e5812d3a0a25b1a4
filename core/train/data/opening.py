"""`open_dataset`: which format a file or folder has, and its reader."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from core.errors import DataError
from core.train.data.dataset import Dataset
from core.train.data.limits import MOST_BYTES, Budget
from core.train.data.npz import open_npz

Format: TypeAlias = Literal["npz"]

_READERS: dict[str, Callable[[Path, Budget], Dataset]] = {"npz": open_npz}


def open_dataset(path: str | Path, format: Format | None = None, *, memory: int = MOST_BYTES) -> Dataset:
    """Open a file or folder; its content decides the format when none is given.

    `memory` bounds the bytes that columns may take when they are read. DataError, naming file, row and column, for
    anything that cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise DataError("there is no such file or folder", file=str(path))
    if format is not None and format not in _READERS:
        raise DataError(f"format '{format}' is unknown, expected one of {', '.join(get_args(Format))}", file=path.name)
    try:
        return _READERS[format or _guess(path)](path, Budget(memory))
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(f"cannot be read: {error}", file=path.name) from None


def _guess(path: Path) -> str:
    if path.is_file() and zipfile.is_zipfile(path):
        return "npz"
    raise DataError(f"holds none of the formats {', '.join(_READERS)}", file=path.name)
