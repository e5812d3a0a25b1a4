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
_FREQUENT = 3  # runs with the same sizes, after the first ones, before they get code of their own
_MAX_COUNTED = 256  # sizes whose runs are counted; at the limit, all of them are forgotten


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

    The first values get a session at once, and others when they are frequent. All other runs use code that takes any
    values.
    """

    def __init__(self, make: Callable[[Sizes], S], types: Mapping[str, TensorType]) -> None:
        """`types`: those of the size inputs by name; empty if there are no sessions for their values."""
        self.names = tuple(types)
        self._types = types
        self.sessions: SessionCache[Sizes, S] = SessionCache(make, _MAX_SIZED)
        self._runs: dict[Sizes, int] = {}
        self._refused: set[Sizes] = set()

    def choice(self, feeds: Mapping[str, Any]) -> Sizes:
        """The values of the size inputs in these feeds, if a session for them exists now; otherwise empty."""
        arrays = [feeds.get(name) for name in self.names]
        if not all(map(_holds_sizes, arrays, self._types.values())):
            return ()  # missing or malformed inputs: the checks of the feeds report them
        pairs = zip(self.names, arrays, strict=True)
        sizes = tuple(
            (name, array.dtype.name, array.shape, array.tobytes()) for name, array in pairs if array is not None
        )
        if sizes in self._refused or not self._is_frequent(sizes):
            return ()
        try:
            self.sessions.get(sizes)
        except SessionClosed:
            raise
        except LatheError:  # the nodes do not take these values: other code reports what is wrong
            self._refused = {*self._refused, sizes} if len(self._refused) < _MAX_COUNTED else {sizes}
            return ()
        return sizes

    def _is_frequent(self, sizes: Sizes) -> bool:
        """Count a run with these sizes; whether they have a session, or are to get one."""
        if not self._runs:
            self._runs[sizes] = _FREQUENT
        if (runs := self._runs.get(sizes, 0)) >= _FREQUENT:
            return True
        if len(self._runs) >= _MAX_COUNTED:
            self._runs.clear()
        self._runs[sizes] = runs + 1
        return False


def _holds_sizes(array: Any, type_: TensorType) -> bool:
    """Whether a feed is an array of few elements that fits the type."""
    if not isinstance(array, np.ndarray) or array.dtype != type_.dtype.numpy or array.size > MAX_ELEMENTS:
        return False
    fixed = ((dim, extent) for dim, extent in zip(type_.dims, array.shape, strict=False) if isinstance(dim, int))
    return array.ndim == len(type_.dims) and all(dim == extent for dim, extent in fixed)


def describe_size(size: tuple[str, str, tuple[int, ...], bytes]) -> str:
    """One size input and its values, for reports for people."""
    name, dtype, shape, data = size
    return f"{name} = {np.frombuffer(data, dtype).reshape(shape).tolist()}"


def values_of(sizes: Sizes) -> dict[str, Array]:
    """The arrays of the size inputs by name."""
    return {name: np.frombuffer(data, dtype).reshape(shape) for name, dtype, shape, data in sizes}
