"""A child process at work for one step of a pipeline: bytes in, bytes out, and begun anew where it has died.

For what a library does that holds the interpreter's lock, or that a file or a text can hurt: in the child it costs
others nothing, and has its limits, each request by itself. Threads wait for theirs without the interpreter's lock, one
after the other; each gives it all that it has, up to a size, and takes the answers as they come.

A frame, on both pipes: one byte that says what it is, eight of its length (little-endian), so many bytes. The child
reads a frame of the first kind to its end before it answers: requests, each with eight bytes of its length before it.
An answer for each follows in its turn.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from itertools import accumulate, count
from typing import TypeAlias

from core.amounts import amount
from core.runtime.priority import usage
from server.children import Limits
from server.errors import BrokenOff, Internal
from server.process import environment, limited

_AT_ONCE = 1 << 20  # bytes of requests in a frame, unless one alone has more
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


Answer: TypeAlias = memoryview | Beyond | Internal


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
        self._beginning = 0.0  # seconds that the child took to begin
        self._numbers = count(1)
        self._run: tuple[int, int] | None = None  # the thread that the child works for, and its run
        self._since = 0.0  # monotonic seconds: when that began
        self._unwanted = 0  # this run and all before
        try:
            self._child = self._start()
        except BaseException:
            os.close(file)
            raise

    def ask(self, requests: Sequence[bytes]) -> list[Answer]:
        """Return the answer to each; blocks. Beyond: it took too much; Internal: it failed, or the process died twice
        over it. Raises BrokenOff where they are not wanted any more, and Internal where there is no process."""
        answers: list[Answer] = []
        with self._lock:
            self._run, self._since = (threading.get_ident(), next(self._numbers)), time.monotonic()
            try:
                while len(answers) < len(requests):
                    self._ask(requests, answers)
            finally:
                self._run = None
        return answers

    def runs(self) -> dict[int, int]:
        """Return the number of the run for which the process works now, under its thread."""
        run = self._run
        return {} if run is None else {run[0]: run[1]}

    def interrupt(self, run: int | None = None) -> None:
        """Break off a run, or what runs now: as soon as it has taken as long as a process takes to begin, since that is
        what it costs."""
        for number in self.runs().values():
            if run in (None, number):
                self._unwanted = number

    def _ask(self, requests: Sequence[bytes], answers: list[Answer]) -> None:
        """Add the answers to the next few; at least one."""
        before = len(answers)
        for _ in range(2):
            if self._closed:
                raise Internal("the step's process has ended")
            self._child = self._child or self._start_again()
            try:
                for answer in self._child.ask(_together(requests[len(answers) :]), self._watch):
                    answers.append(answer)
                    if len(answers) < len(requests):
                        self._go_on()
                return
            except _Died:
                self._let_go()
            except Beyond as error:
                self._let_go(busy=True)
                answers.append(error)
            except BaseException:
                self._let_go(busy=True)
                raise
            if len(answers) > before:
                return
        answers.append(Internal("the step's process has ended"))

    def _watch(self, pid: int) -> _Watch:
        return _Watch(pid, self._limits, self._go_on)

    def _go_on(self) -> None:
        """Raise BrokenOff where the run is not wanted any more."""
        unwanted = self._run is not None and self._run[1] <= self._unwanted
        if unwanted and time.monotonic() - self._since >= self._beginning:
            raise BrokenOff

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
        began = time.monotonic()
        child = _Child(self._command, self._file)
        try:
            child.begun(_Watch(child.pid, self._start_limits))
        except _Died as error:
            child.end()
            raise Internal("the step's process did not start") from error
        except BaseException:
            child.end()
            raise
        self._beginning = time.monotonic() - began
        return child

    def _start_again(self) -> _Child:
        """No request is at fault where that fails."""
        try:
            return self._start()
        except (Refused, Beyond) as error:
            raise Internal(f"the step's process did not begin anew: {error}") from error

    def _let_go(self, *, busy: bool = False) -> None:
        """``busy``: it would not notice that nobody writes to it any more."""
        child, self._child = self._child, None
        if child is not None and busy:
            os.kill(child.pid, signal.SIGKILL)
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

    def ask(self, requests: Sequence[bytes], watch: Callable[[int], _Watch]) -> Iterator[memoryview | Internal]:
        """Yield the answers as they come; raises Beyond, BrokenOff, _Died."""
        body = b"".join(part for request in requests for part in (len(request).to_bytes(8, "little"), request))
        try:
            self._write(bytes((Kind.DONE,)) + len(body).to_bytes(8, "little") + body)
        except OSError as error:
            raise _Died from error
        for _ in requests:
            kind, answer = self._answer(watch(self.pid))
            yield answer if kind == Kind.DONE else Internal(f"the step failed ({_told(answer)})")

    def begun(self, watch: _Watch) -> None:
        """Wait until it is ready; raises Refused, Internal, Beyond, _Died."""
        kind, answer = self._answer(watch)
        if kind != Kind.DONE:
            raise (Refused if kind == Kind.REFUSED else Internal)(_told(answer))

    def _answer(self, watch: _Watch) -> tuple[int, memoryview]:
        head = self._read(_HEAD, watch)
        return head[0], self._read(int.from_bytes(head[1:], "little"), watch)

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


def _together(requests: Sequence[bytes]) -> Sequence[bytes]:
    """Return as many of the first as go into a frame."""
    sizes = accumulate(map(len, requests))
    return requests[: max(1, sum(size <= _AT_ONCE for size in sizes))]


def _told(answer: memoryview) -> str:
    return str(answer, "utf-8", "replace")


class _Watch:
    """What an answer takes, from the first look on."""

    def __init__(self, pid: int, limits: Limits, go_on: Callable[[], object] = bool) -> None:
        """``go_on`` raises what is to end the wait."""
        self._pid = pid
        self._limits = limits
        self._go_on = go_on
        self._began = time.monotonic()
        self._before: float | None = None  # seconds of the processor

    def look(self) -> None:
        """Raise Beyond where it is too much, and what else ends it."""
        self._go_on()
        taken = usage(self._pid)
        self._before = taken.seconds if self._before is None else self._before
        seconds = max(taken.seconds - self._before, (time.monotonic() - self._began) / self._limits.patience)
        if seconds > self._limits.seconds:
            raise Beyond(f"it takes longer than {self._limits.seconds:g} s")
        if taken.memory > self._limits.memory:
            raise Beyond(f"it takes more than {amount(self._limits.memory)} of memory")


def _end(popen: subprocess.Popen[bytes]) -> None:
    assert popen.stdin is not None and popen.stdout is not None
    try:
        popen.stdin.close()
        popen.wait(_LEAVING)
    except (OSError, subprocess.TimeoutExpired):
        popen.kill()
        popen.wait()
    popen.stdout.close()
