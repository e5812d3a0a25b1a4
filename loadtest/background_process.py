"""Background work during traffic, in a process of its own with idle priority (SCHED_IDLE).

In the generator's process this work would delay the very requests whose latency is measured. With normal priority it
would take processor time from the server, which clients on other machines do not.
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

READY = 300.0  # seconds until the process says that it is ready, on a machine that does much else
ENDING = 60.0  # seconds to finish its current work after SIGTERM


@dataclass
class BackgroundProcess:
    """A running background process."""

    done: int = 0  # lines it wrote after the first: one per finished unit of work
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # set when its output ends


@asynccontextmanager
async def background_process(module: str, *arguments: str) -> AsyncIterator[BackgroundProcess]:
    """Run a module (`python -m`) during the block. RuntimeError if the process ends by itself.

    The process reports by its first line that it has begun; TimeoutError if that takes longer than READY. At the end of
    the block it gets SIGTERM and may finish its current work, so that none of it falls into the next measurement;
    RuntimeError if that takes longer than ENDING.
    """
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", module, *arguments, stdout=PIPE, stderr=PIPE)
    _set_idle_priority(process.pid)
    assert process.stdout is not None
    work = BackgroundProcess()
    try:
        begun = await asyncio.wait_for(process.stdout.readline(), READY)
        counting = asyncio.create_task(_count(process.stdout, work))
        try:
            if begun:
                yield work
            if not begun or work.ended.is_set():
                raise RuntimeError(f"{module} ended by itself: {await _error_output(process)}")
            await _end(process, counting)
        finally:
            counting.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def _count(lines: asyncio.StreamReader, work: BackgroundProcess) -> None:
    while await lines.readline():
        work.done += 1
    work.ended.set()


async def _end(process: Process, counting: asyncio.Task[None]) -> None:
    """Send SIGTERM and wait until the process has closed its output."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(counting, ENDING)
    except TimeoutError:
        raise RuntimeError(f"the background process did not end within {ENDING:g} s after SIGTERM") from None


async def _error_output(process: Process) -> str:
    assert process.stderr is not None
    return (await process.stderr.read()).decode(errors="replace").strip()[-2000:]


def _set_idle_priority(pid: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
