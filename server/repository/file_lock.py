"""A lock on a file: one thread of one process holds it at a time."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lathe.server.errors import Unavailable

_MIN_PAUSE, _MAX_PAUSE = 0.0005, 0.02  # seconds


class FileLock:
    """`flock` with a timeout, so that a suspended process cannot block the others for ever.

    Each acquisition opens the file again, so that threads of one process exclude each other, too. The operating system
    releases the lock of a process that dies.
    """

    def __init__(self, path: Path, timeout: float, guarded: str) -> None:
        """`timeout`: in seconds. `guarded`: what the lock guards, for the error."""
        self._path = path
        self._guarded = guarded
        self._timeout = timeout

    @contextmanager
    def hold(self) -> Iterator[None]:
        """A context manager that holds the lock; entering raises Unavailable after the timeout, or OSError."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            self._acquire(fd)
            yield
        finally:
            os.close(fd)

    def _acquire(self, fd: int) -> None:
        deadline, pause = time.monotonic() + self._timeout, _MIN_PAUSE
        while not try_lock(fd):
            if time.monotonic() > deadline:
                raise Unavailable(f"{self._guarded} has been locked by another process for {self._timeout:g} s")
            time.sleep(pause)
            pause = min(pause * 2, _MAX_PAUSE)


def try_lock(fd: int) -> bool:
    """Lock an open file without waiting; False if another holder has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
