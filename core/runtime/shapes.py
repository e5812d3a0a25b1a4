"""Executables by shape: made when first asked for, the one not used for longest dropped when there are too many."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from core.errors import SessionClosed
from core.runtime.executable import Executable

Binding: TypeAlias = tuple[tuple[str, int], ...]  # values of the symbols other than the batch size, sorted by name


@dataclass(eq=False)
class _Entry:
    """One shape. `users` are threads between asking for it and being done with it."""

    making: threading.Lock = field(default_factory=threading.Lock)
    executable: Executable | None = None
    users: int = 0
    dropped: bool = False  # nobody else will find it: the last user closes it


class Shapes:
    """A small cache of executables. Making one holds up only those who want the same shape."""

    def __init__(self, make: Callable[[Binding], Executable], limit: int) -> None:
        self._make = make
        self._limit = limit
        self._entries: OrderedDict[Binding, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def use(self, binding: Binding) -> Iterator[Executable]:
        """The executable of these values, which stays usable inside the block whatever is dropped meanwhile.

        SessionClosed after `close`; whatever making it raises."""
        entry = self._enter(binding)
        try:
            with entry.making:
                if entry.executable is None:
                    entry.executable = self._make(binding)
            yield entry.executable
        finally:
            self._leave(binding, entry)

    def made(self) -> dict[Binding, Executable]:
        """What exists now, the most recently used last."""
        with self._lock:
            entries = list(self._entries.items())
        return {binding: entry.executable for binding, entry in entries if entry.executable is not None}

    def close(self) -> None:
        """Free everything as soon as nobody uses it."""
        with self._lock:
            self._closed = True
            entries = list(self._entries.values())
            self._entries.clear()
            idle = [entry for entry in entries if self._drop(entry)]
        _close(*idle)

    def _enter(self, binding: Binding) -> _Entry:
        with self._lock:
            if self._closed:
                raise SessionClosed("the session is closed")
            entry = self._entries.setdefault(binding, _Entry())
            self._entries.move_to_end(binding)
            entry.users += 1
            surplus = self._entries.popitem(last=False)[1] if len(self._entries) > self._limit else None
            idle = [surplus] if surplus is not None and self._drop(surplus) else []
        _close(*idle)
        return entry

    def _drop(self, entry: _Entry) -> bool:
        """Whether the entry can be closed at once."""
        entry.dropped = True
        return entry.users == 0

    def _leave(self, binding: Binding, entry: _Entry) -> None:
        with self._lock:
            entry.users -= 1
            failed = entry.executable is None and entry.users == 0
            if failed and self._entries.get(binding) is entry:
                del self._entries[binding]
            last = entry.dropped and entry.users == 0
        if last:
            _close(entry)


def _close(*entries: _Entry) -> None:
    for entry in entries:
        if entry.executable is not None:
            entry.executable.close()
