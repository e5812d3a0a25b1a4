"""Background work of a session: a thread that calls one function after the other, and a child process it may wait for.

A child process does not compete with request threads for the interpreter lock. It ends by itself when this process does
(see child_stages.py).
"""

from __future__ import annotations

import atexit
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from weakref import WeakSet

from lathe.core.errors import SessionClosed
from lathe.core.runtime.host import child_python
from lathe.core.runtime.host.priority import Priority, is_starved, resource_usage, set_priority

_CHECK_INTERVAL = 0.5  # seconds between two checks whether an idle child gets processor time
_CLOSE_TIMEOUT = 30.0  # seconds to wait for a job that cannot be interrupted
_instances: WeakSet[Background] = WeakSet()


class Background:
    """Calls functions one after the other, in the order of submission, in a thread that exists while there are any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._work: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False
        _instances.add(self)

    @property
    def closed(self) -> bool:
        return self._closed

    def submit(self, work: Callable[[], None]) -> None:
        """Queue a function to run on the background thread; it must handle its own errors. No effect after `close`."""
        with self._changed:
            if self._closed:
                return
            self._work.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="lathe-background", daemon=True)
                self._thread.start()

    def run_child(self, arguments: Sequence[str], patient: bool = False) -> bool:
        """Run a stage of child_stages.py in a child process to its end; returns whether its exit status was 0.

        The child gets a share of the processors. A `patient` stage, for which no run waits, first runs at idle
        priority, and again with a share if it starves. SessionClosed after `close`.
        """
        if patient and (done := self._attempt(arguments, Priority.IDLE)) is not None:
            return done
        return bool(self._attempt(arguments, Priority.SHARED))

    def _attempt(self, arguments: Sequence[str], priority: Priority) -> bool | None:
        """Run a stage in a child; returns whether it succeeded, or None if an idle child was starved and killed."""
        with self._start(arguments, priority) as child:
            # Its standard input stays open: the child exits when it closes (--while-stdin).
            if priority is Priority.IDLE and not _wait_for_idle(child):
                child.kill()
                return None
            child.wait()
        return child.returncode == 0

    def _start(self, arguments: Sequence[str], priority: Priority) -> subprocess.Popen[bytes]:
        with self._changed:
            if self._closed:
                raise SessionClosed("the session is closed")
            self._child = subprocess.Popen(
                child_python.command("lathe.core.compiler.child_stages", "--while-stdin", *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=child_python.environment(),
            )
            set_priority(self._child.pid, priority)
            return self._child

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until all submitted functions have returned. False if that takes longer than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout)

    def close(self) -> None:
        """Drop the queued functions, kill the child, and wait at most 30 seconds for the function that runs.

        A function that runs on the background thread may call this itself; then there is no wait.
        """
        with self._changed:
            self._closed = True
            self._work.clear()
            if self._child is not None:
                self._child.kill()
        if self._thread is not threading.current_thread():
            self.settle(_CLOSE_TIMEOUT)

    def _serve(self) -> None:
        while True:
            with self._changed:
                if not self._work:
                    self._thread = None
                    self._changed.notify_all()
                    return
                work = self._work.popleft()
            work()


def _wait_for_idle(child: subprocess.Popen[bytes]) -> bool:
    """Wait for the end of a child of priority IDLE. False, while it still runs, if it is starved; otherwise True."""
    while True:
        try:
            child.wait(_CHECK_INTERVAL)
        except subprocess.TimeoutExpired:
            if is_starved(child.pid, resource_usage(child.pid).seconds):
                return False
        else:
            return True


@atexit.register
def _close_all() -> None:
    """At exit, close all `Background` objects: no thread may be inside LLVM when the process tears it down."""
    for background in list(_instances):
        background.close()
