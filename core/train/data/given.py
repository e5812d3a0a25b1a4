"""`Given`: a file or folder to be read, and how much it may take: its sizes are what a stranger says."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from core.errors import DataError
from core.train.data.dataset import digest_of_path

MOST_BYTES = 8 << 30


@dataclass
class Budget:
    """Bytes that the columns of one dataset may take in memory, all together. Mapped files cost nothing."""

    left: int = MOST_BYTES
    _lock: Lock = field(default_factory=Lock)

    def spend(self, size: int) -> bool:
        """Take `size` bytes; False when so many are not left."""
        with self._lock:
            if size > self.left:
                return False
            self.left -= size
            return True


@dataclass(frozen=True)
class Given:
    """What to open, and what errors call it. `image_size` is the (height, width) that images are brought to."""

    path: Path
    name: str
    budget: Budget
    image_size: tuple[int, int] | None = None

    def error(self, message: str, column: str = "", row: int | None = None, line: int | None = None) -> DataError:
        return DataError(message, file=self.name, column=column, row=row, line=line)

    def spend(self, size: int, column: str) -> None:
        """Before `size` bytes are taken; DataError when they are more than are left."""
        if not self.budget.spend(size):
            message = f"takes {size} bytes in memory, more than the {self.budget.left} allowed"
            raise self.error(message, column)

    def digest(self) -> str:
        return digest_of_path(self.path)
