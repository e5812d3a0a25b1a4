"""A file of weights in memory without a copy: the operating system reads its pages when they are used."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lathe.core.errors import ModelError
from lathe.core.files import open_plain


def mapped_bytes(path: Path) -> NDArray[np.uint8]:
    """The bytes of a plain file as a read-only array, mapped into memory.

    ModelError if the file is missing, empty, unreadable, or not a plain file. The mapping ends with the last array that
    refers to it. If another process truncates the file while it is mapped, reading it ends this process (SIGBUS).
    """
    try:
        with open_plain(path) as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except ValueError:
        raise ModelError("the file is empty", where=path.name) from None
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", where=path.name) from None


def check_ranges(ranges: Iterable[tuple[int, int, str]], size: int, where: str) -> None:
    """ModelError unless the ranges (start, end, name of a tensor) lie in `size` bytes, and no two of them overlap."""
    last, owner = 0, ""
    for start, end, name in sorted(ranges):
        if not 0 <= start <= end <= size:
            raise ModelError(f"tensor '{name}': bytes {start} to {end} of {size} bytes of data", where=where)
        if start < last and start < end:
            raise ModelError(f"tensor '{name}' overlaps tensor '{owner}'", where=where)
        if end > last:
            last, owner = end, name
