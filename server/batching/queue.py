"""The waiting requests of one version, grouped by priority and inner shapes. Used on the event loop's thread only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeAlias

from lathe.server.batching.admission import Admission
from lathe.server.batching.backlog import Backlog
from lathe.server.batching.entry import WAITING, Entry
from lathe.server.batching.fair_queue import FairQueue
from lathe.server.batching.signature import BatchGroup
from lathe.server.scheduling.fair_share import FairShares
from lathe.server.types import Shape

Key: TypeAlias = tuple[int, tuple[Shape, ...]]  # priority, inner shapes
MOST_URGENT = 1  # level


class Queue:
    """Waiting requests: one fair queue (`FairQueue`) per priority and shapes; a batch has requests of equal shapes.

    Within a priority, the client's oldest request decides which shapes are next. Between clients, the fair shares
    (`FairShares`) decide. While all waiting requests belong to one client, shares are not computed.

    `starvation`: seconds after which a request counts as most urgent, whatever its priority.
    """

    __slots__ = (
        "_backlog",
        "_client",
        "_gone",
        "_groups",
        "_latest",
        "_length",
        "_levels",
        "_shares",
        "rows",
        "starvation",
        "work",
    )

    def __init__(self, starvation: float = math.inf) -> None:
        self.starvation = starvation
        self.rows = self.work = 0  # waiting
        self._groups: dict[Key, FairQueue] = {}
        self._levels: dict[
            int, list[int]
        ] = {}  # waiting rows and work by priority; not of priority 0, the only one then
        self._length = 0  # entries in the groups, including cancelled ones
        self._gone = 0  # cancelled entries that are still in the groups
        self._client: str | None = None  # the only client that waits; None: there are several
        self._shares = FairShares()
        self._backlog = Backlog()  # kept while several clients wait
        self._latest: tuple[int, BatchGroup, FairQueue] | None = (
            None  # where the last entry was pushed, while it is in `_groups`
        )

    def __len__(self) -> int:
        return self._length - self._gone

    def __iter__(self) -> Iterator[Entry]:
        return (entry for group in self._groups.values() for entry in group if entry.state is WAITING)

    def ahead(self, priority: int, now: float) -> tuple[int, int, int]:
        """The rows and the work that wait ahead of a new request of this priority, and the number of their shapes.

        Less urgent requests are not ahead, unless one of their priority has waited for longer than `starvation`.
        """
        if not priority:
            return self.rows, self.work, len({key[1] for key in self._groups})
        ahead = {
            key[0] for key, group in self._groups.items() if key[0] <= priority or now - group.since > self.starvation
        }
        behind = [counts for level, counts in self._levels.items() if level not in ahead]
        shapes = len({key[1] for key in self._groups if key[0] in ahead})
        return self.rows - sum([rows for rows, _ in behind]), self.work - sum([work for _, work in behind]), shapes

    def _count_level(self, entry: Entry, sign: int) -> None:
        """Add the rows and the work of an entry to those of its priority that wait, or subtract them (`sign` -1)."""
        level = self._levels.setdefault(entry.priority, [0, 0])
        level[0] += sign * entry.rows
        level[1] += sign * entry.work

    def push(self, entry: Entry) -> None:
        """Append an entry to its group."""
        client = entry.client
        if not self._length:
            self._client = client
            self._backlog.clear()
        elif client != self._client and self._client is not None:
            self._start_sharing()
        if self._client is None:
            self._shares.enter(client)
            self._backlog.add(entry)
            self._group(entry).push(entry)
        else:
            self._group(entry).append(entry)
        self._length += 1
        self.rows += entry.rows
        self.work += entry.work
        if entry.priority:
            self._count_level(entry, 1)

    def _group(self, entry: Entry) -> FairQueue:
        latest = self._latest
        if latest is not None and latest[1] is entry.group and latest[0] == entry.priority:
            return latest[2]
        key = (entry.priority, entry.group.key)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = FairQueue(self._shares)
        self._latest = (entry.priority, entry.group, group)
        return group

    def _start_sharing(self) -> None:
        """Begin to share between clients: insert all entries again, in the order they came, with their clients."""
        self._client = None
        waiting = [(entry, group) for group in self._groups.values() for entry in group.take_first_served()]
        for entry, group in sorted(waiting, key=lambda pair: pair[0].since):
            if entry.state is WAITING:
                self._backlog.add(entry)
            self._shares.enter(entry.client)
            group.push(entry)

    def is_entitled(self, client: str, nbytes: int, admission: Admission) -> bool:
        """Whether other clients have to make room for one more request of this client; see `Backlog.is_entitled`."""
        if self._client is not None:
            if client == self._client or not self._length:
                return False
            self._start_sharing()
        return self._backlog.is_entitled(client, nbytes, admission)

    def entry_to_drop(self, *, by_bytes: bool) -> Entry | None:
        """The newest of the least urgent entries of the client with most of the queue.

        None if fewer than two clients wait, or if all waiting entries of that client were put back (`put_back`).
        """
        if self._client is not None or not len(self):
            return None
        client, found = self._backlog.largest_client(by_bytes=by_bytes), list[Entry]()
        for group in self._groups.values():
            entry, dropped = group.newest(client)
            self._length -= dropped
            self._gone -= dropped
            if entry is not None:
                found.append(entry)
        return max(found, key=lambda entry: (entry.priority, entry.since), default=None)

    def forget(self, entry: Entry) -> None:
        """Count a waiting entry as gone; it is removed at its turn, or by a sweep when most entries are gone."""
        self.rows -= entry.rows
        self.work -= entry.work
        if entry.priority:
            self._count_level(entry, -1)
        if self._client is None:
            self._backlog.remove(entry)
        self._gone += 1
        if self._gone > 64 and self._gone * 2 > self._length:
            self._sweep()

    def next(self, now: float) -> list[Entry]:
        """The entries that `take` would choose from, in its order."""
        self._sweep()
        return [entry for key in self._order(now) for entry in self._groups[key]]

    def take(self, max_rows: int, now: float) -> list[Entry]:
        """Take the next batch: entries of the group that is next, then of the less urgent groups of the same shapes.

        Of each group, entries are taken in order until the rows of one do not fit into `max_rows`; smaller entries of
        less urgent groups may still follow. The first entry is taken in any case. One that is never stacked
        (`entry.group.rows` 0) is taken alone. Empty if nothing waits.
        """
        while self._groups:
            batch: list[Entry] = []
            for key in self._order(now):
                group = self._groups[key]
                self._fill(batch, group, max_rows)
                if not group:
                    del self._groups[key]
                    self._latest = None
                if batch and batch[0].group.rows == 0:  # those of a model that packs have the key of packed ones
                    break
            if batch:
                return batch
        return []

    def _order(self, now: float) -> list[Key]:
        """The groups of the shapes that are next, the most urgent first."""
        if len(self._groups) <= 1:
            return list(self._groups)
        ordered = sorted(self._groups, key=lambda key: self._urgency(key, now))
        return [key for key in ordered if key[1] == ordered[0][1]]

    def _urgency(self, key: Key, now: float) -> tuple[int, float, float]:
        group = self._groups[key]
        since = group.since
        return (min(key[0], MOST_URGENT) if now - since > self.starvation else key[0], group.turn, since)

    def _fill(self, batch: list[Entry], group: FairQueue, max_rows: int) -> None:
        rows = before = sum([entry.rows for entry in batch])
        popped, plain, several = 0, group.plain, self._client is None
        while group:
            entry = plain[0] if plain else group.first()
            present = entry.state is WAITING
            if present and batch and (entry.group.rows == 0 or rows + entry.rows > max_rows):
                break
            if plain:
                plain.popleft()
            else:
                group.pop(present, present and not batch)
            popped += 1
            if not present:
                self._gone -= 1
                continue
            batch.append(entry)
            if several:
                self._backlog.remove(entry)
            rows += entry.rows
            self.work -= entry.work
            if entry.priority:
                self._count_level(entry, -1)
            if entry.group.rows == 0:
                break
        self._length -= popped
        self.rows -= rows - before

    def put_back(self, entries: list[Entry]) -> None:
        """Return entries just taken to the fronts of their groups, in their order."""
        if not entries:
            return
        if not self._length:
            clients = {entry.client for entry in entries}
            self._client = clients.pop() if len(clients) == 1 else None
            self._backlog.clear()
        for entry in reversed(entries):
            self._group(entry).put_back(entry)
            if self._client is None:
                self._backlog.add(entry)
            self.rows += entry.rows
            self.work += entry.work
            if entry.priority:
                self._count_level(entry, 1)
        self._length += len(entries)

    def _sweep(self) -> None:
        for key, group in list(self._groups.items()):
            group.drop(lambda entry: entry.state is not WAITING)
            if not group:
                del self._groups[key]
        self._latest = None
        self._length = sum(map(len, self._groups.values()))
        self._gone = 0
