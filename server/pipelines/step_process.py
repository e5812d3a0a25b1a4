"""Runs a step of a pipeline in a child process, with bytes as requests and answers; restarts the process if it died.

It is for libraries that hold the interpreter's lock (GIL), or that a hostile file or text can crash. In the child they
do not block the server, and each request has its own limits. One thread at a time uses the child, and waits without the
GIL; it sends its requests in frames of at most 1 MiB, and reads the answers as they come.

A frame, on both pipes, is one byte for its kind, eight bytes for its length (little-endian), and the body. The body of
a frame to the child is a list of requests, each after eight bytes for its length. The child reads the whole frame, then
sends one frame per answer, in order.
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

from lathe.core.byte_sizes import format_bytes
from lathe.core.runtime.host.priority import resource_usage
from lathe.server.errors import ExecutionInterrupted, Internal
from lathe.server.processes.child_process import environment, limited_command
from lathe.server.processes.stage_children import Limits

_MAX_FRAME_BYTES = 1 << 20  # most bytes of requests in a frame; a larger single request gets its own frame
_POLL = 50  # milliseconds between two checks of the limits
_HEAD = 9  # bytes of a frame before its body
_EXIT_TIMEOUT = 1.0  # seconds for a child to exit after its input is closed


class FrameKind(IntEnum):
    """The kind of an answer's frame."""

    DONE = 0
    REFUSED = 1  # at the start: the file is invalid; the body is the reason
    FAILED = 2  # unexpected error; the body is its name


class InvalidFile(Exception):
    """The child's file is invalid; the message gives the reason."""


class LimitExceeded(Exception):
    """The child exceeded a limit and was killed."""


class _ChildExited(Exception):
    """The child exited before it had answered."""


Answer: TypeAlias = memoryview | LimitExceeded | Internal


class StepProcess:
    """Runs `module` in a child process, with `arguments` and the descriptor of the open `file` that it reads.

    Linux kills the child when the thread that started it ends: the thread that made this object, or the thread of the
    `ask` that restarted the child. Threads of pools live as long as the server, and `ask` restarts a killed child.
    """

    def __init__(self, module: str, arguments: Sequence[str], file: int, start: Limits, each: Limits) -> None:
        """Start the child, and own `file` from now on. `start`, `each`: the limits of the start and of one request.

        Raises InvalidFile, LimitExceeded, Internal.
        """
        self._command = limited_command(start.memory, [module, *arguments, str(file)])
        self._file = file
        self._start_limits = start
        self._limits = each
        self._lock = threading.Lock()
        self._closed = False
        self._child: _Child | None = None
        self._start_seconds = 0.0  # seconds that the start of the child took
        self.greeting = b""  # what the child has sent when it was ready
        self._run_numbers = count(1)
        self._run: tuple[int, int] | None = None  # the thread that uses the child, and the number of its run
        self._since = 0.0  # start of that run, in monotonic seconds
        self._last_interrupted = 0  # runs up to this number are interrupted
        try:
            self._child = self._start()
        except BaseException:
            os.close(file)
            raise

    def ask(self, requests: Sequence[bytes]) -> list[Answer]:
        """Return the answers to `requests`; blocks.

        An answer is LimitExceeded if the request exceeded its limits, and Internal if it failed or the process exited
        twice during it. Raises ExecutionInterrupted after `interrupt`, and Internal if the process is closed or cannot
        be started.
        """
        answers: list[Answer] = []
        with self._lock:
            self._run, self._since = (threading.get_ident(), next(self._run_numbers)), time.monotonic()
            try:
                while len(answers) < len(requests):
                    self._ask(requests, answers)
            finally:
                self._run = None
        return answers

    def runs(self) -> dict[int, int]:
        """Return {id of the thread that uses the process now: number of its run}; empty if no thread uses it."""
        run = self._run
        return {} if run is None else {run[0]: run[1]}

    def interrupt(self, run: int | None = None) -> None:
        """Interrupt run number `run`, or the present one.

        That takes effect when the run has lasted as long as the start of a process, since it costs a restart.
        """
        for number in self.runs().values():
            if run in (None, number):
                self._last_interrupted = number

    def _ask(self, requests: Sequence[bytes], answers: list[Answer]) -> None:
        """Send the next frame of the requests that have no answer yet, and append its answers, at least one.

        If the process exits before the first answer, it is restarted once.
        """
        before = len(answers)
        for _ in range(2):
            if self._closed:
                raise Internal("the step's process has ended")
            self._child = self._child or self._restart()
            try:
                for answer in self._child.ask(_next_frame(requests[len(answers) :]), self._watch):
                    answers.append(answer)
                    if len(answers) < len(requests):
                        self._check_interrupted()
                return
            except _ChildExited:
                self._drop_child()
            except LimitExceeded as error:
                self._drop_child(busy=True)
                answers.append(error)
            except BaseException:
                self._drop_child(busy=True)
                raise
            if len(answers) > before:
                return
        answers.append(Internal("the step's process has ended"))

    def _watch(self, pid: int) -> _Watch:
        return _Watch(pid, self._limits, self._check_interrupted)

    def _check_interrupted(self) -> None:
        """Raises ExecutionInterrupted if the run is interrupted."""
        is_interrupted = self._run is not None and self._run[1] <= self._last_interrupted
        if is_interrupted and time.monotonic() - self._since >= self._start_seconds:
            raise ExecutionInterrupted

    @property
    def memory_bytes(self) -> int:
        """The resident memory of the process, in bytes."""
        child = self._child
        return resource_usage(child.pid).memory if child is not None else 0

    def close(self) -> None:
        """End the process, after an `ask` that is under way; idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._drop_child()
                os.close(self._file)

    def _start(self) -> _Child:
        began = time.monotonic()
        child = _Child(self._command, self._file)
        try:
            self.greeting = child.wait_until_ready(_Watch(child.pid, self._start_limits))
        except _ChildExited as error:
            child.end()
            raise Internal("the step's process did not start") from error
        except BaseException:
            child.end()
            raise
        self._start_seconds = time.monotonic() - began
        return child

    def _restart(self) -> _Child:
        """Start a new child and return it; raises Internal if that fails, because no request is at fault."""
        try:
            return self._start()
        except (InvalidFile, LimitExceeded) as error:
            raise Internal(f"the step's process could not be restarted: {error}") from error

    def _drop_child(self, *, busy: bool = False) -> None:
        """End the child; a `busy` one is killed, because it would not notice that its input is closed."""
        child, self._child = self._child, None
        if child is not None and busy:
            os.kill(child.pid, signal.SIGKILL)
        if child is not None:
            child.end()


class _Child:
    """The child process of a `StepProcess`, with its pipes; `end` ends it, and so does dropping the object."""

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
        """Send `requests` as one frame, and yield the answers as they come.

        Raises LimitExceeded, ExecutionInterrupted, _ChildExited.
        """
        body = b"".join(part for request in requests for part in (len(request).to_bytes(8, "little"), request))
        try:
            self._write(bytes((FrameKind.DONE,)) + len(body).to_bytes(8, "little") + body)
        except OSError as error:
            raise _ChildExited from error
        for _ in requests:
            kind, answer = self._answer(watch(self.pid))
            yield answer if kind == FrameKind.DONE else Internal(f"the step failed ({_text(answer)})")

    def wait_until_ready(self, watch: _Watch) -> bytes:
        """Wait until the child is ready, and return what it says then.

        Raises InvalidFile, Internal, LimitExceeded, _ChildExited.
        """
        kind, answer = self._answer(watch)
        if kind != FrameKind.DONE:
            raise (InvalidFile if kind == FrameKind.REFUSED else Internal)(_text(answer))
        return bytes(answer)

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
            if not self._ready.poll(_POLL):
                watch.look()
                continue
            got = os.readv(self._output.fileno(), [rest])
            if not got:
                raise _ChildExited
            rest = rest[got:]
        return whole


def _next_frame(requests: Sequence[bytes]) -> Sequence[bytes]:
    """Return as many of the first requests as fit into a frame of 1 MiB; at least one."""
    sizes = accumulate(map(len, requests))
    return requests[: max(1, sum(size <= _MAX_FRAME_BYTES for size in sizes))]


def _text(answer: memoryview) -> str:
    return str(answer, "utf-8", "replace")


class _Watch:
    """Watches the limits of time and memory of a process during one answer; CPU time counts from the first check."""

    def __init__(self, pid: int, limits: Limits, check_interrupted: Callable[[], object] = bool) -> None:
        """`check_interrupted` is called at each check, and raises to end the wait."""
        self._pid = pid
        self._limits = limits
        self._check_interrupted = check_interrupted
        self._began = time.monotonic()
        self._cpu_before: float | None = None  # CPU seconds of the process at the first check

    def look(self) -> None:
        """Raises LimitExceeded if a limit is exceeded; exceptions of `check_interrupted` pass."""
        self._check_interrupted()
        used = resource_usage(self._pid)
        self._cpu_before = used.seconds if self._cpu_before is None else self._cpu_before
        seconds = max(used.seconds - self._cpu_before, (time.monotonic() - self._began) / self._limits.patience)
        if seconds > self._limits.seconds:
            raise LimitExceeded(f"it takes longer than {self._limits.seconds:g} s")
        if used.memory > self._limits.memory:
            raise LimitExceeded(f"it takes more than {format_bytes(self._limits.memory)} of memory")


def _end(popen: subprocess.Popen[bytes]) -> None:
    assert popen.stdin is not None and popen.stdout is not None
    try:
        popen.stdin.close()
        popen.wait(_EXIT_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        popen.kill()
        popen.wait()
    popen.stdout.close()
