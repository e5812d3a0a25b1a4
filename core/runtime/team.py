"""The thread team: workers that live in native code and run tapes together with the calling thread.

One team per process, shared by all sessions. While it runs one session's tape, another session's run goes ahead on its
caller's thread alone, so nobody waits behind a long model.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading

import numpy as np
from numpy.typing import NDArray

from core.codegen.jit import Library, compile_text
from core.codegen.target import host
from core.runtime.memory import aligned_words
from core.runtime.native import TeamWord, source


class Team:
    """Native worker threads; `enter(handle, context)` runs a context (see native.py) with as many as it asks for."""

    def __init__(self) -> None:
        self._library = Library({"enter": compile_text(source(), host())}, further=("work", "stop"))
        self._block: NDArray[np.int64] = aligned_words(TeamWord.SIZE)
        self._workers: list[threading.Thread] = []
        self._growing = threading.Lock()
        self.address = int(self._block.ctypes.data)
        self.ended = 0  # when the last run ended, by perf_counter_ns; see Executable
        word = ctypes.c_int64
        self._work = ctypes.CFUNCTYPE(None, word, word, word)(self._library.address("work"))
        self._stop = ctypes.CFUNCTYPE(None, word)(self._library.address("stop"))
        # Objects of ctypes go through as they are; it would make one of each plain integer.
        pointer = ctypes.c_void_p
        self.enter = ctypes.CFUNCTYPE(word, pointer, pointer)(self._library.address("enter"))
        self.handle = pointer(self.address)

    @property
    def size(self) -> int:
        """Threads that can take part in a run, the caller's included."""
        return len(self._workers) + 1

    def ensure(self, threads: int) -> None:
        """Grow the team so that `threads` can take part."""
        with self._growing:
            while self.size < threads:
                self._add_worker()

    def stop(self) -> None:
        """End all workers once the run they are in has ended; later runs go ahead on their callers' threads alone."""
        self._stop(self.address)
        for worker in self._workers:
            worker.join(timeout=1.0)
        self._workers.clear()

    def abandon(self) -> None:
        """After a fork: the workers stayed behind in the parent, so runs here go ahead alone."""
        self._block[TeamWord.BUSY] = 1

    def _add_worker(self) -> None:
        """The new worker takes the job word as it is now for seen: it serves jobs published from here on, and none
        that names it can be published before this method ends."""
        generation = int(self._block[TeamWord.JOB]) & 0xFFFFFFFF
        arguments = (self.address, self.size, generation)
        worker = threading.Thread(target=self._work, args=arguments, name=f"lathe-{self.size}", daemon=True)
        worker.start()
        self._workers.append(worker)


_created = threading.Lock()
_team: list[Team] = []


def team(threads: int = 1) -> Team:
    """The process's team, grown to at least `threads`."""
    with _created:
        if not _team:
            _team.append(Team())
            atexit.register(_team[0].stop)
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=_team[0].abandon)
    _team[0].ensure(threads)
    return _team[0]
