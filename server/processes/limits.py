"""Runs a Python module in this process after restricting the process.

Used as `python -m lathe.server.processes.limits SERVER MEMORY FILE_SIZE MODULE [ARGUMENT ...]`: with limits of address
space and file size, no core dump, and killed when the server (a process id) dies; the limit of address space and the
killing are for Linux only. The exit code says that memory or storage was exhausted, if the module does not handle that
itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import runpy
import sys

from lathe.core.exit_status import ExitStatus, is_out_of_space
from lathe.core.parent_process import die_with_parent


def restrict(server: int, memory: int, file_size: int) -> None:
    """Restrict this process, a child of the process `server`, and make it lead a process group; sizes in bytes.

    On Linux it is also limited in `memory` (address space), dies with the server, and is the first to be killed when
    the machine runs out of memory.
    """
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        die_with_parent(server)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")


def main() -> None:
    """Restrict the process, then run the module."""
    server, memory, file_size, module, *arguments = sys.argv[1:]
    restrict(int(server), int(memory), int(file_size))
    run_as_program(module, arguments)


def run_as_program(module: str, arguments: list[str]) -> None:
    """Run a module as a program; exits with OUT_OF_MEMORY or OUT_OF_SPACE if the module raises such an error."""
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except MemoryError:
        sys.exit(ExitStatus.OUT_OF_MEMORY)
    except OSError as error:
        if is_out_of_space(error):
            sys.exit(ExitStatus.OUT_OF_SPACE)
        if error.errno == errno.ENOMEM:
            sys.exit(ExitStatus.OUT_OF_MEMORY)
        raise


if __name__ == "__main__":
    main()
