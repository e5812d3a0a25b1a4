"""`Location`: a file or folder to read, with a memory budget, since the sizes in its headers cannot be trusted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lathe.core.errors import DataError
from lathe.core.train.data.budget import Budget
from lathe.core.train.data.dataset import digest_of_path


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
        if refusal := self.budget.spend(size):
            raise self.error(refusal, column)

    def digest(self) -> str:
        return digest_of_path(self.path)
