"""Sessions of the same model with other inputs: one for each choice of the defaults that runs have fed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet

from core.errors import SessionClosed

Fed = frozenset[str]  # names of the defaults that a run feeds


class Closable(Protocol):
    def close(self) -> None: ...


S = TypeVar("S", bound=Closable)


class Variants(Generic[S]):
    """A small cache. The session that was not used for longest is closed when there are too many."""

    def __init__(self, make: Callable[[Fed], S], limit: int) -> None:
        """`make` is called with a lock held: it must leave compiling to the session's runs."""
        self._make = make
        self._limit = limit
        self._sessions: OrderedDict[Fed, S] = OrderedDict()
        self._alive: WeakSet[S] = WeakSet()
        self._lock = threading.Lock()
        self._closed = False

    def get(self, fed: Fed) -> S:
        """The session that takes these defaults as inputs. It may be closed at any time, and then has to be got again.

        SessionClosed after `close`; raises whatever making it raises."""
        surplus = None
        with self._lock:
            if self._closed:
                raise SessionClosed("the session is closed")
            session = self._sessions[fed] = self._sessions.get(fed) or self._make(fed)
            self._sessions.move_to_end(fed)
            self._alive.add(session)
            if len(self._sessions) > self._limit:
                surplus = self._sessions.popitem(last=False)[1]
        if surplus is not None:
            surplus.close()
        return session

    def made(self) -> dict[Fed, S]:
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
