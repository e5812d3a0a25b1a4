"""TLS writes in slices, because a TLS transport encrypts each write as a whole, on the event loop.

Encrypting 64 MiB would block all other clients for 50 ms and more, and would hold the bytes twice. Therefore a large
answer is passed to the transport in slices, one per iteration of the event loop, while its client reads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

SLICE = 1 << 18  # bytes: 0.2 ms of encryption


class SlicedTransport:
    """The transport of one TLS connection. It pauses its writer earlier than the transport below does."""

    def __init__(self, transport: asyncio.Transport, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """`pause` is called when slices begin to wait; `resume` when none waits and the transport accepts more."""
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._pause = pause
        self._resume = resume
        self._waiting: deque[memoryview] = deque()
        self._size = 0  # bytes that wait
        self._is_full = False  # the transport below has paused writing
        self._closing = False
        self._handle: asyncio.Handle | None = None  # the scheduled `_write_slice`

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    # flow control of the transport below

    def full(self) -> None:
        """Note that the transport below has paused writing."""
        self._is_full = True

    def drained(self) -> bool:
        """Note that the transport below accepts more; True if no slice waits, so the writer may go on."""
        self._is_full = False
        if self._waiting:
            self._schedule()
        return not self._waiting

    def lost(self) -> None:
        """Drop the waiting slices: the connection is lost."""
        self._waiting.clear()
        self._size = 0
        if self._handle is not None:
            self._handle.cancel()

    # the transport's interface

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write at most `SLICE` bytes at once, and more in slices; bytes written after waiting slices wait, too.

        Waiting bytes are not copied, so `data` must not change.
        """
        if self._waiting:
            self._add(data)
        elif len(data) <= SLICE:
            self._transport.write(data)
        else:
            self._add(data)
            self._pause()
            self._write_slice()

    def writelines(self, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        """Write the parts one after the other."""
        for part in parts:
            self.write(part)

    def get_write_buffer_size(self) -> int:
        """The number of bytes that are not sent yet: waiting slices and the buffer of the transport below."""
        return self._size + self._transport.get_write_buffer_size()

    def is_closing(self) -> bool:
        """Whether the connection is closing or closed."""
        return self._closing or self._transport.is_closing()

    def close(self) -> None:
        """Close the connection after all waiting slices are written."""
        self._closing = True
        if not self._waiting:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once, without the waiting slices."""
        self._closing = True
        self.lost()
        self._transport.abort()

    def _add(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        self._size += len(view)
        self._waiting.append(view)

    def _schedule(self) -> None:
        if self._handle is None:
            self._handle = self._loop.call_soon(self._write_slice)

    def _write_slice(self) -> None:
        """Write the first waiting slice, of at most `SLICE` bytes.

        If none is left, close the connection if it is closing. In all other cases, unless the transport below is full,
        schedule the next slice, or resume the writer if none is left.
        """
        self._handle = None
        first = self._waiting.popleft()
        if len(first) > SLICE:
            self._waiting.appendleft(first[SLICE:])
            first = first[:SLICE]
        self._size -= len(first)
        self._transport.write(first)
        if not self._waiting:
            if self._closing:
                self._transport.close()
            elif not self._is_full:
                self._resume()
        elif not self._is_full:
            self._schedule()
