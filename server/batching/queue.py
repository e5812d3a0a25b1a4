"""Waiting requests, apart by urgency and by what may be stacked with what. Used on the event loop's thread only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeAlias

from server.batching.entry import Entry, State
from server.batching.line import Line
from server.batching.signature import Shape

Key: TypeAlias = tuple[int, tuple[Shape, ...]]  # priority, inner shapes


class Queue:
    """Requests of equal priority and shapes in the order of a :class:`Line`; between shapes, who came first goes first.

    Inside a batch there are only requests of equal shapes.

    ``starvation``: seconds after which a request's priority counts no more.
    """

    __slots__ = ("_gone", "_groups", "_length", "starvation")

    def __init__(self, starvation: float = math.inf) -> None:
        self.starvation = starvation
        self._groups: dict[Key, Line] = {}
        self._length = 0  # including those that left since
        self._gone = 0

    def __len__(self) -> int:
        return self._length - self._gone

    def __iter__(self) -> Iterator[Entry]:
        return (entry for group in self._groups.values() for entry in group if entry.state is State.WAITING)

    def push(self, entry: Entry) -> None:
        """Queue an entry behind its group."""
        key = (entry.priority, entry.group.key)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Line()
        group.push(entry)
        self._length += 1

    def forget(self) -> None:
        """Count one waiting entry as gone; its place is cleared on the way, or by a sweep when many have left."""
        self._gone += 1
        if self._gone > 64 and self._gone * 2 > self._length:
            self._sweep()

    def next(self, now: float) -> list[Entry]:
        """Return what :meth:`take` would choose from, in its order, without taking it."""
        self._sweep()
        return [entry for key in self._order(now) for entry in self._groups[key]]

    def take(self, max_rows: int, now: float) -> list[Entry]:
        """Take the most urgent group whose head waited longest: as many of its entries, in order, as fit, at least
        one; then, while there is room, less urgent ones of the same shapes."""
        while self._groups:
            batch: list[Entry] = []
            for key in self._order(now):
                group = self._groups[key]
                self._fill(batch, group, max_rows)
                if not group:
                    del self._groups[key]
            if batch:
                return batch
        return []

    def _order(self, now: float) -> list[Key]:
        """The groups a batch may be made of, the first to be served first; all of the same shapes."""
        if len(self._groups) <= 1:
            return list(self._groups)
        ordered = sorted(self._groups, key=lambda key: self._urgency(key, now))
        return [key for key in ordered if key[1] == ordered[0][1]]

    def _urgency(self, key: Key, now: float) -> tuple[int, float]:
        since = self._groups[key].since
        return (-1 if now - since > self.starvation else key[0], since)

    def _fill(self, batch: list[Entry], group: Line, max_rows: int) -> None:
        rows = sum([entry.rows for entry in batch])
        while (entry := group.first) is not None:
            if entry.state is not State.WAITING:
                self._gone -= 1
            elif batch and (entry.group.rows == 0 or rows + entry.rows > max_rows):
                break
            else:
                batch.append(entry)
                rows += entry.rows
            group.pop()
            self._length -= 1
            if batch and batch[-1].group.rows == 0:
                break

    def put_back(self, entries: list[Entry]) -> None:
        """Return entries just taken to the fronts of their groups, in their order."""
        for entry in reversed(entries):
            self._groups.setdefault((entry.priority, entry.group.key), Line()).put_back(entry)
        self._length += len(entries)

    def _sweep(self) -> None:
        for key, group in list(self._groups.items()):
            group.drop(lambda entry: entry.state is not State.WAITING)
            if not group:
                del self._groups[key]
        self._length = sum(map(len, self._groups.values()))
        self._gone = 0
