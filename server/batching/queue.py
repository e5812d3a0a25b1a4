"""Waiting requests, kept apart by what may be stacked with what. Used on the event loop's thread only."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

from server.batching.entry import Entry, State
from server.batching.signature import Shape

Key: TypeAlias = tuple[Shape, ...]


class Queue:
    """First come, first served over groups; inside a batch only requests of one group."""

    __slots__ = ("_gone", "_groups", "_length")

    def __init__(self) -> None:
        self._groups: dict[Key, deque[Entry]] = {}
        self._length = 0  # including those that left since
        self._gone = 0

    def __len__(self) -> int:
        return self._length - self._gone

    def __iter__(self) -> Iterator[Entry]:
        return (entry for group in self._groups.values() for entry in group if entry.state is State.WAITING)

    def push(self, entry: Entry) -> None:
        """Queue an entry behind its group."""
        group = self._groups.get(entry.group.key)
        if group is None:
            group = self._groups[entry.group.key] = deque()
        group.append(entry)
        self._length += 1

    def forget(self) -> None:
        """Count one waiting entry as gone; its place is cleared on the way, or by a sweep when many have left."""
        self._gone += 1
        if self._gone > 64 and self._gone * 2 > self._length:
            self._sweep()

    def take(self, max_rows: int) -> list[Entry]:
        """Take the group whose head waited longest: as many of its entries, in order, as fit; at least one."""
        while self._groups:
            key, group = self._oldest()
            batch = self._fill(group, max_rows)
            if not group:
                del self._groups[key]
            if batch:
                return batch
        return []

    def _oldest(self) -> tuple[Key, deque[Entry]]:
        if len(self._groups) == 1:
            return next(iter(self._groups.items()))
        return min(self._groups.items(), key=lambda item: item[1][0].since)

    def _fill(self, group: deque[Entry], max_rows: int) -> list[Entry]:
        batch: list[Entry] = []
        rows = 0
        while group:
            entry = group[0]
            if entry.state is not State.WAITING:
                self._gone -= 1
            elif batch and (entry.group.rows == 0 or rows + entry.rows > max_rows):
                break
            else:
                batch.append(entry)
                rows += entry.rows
            group.popleft()
            self._length -= 1
            if batch and entry.group.rows == 0:
                break
        return batch

    def put_back(self, entries: list[Entry]) -> None:
        """Return entries just taken, of one group, to its front in their order."""
        if entries:
            self._groups.setdefault(entries[0].group.key, deque()).extendleft(reversed(entries))
            self._length += len(entries)

    def _sweep(self) -> None:
        for key, group in list(self._groups.items()):
            alive = deque(entry for entry in group if entry.state is State.WAITING)
            if alive:
                self._groups[key] = alive
            else:
                del self._groups[key]
        self._length = sum(map(len, self._groups.values()))
        self._gone = 0
