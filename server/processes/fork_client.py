"""The client of `lathe.server.processes.fork_server`: starts a process per task without repeating the imports."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import orjson

from lathe.server.processes.child_process import connect_or_kill, environment, limited_command
from lathe.server.processes.fork_server import LARGEST

_START_TIMEOUT = 120.0  # seconds in which a process must start; the first one waits for the imports
IS_SUPPORTED = sys.platform == "linux" and hasattr(os, "pidfd_open")


class ForkServerEnded(Exception):
    """The fork server has ended, and all its tasks with it; or it did not start a task."""


class Forked:
    """The process of a task, with the interface of `lathe.server.processes.child_process.Child`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stdout: asyncio.StreamReader | None = None  # set by `connect_or_kill`
        self.stderr: asyncio.StreamReader | None = None
        self.returncode: int | None = None
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        """Wait for its end and return the exit code, or minus the number of the signal that ended it.

        Raises ForkServerEnded if the fork server ends before, which ends all its processes.
        """
        self.returncode = await asyncio.shield(self.ended)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkClient:
    """Starts tasks of one module in forks of one process. Used on one event loop; must be closed."""

    def __init__(self, memory: int, module: Sequence[str]) -> None:
        """Start the fork server; OSError if that fails. Linux only (`IS_SUPPORTED`).

        `memory`: the limit of each task in bytes. `module`: its name, and arguments before those of every task.
        """
        name, *self._prefix = module
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        nothing = subprocess.DEVNULL
        with theirs:
            self._popen = subprocess.Popen(
                limited_command(memory, ["lathe.server.processes.fork_server", str(theirs.fileno()), name]),
                stdin=nothing, stdout=nothing, stderr=nothing, env=environment(), pass_fds=[theirs.fileno()],
            )  # fmt: skip
        self._numbers = itertools.count()
        self._starting: dict[int, asyncio.Future[Forked]] = {}
        self._at_work: dict[int, Forked] = {}
        self.gone = False
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read)

    async def start(self, arguments: Sequence[str]) -> Forked:
        """Start a task with these arguments.

        Raises ForkServerEnded if the fork server has ended, if the message would exceed `LARGEST` bytes, or if the task
        does not start within `_START_TIMEOUT` seconds; in the last two cases the fork server may still run. Raises
        OSError if there are too many open files.
        """
        task = next(self._numbers)
        out, out_end = os.pipe()
        try:
            err, err_end = os.pipe()
        except OSError:
            os.close(out)
            os.close(out_end)
            raise
        stdout, stderr = os.fdopen(out, "rb", buffering=0), os.fdopen(err, "rb", buffering=0)
        started: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        self._starting[task] = started
        try:
            self._send(task, [*self._prefix, *arguments], (out_end, err_end))
            forked = await asyncio.wait_for(started, _START_TIMEOUT)
        except BaseException as error:
            self._starting.pop(task, None)  # if the process starts now, `_take` kills it
            stdout.close()
            stderr.close()
            if isinstance(error, TimeoutError):
                raise ForkServerEnded(f"the process did not start within {_START_TIMEOUT:g} s") from error
            raise
        await connect_or_kill(forked, stdout, stderr)
        return forked

    async def close(self) -> None:
        """Kill the fork server and its tasks, and wait for its end."""
        self._end()
        await asyncio.to_thread(self._popen.wait)

    @property
    def idle(self) -> bool:
        """Whether no task is starting or running."""
        return not (self._starting or self._at_work)

    def _send(self, task: int, arguments: Sequence[str], descriptors: Sequence[int]) -> None:
        try:
            message = orjson.dumps({"task": task, "arguments": arguments})
            if self.gone or len(message) > LARGEST:
                raise ForkServerEnded("the fork server has ended")
            socket.send_fds(self._socket, [message], list(descriptors))
        except OSError as error:
            raise ForkServerEnded(f"the fork server cannot be reached: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _read(self) -> None:
        while not self.gone:
            try:
                message = self._socket.recv(LARGEST)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self._end()
                return
            self._take(**orjson.loads(message))

    def _take(self, task: int, pid: int | None = None, ended: int | None = None) -> None:
        if pid is not None:
            started = self._starting.pop(task, None)
            if started is not None and not started.done():
                forked = self._at_work[task] = Forked(pid)
                started.set_result(forked)
            else:  # the caller of `start` was cancelled or timed out
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        elif ended is not None and task in self._at_work:
            self._at_work.pop(task).ended.set_result(ended)

    def _end(self) -> None:
        if self.gone:
            return
        self.gone = True
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._popen.kill()
        futures: list[asyncio.Future[Any]] = [*self._starting.values()]
        futures += [forked.ended for forked in self._at_work.values()]
        for future in futures:
            if not future.done():
                future.set_exception(ForkServerEnded("the fork server has ended"))
                future.exception()  # marks it as retrieved: asyncio logs no error if no task awaits it
        self._starting.clear()
        self._at_work.clear()
