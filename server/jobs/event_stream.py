"""Streams a job's events: the lines of its events file, from any offset, until the job has ended."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from lathe.server.errors import Overloaded, ServerError
from lathe.server.jobs.job import Job, JobState

_POLL = 0.2  # seconds between two reads of the file
_BLOCK = 1 << 18  # bytes per read; the next read follows when the client has taken these
_MAX_LINE_BYTES = 1 << 20  # most bytes of one line
HEARTBEAT = 15.0  # seconds without events after which a heartbeat is sent
MAX_STREAMS = 64  # most concurrent streams


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the events file; `offset` is the file offset of the next line."""

    offset: int
    text: bytes


@dataclass(frozen=True, slots=True)
class StateChanged:
    """An item of the stream with the job's present state: at the start of the stream, and after each change."""

    state: JobState


class Heartbeat:
    """A heartbeat: nothing has happened for `HEARTBEAT` seconds."""


StreamItem: TypeAlias = Line | StateChanged | Heartbeat


class EventStreams:
    """Limits the concurrent event streams, shared fairly between clients.

    A client may open another stream while it has fewer than are free: a single client gets half of the limit, each of n
    clients 1 / (n + 1) of it.
    """

    def __init__(self, stopping: Callable[[], bool], limit: int = MAX_STREAMS) -> None:
        self._stopping = stopping
        self._limit = limit
        self._open_streams: Counter[str] = Counter()  # by client

    @contextmanager
    def place(self, client: str) -> Iterator[None]:
        """A context manager that counts a stream of a client; raises Overloaded if it may not open another one."""
        total, own = self._open_streams.total(), self._open_streams[client]
        if own >= self._limit - total:
            raise Overloaded(
                f"{total} streams of events are open, {own} of them yours: expected fewer", retry_after=10.0
            )
        self._open_streams[client] += 1
        try:
            yield
        finally:
            self._open_streams[client] -= 1
            if not self._open_streams[client]:
                del self._open_streams[client]

    async def follow(self, look: Callable[[], Job], file: Path, offset: int) -> AsyncGenerator[list[StreamItem]]:
        """Yield lists of lines, from `offset` in the events file on, of state changes and of heartbeats.

        `look` returns the job in its present state. The stream ends after the job's final state, when the server is
        about to stop, or when `look` raises a ServerError.
        """
        async for events in _follow(look, file, offset, self._stopping):
            yield events


async def _follow(
    look: Callable[[], Job], file: Path, offset: int, stopping: Callable[[], bool]
) -> AsyncGenerator[list[StreamItem]]:
    state, last_sent = None, time.monotonic()
    while not stopping():
        try:
            now = look().state  # before the file is read, so that the last events are sent before the end
        except ServerError:
            return  # the job is deleted or no longer visible to the client, or the register is down
        lines = await asyncio.to_thread(read_lines, file, offset)
        happened: list[StreamItem] = [*lines]
        if now is not state and not (now.is_final and lines):
            happened.append(StateChanged(now))
            state = now
        if not happened and time.monotonic() - last_sent > HEARTBEAT:
            happened.append(Heartbeat())
        if happened:
            yield happened
            last_sent = time.monotonic()
        if state is not None and state.is_final:
            return
        offset = lines[-1].offset if lines else offset
        await asyncio.sleep(_POLL)


def read_lines(file: Path, offset: int) -> list[Line]:
    """Return complete lines of a growing file from `offset` on, about as many as one block holds.

    Empty if there is no complete line yet, no file, or a line of more than `_MAX_LINE_BYTES`.
    """
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    try:
        block = os.pread(fd, _BLOCK, offset)
        if block and b"\n" not in block:
            block = os.pread(fd, _MAX_LINE_BYTES, offset)
    finally:
        os.close(fd)
    lines, at = [], offset
    for text in block[: block.rfind(b"\n") + 1].splitlines(keepends=True):
        at += len(text)
        lines.append(Line(at, text.rstrip(b"\n")))
    return lines
