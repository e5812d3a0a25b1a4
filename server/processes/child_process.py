"""Starts child processes of the server as leaders of their own process groups, and kills whole groups."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import IO, Protocol

import uvloop

from lathe.core.runtime.host import child_python
from lathe.core.runtime.host.priority import Priority, set_priority

_LOOK = 0.05  # seconds between two polls of a process, on systems without pidfd
_GIB = 1 << 30
_ADDRESS_SPACE = 4 * _GIB  # address space that a child may map beyond its memory limit
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


def limited_command(memory: int, module: Sequence[str]) -> list[str]:
    """Return the command that runs `module`, its name and arguments, restricted by `lathe.server.processes.limits`.

    Its address space is limited to `memory` bytes and 4 GiB more, which it may map without using them; its files to
    64 GiB each. It is killed when the thread that runs the command ends (`die_with_parent`).
    """
    bounds = [str(os.getpid()), str(memory + _ADDRESS_SPACE), str(_FILE_SIZE)]
    return child_python.command("lathe.server.processes.limits", *bounds, *module)


class Child(Protocol):
    """A child process, started directly or by the fork server; it leads a process group."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    stdout: asyncio.StreamReader | None  # set by `connect_or_kill`
    stderr: asyncio.StreamReader | None

    async def wait(self) -> int:
        """Wait for its end and return the exit code, or minus the number of the signal that killed it."""

    def send_signal(self, number: int) -> None: ...


class Process:
    """A child process started by `subprocess`, with asyncio's interface to its output and its end.

    asyncio with uvloop forks: while the kernel copies the page tables of a server that holds models, no request is
    answered, and every page written afterwards is copied too. `subprocess` uses vfork, which shares the memory until
    the child calls exec.
    """

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.stdout: asyncio.StreamReader | None = None  # set by `connect_or_kill`
        self.stderr: asyncio.StreamReader | None = None

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the number of the signal that killed it; None until its end was waited for."""
        return self._popen.returncode

    async def wait(self) -> int:
        """Wait for its end and return `returncode`."""
        if self._popen.poll() is None:
            await self._wait_for_end()
        return self._popen.wait()

    def send_signal(self, number: int) -> None:
        self._popen.send_signal(number)

    async def _wait_for_end(self) -> None:
        try:
            descriptor = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # not Linux, or older than 5.3
            while self._popen.poll() is None:  # noqa: ASYNC110 (nothing would set an event)
                await asyncio.sleep(_LOOK)
            return
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        try:
            loop.add_reader(descriptor, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)


class _PipeProtocol(asyncio.StreamReaderProtocol):
    def eof_received(self) -> bool:
        """Return False, so that the transport closes the pipe; uvloop would keep it open."""
        super().eof_received()
        return False


async def open_reader(pipe: IO[bytes] | None) -> asyncio.StreamReader | None:
    """Return a reader of a pipe on the running event loop, which closes the pipe at the end of data; None for None."""
    if pipe is None:
        return None
    reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
    source = _UvloopPipe(pipe) if isinstance(loop, uvloop.Loop) else pipe
    await loop.connect_read_pipe(lambda: _PipeProtocol(reader), source)
    return reader


class _UvloopPipe:
    """A pipe whose descriptor uvloop owns.

    uvloop closes the descriptor itself, and then calls `close` of the file object. Closing the descriptor a second
    time could close a file that another thread has opened in between under the same number.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._descriptor = os.dup(pipe.fileno())
        pipe.close()

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def close(self) -> None:
        """Do nothing: uvloop closes the descriptor."""


async def start(command: Sequence[str], priority: Priority = Priority.LOW, *, stderr: int = subprocess.PIPE) -> Process:
    """Start a child by a command of `limited_command`; it leads a process group.

    `stderr`: the descriptor that the child's standard error goes to; by default a pipe that `Process.stderr` reads.
    Raises OSError if the child cannot be started; then no process is left. The child stays in the server's session:
    Linux gives sessions equal shares of the CPU (autogroups), whatever the priorities of their processes, so a session
    of its own would void its low priority.
    """
    popen = _spawn(command, stderr)
    process = Process(popen)
    await connect_or_kill(process, popen.stdout, popen.stderr, lambda: set_priority(popen.pid, priority))
    return process


async def connect_or_kill(
    child: Child, stdout: IO[bytes] | None, stderr: IO[bytes] | None, prepare: Callable[[], None] = lambda: None
) -> None:
    """Call `prepare`, and set `stdout` and `stderr` of a started child to readers of these pipes; None for None.

    If that fails, or if the task is cancelled meanwhile, kills the child, waits for its end, and raises the error.
    """
    connecting: asyncio.Future[None] | None = None
    try:
        prepare()
        connecting = asyncio.ensure_future(_connect(child, stdout, stderr))
        await asyncio.shield(connecting)
    except BaseException:
        kill(child)
        if connecting is not None:
            await asyncio.wait([connecting])
        for pipe, reader in ((stdout, child.stdout), (stderr, child.stderr)):
            if pipe is not None and reader is None:  # a reader closes its pipe
                pipe.close()
        tails = [read_tail(reader) for reader in (child.stdout, child.stderr) if reader]
        await asyncio.gather(child.wait(), *tails, return_exceptions=True)
        raise


async def _connect(child: Child, stdout: IO[bytes] | None, stderr: IO[bytes] | None) -> None:
    child.stdout = await open_reader(stdout)
    child.stderr = await open_reader(stderr)


def _spawn(command: Sequence[str], stderr: int) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=stderr, bufsize=0, env=environment())


def kill(process: Child) -> None:
    """Kill the child's process group: the child and all processes it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # the child leads no group yet, so it has started no process either
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)


async def read_tail(stream: asyncio.StreamReader | None, keep: int = 1 << 16) -> bytes:
    """Read a stream (not None) to its end, and return its last `keep` bytes."""
    assert stream is not None
    tail = b""
    while chunk := await stream.read(1 << 16):
        tail = (tail + chunk)[-keep:]
    return tail


def environment() -> dict[str, str]:
    """Return the environment of children: the variables of `_ENVIRONMENT`, and BLAS and OpenMP on one thread.

    The server's secrets are not among them. One thread per library suffices, since Lathe's own thread pool computes.
    """
    passed = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    passed["PYTHONPATH"] = child_python.python_path()
    return {**passed, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
