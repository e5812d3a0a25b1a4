"""What a run in flight owns, and the pool that runs take it from."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.errors import Interrupted, SessionClosed
from core.plan.plan import ARENA
from core.runtime.memory import address_of, aligned_bytes

RUN_NUMBERS = count(1)  # of runs; a thread's next one is never taken for the one before


@dataclass(eq=False, slots=True)
class Context:
    """An arena, operand addresses, step counters: `words` is what the driver reads (see native.py)."""

    words: NDArray[np.int64]
    bases: NDArray[np.int64]
    addresses: NDArray[np.int64]
    counters: NDArray[np.int64]
    arrays: NDArray[np.int64]  # objects of inputs and outputs, for the driver to look up where their elements are
    arena: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    second: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    handle: ctypes.c_void_p = field(init=False)
    objects: memoryview = field(init=False)  # over `arrays`: twice as fast to write one word
    rows: int = -1  # of the views
    views: dict[str, NDArray[Any]] = field(default_factory=dict)  # of values in the arena, for so many rows
    call: int = 0  # what the words are set for, see call.py; 0 where each run sets them
    # What of these is kept where a run may not end by itself.
    run: int = 0
    thread: int = 0
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.handle = ctypes.c_void_p(address_of(self.words))
        self.objects = self.arrays.data

    def make_room(self, nbytes: int) -> None:
        """Have an arena of at least so many bytes."""
        if self.arena.nbytes < nbytes:
            self.arena = aligned_bytes(nbytes)
            self.bases[ARENA] = address_of(self.arena)
            self.views.clear()

    def show(self, n: int) -> None:
        """Have views for `n` rows alone."""
        if self.rows != n:
            self.views.clear()
            self.rows = n

    def behind(self, nbytes: int) -> NDArray[np.uint8]:
        """The arena of the steps behind a seam, at least so large."""
        if self.second.nbytes < nbytes:
            self.second = aligned_bytes(nbytes)
        return self.second

    def check(self) -> None:
        """Raise Interrupted once the run is to end."""
        if self.interrupted:
            raise Interrupted("the run was broken off")


class Contexts:
    """A pool of them. A run that finds an idle one takes no lock: `deque` gives each to one thread."""

    def __init__(self, keep: int) -> None:
        """`keep`: how many wait here for further runs at most."""
        self.idle: deque[Context] = deque()
        self._keep = keep
        self._made = 0  # and not gone again
        self._closed = self._ended = False
        self._guard = threading.Lock()

    def take(self, make: Callable[[], Context]) -> Context:
        """One that nobody else has, new where none is idle. SessionClosed after `close`."""
        try:
            return self.idle.pop()
        except IndexError:
            return self._new(make)

    def give(self, context: Context) -> bool:
        """Bring one back. Whether it was the last one after `close`: then nothing runs any more, nor will."""
        if len(self.idle) < self._keep:
            self.idle.append(context)
        else:
            self._forget()
        return self._closed and self._end()

    def close(self) -> bool:
        """No run begins any more. Whether none is under way either; harmless when repeated."""
        self._closed = True
        return self._end()

    def _new(self, make: Callable[[], Context]) -> Context:
        context = make()
        with self._guard:
            if self._closed:
                raise SessionClosed("the session is closed")
            self._made += 1
        return context

    def _forget(self) -> None:
        with self._guard:
            self._made -= 1

    def _end(self) -> bool:
        """After `close`: what is idle goes. True for the one call behind which there is none."""
        with self._guard:
            while self.idle:
                with suppress(IndexError):  # a run that began before has just taken it
                    self.idle.pop()
                    self._made -= 1
            before, self._ended = self._ended, self._made == 0
            return self._ended and not before
