"""The thread pool: native worker threads that run the steps of a plan together with the calling thread.

There is one pool per process, shared by all sessions. While it runs the steps of one session, a run of another session
uses only its caller's thread, so that no run waits for a long model.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading

import numpy as np
from numpy.typing import NDArray

from lathe.core.codegen.jit import Library, compile_text
from lathe.core.codegen.target import host
from lathe.core.runtime.host.memory import aligned_words
from lathe.core.runtime.host.native_driver import PoolWord, source


class ThreadPool:
    """Native worker threads.

    `enter(handle, context)` runs a context (see native_driver.py) with as many threads as the context asks for, or with
    the caller's thread alone while the pool runs another context.
    """

    def __init__(self) -> None:
        self._library = Library({"enter": compile_text(source(), host())}, further=("work", "stop"))
        self._block: NDArray[np.int64] = aligned_words(PoolWord.SIZE)
        self._workers: list[threading.Thread] = []
        self._growing = threading.Lock()
        self._ended = False
        self.address = int(self._block.ctypes.data)
        self.ended = 0  # when the last run ended, by perf_counter_ns; read by Executable
        word = ctypes.c_int64
        self._work = ctypes.CFUNCTYPE(None, word, word, word)(self._library.address("work"))
        self._stop = ctypes.CFUNCTYPE(None, word)(self._library.address("stop"))
        # ctypes passes its own objects as they are, but makes a new object of each plain integer.
        pointer = ctypes.c_void_p
        self.enter = ctypes.CFUNCTYPE(word, pointer, pointer)(self._library.address("enter"))
        self.handle = pointer(self.address)

    @property
    def size(self) -> int:
        """The number of threads that can take part in a run, including the caller's."""
        return len(self._workers) + 1

    def ensure(self, threads: int) -> None:
        """Grow the pool so that `threads` threads can take part."""
        with self._growing:
            while self.size < threads:
                self._add_worker()

    def stop(self) -> None:
        """Wait for the pool's run in progress, end all workers, and wait at most one second for each.

        Later runs use only their callers' threads. No effect after `abandon`, and for a second call.
        """
        if self._ended:
            return
        self._ended = True
        self._stop(self.address)
        for worker in self._workers:
            worker.join(timeout=1.0)
        self._workers.clear()

    def abandon(self) -> None:
        """Let all later runs use only their callers' threads.

        For the child of a fork: the workers exist only in the parent.
        """
        self._block[PoolWord.BUSY] = 1
        self._ended = True  # a child that exits normally calls `stop`, which would wait for the workers for ever

    def _add_worker(self) -> None:
        """Start a worker that takes the current job word as already seen.

        It serves jobs published from here on, and no job that needs it can be published before this method ends.
        """
        generation = int(self._block[PoolWord.JOB]) & 0xFFFFFFFF
        arguments = (self.address, self.size, generation)
        worker = threading.Thread(target=self._work, args=arguments, name=f"lathe-{self.size}", daemon=True)
        worker.start()
        self._workers.append(worker)


_created = threading.Lock()
_team: list[ThreadPool] = []


def thread_pool(threads: int = 1) -> ThreadPool:
    """The thread pool of this process, grown to at least `threads` threads."""
    with _created:
        if not _team:
            _team.append(ThreadPool())
            atexit.register(_team[0].stop)
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=_team[0].abandon)
    _team[0].ensure(threads)
    return _team[0]
