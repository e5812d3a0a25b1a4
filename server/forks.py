"""The server's side of `server.fork_server`: a process per task, without what importing takes each."""

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
from typing import IO, Any

import orjson

from server.fork_server import LARGEST
from server.process import connected, environment, limited, open_reader

_BIRTH = 120.0  # seconds in which a process has begun; the first one waits for the imports
POSSIBLE = sys.platform == "linux" and hasattr(os, "pidfd_open")


class Gone(Exception):
    """The process that forks has ended, and all its tasks with it."""


class Forked:
    """A task's process, as :class:`server.process.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stdout: asyncio.StreamReader | None = None  # there once connected
        self.stderr: asyncio.StreamReader | None = None
        self.returncode: int | None = None
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def connect(self, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Let the running loop read its pipes."""
        self.stdout, self.stderr = await open_reader(stdout), await open_reader(stderr)

    async def wait(self) -> int:
        """Return its exit code once it has ended; raises Gone."""
        self.returncode = await asyncio.shield(self.ended)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Forks:
    """Starts tasks of one module. Used on one event loop; closed in the end."""

    def __init__(self, memory: int, module: Sequence[str]) -> None:
        """``memory``: bytes of each task. Raises OSError where no process can be started."""
        name, *self._prefix = module
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        nothing = subprocess.DEVNULL
        with theirs:
            self._popen = subprocess.Popen(
                limited(memory, ["server.fork_server", str(theirs.fileno()), name]),
                stdin=nothing, stdout=nothing, stderr=nothing, env=environment(), pass_fds=[theirs.fileno()],
            )  # fmt: skip
        self._numbers = itertools.count()
        self._born: dict[int, asyncio.Future[Forked]] = {}
        self._at_work: dict[int, Forked] = {}
        self.gone = False
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read)

    async def start(self, arguments: Sequence[str]) -> Forked:
        """Begin a task; raises Gone."""
        task = next(self._numbers)
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        stdout, stderr = os.fdopen(out, "rb", buffering=0), os.fdopen(err, "rb", buffering=0)
        born: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        self._born[task] = born
        try:
            self._send(task, [*self._prefix, *arguments], (out_end, err_end))
            forked = await asyncio.wait_for(born, _BIRTH)
        except BaseException as error:
            self._born.pop(task, None)  # whoever is born now is killed
            stdout.close()
            stderr.close()
            if isinstance(error, TimeoutError):
                raise Gone("no process has begun in time") from error
            raise
        await connected(forked, forked.connect(stdout, stderr))
        return forked

    async def close(self) -> None:
        """End the process that forks, and what still runs in it."""
        self._end()
        await asyncio.to_thread(self._popen.wait)

    @property
    def idle(self) -> bool:
        """Whether no task is under way."""
        return not (self._born or self._at_work)

    def _send(self, task: int, arguments: Sequence[str], descriptors: Sequence[int]) -> None:
        try:
            message = orjson.dumps({"task": task, "arguments": arguments})
            if self.gone or len(message) > LARGEST:
                raise Gone("the process that forks has ended")
            socket.send_fds(self._socket, [message], list(descriptors))
        except OSError as error:
            raise Gone(f"the process that forks cannot be reached: {error}") from error
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
            born = self._born.pop(task, None)
            if born is not None and not born.done():
                forked = self._at_work[task] = Forked(pid)
                born.set_result(forked)
            else:  # whoever asked for it has left
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
        under_way: list[asyncio.Future[Any]] = [*self._born.values()]
        under_way += [forked.ended for forked in self._at_work.values()]
        for waiting in under_way:
            if not waiting.done():
                waiting.set_exception(Gone("the process that forks has ended"))
                waiting.exception()  # seen, should nobody wait for it
        self._born.clear()
        self._at_work.clear()
