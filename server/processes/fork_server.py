"""A fork server: a process that imports a module once, and runs it as a program in a fork for each task.

Used as

    python -m lathe.server.processes.limits SERVER MEMORY FILE_SIZE lathe.server.processes.fork_server SOCKET MODULE

It receives only arguments. A task runs in the fork, which inherits the limits of this process and has no state but the
imports.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from lathe.core.parent_process import die_with_parent
from lathe.server.processes.limits import run_as_program

LARGEST = 1 << 16  # bytes of a message


@dataclass(frozen=True, slots=True)
class _Forked:
    """The process of a running task."""

    task: int
    pid: int
    descriptor: int  # a pidfd, readable once the process has ended


class ForkServer:
    """Serves tasks over a socket, in JSON messages.

    It receives {"task", "arguments"} with the descriptors of standard output and error. It sends {"task", "pid"} when
    the process has started, and {"task", "ended": exit code, or minus the signal} when it has ended.
    """

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._selector = selectors.DefaultSelector()
        self._selector.register(peer, selectors.EVENT_READ)
        self._at_work: dict[int, _Forked] = {}  # by descriptor

    def serve(self) -> list[str] | None:
        """Serve until the peer closes the socket, and return None; in a fork, return the arguments of its task."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._peer:
                    self._on_end(self._at_work[key.fd])
                    continue
                message, descriptors, _, _ = socket.recv_fds(self._peer, LARGEST, 2)
                if not message:
                    return None
                request = json.loads(message)
                if self._fork(request["task"], descriptors):
                    return [str(argument) for argument in request["arguments"]]

    def _fork(self, task: int, descriptors: Sequence[int]) -> bool:
        """Fork a process for a task; returns True in the child, False in the parent."""
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._close_in_child()
            os.setpgid(0, 0)
            die_with_parent(parent)
            for target, descriptor in enumerate(descriptors, 1):
                os.dup2(descriptor, target)
                os.close(descriptor)
            return True
        with contextlib.suppress(OSError):  # the child has done so itself, or has ended
            os.setpgid(pid, pid)
        for descriptor in descriptors:
            os.close(descriptor)
        forked = _Forked(task, pid, os.pidfd_open(pid))
        self._at_work[forked.descriptor] = forked
        self._selector.register(forked.descriptor, selectors.EVENT_READ)
        self._send(task=task, pid=pid)
        return False

    def _on_end(self, forked: _Forked) -> None:
        self._selector.unregister(forked.descriptor)
        os.close(forked.descriptor)
        del self._at_work[forked.descriptor]
        _, status = os.waitpid(forked.pid, 0)
        self._send(task=forked.task, ended=os.waitstatus_to_exitcode(status))

    def _send(self, **message: Any) -> None:
        self._peer.send(json.dumps(message).encode())

    def _close_in_child(self) -> None:
        self._selector.close()
        self._peer.close()
        for descriptor in self._at_work:
            os.close(descriptor)


def main() -> None:
    """Import the module, then serve; a fork runs its task and exits with the task's status."""
    descriptor, module = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    importlib.import_module(module)
    gc.collect()
    gc.freeze()  # the collector of a fork then writes to no imported object, so few pages are copied
    arguments = ForkServer(socket.socket(fileno=int(descriptor))).serve()
    if arguments is not None:
        del sys.modules[module]  # so that runpy runs it as a program; its imports stay loaded
        _run_and_exit(module, arguments)


def _run_and_exit(module: str, arguments: list[str]) -> NoReturn:
    """Run a module as a program, then the functions of `atexit`, and exit with its status; 1 after an exception.

    There is no interpreter shutdown, which takes as long as a small model.
    """
    code: object = 0
    try:
        run_as_program(module, arguments)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    main()
