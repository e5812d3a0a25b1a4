"""Contexts: the memory that a run in flight owns, and the pool that provides it."""

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

from lathe.core.errors import Interrupted, SessionClosed
from lathe.core.plan.plan import ARENA
from lathe.core.runtime.host.memory import address_of, aligned_bytes, bytes_with_room

RUN_NUMBERS = count(1)  # unique, so that a thread's next run is never confused with the previous one


@dataclass(eq=False, slots=True)
class Context:
    """The memory of one run in flight: an arena, operand addresses, step counters.

    The driver reads `words` (see native_driver.py).
    """

    words: NDArray[np.int64]
    bases: NDArray[np.int64]
    addresses: NDArray[np.int64]
    counters: NDArray[np.int64]
    arrays: NDArray[np.int64]  # addresses of the NumPy objects of inputs and outputs, where the driver finds elements
    arena: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    room: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))  # begins with the arena
    second: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    handle: ctypes.c_void_p = field(init=False)
    objects: memoryview = field(init=False)  # over `arrays`: twice as fast to write one word
    rows: int = -1  # the batch size of the views
    views: dict[str, NDArray[Any]] = field(default_factory=dict)  # values in the arena, for `rows` rows
    call: int = 0  # the call that the words are set up for, see prepared_calls.py; 0 if each run sets them
    # Set only if the run may not end by itself.
    run: int = 0
    thread: int = 0
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.handle = ctypes.c_void_p(address_of(self.words))
        self.objects = self.arrays.data

    def make_room(self, nbytes: int) -> None:
        """Ensure an arena of at least `nbytes` bytes; growing may lose its contents."""
        if self.arena.nbytes < nbytes:
            if self.room.nbytes < nbytes:
                self.room = bytes_with_room(nbytes)
                self.bases[ARENA] = address_of(self.room)
            self.arena = self.room[:nbytes]
            self.views.clear()

    def show(self, n: int) -> None:
        """Set the number of rows of cached views to `n`; views for another number are dropped."""
        if self.rows != n:
            self.views.clear()
            self.rows = n

    def second_arena(self, nbytes: int) -> NDArray[np.uint8]:
        """The second arena, for the steps after a cut point, of at least `nbytes` bytes; growing loses its contents."""
        if self.second.nbytes < nbytes:
            self.second = aligned_bytes(nbytes)
        return self.second

    def check(self) -> None:
        """Raise Interrupted if the run was interrupted."""
        if self.interrupted:
            raise Interrupted("the run was interrupted")


class ContextPool:
    """A pool of contexts. A run that finds an idle one takes no lock: `deque` gives each to one thread."""

    def __init__(self, keep: int) -> None:
        """`keep`: the most idle contexts in the pool."""
        self.idle: deque[Context] = deque()
        self._keep = keep
        self._count = 0  # contexts that exist
        self._closed = self._is_over = False
        self._guard = threading.Lock()

    def take(self, make: Callable[[], Context]) -> Context:
        """An idle context, or one made by `make` if none is idle. SessionClosed after `close`."""
        try:
            return self.idle.pop()
        except IndexError:
            return self._new(make)

    def release(self, context: Context) -> bool:
        """Return a context to the pool, or drop it if enough are idle.

        True if it was the last one in use after `close`: then nothing runs any more, nor will.
        """
        if len(self.idle) < self._keep:
            self.idle.append(context)
        else:
            self._count_down()
        return self._closed and self._drop_idle()

    def close(self) -> bool:
        """Refuse further runs. True if no run is in flight: then the caller frees the code. Later calls give False."""
        self._closed = True
        return self._drop_idle()

    def _new(self, make: Callable[[], Context]) -> Context:
        context = make()
        with self._guard:
            if self._closed:
                raise SessionClosed("the session is closed")
            self._count += 1
        return context

    def _count_down(self) -> None:
        with self._guard:
            self._count -= 1

    def _drop_idle(self) -> bool:
        """After `close`: drop the idle contexts. True for exactly one call, the one after which none is left."""
        with self._guard:
            while self.idle:
                with suppress(IndexError):  # a run that began earlier has just taken it
                    self.idle.pop()
                    self._count -= 1
            before, self._is_over = self._is_over, self._count == 0
            return self._is_over and not before
