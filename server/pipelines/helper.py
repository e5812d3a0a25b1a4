"""A child process at work for one step of a pipeline: bytes in, bytes out, and begun anew where it has died.

For what a library does that holds the interpreter's lock, or that a file or a text can hurt: in the child it costs
others nothing, and has its limits. Requests go through one at a time; threads wait for theirs without the lock.

A frame, on both pipes: one byte that says what it is, eight of its length (little-endian), so many bytes.
"""

from __future__ import annotations

import os
import select
import subprocess
import threading
import time
import weakref
from collections.abc import Sequence
from enum import IntEnum

from core.runtime.priority import usage
from server.children import Limits
from server.errors import Internal
from server.process import environment, limited

_LOOK = 50  # milliseconds between two looks at a child that takes long
_HEAD = 9  # bytes
_LEAVING = 1.0  # seconds for a child to end once nobody writes to it any more


class Kind(IntEnum):
    """Of an answer."""

    DONE = 0
    REFUSED = 1  # what it was to be made of is at fault; the reason follows
    FAILED = 2  # unforeseen; a word about it follows


class Refused(Exception):
    """What the child was to be made of is at fault; the message says why."""


class Beyond(Exception):
    """The child went beyond a limit, and is no more."""


class _Died(Exception):
    """The child ended before it had answered."""


class Helper:
    """Runs ``module`` with ``arguments`` and, as the last of them, the number of the open ``file`` that it reads."""

    def __init__(self, module: str, arguments: Sequence[str], file: int, start: Limits, each: Limits) -> None:
        """Start it; takes ``file`` over. ``start`` and ``each``: what beginning and one request may take. Raises
        Refused, Beyond, Internal."""
        self._command = limited(start.memory, [module, *arguments, str(file)])
        self._file = file
        self._start_limits = start
        self._limits = each
        self._lock = threading.Lock()
        self._closed = False
        self._child: _Child | None = None
        try:
            self._child = self._start()
        except BaseException:
            os.close(file)
            raise

    def ask(self, request: bytes) -> memoryview:
        """Return the answer; blocks. Raises Beyond, and Internal where it fails or has died twice over it."""
        with self._lock:
            for _ in range(2):
                if self._closed:
                    break
                self._child = self._child or self._start_again()
                try:
                    return self._child.ask(request, self._limits)
                except _Died:
                    self._let_go()
                except Beyond:
                    self._let_go()
                    raise
        raise Internal("the step's process has ended")

    @property
    def memory_bytes(self) -> int:
        """What the process has in memory."""
        child = self._child
        return usage(child.pid).memory if child is not None else 0

    def close(self) -> None:
        """End it."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._let_go()
                os.close(self._file)

    def _start(self) -> _Child:
        child = _Child(self._command, self._file)
        try:
            child.answer(self._start_limits)
        except _Died as error:
            child.end()
            raise Internal("the step's process did not start") from error
        except BaseException:
            child.end()
            raise
        return child

    def _start_again(self) -> _Child:
        """No request is at fault where that fails."""
        try:
            return self._start()
        except (Refused, Beyond) as error:
            raise Internal(f"the step's process did not begin anew: {error}") from error

    def _let_go(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


class _Child:
    """One process."""

    def __init__(self, command: Sequence[str], file: int) -> None:
        pipe = subprocess.PIPE
        popen = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=environment(),
            pass_fds=(file,),
        )
        assert popen.stdin is not None and popen.stdout is not None
        self.pid = popen.pid
        self._input, self._output = popen.stdin, popen.stdout
        self._ready = select.poll()
        self._ready.register(self._output, select.POLLIN | select.POLLHUP)
        self.end = weakref.finalize(self, _end, popen)

    def ask(self, request: bytes, limits: Limits) -> memoryview:
        try:
            self._write(bytes((Kind.DONE,)) + len(request).to_bytes(8, "little") + request)
        except OSError as error:
            raise _Died from error
        return self.answer(limits)

    def answer(self, limits: Limits) -> memoryview:
        """Wait for an answer; raises Refused, Internal, Beyond, _Died."""
        watch = _Watch(self.pid, limits)
        head = self._read(_HEAD, watch)
        body = self._read(int.from_bytes(head[1:], "little"), watch)
        if head[0] == Kind.DONE:
            return body
        told = str(body, "utf-8", "replace")
        raise Refused(told) if head[0] == Kind.REFUSED else Internal(f"the step failed ({told})")

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._input.write(view) :]

    def _read(self, count: int, watch: _Watch) -> memoryview:
        whole = memoryview(bytearray(count))
        rest = whole
        while rest:
            if not self._ready.poll(_LOOK):
                watch.look()
                continue
            got = os.readv(self._output.fileno(), [rest])
            if not got:
                raise _Died
            rest = rest[got:]
        return whole


class _Watch:
    """What an answer takes, from the first look on."""

    def __init__(self, pid: int, limits: Limits) -> None:
        self._pid = pid
        self._limits = limits
        self._began = time.monotonic()
        self._before: float | None = None  # seconds of the processor

    def look(self) -> None:
        """Raise Beyond where it is too much."""
        taken = usage(self._pid)
        self._before = taken.seconds if self._before is None else self._before
        seconds = max(taken.seconds - self._before, (time.monotonic() - self._began) / self._limits.patience)
        if seconds > self._limits.seconds:
            raise Beyond(f"it takes longer than {self._limits.seconds:g} s")
        if taken.memory > self._limits.memory:
            raise Beyond(f"it takes more than {self._limits.memory >> 20} MiB of memory")


def _end(popen: subprocess.Popen[bytes]) -> None:
    assert popen.stdin is not None and popen.stdout is not None
    try:
        popen.stdin.close()
        popen.wait(_LEAVING)
    except (OSError, subprocess.TimeoutExpired):
        popen.kill()
        popen.wait()
    popen.stdout.close()
