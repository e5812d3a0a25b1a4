"""Runs a Python module in this process after giving up what a child process must not have.

Used as ``python -m server.limits SERVER MEMORY FILE_SIZE MODULE [ARGUMENT ...]``: bounded address space and file size,
no core dump, dead when the server (a process id) dies. Its exit says what went wrong when the module itself does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import runpy
import signal
import sys

OUT_OF_MEMORY, OUT_OF_SPACE = 3, 4  # exit codes; the module's own are 0, 1, 2 and 5
_PR_SET_PDEATHSIG = 1


def restrict(server: int, memory: int, file_size: int) -> None:
    """Limit this process, child of the process ``server``, and let it lead a process group; sizes in bytes."""
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        die_with(server)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")


def die_with(parent: int) -> None:
    """Let the system kill this process when its parent (a process id) dies; Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before it could be asked for
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Restrict the process, then become the module."""
    server, memory, file_size, module, *arguments = sys.argv[1:]
    restrict(int(server), int(memory), int(file_size))
    become(module, arguments)


def become(module: str, arguments: list[str]) -> None:
    """Run a module as a program; its exit says what went wrong when the module itself does not."""
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            sys.exit(OUT_OF_SPACE)
        if error.errno == errno.ENOMEM:
            sys.exit(OUT_OF_MEMORY)
        raise


if __name__ == "__main__":
    main()
