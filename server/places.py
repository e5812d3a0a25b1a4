"""A bounded number of places that parties take turns in: one that asks for many does not hold up the others."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

from server.errors import Overloaded

OWN = ""  # the party whose work is the server's own
PARTY: ContextVar[str] = ContextVar("party", default=OWN)  # for whom something is done, lest it hold up others


class Places:
    """Whoever has fewest places gets the next one; among equals, whoever has waited for a turn longest.

    Where there are several places one party never has the last of them, but for the server's own work: who comes next
    would else wait until the work of one who came before is done.
    """

    def __init__(self, places: int, waiting: int, what: str) -> None:
        """``waiting``: how many may wait, half of them of one party; the server's own work is not counted. ``what``
        they wait for, for those who are refused."""
        self._places = places
        self._most_waiting = waiting
        self._what = what
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by party, the next one first
        self._taken: Counter[str] = Counter()

    @asynccontextmanager
    async def place(self, party: str) -> AsyncIterator[None]:
        """Hold a place, once there is one; raises Overloaded where too many wait."""
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
        if party == OWN:
            return
        counts = {name: len(turns) for name, turns in self._waiting.items() if name != OWN}
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
            if not turn.done():  # else cancelled, and about to hear of it
                self._taken[party] += 1
                turn.set_result(None)

    def _next(self) -> str | None:
        able = [party for party in self._waiting if self._taken[party] < self._most(party)]
        return min(able, key=lambda party: self._taken[party], default=None)

    def _most(self, party: str) -> int:
        return self._places if party == OWN else max(1, self._places - 1)
