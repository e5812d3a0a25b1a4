"""A process that imports a module once, and then becomes it as often as it is told to, each time in a fork of its own.

Used as ``python -m server.limits SERVER MEMORY FILE_SIZE server.fork_server SOCKET MODULE``. Of what it is sent it
reads nothing but arguments; whatever a task does happens in the fork, which has the limits of this process and starts
with nothing but the imports.
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

from server.limits import become, die_with

LARGEST = 1 << 16  # bytes of a message


@dataclass(frozen=True, slots=True)
class _Forked:
    """A process at work."""

    task: int
    pid: int
    descriptor: int  # ready once it has ended


class ForkServer:
    """Messages are JSON: in come {"task", "arguments"} with descriptors for standard output and error; out go
    {"task", "pid"} and, once it has ended, {"task", "ended": exit code, or minus the signal}."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._selector = selectors.DefaultSelector()
        self._selector.register(peer, selectors.EVENT_READ)
        self._at_work: dict[int, _Forked] = {}  # by descriptor

    def serve(self) -> list[str] | None:
        """Serve until the peer closes: None; in a fork, return the arguments of its task."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._peer:
                    self._end(self._at_work[key.fd])
                    continue
                message, descriptors, _, _ = socket.recv_fds(self._peer, LARGEST, 2)
                if not message:
                    return None
                asked = json.loads(message)
                if self._forks(asked["task"], descriptors):
                    return [str(argument) for argument in asked["arguments"]]

    def _forks(self, task: int, descriptors: Sequence[int]) -> bool:
        """Begin a process, in which this returns true."""
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._let_go()
            os.setpgid(0, 0)
            die_with(parent)
            for target, descriptor in enumerate(descriptors, 1):
                os.dup2(descriptor, target)
                os.close(descriptor)
            return True
        with contextlib.suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(pid, pid)
        for descriptor in descriptors:
            os.close(descriptor)
        forked = _Forked(task, pid, os.pidfd_open(pid))
        self._at_work[forked.descriptor] = forked
        self._selector.register(forked.descriptor, selectors.EVENT_READ)
        self._tell(task=task, pid=pid)
        return False

    def _end(self, forked: _Forked) -> None:
        self._selector.unregister(forked.descriptor)
        os.close(forked.descriptor)
        del self._at_work[forked.descriptor]
        _, status = os.waitpid(forked.pid, 0)
        self._tell(task=forked.task, ended=os.waitstatus_to_exitcode(status))

    def _tell(self, **message: Any) -> None:
        self._peer.send(json.dumps(message).encode())

    def _let_go(self) -> None:
        self._selector.close()
        self._peer.close()
        for descriptor in self._at_work:
            os.close(descriptor)


def main() -> None:
    """Import the module, then serve."""
    descriptor, module = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a fork looks at none of what was imported, so it copies little of it
    arguments = ForkServer(socket.socket(fileno=int(descriptor))).serve()
    if arguments is not None:
        del sys.modules[module]  # to run it as a program, its own imports being there
        _become(module, arguments)


def _become(module: str, arguments: list[str]) -> NoReturn:
    """Run a module as a program and end. What was imported is not taken down: that takes as long as a small model."""
    code: object = 0
    try:
        become(module, arguments)
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
