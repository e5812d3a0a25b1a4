"""Sessions of the same model with other inputs: one per set of fed defaults, and one per choice of open ranks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeAlias, TypeVar
from weakref import WeakSet

from lathe.core.errors import SessionClosed

FedDefaults = frozenset[str]  # names of the defaults that a run feeds
# Name and rank of the inputs whose ranks a model leaves open, in their order.
Ranks: TypeAlias = tuple[tuple[str, int], ...]


class Closable(Protocol):
    def close(self) -> None: ...


K = TypeVar("K", bound=Hashable)
S = TypeVar("S", bound=Closable)


class SessionCache(Generic[K, S]):
    """A small cache. If there are too many sessions, the least recently used one is closed."""

    def __init__(self, make: Callable[[K], S], limit: int) -> None:
        """`make` is called with a lock held, so it must not compile: the session compiles when it runs."""
        self._make = make
        self._limit = limit
        self._sessions: OrderedDict[K, S] = OrderedDict()
        self._alive: WeakSet[S] = WeakSet()
        self._lock = threading.Lock()
        self._closed = False

    def get(self, choice: K) -> S:
        """The session for this choice.

        Another thread may close it at any time: then `run` raises SessionClosed, and the caller gets it again.
        SessionClosed after `close`; raises whatever `make` raises.
        """
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
        """The sessions that exist now, the most recently used last."""
        with self._lock:
            return dict(self._sessions)

    def alive(self) -> list[S]:
        """All sessions that exist now, including closed ones that threads still run."""
        with self._lock:
            return list(self._alive)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            sessions = list(self._sessions.values())
            self._sessions.clear()
        for session in sessions:
            session.close()
