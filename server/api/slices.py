"""Writes in slices: what is written over TLS is encrypted at once, on the event loop, all of it.

64 MiB keep everybody else waiting for 50 milliseconds and more, and are in memory twice. So a large answer is handed on
in slices, one in each turn of the event loop, while its client reads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

SLICE = 1 << 18  # bytes: 0.2 ms of encryption


class Slices:
    """A transport for one connection, that says when it has enough before the other does."""

    def __init__(self, transport: asyncio.Transport, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """``pause`` is called when slices begin to wait, ``resume`` when there are none left and the transport takes
        more."""
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._pause = pause
        self._resume = resume
        self._waiting: deque[memoryview] = deque()
        self._size = 0  # bytes that wait
        self._is_full = False  # the transport has enough
        self._closing = False
        self._turn: asyncio.Handle | None = None  # of the next slice

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    # what the transport says

    def full(self) -> None:
        """The transport has enough."""
        self._is_full = True

    def drained(self) -> bool:
        """The transport takes more; says whether that is news for who writes."""
        self._is_full = False
        if self._waiting:
            self._go_on()
        return not self._waiting

    def lost(self) -> None:
        """The connection is gone, and with it what waits."""
        self._waiting.clear()
        self._size = 0
        if self._turn is not None:
            self._turn.cancel()

    # what is asked of it

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write, now what is small."""
        if self._waiting:
            self._add(data)
        elif len(data) <= SLICE:
            self._transport.write(data)
        else:
            self._add(data)
            self._pause()
            self._next()

    def writelines(self, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        """Write one after the other."""
        for part in parts:
            self.write(part)

    def get_write_buffer_size(self) -> int:
        """Return how many bytes the client has still to be sent."""
        return self._size + self._transport.get_write_buffer_size()

    def is_closing(self) -> bool:
        """Whether nothing more may be written."""
        return self._closing or self._transport.is_closing()

    def close(self) -> None:
        """Close once all is written."""
        self._closing = True
        if not self._waiting:
            self._transport.close()

    def abort(self) -> None:
        """Drop the connection."""
        self._closing = True
        self.lost()
        self._transport.abort()

    def _add(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        self._size += len(view)
        self._waiting.append(view)

    def _go_on(self) -> None:
        if self._turn is None:
            self._turn = self._loop.call_soon(self._next)

    def _next(self) -> None:
        """Write one slice."""
        self._turn = None
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
            self._go_on()
