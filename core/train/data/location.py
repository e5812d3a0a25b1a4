"""`Location`: a file or folder to read, with a memory budget, since the sizes in its headers cannot be trusted."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from lathe.core.errors import DataError
from lathe.core.train.data.dataset import digest_of_path

DEFAULT_MAX_BYTES = 8 << 30  # default budget of a dataset


@dataclass
class Budget:
    """The memory in bytes that all columns of a dataset may use together. Memory-mapped files do not count."""

    left: int = DEFAULT_MAX_BYTES
    _lock: Lock = field(default_factory=Lock)

    def spend(self, size: int) -> bool:
        """Take `size` bytes from the budget; False if less is left."""
        with self._lock:
            if size > self.left:
                return False
            self.left -= size
            return True


@dataclass(frozen=True)
class Location:
    """A file or folder to open, with the memory budget of its columns.

    `name` is its name in messages; images are resized to `image_size` (height, width).
    """

    path: Path
    name: str
    budget: Budget
    image_size: tuple[int, int] | None = None

    def error(self, message: str, column: str = "", row: int | None = None, line: int | None = None) -> DataError:
        return DataError(message, file=self.name, column=column, row=row, line=line)

    def spend(self, size: int, column: str) -> None:
        """Call before allocating `size` bytes for a column. DataError if the budget has less left."""
        if not self.budget.spend(size):
            message = f"needs {size} bytes of memory, more than the {self.budget.left} bytes left"
            raise self.error(message, column)

    def digest(self) -> str:
        return digest_of_path(self.path)
