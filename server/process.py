"""Child processes of the server: started in process groups of their own, watched, ended with all they started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Coroutine, Sequence
from typing import IO, Any, Protocol

import uvloop

from core.runtime import child_python
from core.runtime.priority import Priority, lower

_LOOK = 0.05  # seconds between two looks at a process whose end the system does not announce
_GIB = 1 << 30
_ADDRESS_SPACE = 4 * _GIB  # what a child may map beyond the memory it may use
_FILE_SIZE = 64 * _GIB
_ENVIRONMENT = (
    "PATH",
    "HOME",
    "LANG",
    "LATHE_CACHE",
    "LATHE_CACHE_DIR",
    "LATHE_OPERATORS",
    "LATHE_TARGET",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "TMPDIR",
)


def limited(memory: int, module: Sequence[str]) -> list[str]:
    """Return the command that runs a module with bounds on its memory (bytes); see `server.limits`."""
    bounds = [str(os.getpid()), str(memory + _ADDRESS_SPACE), str(_FILE_SIZE)]
    return child_python.command("server.limits", *bounds, *module)


class Child(Protocol):
    """A process at work for the server, whoever has started it; it leads a process group."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    @property
    def stdout(self) -> asyncio.StreamReader | None: ...

    @property
    def stderr(self) -> asyncio.StreamReader | None: ...

    async def wait(self) -> int:
        """Return its exit code once it has ended."""

    def send_signal(self, number: int) -> None: ...


class Process:
    """A child process: what it says, and its end.

    asyncio with uvloop forks: while the page tables of a server that holds models are copied, nobody is answered, and
    every page written afterwards is copied, too. `subprocess` lets the child borrow the memory until it is replaced.
    """

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.stdout: asyncio.StreamReader | None = None  # there once connected
        self.stderr: asyncio.StreamReader | None = None

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while nobody has waited for its end."""
        return self._popen.returncode

    async def connect(self) -> None:
        """Let the running loop read its pipes."""
        self.stdout, self.stderr = await open_reader(self._popen.stdout), await open_reader(self._popen.stderr)

    async def wait(self) -> int:
        """Return its exit code once it has ended."""
        if self._popen.poll() is None:
            await self._end()
        return self._popen.wait()

    def send_signal(self, number: int) -> None:
        self._popen.send_signal(number)

    async def _end(self) -> None:
        try:
            descriptor = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # another system than Linux, or an old one
            while self._popen.poll() is None:  # noqa: ASYNC110 (nothing there would set an event)
                await asyncio.sleep(_LOOK)
            return
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)


class _PipeProtocol(asyncio.StreamReaderProtocol):
    def eof_received(self) -> bool:
        """Nothing is left to do with the pipe; uvloop would keep it open."""
        super().eof_received()
        return False


async def open_reader(pipe: IO[bytes] | None) -> asyncio.StreamReader | None:
    """Return what reads a pipe on the running loop, and closes it in the end."""
    if pipe is None:
        return None
    reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
    given = _Handed(pipe) if isinstance(loop, uvloop.Loop) else pipe
    await loop.connect_read_pipe(lambda: _PipeProtocol(reader), given)
    return reader


class _Handed:
    """A pipe's end that belongs to uvloop. It closes the descriptor, and then this, too: closed here, that might
    be one which another thread has opened in between."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._descriptor = os.dup(pipe.fileno())
        pipe.close()

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def close(self) -> None:
        """Leave that to uvloop."""


async def start(command: Sequence[str], priority: Priority = Priority.LOW, *, stderr: int = subprocess.PIPE) -> Process:
    """Start a child made by `limited`, which leads a process group; ``stderr``: a descriptor.

    It stays in the server's session: Linux gives sessions equal shares of the processor (autogroups), whatever the
    priorities of what runs in them.
    """
    popen = _spawn(command, stderr)
    lower(popen.pid, priority)
    process = Process(popen)
    await connected(process, process.connect())
    return process


async def connected(child: Child, connect: Coroutine[Any, Any, None]) -> None:
    """Connect a child that has begun; when cancelled meanwhile, end it."""
    connecting = asyncio.ensure_future(connect)
    try:
        await asyncio.shield(connecting)
    except asyncio.CancelledError:
        await connecting
        kill(child)
        pipes = [read_tail(pipe) for pipe in (child.stdout, child.stderr) if pipe]
        await asyncio.gather(child.wait(), *pipes, return_exceptions=True)
        raise


def _spawn(command: Sequence[str], stderr: int) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=stderr, bufsize=0, env=environment())


def kill(process: Child) -> None:
    """Kill the child and all it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it leads no group yet, and has started nothing
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)


async def read_tail(stream: asyncio.StreamReader | None, keep: int = 1 << 16) -> bytes:
    """Read to the end, keep the last bytes."""
    assert stream is not None
    kept = b""
    while chunk := await stream.read(1 << 16):
        kept = (kept + chunk)[-keep:]
    return kept


def environment() -> dict[str, str]:
    """What a child sees: no secrets of the server, and one thread per library: Lathe's own threads do the computing."""
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    kept["PYTHONPATH"] = child_python.python_path()
    return {**kept, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
