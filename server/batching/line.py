"""Entries that may share a batch, in an order that is fair between those they belong to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from math import inf

from server.batching.entry import WAITING, Entry
from server.batching.shares import Shares


class Line:
    """First come, first served for each client; between clients, whose turn it is."""

    __slots__ = ("_count", "_shares", "_turns", "_waiting", "plain")

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self.plain: deque[Entry] = deque()  # goes first: the only client's, and what was put back
        self._waiting: dict[str, deque[Entry]] = {}  # of each client
        # A heap of the clients' turns, as they were when put there: one who was served elsewhere since is found too
        # early, and then put right. The number decides between equals: who came into the line first.
        self._turns: list[tuple[float, int, str]] = []
        self._count = 0

    def __bool__(self) -> bool:
        return True if self.plain else bool(self._turns)

    def __len__(self) -> int:
        return len(self.plain) + sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Entry]:
        """Yield the entries about as they would be taken: the clients' firsts, the clients' seconds ..."""
        yield from self.plain
        owners = sorted(self._turns)
        for place in range(max(map(len, self._waiting.values()), default=0)):
            yield from (self._waiting[client][place] for *_, client in owners if place < len(self._waiting[client]))

    def first(self) -> Entry:
        """Return what is taken next; something must be there."""
        return self.plain[0] if self.plain else self._waiting[self._next()[2]][0]

    @property
    def turn(self) -> float:
        """When it is the first entry's turn, -inf for one that goes before all others."""
        return -inf if self.plain or not self._turns else self._next()[0]

    @property
    def since(self) -> float:
        """When the longest waiting entry came (monotonic seconds)."""
        oldest = min([own[0].since for own in self._waiting.values()], default=inf)
        return min(oldest, self.plain[0].since) if self.plain else oldest

    def append(self, entry: Entry) -> None:
        """Add an entry of the only client there is."""
        self.plain.append(entry)

    def push(self, entry: Entry) -> None:
        """Add an entry behind the others of its client."""
        own = self._waiting.get(entry.client)
        if own is None:
            self._waiting[entry.client] = deque((entry,))
            self._count += 1
            heappush(self._turns, (self._shares.turn(entry.client), self._count, entry.client))
        else:
            own.append(entry)

    def pop(self, present: bool, begins: bool) -> None:
        """Take the first entry, which counts to its client's share unless it goes before all others.

        ``present``: its caller is still there; ``begins``: it is the first of a batch.
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
        """Return the last entry of a client that waits in its turn; and how many were dropped that are gone."""
        own = self._waiting.get(client)
        if own is None:
            return None, 0
        dropped = 0
        while own[-1].state is not WAITING:
            if len(own) == 1:  # it is this client's place, and goes when that comes
                return None, dropped
            own.pop()
            dropped += 1
        return own[-1], dropped

    def put_back(self, entry: Entry) -> None:
        """Return the entry taken last; it is the first again."""
        self.plain.appendleft(entry)

    def take_plain(self) -> deque[Entry]:
        """Take out what goes before all others, to be pushed again."""
        plain, self.plain = self.plain, deque()
        return plain

    def drop(self, gone: Callable[[Entry], bool]) -> None:
        """Forget the entries that are gone."""
        self.plain = deque(entry for entry in self.plain if not gone(entry))
        kept = {client: deque(entry for entry in own if not gone(entry)) for client, own in self._waiting.items()}
        self._waiting = {client: own for client, own in kept.items() if own}
        self._turns = [turn for turn in self._turns if turn[2] in self._waiting]
        heapify(self._turns)

    def _next(self) -> tuple[float, int, str]:
        """The top of the heap, put right."""
        while True:
            turn, place, client = self._turns[0]
            now = self._shares.turn(client)
            if turn >= now:
                return self._turns[0]
            heapreplace(self._turns, (now, place, client))
