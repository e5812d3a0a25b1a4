"""The memory of the host that a plan on a device uses, for streamed weights and for values between their uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from lathe.core.plan.plan import Plan
from lathe.core.runtime.device.device import Device
from lathe.core.runtime.host.memory import address_of


class SwapMemory:
    """Pinned memory of the host: the end of the weight block, and the swap memory of a plan; both may be empty.

    `generation` counts how often the swap memory has moved, which invalidates graphs with its address.
    """

    def __init__(self, plan: Plan, device: Device) -> None:
        self._plan, self._device = plan, device
        self._weights, self._values = device.host_bytes(0), device.host_bytes(0)
        self.generation = 0

    @property
    def weights(self) -> int:
        """The address of the first byte of the weight block, as if all of it were here: only its end is."""
        return address_of(self._weights) - self._plan.resident

    @property
    def values(self) -> int:
        return address_of(self._values)

    def keep_end(self, chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
        """Yield the beginning of the weight block, which is given in chunks, and copy its end to the host.

        Streamed weights are copied as the result is read to its end. DeviceMemoryError if the host lacks memory.
        """
        if self._plan.streamed:
            self._weights = self._device.host_bytes(self._plan.streamed)
        at, resident = 0, self._plan.resident
        for chunk in chunks:
            data = np.frombuffer(chunk, np.uint8)
            here = min(max(resident - at, 0), data.size)
            if here:
                yield memoryview(data[:here])  # type: ignore[arg-type]
            first = at + here - resident
            if here < data.size:
                self._weights[first : first + data.size - here] = data[here:]
            at += data.size

    def fit(self, n: int) -> None:
        """Grow to what batches of up to `n` rows need; loses the values in it. No unfinished run may use them."""
        nbytes = self._plan.swap.at(self._plan.address_rows(n))
        if nbytes > self._values.nbytes:
            larger = self._device.host_bytes(nbytes)
            self._device.free_host(self._values)
            self._values = larger
            self.generation += 1

    def close(self) -> None:
        self._device.free_host(self._weights)
        self._device.free_host(self._values)
        self._weights = self._values = np.zeros(0, np.uint8)
