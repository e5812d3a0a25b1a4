"""Parses, compiles and checks uploads in child processes, which get command lines and files, never pickles.

A child has limits of time and memory, which are polled, and runs at idle priority, so that it does not slow down
inference. If it waits too long for the CPU, it is restarted with a share of the CPUs, so that a version is compiled
even on a machine that is always busy. Failures of a child become errors for the uploader; they do not affect the
server.

At the server's start there is no traffic yet: children then run at normal priority, and are forks of one process that
has done the imports (`lathe.server.processes.fork_client`). The imports take ten times as long as a small model.
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

from lathe.core.byte_sizes import format_bytes
from lathe.core.exit_status import ExitStatus
from lathe.core.runtime.host.priority import IDLE_PATIENCE, Priority, is_starved, resource_usage
from lathe.server.errors import Internal, OutOfMemory, ServerError, StorageFull, TooLarge, Unavailable, Unprocessable
from lathe.server.fair_slots import CLIENT, FairSlots
from lathe.server.processes.child_process import Child, kill, limited_command, read_tail, start
from lathe.server.processes.fork_client import IS_SUPPORTED, ForkClient, ForkServerEnded

log = logging.getLogger(__name__)

_LOOK = 0.05  # seconds between two polls of a child's time and memory
_TIME_SETTING, _MEMORY_SETTING = "LATHE_CHILD_TIMEOUT", "LATHE_CHILD_MEMORY"  # named in errors: they raise a limit
_MODULE = ("lathe.core.compiler.child_stages",)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of child processes."""

    seconds: float  # of CPU time, including the child's own children; waiting on a busy machine does not count
    memory: int  # resident bytes, including the child's own children
    processes: int = 1  # children that run at once
    waiting: int = 64  # uploads that may wait for a child, half of them of one client
    patience: float = 10.0  # the limit of wall-clock time is this many times `seconds`
    modesty: float = IDLE_PATIENCE  # seconds that a child at idle priority may wait for the CPU, see `is_starved`


class _Starved(Exception):
    """A child at idle priority waited too long for the CPU, see `is_starved`."""


class Children:
    """Runs tasks of a module, by default `lathe.core.compiler.child_stages`, in a bounded number of child processes."""

    def __init__(self, limits: Limits, module: Sequence[str] = _MODULE, subject: str = "model") -> None:
        self._limits = limits
        self._module = tuple(module)
        self._subject = subject  # the noun for uploads in error messages: "model" or "dataset"
        self._places = FairSlots(limits.processes, limits.waiting, f"{subject}s")
        self._is_urgent = False
        self._forks: ForkClient | None = None

    async def run(self, task: str, *arguments: str | Path) -> bytes:
        """Run one task to its end; returns the last 64 KiB of its standard output.

        Raises Unprocessable for an invalid upload or if its child was killed by a signal, OutOfMemory if a device is
        too small for it, TooLarge beyond a limit, StorageFull, Overloaded if too many uploads wait, Unavailable if no
        process can be started, otherwise Internal.
        """
        async with self._places.place(CLIENT.get()):
            return await self._run(task, [os.fspath(argument) for argument in arguments])

    @asynccontextmanager
    async def at_normal_priority(self) -> AsyncIterator[None]:
        """A context manager inside which children run at normal priority and as forks of one process.

        It is for the server's start, when there is no traffic.
        """
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
            except ForkServerEnded as error:
                log.warning("%s: restarted in a process of its own: %s", task, error)
                await self._close_forks()
            finally:
                await self._close_unused_forks()
        try:
            return await self._attempt(task, arguments, Priority.IDLE)
        except _Starved:
            log.info("%s: restarted with a share of the CPUs, after too long a wait for idle CPUs", task)
            return await self._attempt(task, arguments, Priority.SHARED)

    async def _attempt(self, task: str, arguments: list[str], priority: Priority) -> bytes:
        """Run a child to its end and return the end of its output; raises _Starved if it waited too long for the CPU.

        Also raises the error of a failed child, TooLarge beyond a limit, and ForkServerEnded. The child is killed.
        """
        try:
            process = await self._start([task, *arguments], priority)
        except OSError as error:
            reason = f"{task}: its process cannot be started: {error.strerror}"
            raise Unavailable(reason, retry_after=1.0) from error
        answer = asyncio.gather(read_tail(process.stdout), read_tail(process.stderr), process.wait())
        try:
            await self._watch(process, answer, task, self._limits.modesty if priority is Priority.IDLE else math.inf)
        finally:
            kill(process)
            output, errors, _ = await answer
        if process.returncode:
            raise self._error(task, process.returncode, output, errors, arguments)
        return output

    async def _start(self, arguments: list[str], priority: Priority) -> Child:
        if priority is not Priority.NORMAL or not IS_SUPPORTED:
            return await start(limited_command(self._limits.memory, [*self._module, *arguments]), priority)
        if self._forks is None:
            self._forks = ForkClient(self._limits.memory, self._module)
        return await self._forks.start(arguments)

    async def _close_unused_forks(self) -> None:
        """Close the fork server if it has no task and the start is over; otherwise do nothing."""
        if not self._is_urgent and self._forks is not None and self._forks.idle:
            await self._close_forks()

    async def _close_forks(self) -> None:
        forks, self._forks = self._forks, None
        if forks is not None:
            await forks.close()

    async def _watch(self, process: Child, answer: asyncio.Future[Any], task: str, modesty: float) -> None:
        """Wait for `answer` (the child's end); raises TooLarge beyond a limit, _Starved if it gets no CPU for long.

        `modesty` bounds that wait (see `is_starved`); infinity: never.
        """
        limits, started = self._limits, time.monotonic()
        while not answer.done():
            used = resource_usage(process.pid)
            seconds = max(used.seconds, (time.monotonic() - started) / limits.patience)
            if seconds > limits.seconds:
                raise TooLarge(
                    f"{task}: the {self._subject} takes longer than {limits.seconds:g} s, the limit of {_TIME_SETTING}"
                )
            if used.memory > limits.memory:
                raise self._too_large(task)
            if is_starved(process.pid, used.seconds, modesty):
                raise _Starved
            await asyncio.wait([answer], timeout=_LOOK)

    def _too_large(self, task: str) -> TooLarge:
        most = format_bytes(self._limits.memory)
        return TooLarge(f"{task}: the {self._subject} takes more than {most} of memory, the limit of {_MEMORY_SETTING}")

    def _error(self, task: str, code: int, output: bytes, errors: bytes, arguments: list[str]) -> ServerError:
        if code == ExitStatus.INPUT_REFUSED and (reason := refusal(output, arguments)):
            return Unprocessable(reason)
        if code == ExitStatus.DEVICE_TOO_SMALL and (reason := refusal(output, arguments)):
            return OutOfMemory(reason)
        if code == ExitStatus.OUT_OF_MEMORY:
            return self._too_large(task)
        if code == ExitStatus.OUT_OF_SPACE:
            return StorageFull(f"{task}: the storage for its results is full")
        log.error("child %s ended with %d: %s", task, code, errors.decode(errors="replace"))
        if code < 0:
            return Unprocessable(f"{task}: the {self._subject} ended its process by {signal.Signals(-code).name}")
        return Internal(f"{task}: failed on this {self._subject}; see the server's log")


def refusal(output: bytes, arguments: Sequence[str]) -> str | None:
    """Return the error in a child's last line of output; None without one.

    The absolute paths among `arguments` are shortened to file names.
    """
    try:
        reason = str(orjson.loads(output.splitlines()[-1])["error"])
    except (orjson.JSONDecodeError, IndexError, KeyError, TypeError):
        return None
    for path in sorted(arguments, key=len, reverse=True):
        if path.startswith("/"):
            reason = reason.replace(path, Path(path).name)
    return reason
