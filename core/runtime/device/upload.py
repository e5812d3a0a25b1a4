"""Uploads bytes of any host memory to a device, through a small buffer of pinned memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lathe.core.runtime.device.device import Device, Stream
from lathe.core.runtime.host.memory import address_of

_BUFFER_BYTES = 4 << 20  # bytes of the buffer


class Uploader:
    """Copies host memory to a device in one stream, through a pinned buffer, which `close` frees."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device, self._stream = device, stream
        self._buffer = device.host_bytes(_BUFFER_BYTES)

    def put(self, address: int, chunks: Iterable[bytes | memoryview]) -> None:
        """Copy chunks to consecutive addresses from `address` on. The copies are done when this returns."""
        filled = 0
        for chunk in chunks:
            data = np.frombuffer(chunk, np.uint8)
            while data.size:
                part = data[: _BUFFER_BYTES - filled]
                self._buffer[filled : filled + part.size] = part
                filled, data = filled + part.size, data[part.size :]
                if filled == _BUFFER_BYTES:
                    self._send(address, filled)
                    address, filled = address + filled, 0
        if filled:
            self._send(address, filled)

    def _send(self, address: int, nbytes: int) -> None:
        self._stream.copy_in(address, address_of(self._buffer), nbytes)
        self._stream.synchronize()

    def close(self) -> None:
        self._device.free_host(self._buffer)
