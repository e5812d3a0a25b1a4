"""Fair sharing of a bounded number of slots: a client with many requests does not hold up the other clients."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

from lathe.server.errors import Overloaded

SERVER_ITSELF = ""  # the party of the server's own work
CLIENT: ContextVar[str] = ContextVar("party", default=SERVER_ITSELF)  # the client that the current task works for


class FairSlots:
    """A fair semaphore: the next slot goes to the waiting party with the fewest slots; equal parties take turns.

    A party is a client, or the server itself. If there are several slots, a client never holds all of them: otherwise
    the next party would wait until that client's work is done.
    """

    def __init__(self, places: int, waiting: int, what: str) -> None:
        """`places`: the number of slots.

        `waiting`: the most requests that may wait, at most half of them of one party; those of the server itself are
        not counted. `what`: the name of the waiting things, for the error message.
        """
        self._places = places
        self._most_waiting = waiting
        self._what = what
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by party, the next party first
        self._taken: Counter[str] = Counter()

    @asynccontextmanager
    async def place(self, party: str) -> AsyncIterator[None]:
        """A context manager that waits for a slot and holds it inside; raises Overloaded if too many requests wait."""
        self._check(party)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(party, deque()).append(turn)
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(party)
            else:
                self._forget(party, turn)
            raise
        try:
            yield
        finally:
            self._leave(party)

    def _check(self, party: str) -> None:
        if party == SERVER_ITSELF:
            return
        counts = {name: len(turns) for name, turns in self._waiting.items() if name != SERVER_ITSELF}
        total, own = sum(counts.values()), counts.get(party, 0)
        if total >= self._most_waiting or own >= max(1, self._most_waiting // 2):
            whose = f"{own} of yours" if total < self._most_waiting else str(total)
            raise Overloaded(f"{self._what}: {whose} are waiting for a process already", retry_after=10.0)

    def _leave(self, party: str) -> None:
        self._taken[party] -= 1
        if not self._taken[party]:
            del self._taken[party]
        self._hand_out()

    def _forget(self, party: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(party)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[party]

    def _hand_out(self) -> None:
        while self._taken.total() < self._places and (party := self._next()) is not None:
            turns = self._waiting[party]
            turn = turns.popleft()
            if turns:
                self._waiting.move_to_end(party)
            else:
                del self._waiting[party]
            if not turn.done():  # a cancelled turn takes no slot; its task is about to see the cancellation
                self._taken[party] += 1
                turn.set_result(None)

    def _next(self) -> str | None:
        eligible = [party for party in self._waiting if self._taken[party] < self._most(party)]
        return min(eligible, key=lambda party: self._taken[party], default=None)

    def _most(self, party: str) -> int:
        return self._places if party == SERVER_ITSELF else max(1, self._places - 1)
