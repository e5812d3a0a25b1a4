"""The fair queue of the entries that may share a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from math import inf

from lathe.server.batching.entry import WAITING, Entry
from lathe.server.scheduling.fair_share import FairShares


class FairQueue:
    """A fair queue: first come, first served within a client; between clients, the least `FairShares.turn` is next."""

    __slots__ = ("_count", "_shares", "_turns", "_waiting", "plain")

    def __init__(self, shares: FairShares) -> None:
        self._shares = shares
        self.plain: deque[Entry] = deque()  # served first: the entries of an only client, and those put back
        self._waiting: dict[str, deque[Entry]] = {}  # by client
        # A heap of (turn, number, client). A turn may be outdated, because the client was served from another queue
        # since; then it is too low, and `_next` corrects it at the top. The number breaks ties: first come first.
        self._turns: list[tuple[float, int, str]] = []
        self._count = 0

    def __bool__(self) -> bool:
        return True if self.plain else bool(self._turns)

    def __len__(self) -> int:
        return len(self.plain) + sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Entry]:
        """Yield the entries in roughly the order they are taken: the first of each client, the second of each, ..."""
        yield from self.plain
        owners = sorted(self._turns)
        for place in range(max(map(len, self._waiting.values()), default=0)):
            yield from (self._waiting[client][place] for *_, client in owners if place < len(self._waiting[client]))

    def first(self) -> Entry:
        """The entry that is taken next. The queue must not be empty."""
        return self.plain[0] if self.plain else self._waiting[self._next()[2]][0]

    @property
    def turn(self) -> float:
        """The turn of the first entry; -inf if this entry is served before all others, or the queue is empty."""
        return -inf if self.plain or not self._turns else self._next()[0]

    @property
    def since(self) -> float:
        """The arrival time of the oldest entry (monotonic seconds); inf if the queue is empty."""
        oldest = min([own[0].since for own in self._waiting.values()], default=inf)
        return min(oldest, self.plain[0].since) if self.plain else oldest

    def append(self, entry: Entry) -> None:
        """Add an entry while all entries belong to one client."""
        self.plain.append(entry)

    def push(self, entry: Entry) -> None:
        """Add an entry after the other entries of its client."""
        own = self._waiting.get(entry.client)
        if own is None:
            self._waiting[entry.client] = deque((entry,))
            self._count += 1
            heappush(self._turns, (self._shares.turn(entry.client), self._count, entry.client))
        else:
            own.append(entry)

    def pop(self, present: bool, begins: bool) -> None:
        """Remove the first entry and charge it to its client's share, unless it is served before all others.

        `present`: the entry was not cancelled, otherwise it costs nothing. `begins`: the entry is the first of a batch.
        """
        if self.plain:
            self.plain.popleft()
            return
        _, place, client = self._next()
        own, shares = self._waiting[client], self._shares
        if begins:
            shares.begin(client)
        entry = own.popleft()
        if present:
            shares.charge(client, entry.work)
        if own:
            heapreplace(self._turns, (shares.turn(client), place, client))
        else:
            heappop(self._turns)
            del self._waiting[client]

    def newest(self, client: str) -> tuple[Entry | None, int]:
        """The client's newest waiting entry outside of `plain`, or None; and the number of cancelled entries removed.

        None if the client has no waiting entry there.
        """
        own = self._waiting.get(client)
        if own is None:
            return None, 0
        dropped = 0
        while own[-1].state is not WAITING:
            if len(own) == 1:  # it stands for the client in the heap, and is removed when it is taken
                return None, dropped
            own.pop()
            dropped += 1
        return own[-1], dropped

    def put_back(self, entry: Entry) -> None:
        """Put the entry that was taken last back to the front."""
        self.plain.appendleft(entry)

    def take_first_served(self) -> deque[Entry]:
        """Remove and return the entries that are served before all others; the caller pushes them again."""
        plain, self.plain = self.plain, deque()
        return plain

    def drop(self, gone: Callable[[Entry], bool]) -> None:
        """Remove the entries for which `gone` is true."""
        self.plain = deque(entry for entry in self.plain if not gone(entry))
        kept = {client: deque(entry for entry in own if not gone(entry)) for client, own in self._waiting.items()}
        self._waiting = {client: own for client, own in kept.items() if own}
        self._turns = [turn for turn in self._turns if turn[2] in self._waiting]
        heapify(self._turns)

    def _next(self) -> tuple[float, int, str]:
        """The top of the heap, after correcting outdated turns."""
        while True:
            turn, place, client = self._turns[0]
            now = self._shares.turn(client)
            if turn >= now:
                return self._turns[0]
            heapreplace(self._turns, (now, place, client))
