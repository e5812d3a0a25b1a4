"""How much a dataset may take: files are uploaded by strangers, and say what they like about their sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

from core.errors import DataError

MOST_BYTES = 8 << 30
MOST_PIXELS = 1 << 26  # of one image


@dataclass
class Budget:
    """Bytes that the columns of one dataset may take in memory, all together. Mapped files cost nothing."""

    left: int = MOST_BYTES
    _lock: Lock = field(default_factory=Lock)

    def spend(self, size: int, file: str, column: str = "") -> None:
        """Take `size` bytes; DataError when so many are not left."""
        with self._lock:
            if size > self.left:
                raise DataError(
                    f"takes {size} bytes in memory, more than the {self.left} allowed", file=file, column=column
                )
            self.left -= size
