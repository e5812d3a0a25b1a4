"""Values that stay on a device between two parts of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from core.runtime.device import Device


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes of a value in a device's memory, which stay as they are as long as the run that made them is held."""

    device: Device
    address: int
    nbytes: int


class Held:
    """A run that has ended, and whose memory is still its own: `arrays` are the outputs that came to the host, with
    None for those that did not, `resident` all of them where they are. Closed once."""

    def __init__(self, arrays: list[Any], resident: Sequence[Resident], release: Callable[[], None]) -> None:
        self.arrays, self.resident = arrays, resident
        self._release: Callable[[], None] | None = release

    def close(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> Held:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
