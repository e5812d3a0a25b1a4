"""Work beside the runs of a session: a thread that does one thing after the other, and the child it may be waiting for.

A child process takes no turn of the interpreter lock from those who answer requests, and ends by itself when this
process does (see children.py).
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from weakref import WeakSet

from core.errors import SessionClosed

_ROOT = Path(__file__).resolve().parents[2]  # where a child finds this package
_CHILD = (sys.executable, "-m", "core.children", "--while-stdin")
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

    def run_child(self, arguments: Sequence[str]) -> bool:
        """Run a stage of children.py to its end; whether it succeeded. SessionClosed once this is closed."""
        with self._changed:
            if self._closed:
                raise SessionClosed("the session is closed")
            path = os.pathsep.join((str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))
            self._child = subprocess.Popen(
                [*_CHILD, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )
        with self._child as child:
            child.wait()  # with its standard input open: it works as long as that is
        return child.returncode == 0

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


@atexit.register
def _close_all() -> None:
    """No thread may be inside LLVM when the process tears it down."""
    for background in list(_everyone):
        background.close()
