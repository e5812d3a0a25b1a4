"""Bytes from anywhere to a device, through a small stage of pinned memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from core.runtime.device import Device, Stream
from core.runtime.memory import address_of

_STAGE = 4 << 20  # bytes that travel at a time


class Uploader:
    """Copies in a stream of a device; `close` gives the stage back."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device, self._stream = device, stream
        self._stage = device.host_bytes(_STAGE)

    def put(self, address: int, chunks: Iterable[bytes | memoryview]) -> None:
        """Chunks one behind the other from `address` on. They are there when this returns."""
        filled = 0
        for chunk in chunks:
            data = np.frombuffer(chunk, np.uint8)
            while data.size:
                part = data[: _STAGE - filled]
                self._stage[filled : filled + part.size] = part
                filled, data = filled + part.size, data[part.size :]
                if filled == _STAGE:
                    self._send(address, filled)
                    address, filled = address + filled, 0
        if filled:
            self._send(address, filled)

    def _send(self, address: int, nbytes: int) -> None:
        self._stream.copy_in(address, address_of(self._stage), nbytes)
        self._stream.synchronize()

    def close(self) -> None:
        self._device.free_host(self._stage)
