"""One attempt at a job: its child process, its resource bounds, and how it ended."""

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

from lathe.core.byte_sizes import format_bytes
from lathe.core.exit_status import ExitStatus
from lathe.core.runtime.host.priority import Priority, resource_usage
from lathe.server.processes.child_process import Process, kill, limited_command, read_tail, start
from lathe.server.processes.stage_children import refusal
from lathe.server.repository.disk_space import DiskSpace

_POLL = 0.2  # seconds between two checks of a child
_DISK_EVERY = 25  # checks between two measurements of the files' size
_GROWTH = 1 << 20  # bytes that a job may write while the disk is full, for events and its log
_LOG_BYTES = 4 << 20  # above this size a log loses its older half


class EndKind(Enum):
    """The kinds of ends of an attempt."""

    DONE = "done"  # with a result
    STOPPED = "stopped"  # as requested
    REFUSED = "refused"  # a retry would fail, too
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended, with the reason and its duration."""

    end: EndKind
    reason: str = ""
    seconds: float = 0.0  # wall time


@dataclass(frozen=True, slots=True)
class ResourceBounds:
    """The resource bounds of an attempt."""

    seconds: float
    memory: int  # bytes of resident memory
    disk: int  # bytes in the job's folder
    grace: float  # seconds between SIGTERM and SIGKILL
    idle: bool = True  # runs at idle CPU priority


class Attempt:
    """The child process of an attempt. `stop` may be called at any time, even before the process exists."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        bounds: ResourceBounds,
        size: Callable[[], int],
        space: DiskSpace | None = None,
    ) -> None:
        self.started = time.monotonic()
        self._command = command
        self._log = log
        self._bounds = bounds
        self._size = size  # bytes in the job's folder; called on another thread
        self._space = space  # free space of the disk it writes to; None: not checked
        self._smallest_size: int | None = None  # smallest size of its files since the disk is full
        self._stop_requested: float | None = None  # time of `stop`, in monotonic seconds
        self._process: Process | None = None

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stop_requested is not None

    def stop(self) -> None:
        """Request a checkpoint and the end (SIGTERM), at once or when the process starts.

        If the process still runs after `ResourceBounds.grace` seconds, `run` kills it. A second call does nothing.
        """
        if self._stop_requested is None:
            self._stop_requested = time.monotonic()
            self._send_stop()

    def kill(self) -> None:
        """Kill the process now, and keep its last checkpoint; if it does not exist yet, request its end like `stop`."""
        self.stop()
        if self._process is not None:
            kill(self._process)

    async def run(self) -> Ending:
        """Run the child to its end, with its standard error in the log; raises OSError if it cannot be started.

        The child's whole process group is killed before this returns or raises.
        """
        fd = os.open(self._log, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            priority = Priority.IDLE if self._bounds.idle else Priority.LOW
            self._process = process = await start(
                limited_command(self._bounds.memory, self._command), priority, stderr=fd
            )
            self._send_stop()
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
            return Ending(EndKind.REFUSED, excess, seconds)
        end, reason = self._interpret_exit(code, output)
        return Ending(end, reason, seconds)

    async def _watch(self, process: Process, answer: asyncio.Future[tuple[bytes, int]], log: int) -> str | None:
        """Wait for `answer` (output and exit code); returns a message if a limit is exceeded, otherwise None.

        Meanwhile it cuts the log (descriptor `log`) to its bound, and kills the process when the grace after `stop` is
        over.
        """
        checks = 0
        while not answer.done():
            await asyncio.wait([answer], timeout=_POLL)
            checks += 1
            if self._stop_requested is not None and time.monotonic() - self._stop_requested > self._bounds.grace:
                kill(process)
            _truncate_log(log)
            excess = self._excess(process.pid) or await asyncio.to_thread(
                self._excess_on_disk, checks % _DISK_EVERY == 0
            )
            if excess and not answer.done():
                return excess
        return None

    def _excess(self, pid: int) -> str | None:
        bounds = self._bounds
        if time.monotonic() - self.started > bounds.seconds:
            return "the job ran longer than its limit of seconds"
        if resource_usage(pid).memory > bounds.memory:
            return f"the job uses more than {format_bytes(bounds.memory)} of memory, its limit"
        return None

    def _excess_on_disk(self, due: bool) -> str | None:
        """Return a message if the job's files exceed their limit, or grow on a full disk; otherwise None. Blocks.

        Their size is measured only if `due` or if the disk is full.
        """
        space = self._space
        if space is not None:
            space.look()
        is_full = space is not None and space.is_full
        if not (due or is_full):
            return None
        size = self._size()
        if size > self._bounds.disk:
            return f"the job's files use more than {format_bytes(self._bounds.disk)} of disk, its limit"
        if space is None or not is_full:
            self._smallest_size = None
            return None
        self._smallest_size = size if self._smallest_size is None else min(self._smallest_size, size)
        if size > self._smallest_size + _GROWTH:
            return (
                f"the job wrote {size - self._smallest_size} bytes to a disk with {space.free} bytes free, "
                f"expected at least {space.kept}; its last checkpoint is stored"
            )
        return None

    def _interpret_exit(self, code: int, output: bytes) -> tuple[EndKind, str]:
        """Return the kind of end and its reason (may be empty), by the process's exit code and its last output."""
        if code == ExitStatus.DONE:
            return EndKind.DONE, ""
        if code == ExitStatus.INPUT_REFUSED and (reason := refusal(output, self._command)):
            return EndKind.REFUSED, reason
        if code == ExitStatus.OUT_OF_MEMORY:
            return EndKind.REFUSED, f"the job uses more than {format_bytes(self._bounds.memory)} of memory, its limit"
        if code == ExitStatus.OUT_OF_SPACE:
            return EndKind.REFUSED, refusal(output, self._command) or "the disk is full"
        if self.stopping or code == ExitStatus.STOPPED:
            return EndKind.STOPPED, ""
        if code == ExitStatus.OCCUPIED:
            return EndKind.CRASHED, "another process works in the job's folder"
        if code < 0:
            return EndKind.CRASHED, f"its process was ended by {signal.Signals(-code).name}"
        return EndKind.CRASHED, f"its process ended with exit code {code}; see the job's log"

    def _send_stop(self) -> None:
        """Send SIGTERM, if `stop` was called and the process exists."""
        if self._process is not None and self.stopping:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)


def _truncate_log(log: int) -> None:
    """If a log (its descriptor) has more than `_LOG_BYTES`, keep only its last `_LOG_BYTES / 2` bytes.

    Output that the process writes meanwhile may be lost.
    """
    size, kept_bytes = os.fstat(log).st_size, _LOG_BYTES // 2
    if size > _LOG_BYTES:
        end = os.pread(log, kept_bytes, size - kept_bytes)
        os.ftruncate(log, 0)
        os.write(log, end)
