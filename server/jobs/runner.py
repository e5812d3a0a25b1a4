"""One attempt at a job: its child process, what it may take, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from core.amounts import amount
from core.runtime.priority import Priority, usage
from server.children import refusal
from server.limits import OUT_OF_MEMORY, OUT_OF_SPACE
from server.process import Process, kill, limited, read_tail, start
from server.repository.space import Space

_LOOK = 0.2  # seconds between two looks at a child
_SELDOM = 25  # looks between two counts of the bytes on disk
_GROWTH = 1 << 20  # bytes that a job may write while the disk is full: events, its log
_LOG_BYTES = 4 << 20  # a log beyond this loses its older half
_REFUSED, _STOPPED = 2, 75  # exit codes: the recipe or the data is at fault; stopped after a checkpoint


class End(Enum):
    """How an attempt ended."""

    DONE = "done"  # the result is there
    STOPPED = "stopped"  # as it was told to
    REFUSED = "refused"  # trying again would not help
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended, and why."""

    end: End
    reason: str = ""
    seconds: float = 0.0  # by the clock


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an attempt may take."""

    seconds: float
    memory: int  # bytes resident
    disk: int  # bytes in the job's folder
    grace: float  # seconds between being asked to stop and being killed
    idle: bool = True  # computes only while nobody else wants to


class Run:
    """A child process at work on a job. `stop` may come at any time, also before the process is there."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        bounds: Bounds,
        size: Callable[[], int],
        space: Space | None = None,
    ) -> None:
        self.started = time.monotonic()
        self._command = command
        self._log = log
        self._bounds = bounds
        self._size = size  # bytes in the job's folder; called on another thread
        self._space = space  # of the disk it writes to; None: it writes next to nothing
        self._had: int | None = None  # the least it had since that is full
        self._asked: float | None = None  # when it was told to stop
        self._process: Process | None = None

    @property
    def stopping(self) -> bool:
        """Whether it was told to stop."""
        return self._asked is not None

    def stop(self) -> None:
        """Ask for a checkpoint and the end; what is not gone after the grace is killed."""
        if self._asked is None:
            self._asked = time.monotonic()
            self._pass_on()

    def kill(self) -> None:
        """End it now; the last checkpoint stays."""
        self.stop()
        if self._process is not None:
            kill(self._process)

    async def to_end(self) -> Ending:
        """Run the child to its end. Nothing it started is left then, whatever happens here."""
        fd = os.open(self._log, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            priority = Priority.IDLE if self._bounds.idle else Priority.LOW
            self._process = process = await start(limited(self._bounds.memory, self._command), priority, stderr=fd)
            self._pass_on()
            answer = asyncio.gather(read_tail(process.stdout), process.wait())
            try:
                excess = await self._watch(process, answer, fd)
            finally:
                kill(process)
                output, code = await answer
        finally:
            os.close(fd)
        seconds = time.monotonic() - self.started
        if excess is not None:
            return Ending(End.REFUSED, excess, seconds)
        end, reason = self._meaning(code, output)
        return Ending(end, reason, seconds)

    async def _watch(self, process: Process, answer: asyncio.Future[tuple[bytes, int]], log: int) -> str | None:
        """Wait for the end; returns which limit was passed, if one was."""
        looks = 0
        while not answer.done():
            await asyncio.wait([answer], timeout=_LOOK)
            looks += 1
            if self._asked is not None and time.monotonic() - self._asked > self._bounds.grace:
                kill(process)
            _shorten(log)
            excess = self._excess(process.pid) or await asyncio.to_thread(self._excess_on_disk, looks % _SELDOM == 0)
            if excess and not answer.done():
                return excess
        return None

    def _excess(self, pid: int) -> str | None:
        bounds = self._bounds
        if time.monotonic() - self.started > bounds.seconds:
            return "the job ran for longer than its limit of seconds"
        if usage(pid).memory > bounds.memory:
            return f"the job takes more than {amount(bounds.memory)} of memory, its limit"
        return None

    def _excess_on_disk(self, due: bool) -> str | None:
        """Look at the disk, and at the job's files if that is due or the disk is full. Blocks."""
        space = self._space
        if space is not None:
            space.look()
        is_full = space is not None and space.is_full
        if not (due or is_full):
            return None
        size = self._size()
        if size > self._bounds.disk:
            return f"the job's files take more than {amount(self._bounds.disk)} of disk, its limit"
        if space is None or not is_full:
            self._had = None
            return None
        self._had = size if self._had is None else min(self._had, size)
        if size > self._had + _GROWTH:
            return (
                f"the job wrote {size - self._had} bytes to a disk of which {space.free} are free, and at least "
                f"{space.kept} are kept; its last checkpoint is there"
            )
        return None

    def _meaning(self, code: int, output: bytes) -> tuple[End, str]:
        """Return what an exit code says."""
        if code == 0:
            return End.DONE, ""
        if code == _REFUSED and (reason := refusal(output, self._command)):
            return End.REFUSED, reason
        if code == OUT_OF_MEMORY:
            return End.REFUSED, f"the job takes more than {amount(self._bounds.memory)} of memory, its limit"
        if code == OUT_OF_SPACE:
            return End.REFUSED, refusal(output, self._command) or "the disk is full"
        if self.stopping or code == _STOPPED:
            return End.STOPPED, ""
        if code < 0:
            return End.CRASHED, f"its process was ended by {signal.Signals(-code).name}"
        return End.CRASHED, f"its process ended with exit code {code}; the job's log says more"

    def _pass_on(self) -> None:
        """Tell the process to stop, once both are there."""
        if self._process is not None and self.stopping:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)


def _shorten(log: int) -> None:
    """Keep the end of a log that has grown too large; what the process says meanwhile may be lost."""
    size, kept = os.fstat(log).st_size, _LOG_BYTES // 2
    if size > _LOG_BYTES:
        end = os.pread(log, kept, size - kept)
        os.ftruncate(log, 0)
        os.write(log, end)
