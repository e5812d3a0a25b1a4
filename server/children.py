"""Work on uploaded data in child processes: command lines and files, never pickles.

A child has watched limits of time and memory, and the lowest priority. What goes wrong in it becomes an error that
the uploader understands; the server lives on whatever the model did to the child.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from server.errors import Internal, Overloaded, ServerError, StorageFull, TooLarge, Unprocessable
from server.limits import OUT_OF_MEMORY, OUT_OF_SPACE

log = logging.getLogger(__name__)

_GIB = 1 << 30
_LOOK = 0.05  # seconds between two looks at a child's memory
_ADDRESS_SPACE = 4 * _GIB  # what a child may map beyond the memory it may use
_FILE_SIZE = 64 * _GIB
_MODULE = ("core.children",)
_REFUSED = 2  # exit code: the model is bad, standard output says why
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "TMPDIR")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one child may take."""

    seconds: float  # of processor time, the child's own children included: a busy machine does not count against it
    memory: int  # bytes resident, likewise
    processes: int = 1  # children at work at once
    waiting: int = 64  # callers that may wait for one
    patience: float = 10.0  # times ``seconds`` by the clock, for a child that waits instead of working


class Children:
    """Runs ``core.children`` (or another module, in tests), a bounded number at a time."""

    def __init__(self, limits: Limits, module: Sequence[str] = _MODULE) -> None:
        self._limits = limits
        self._module = tuple(module)
        self._free = asyncio.Semaphore(limits.processes)
        self._waiting = 0

    async def run(self, task: str, *arguments: str | Path) -> None:
        """Run one task to its end.

        Raises Unprocessable for a bad model, TooLarge beyond a limit, StorageFull, Overloaded when too many wait.
        """
        if self._waiting >= self._limits.waiting:
            raise Overloaded(f"{self._waiting} models are waiting to be compiled", retry_after=10.0)
        self._waiting += 1
        try:
            async with self._free:
                await self._run(task, [os.fspath(argument) for argument in arguments])
        finally:
            self._waiting -= 1

    async def _run(self, task: str, arguments: list[str]) -> None:
        process = await self._start(task, arguments)
        answer = asyncio.gather(_read(process.stdout), _read(process.stderr), process.wait())
        try:
            await self._watch(process, answer, task)
        finally:
            _kill(process)
            output, complaint, _ = await answer
        if process.returncode:
            raise _error(task, process.returncode, output, complaint, arguments)

    async def _start(self, task: str, arguments: list[str]) -> Process:
        """Start the child in a session of its own, so that all it starts can be killed with it."""
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *self._command(task, arguments),
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=PIPE,
                env=_environment(),
                start_new_session=True,
            )
        )
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:  # asyncio itself would kill the child alone, and wait for what it started
            process = await starting
            _kill(process)
            await process.communicate()
            raise

    def _command(self, task: str, arguments: list[str]) -> list[str]:
        memory = str(self._limits.memory + _ADDRESS_SPACE)
        return [sys.executable, "-m", "server.limits", memory, str(_FILE_SIZE), *self._module, task, *arguments]

    async def _watch(self, process: Process, answer: asyncio.Future[Any], task: str) -> None:
        """Wait for the end; raises TooLarge as soon as a limit is passed."""
        limits, started = self._limits, time.monotonic()
        while not answer.done():
            memory, seconds = _usage(process.pid)
            seconds = max(seconds, (time.monotonic() - started) / limits.patience)
            if seconds > limits.seconds:
                raise TooLarge(f"{task}: the model takes longer than {limits.seconds:g} s")
            if memory > limits.memory:
                raise TooLarge(f"{task}: the model takes more than {limits.memory >> 20} MiB of memory")
            await asyncio.wait([answer], timeout=_LOOK)


async def _read(stream: asyncio.StreamReader | None, keep: int = 1 << 16) -> bytes:
    """Read to the end, keep the last bytes."""
    assert stream is not None
    kept = b""
    while chunk := await stream.read(1 << 16):
        kept = (kept + chunk)[-keep:]
    return kept


def _kill(process: Process) -> None:
    """Kill the child and all it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _usage(pid: int) -> tuple[int, float]:
    """Return the bytes in memory of a process and its descendants, and the processor seconds they have taken.

    Both are 0 where the system does not say.
    """
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]  # own, and of those waited for
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (OSError, IndexError):
        return 0, 0.0
    others = [_usage(int(child)) for child in below]
    memory = pages * os.sysconf("SC_PAGE_SIZE") + sum(memory for memory, _ in others)
    return memory, sum(map(int, times)) / os.sysconf("SC_CLK_TCK") + sum(seconds for _, seconds in others)


def _environment() -> dict[str, str]:
    """No secrets of the server, and one thread per library: the child compiles, it does not compute."""
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return {**kept, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def _error(task: str, code: int, output: bytes, complaint: bytes, arguments: list[str]) -> ServerError:
    if code == _REFUSED and (reason := _reason(output, arguments)):
        return Unprocessable(reason)
    if code == OUT_OF_MEMORY:
        return TooLarge(f"{task}: the model takes more memory than one may")
    if code == OUT_OF_SPACE:
        return StorageFull(f"{task}: the storage for compiled models is full")
    log.error("child %s ended with %d: %s", task, code, complaint.decode(errors="replace"))
    if code < 0:
        return Unprocessable(f"{task}: the model ended its process by {signal.Signals(-code).name}")
    return Internal(f"{task}: failed on this model; the server's log says more")


def _reason(output: bytes, arguments: list[str]) -> str | None:
    """Return the child's reason, without the server's paths."""
    try:
        reason = str(orjson.loads(output.splitlines()[-1])["error"])
    except (orjson.JSONDecodeError, IndexError, KeyError, TypeError):
        return None
    for path in sorted(arguments, key=len, reverse=True):
        if path.startswith("/"):
            reason = reason.replace(path, Path(path).name)
    return reason
