"""Sessions of the same model with other inputs: one for each choice of the defaults that runs have fed, and one for
each choice of ranks where the model leaves those open."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeAlias, TypeVar
from weakref import WeakSet

from core.errors import SessionClosed

Fed = frozenset[str]  # names of the defaults that a run feeds
Ranks: TypeAlias = tuple[tuple[str, int], ...]  # of the inputs whose ranks a model leaves open, in their order


class Closable(Protocol):
    def close(self) -> None: ...


K = TypeVar("K", bound=Hashable)
S = TypeVar("S", bound=Closable)


class Variants(Generic[K, S]):
    """A small cache. The session that was not used for longest is closed when there are too many."""

    def __init__(self, make: Callable[[K], S], limit: int) -> None:
        """`make` is called with a lock held: it must leave compiling to the session's runs."""
        self._make = make
        self._limit = limit
        self._sessions: OrderedDict[K, S] = OrderedDict()
        self._alive: WeakSet[S] = WeakSet()
        self._lock = threading.Lock()
        self._closed = False

    def get(self, choice: K) -> S:
        """The session for this choice. It may be closed at any time, and then has to be got again.

        SessionClosed after `close`; raises whatever making it raises."""
        surplus = None
        with self._lock:
            if self._closed:
                raise SessionClosed("the session is closed")
            session = self._sessions[choice] = self._sessions.get(choice) or self._make(choice)
            self._sessions.move_to_end(choice)
            self._alive.add(session)
            if len(self._sessions) > self._limit:
                surplus = self._sessions.popitem(last=False)[1]
        if surplus is not None:
            surplus.close()
        return session

    def made(self) -> dict[K, S]:
        """What exists now, the most recently used last."""
        with self._lock:
            return dict(self._sessions)

    def alive(self) -> list[S]:
        """All sessions, and those that were closed as long as somebody runs them."""
        with self._lock:
            return list(self._alive)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            sessions = list(self._sessions.values())
            self._sessions.clear()
        for session in sessions:
            session.close()
