"""Sessions of the same model with other inputs: one per set of fed defaults, choice of open ranks, or fed sizes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, Protocol, TypeAlias, TypeVar
from weakref import WeakSet

import numpy as np

from lathe.core.errors import LatheError, SessionClosed
from lathe.core.ir.graph import Array
from lathe.core.ir.types import TensorType
from lathe.core.passes.proofs.size_inputs import MAX_ELEMENTS

FedDefaults = frozenset[str]  # names of the defaults that a run feeds
# Name and rank of the inputs whose ranks a model leaves open, in their order.
Ranks: TypeAlias = tuple[tuple[str, int], ...]
# Name, dtype, shape and bytes of each size input, in their order.
Sizes: TypeAlias = tuple[tuple[str, str, tuple[int, ...], bytes], ...]

_MAX_SIZED = 8  # cached sessions for fed sizes, as for shapes
_FREQUENT = 3  # runs with the same sizes before these get code of their own; the first sizes get it at once
_MAX_COUNTED = 256  # sizes whose runs are counted; at the limit, all of them are forgotten
# A session that served one of the last 256 runs with sizes keeps its place. Otherwise 9 sizes in turn would compile 8
# sessions again and again; with this limit, 256 runs or more share the cost of a compilation.
_IDLE = 256


class Closable(Protocol):
    def close(self) -> None: ...


K = TypeVar("K", bound=Hashable)
S = TypeVar("S", bound=Closable)


class SessionCache(Generic[K, S]):
    """An LRU cache of at most `limit` sessions: the least recently used one beyond that is closed."""

    def __init__(self, make: Callable[[K], S], limit: int) -> None:
        """`make` gives the session for a choice, such as the fed defaults.

        It is called with a lock held, so it must not compile: the session compiles when it runs.
        """
        self._make = make
        self._limit = limit
        self._sessions: OrderedDict[K, S] = OrderedDict()
        self._alive: WeakSet[S] = WeakSet()
        self._lock = threading.Lock()
        self._closed = False

    def get(self, choice: K) -> S:
        """The session for this choice.

        The cache closes it. That may happen at any time, if other threads get sessions for other choices: then `run` of
        the session raises SessionClosed, and the caller calls `get` again. SessionClosed after `close`; raises whatever
        `make` raises.
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

    def cached_sessions(self) -> dict[K, S]:
        """The sessions in the cache by choice, the most recently used last."""
        with self._lock:
            return dict(self._sessions)

    def alive(self) -> list[S]:
        """All sessions that exist now, including closed ones that runs still use."""
        with self._lock:
            return list(self._alive)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            sessions = list(self._sessions.values())
            self._sessions.clear()
        for session in sessions:
            session.close()


class SizedSessions(Generic[S]):
    """The sessions for the values of size inputs.

    The first values get a session at once. Others get one when they are frequent, if there are few sessions or one is
    idle. All other runs use code that takes any values.
    """

    def __init__(self, make: Callable[[Sizes], S], types: Mapping[str, TensorType]) -> None:
        """`types`: those of the size inputs by name; empty if there are no sessions for their values."""
        self.names = tuple(types)
        self._types = types
        self.sessions: SessionCache[Sizes, S] = SessionCache(make, _MAX_SIZED)
        self._runs: dict[Sizes, int] = {}  # by sizes without a session
        self._last_run: dict[Sizes, int] = {}  # by sizes with a session; runs have numbers from 1
        self._count = 0
        self._counting = threading.Lock()
        self._refused: set[Sizes] = set()

    def choice(self, feeds: Mapping[str, Any]) -> Sizes:
        """The values of the size inputs in these feeds, if they have a session after this call; otherwise empty.

        Counts a run with these values, and makes their session if they get one now. SessionClosed after `close`.
        """
        arrays = [feeds.get(name) for name in self.names]
        if not all(map(_holds_sizes, arrays, self._types.values())):
            return ()  # missing or malformed inputs: the checks of the feeds report them
        pairs = zip(self.names, arrays, strict=True)
        sizes = tuple(
            (name, array.dtype.name, array.shape, array.tobytes()) for name, array in pairs if array is not None
        )
        if sizes in self._refused or not self._has_session(sizes):
            return ()
        try:
            self.sessions.get(sizes)
        except SessionClosed:
            raise
        except LatheError:  # the nodes do not take these values: other code reports what is wrong
            self._refused = {*self._refused, sizes} if len(self._refused) < _MAX_COUNTED else {sizes}
            with self._counting:
                self._last_run.pop(sizes, None)
            return ()
        return sizes

    def others(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """The feeds without the size inputs, which are constants of the sessions here."""
        return {name: feed for name, feed in feeds.items() if name not in self.names}

    def _has_session(self, sizes: Sizes) -> bool:
        """Count a run with these sizes; whether they have a session, or are to get one."""
        with self._counting:
            self._count += 1
            if sizes not in self._last_run and not self._is_admitted(sizes):
                return False
            self._last_run[sizes] = self._count
            return True

    def _is_admitted(self, sizes: Sizes) -> bool:
        """Whether sizes without a session get one now: the first ones, and frequent ones if there is a place.

        There is a place if fewer than 8 sizes have sessions, or if the session whose last run is longest ago is idle
        and gives up its place. Counts the run if the sizes are not frequent yet.
        """
        runs = self._runs.get(sizes, 0 if self._count > 1 else _FREQUENT)
        if runs < _FREQUENT:
            if len(self._runs) >= _MAX_COUNTED:
                self._runs.clear()
            self._runs[sizes] = runs + 1
            return False
        if len(self._last_run) >= _MAX_SIZED:
            oldest = min(self._last_run, key=self._last_run.__getitem__)
            if self._count - self._last_run[oldest] <= _IDLE:
                return False
            del self._last_run[oldest]
        self._runs.pop(sizes, None)
        return True


def _holds_sizes(array: Any, type_: TensorType) -> bool:
    """Whether a feed is an array of at most 16 elements (`MAX_ELEMENTS`) that fits the type."""
    if not isinstance(array, np.ndarray) or array.dtype != type_.dtype.numpy or array.size > MAX_ELEMENTS:
        return False
    fixed = ((dim, extent) for dim, extent in zip(type_.dims, array.shape, strict=False) if isinstance(dim, int))
    return array.ndim == len(type_.dims) and all(dim == extent for dim, extent in fixed)


def describe_size(size: tuple[str, str, tuple[int, ...], bytes]) -> str:
    """One size input and its values, for reports for people."""
    name, dtype, shape, data = size
    return f"{name} = {np.frombuffer(data, dtype).reshape(shape).tolist()}"


def values_of(sizes: Sizes) -> dict[str, Array]:
    """The arrays of the size inputs by name, read-only."""
    return {name: np.frombuffer(data, dtype).reshape(shape) for name, dtype, shape, data in sizes}
