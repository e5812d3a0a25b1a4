"""Ends a child process together with its parent, so that no orphan holds memory, files or a folder."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_parent(parent: int) -> None:
    """Have the system kill this process when its parent, the process with id `parent`, dies.

    If the parent is dead already, this process is killed at once. Linux counts as the parent the thread that started
    this process (PR_SET_PDEATHSIG), so that thread must live as long as this process: the main thread, an event loop's
    thread, or a thread of a pool that exists as long as the program. Other systems have no such request.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the request
        os.kill(os.getpid(), signal.SIGKILL)
