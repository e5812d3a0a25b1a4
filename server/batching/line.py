"""Entries that may share a batch, in an order that is fair between those they belong to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from math import inf

from server.batching.entry import Entry


class Line:
    """First come, first served for each client; between clients self-clocked fair queueing (Golestani, 1994), by rows.

    An entry is due its own rows after the one before it of the same client or, where that has been taken, after the one
    taken last; what is due first goes first. So however much one client sends, the next entry of another waits for
    no more rows of each client than it has itself. While there is one client only, none of this is reckoned.
    """

    __slots__ = ("_client", "_clock", "_count", "_plain", "_turns", "_waiting")

    def __init__(self) -> None:
        self._plain: deque[Entry] = deque()  # goes first: the only client's, and what was put back
        self._client: str | None = None  # whose all of these are, if that is one client
        self._waiting: dict[str, deque[tuple[float, Entry]]] = {}  # each client's entries with when they are due
        self._turns: list[tuple[float, int, str]] = []  # a heap of when each client's first entry is due
        self._clock = 0.0  # when what was taken last was due
        self._count = 0  # decides between equals: who came into the line first

    def __bool__(self) -> bool:
        return bool(self._plain or self._turns)

    def __len__(self) -> int:
        return len(self._plain) + sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Entry]:
        """Yield the entries about as they would be taken."""
        own = [(due, place, entry) for place, line in enumerate(self._waiting.values()) for due, entry in line]
        yield from self._plain
        yield from (entry for _, _, entry in sorted(own, key=lambda item: item[:2]))

    @property
    def first(self) -> Entry | None:
        """What is taken next, None where nothing waits."""
        if self._plain:
            return self._plain[0]
        return self._waiting[self._turns[0][2]][0][1] if self._turns else None

    @property
    def since(self) -> float:
        """When the longest waiting entry came (monotonic seconds)."""
        oldest = min([own[0][1].since for own in self._waiting.values()], default=inf)
        return min(oldest, self._plain[0].since) if self._plain else oldest

    def push(self, entry: Entry) -> None:
        """Add an entry behind the others of its client."""
        if not self._turns:
            if not self._plain:
                self._client = entry.client
            if entry.client == self._client:
                self._plain.append(entry)
                return
            self._deal()
        self._push_fairly(entry)

    def pop(self) -> Entry:
        """Take the first entry."""
        if self._plain:
            return self._plain.popleft()
        due, place, client = self._turns[0]
        own = self._waiting[client]
        self._clock = due
        _, entry = own.popleft()
        if own:
            heapreplace(self._turns, (own[0][0], place, client))
        else:
            heappop(self._turns)
            del self._waiting[client]
        return entry

    def put_back(self, entry: Entry) -> None:
        """Return the entry taken last; it is the first again."""
        self._plain.appendleft(entry)
        if entry.client != self._client:
            self._client = None

    def drop(self, gone: Callable[[Entry], bool]) -> None:
        """Forget the entries that are gone."""
        self._plain = deque(entry for entry in self._plain if not gone(entry))
        places = {client: place for _, place, client in self._turns}
        kept = {client: deque(pair for pair in own if not gone(pair[1])) for client, own in self._waiting.items()}
        self._waiting = {client: own for client, own in kept.items() if own}
        self._turns = [(own[0][0], places[client], client) for client, own in self._waiting.items()]
        heapify(self._turns)

    def _deal(self) -> None:
        """A second client comes: from now on they take turns."""
        plain, self._plain = self._plain, deque()
        for entry in plain:
            self._push_fairly(entry)

    def _push_fairly(self, entry: Entry) -> None:
        rows = entry.group.rows or 1
        own = self._waiting.get(entry.client)
        if own is None:
            due = self._clock + rows
            self._waiting[entry.client] = deque([(due, entry)])
            self._count += 1
            heappush(self._turns, (due, self._count, entry.client))
        else:
            own.append((own[-1][0] + rows, entry))
