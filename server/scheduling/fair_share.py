"""Fair shares: decides which client of a queue is served next."""

from __future__ import annotations

_SWEEP_AT = 1024  # stored clients above which those that are not ahead of the virtual time are dropped


class FairShares:
    """Equal shares by start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996), counted in work (rows, or tokens).

    `turn` of a client is its virtual start time: the work it was served. The client with the least turn is next. A
    client that returns after a pause starts at the current virtual time, so that idle time earns no credit. However
    much one client sends, and in however many shapes, the next entry of another waits only for about its own work from
    each client, and for the batch that runs already.
    """

    __slots__ = ("_now", "_sweep_at", "_turns")

    def __init__(self) -> None:
        self._turns: dict[str, float] = {}
        self._now = 0.0  # virtual time: the turn of the latest batch's first client; no waiting client has a lower turn
        self._sweep_at = _SWEEP_AT

    def enter(self, client: str) -> None:
        """Note that a client has a waiting request: its turn becomes at least the current virtual time."""
        if self._turns.get(client, -1.0) < self._now:
            self._turns[client] = self._now
            if len(self._turns) > self._sweep_at:
                self._sweep()

    def turn(self, client: str) -> float:
        """The virtual start time of a client: the least is next. It never decreases."""
        return self._turns.get(client, self._now)

    def begin(self, client: str) -> None:
        """Note the client of the first entry of a batch: the virtual time advances to its turn."""
        self._now = max(self._now, self.turn(client))

    def charge(self, client: str, work: float) -> None:
        """Add a client's work in a batch to its turn."""
        self._turns[client] = self.turn(client) + work

    def _sweep(self) -> None:
        """Forget clients that are not ahead of the virtual time: `turn` gives the same for them without an entry."""
        self._turns = {client: turn for client, turn in self._turns.items() if turn > self._now}
        self._sweep_at = max(_SWEEP_AT, 2 * len(self._turns))
