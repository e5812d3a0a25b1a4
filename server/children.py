"""Work on uploaded data in child processes: command lines and files, never pickles.

A child has watched limits of time and memory, and computes while nobody else wants to: whoever asks for answers does
not feel it. Where that leaves it no time at all it starts again with a share of the processors, so that a version
comes in the end however busy the machine is. What goes wrong in it becomes an error that the uploader understands;
the server lives on whatever the model did to the child.

Before the server serves anything there is nobody to be modest for: children then have the processors like anybody, and
are forks of one process that has done the imports (`server.forks`), which take ten times as long as a small model.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from core.amounts import amount
from core.runtime.priority import MODESTY, Priority, is_starved, usage
from server.errors import Internal, OutOfMemory, ServerError, StorageFull, TooLarge, Unprocessable
from server.forks import POSSIBLE, Forks, Gone
from server.limits import OUT_OF_MEMORY, OUT_OF_SPACE
from server.places import PARTY, Places
from server.process import Child, kill, limited, read_tail, start

log = logging.getLogger(__name__)

_LOOK = 0.05  # seconds between two looks at a child's memory
_MODULE = ("core.children",)
_REFUSED, _NO_ROOM = 2, 5  # exit codes: the model is bad, or a device too small; standard output says why


@dataclass(frozen=True, slots=True)
class Limits:
    """What one child may take."""

    seconds: float  # of processor time, the child's own children included: a busy machine does not count against it
    memory: int  # bytes resident, likewise
    processes: int = 1  # children at work at once
    waiting: int = 64  # uploads that may wait for one, half of them of one caller
    patience: float = 10.0  # times ``seconds`` by the clock, for a child that waits instead of working
    modesty: float = MODESTY  # of an idle child, see there


class _Starved(Exception):
    """Others left a child no time for as long as it lets them go first."""


class Children:
    """Runs ``core.children`` (or another module, in tests), a bounded number at a time."""

    def __init__(self, limits: Limits, module: Sequence[str] = _MODULE, subject: str = "model") -> None:
        self._limits = limits
        self._module = tuple(module)
        self._subject = subject  # what the children work on, for those who read why it was refused
        self._places = Places(limits.processes, limits.waiting, f"{subject}s")
        self._is_urgent = False
        self._forks: Forks | None = None

    async def run(self, task: str, *arguments: str | Path) -> bytes:
        """Run one task to its end; returns the end of what it wrote to standard output.

        Raises Unprocessable for a bad model, OutOfMemory for one that a device has no room for, TooLarge beyond a
        limit, StorageFull, Overloaded when too many wait.
        """
        async with self._places.place(PARTY.get()):
            return await self._run(task, [os.fspath(argument) for argument in arguments])

    @asynccontextmanager
    async def urgent(self) -> AsyncIterator[None]:
        """Have children compute at once meanwhile: there is nobody yet who could be disturbed."""
        self._is_urgent = True
        try:
            yield
        finally:
            self._is_urgent = False
            await self._close_unused_forks()

    async def _run(self, task: str, arguments: list[str]) -> bytes:
        if self._is_urgent:
            try:
                return await self._attempt(task, arguments, Priority.NORMAL)
            except Gone as error:
                log.warning("%s: starts again in a process of its own: %s", task, error)
                await self._close_forks()
            finally:
                await self._close_unused_forks()
        try:
            return await self._attempt(task, arguments, Priority.IDLE)
        except _Starved:
            log.info("%s: starts again with a share of the processors, having waited long enough for idle ones", task)
            return await self._attempt(task, arguments, Priority.SHARED)

    async def _attempt(self, task: str, arguments: list[str], priority: Priority) -> bytes:
        """Run a child to its end; raises _Starved where an idle one has let others go first for long enough."""
        process = await self._start([task, *arguments], priority)
        answer = asyncio.gather(read_tail(process.stdout), read_tail(process.stderr), process.wait())
        try:
            await self._watch(process, answer, task, self._limits.modesty if priority is Priority.IDLE else math.inf)
        finally:
            kill(process)
            output, complaint, _ = await answer
        if process.returncode:
            raise self._error(task, process.returncode, output, complaint, arguments)
        return output

    async def _start(self, arguments: list[str], priority: Priority) -> Child:
        if priority is not Priority.NORMAL or not POSSIBLE:
            return await start(limited(self._limits.memory, [*self._module, *arguments]), priority)
        if self._forks is None:
            self._forks = Forks(self._limits.memory, self._module)
        return await self._forks.start(arguments)

    async def _close_unused_forks(self) -> None:
        """End the process that forks, once the last of its tasks has ended and nothing is urgent any more."""
        if not self._is_urgent and self._forks is not None and self._forks.idle:
            await self._close_forks()

    async def _close_forks(self) -> None:
        forks, self._forks = self._forks, None
        if forks is not None:
            await forks.close()

    async def _watch(self, process: Child, answer: asyncio.Future[Any], task: str, modesty: float) -> None:
        """Wait for the end; raises TooLarge as soon as a limit is passed, _Starved when modesty is."""
        limits, started = self._limits, time.monotonic()
        while not answer.done():
            taken = usage(process.pid)
            seconds = max(taken.seconds, (time.monotonic() - started) / limits.patience)
            if seconds > limits.seconds:
                raise TooLarge(f"{task}: the {self._subject} takes longer than {limits.seconds:g} s")
            if taken.memory > limits.memory:
                raise TooLarge(f"{task}: the {self._subject} takes more than {amount(limits.memory)} of memory")
            if is_starved(process.pid, taken.seconds, modesty):
                raise _Starved
            await asyncio.wait([answer], timeout=_LOOK)

    def _error(self, task: str, code: int, output: bytes, complaint: bytes, arguments: list[str]) -> ServerError:
        if code == _REFUSED and (reason := refusal(output, arguments)):
            return Unprocessable(reason)
        if code == _NO_ROOM and (reason := refusal(output, arguments)):
            return OutOfMemory(reason)
        if code == OUT_OF_MEMORY:
            return TooLarge(f"{task}: the {self._subject} takes more memory than one may")
        if code == OUT_OF_SPACE:
            return StorageFull(f"{task}: the storage for what is made of it is full")
        log.error("child %s ended with %d: %s", task, code, complaint.decode(errors="replace"))
        if code < 0:
            return Unprocessable(f"{task}: the {self._subject} ended its process by {signal.Signals(-code).name}")
        return Internal(f"{task}: failed on this {self._subject}; the server's log says more")


def refusal(output: bytes, arguments: Sequence[str]) -> str | None:
    """Return the reason a child gave on standard output, without the server's paths; None when there is none."""
    try:
        reason = str(orjson.loads(output.splitlines()[-1])["error"])
    except (orjson.JSONDecodeError, IndexError, KeyError, TypeError):
        return None
    for path in sorted(arguments, key=len, reverse=True):
        if path.startswith("/"):
            reason = reason.replace(path, Path(path).name)
    return reason
