"""What goes on beside the traffic, in a process of its own that computes while nobody else wants to.

In the generator's process it would itself delay the requests whose delay by the server is to be measured; on other
machines, where such clients are in truth, it would take no processor from the server either.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

READY = 60.0  # seconds for a process to begin
ENDING = 60.0  # and to end what it has begun, once asked to


@dataclass
class Beside:
    """A process at work."""

    done: int = 0  # lines it wrote, one for each thing worth counting
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # by itself


@asynccontextmanager
async def beside(module: str, *arguments: str) -> AsyncIterator[Beside]:
    """Run a module meanwhile, which says by its first line that it has begun; RuntimeError when it ends by itself.

    It is then told to end (SIGTERM) and may end what it is at, so that none of its work falls into what comes after.
    """
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", module, *arguments, stdout=PIPE, stderr=PIPE)
    _idle(process.pid)
    assert process.stdout is not None
    work = Beside()
    try:
        begun = await asyncio.wait_for(process.stdout.readline(), READY)
        counting = asyncio.create_task(_count(process.stdout, work))
        try:
            if begun:
                yield work
            if not begun or work.ended.is_set():
                raise RuntimeError(f"{module} ended by itself: {await _complaint(process)}")
            await _end(process, counting)
        finally:
            counting.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def _count(lines: asyncio.StreamReader, work: Beside) -> None:
    while await lines.readline():
        work.done += 1
    work.ended.set()


async def _end(process: Process, counting: asyncio.Task[None]) -> None:
    """Tell it to end, and wait until it has written its last line."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(counting, ENDING)
    except TimeoutError:
        raise RuntimeError(f"a process beside the traffic did not end within {ENDING:g} s") from None


async def _complaint(process: Process) -> str:
    assert process.stderr is not None
    return (await process.stderr.read()).decode(errors="replace").strip()[-2000:]


def _idle(pid: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
