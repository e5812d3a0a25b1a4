"""A job's events as they come: whole lines of its file, from any offset, until the job has ended."""

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

from server.errors import Overloaded, ServerError
from server.jobs.job import Job, JobState

_LOOK = 0.2  # seconds between two looks at the file
_BLOCK = 1 << 18  # bytes read at a time; nothing is read ahead of who listens
_LINE = 1 << 20  # bytes of the longest line
HEARTBEAT = 15.0  # seconds of silence
STREAMS = 64  # at once


@dataclass(frozen=True, slots=True)
class Line:
    """One event of the job's process, as it wrote it; ``offset`` is where the next one begins."""

    offset: int
    text: bytes


@dataclass(frozen=True, slots=True)
class Turned:
    """The job is in another state."""

    state: JobState


class Beat:
    """Nothing has happened for a while."""


Happened: TypeAlias = Line | Turned | Beat


class Followers:
    """Those who follow jobs; bounded. Each may have as many places as are left free for others: one who is alone gets
    half, of n each gets the (n + 1)th part, and there is always one for who has none."""

    def __init__(self, stopping: Callable[[], bool], limit: int = STREAMS) -> None:
        self._stopping = stopping
        self._limit = limit
        self._taken: Counter[str] = Counter()  # by client

    @contextmanager
    def place(self, client: str) -> Iterator[None]:
        """Hold one of a client's places; raises Overloaded when there is none."""
        total, own = self._taken.total(), self._taken[client]
        if own >= self._limit - total:
            raise Overloaded(
                f"{total} calls follow jobs, {own} of them yours: there is no place for another one", retry_after=10.0
            )
        self._taken[client] += 1
        try:
            yield
        finally:
            self._taken[client] -= 1
            if not self._taken[client]:
                del self._taken[client]

    async def follow(self, look: Callable[[], Job], file: Path, offset: int) -> AsyncGenerator[list[Happened]]:
        """Yield what happens from ``offset`` on; ends after the job's end, when the server stops, or where ``look``
        raises a ServerError."""
        async for events in _follow(look, file, offset, self._stopping):
            yield events


async def _follow(
    look: Callable[[], Job], file: Path, offset: int, stopping: Callable[[], bool]
) -> AsyncGenerator[list[Happened]]:
    state, spoken = None, time.monotonic()
    while not stopping():
        try:
            now = look().state  # before the file is read: what was written before the end is sent before it
        except ServerError:
            return  # deleted, or the register is down, or the caller may not see it any more
        lines = await asyncio.to_thread(read_lines, file, offset)
        happened: list[Happened] = [*lines]
        if now is not state and not (now.is_final and lines):
            happened.append(Turned(now))
            state = now
        if not happened and time.monotonic() - spoken > HEARTBEAT:
            happened.append(Beat())
        if happened:
            yield happened
            spoken = time.monotonic()
        if state is not None and state.is_final:
            return
        offset = lines[-1].offset if lines else offset
        await asyncio.sleep(_LOOK)


def read_lines(file: Path, offset: int) -> list[Line]:
    """Return the next whole lines of a file that grows; none when there are none yet."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    try:
        block = os.pread(fd, _BLOCK, offset)
        if block and b"\n" not in block:
            block = os.pread(fd, _LINE, offset)
    finally:
        os.close(fd)
    lines, at = [], offset
    for text in block[: block.rfind(b"\n") + 1].splitlines(keepends=True):
        at += len(text)
        lines.append(Line(at, text.rstrip(b"\n")))
    return lines
