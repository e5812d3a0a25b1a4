"""`Budget`: bounds the memory of a dataset's columns, since the sizes in headers of files cannot be trusted."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

DEFAULT_MAX_BYTES = 8 << 30  # default budget of a dataset


@dataclass
class Budget:
    """The memory in bytes that all columns of a dataset may use together. Memory-mapped files do not count."""

    left: int = DEFAULT_MAX_BYTES
    _lock: Lock = field(default_factory=Lock)

    def spend(self, size: int) -> str:
        """Take `size` bytes from the budget; if less is left, take none and return the text of the error."""
        with self._lock:
            if size > self.left:
                return f"needs {size} bytes of memory, more than the {self.left} bytes left"
            self.left -= size
            return ""

    def give_back(self, size: int) -> None:
        with self._lock:
            self.left += size
