"""Values that stay in a device's memory between two parts of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from lathe.core.runtime.device.device import Device


@dataclass(frozen=True, slots=True)
class Resident:
    """A value in a device's memory. It is valid as long as the run that made it is held."""

    device: Device
    address: int
    nbytes: int


class HeldRun:
    """A finished run that still owns its device memory until `close`.

    `arrays`: the outputs that were copied to the host, None for the others. `resident`: the places of all outputs on
    the device.
    """

    def __init__(self, arrays: list[Any], resident: Sequence[Resident], release: Callable[[], None]) -> None:
        self.arrays, self.resident = arrays, resident
        self._release: Callable[[], None] | None = release

    def close(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> HeldRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
