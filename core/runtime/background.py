"""Work beside the runs of a session: a thread that does one thing after the other, and the child it may be waiting for.

A child process takes no turn of the interpreter lock from those who answer requests, and ends by itself when this
process does (see children.py).
"""

from __future__ import annotations

import atexit
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from weakref import WeakSet

from core.errors import SessionClosed
from core.runtime import child_python
from core.runtime.priority import Priority, is_starved, lower, usage

_LOOK = 0.5  # seconds between two looks at whether an idle child is let compute
_PATIENCE = 30.0  # seconds for what cannot be interrupted
_everyone: WeakSet[Background] = WeakSet()


class Background:
    """Does work in the order of submission, in a thread that exists while there is some."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._work: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False
        _everyone.add(self)

    @property
    def closed(self) -> bool:
        return self._closed

    def submit(self, work: Callable[[], None]) -> None:
        """Do this after everything submitted before; `work` handles its own errors. Nothing once it is closed."""
        with self._changed:
            if self._closed:
                return
            self._work.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="lathe-background", daemon=True)
                self._thread.start()

    def run_child(self, arguments: Sequence[str], patient: bool = False) -> bool:
        """Run a stage of children.py to its end; whether it succeeded. SessionClosed once this is closed.

        It gets a share of the processors. A ``patient`` one, which nobody waits for, first tries with those that nobody
        else wants.
        """
        if patient and (done := self._attempt(arguments, Priority.IDLE)) is not None:
            return done
        return bool(self._attempt(arguments, Priority.SHARED))

    def _attempt(self, arguments: Sequence[str], priority: Priority) -> bool | None:
        """Whether the stage succeeded; None where others left an idle child no time."""
        with self._start(arguments, priority) as child:
            # With its standard input open: it works as long as that is.
            if priority is Priority.IDLE and not _ends(child):
                child.kill()
                return None
            child.wait()
        return child.returncode == 0

    def _start(self, arguments: Sequence[str], priority: Priority) -> subprocess.Popen[bytes]:
        with self._changed:
            if self._closed:
                raise SessionClosed("the session is closed")
            self._child = subprocess.Popen(
                child_python.command("core.children", "--while-stdin", *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=child_python.environment(),
            )
            lower(self._child.pid, priority)
            return self._child

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to do; whether that was so in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout)

    def close(self) -> None:
        """Forget what is waiting, kill the child, and wait for what is being done, unless that is what closes."""
        with self._changed:
            self._closed = True
            self._work.clear()
            if self._child is not None:
                self._child.kill()
        if self._thread is not threading.current_thread():
            self.settle(_PATIENCE)

    def _serve(self) -> None:
        while True:
            with self._changed:
                if not self._work:
                    self._thread = None
                    self._changed.notify_all()
                    return
                work = self._work.popleft()
            work()


def _ends(child: subprocess.Popen[bytes]) -> bool:
    """Wait for the end of an idle child; False as soon as it is starved."""
    while True:
        try:
            child.wait(_LOOK)
        except subprocess.TimeoutExpired:
            if is_starved(child.pid, usage(child.pid).seconds):
                return False
        else:
            return True


@atexit.register
def _close_all() -> None:
    """No thread may be inside LLVM when the process tears it down."""
    for background in list(_everyone):
        background.close()
