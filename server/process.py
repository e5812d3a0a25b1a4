"""Child processes of the server: started in process groups of their own, watched, ended with all they started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_GIB = 1 << 30
_ADDRESS_SPACE = 4 * _GIB  # what a child may map beyond the memory it may use
_FILE_SIZE = 64 * _GIB
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LATHE_CACHE", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "TMPDIR")


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process and its descendants take; 0 where the system does not say."""

    memory: int = 0  # bytes resident
    seconds: float = 0.0  # of processor time

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.memory + other.memory, self.seconds + other.seconds)


def limited(memory: int, module: Sequence[str], *, idle: bool = False) -> list[str]:
    """Return the command that runs a module with bounds on its memory (bytes); see `server.limits`."""
    flags = ["--idle"] if idle else []
    bounds = [str(os.getpid()), str(memory + _ADDRESS_SPACE), str(_FILE_SIZE)]
    return [sys.executable, "-m", "server.limits", *flags, *bounds, *module]


async def start(command: Sequence[str], *, stderr: int = PIPE) -> Process:
    """Start a child made by `limited`, which leads a process group; ``stderr``: a descriptor.

    It stays in the server's session: Linux gives sessions equal shares of the processor (autogroups), whatever the
    priorities of what runs in them.
    """
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE, stderr=stderr, env=_environment())
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:  # asyncio itself would kill the child alone, and wait for what it started
        process = await starting
        kill(process)
        await process.communicate()
        raise


def kill(process: Process) -> None:
    """Kill the child and all it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it leads no group yet, and has started nothing
        with contextlib.suppress(ProcessLookupError):
            process.kill()


async def read_tail(stream: asyncio.StreamReader | None, keep: int = 1 << 16) -> bytes:
    """Read to the end, keep the last bytes."""
    assert stream is not None
    kept = b""
    while chunk := await stream.read(1 << 16):
        kept = (kept + chunk)[-keep:]
    return kept


def usage(pid: int) -> Usage:
    """Return what a process and its descendants take at the moment; processor time counts what they waited for."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]  # own, and of those waited for
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (OSError, IndexError):
        return Usage()
    own = Usage(pages * os.sysconf("SC_PAGE_SIZE"), sum(map(int, times)) / os.sysconf("SC_CLK_TCK"))
    return sum((usage(int(child)) for child in below), own)


def _environment() -> dict[str, str]:
    """No secrets of the server, and one thread per library: Lathe's own threads do the computing."""
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return {**kept, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
