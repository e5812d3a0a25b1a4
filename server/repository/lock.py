"""A lock on a file, held by one process (and one thread of it) at a time."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server.errors import Unavailable

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02  # seconds


class FileLock:
    """``flock`` with a time limit: a stopped process must not stop the others for ever.

    Every acquisition opens the file anew, so threads of one process exclude each other too. The system drops the lock
    of a process that dies.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        self._path = path
        self._timeout = timeout  # seconds

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock; raises Unavailable after the time limit."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            self._wait_for(fd)
            yield
        finally:
            os.close(fd)

    def _wait_for(self, fd: int) -> None:
        deadline, pause = time.monotonic() + self._timeout, _FIRST_PAUSE
        while not try_lock(fd):
            if time.monotonic() > deadline:
                raise Unavailable(f"the repository has been locked by another process for {self._timeout:g} s")
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)


def try_lock(fd: int) -> bool:
    """Lock an open file if nobody else holds it; say whether it worked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
