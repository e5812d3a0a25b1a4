"""Who is next among the clients of one queue."""

from __future__ import annotations

_MANY = 1024  # clients remembered before those whose share is used up are forgotten


class Shares:
    """Equal shares by start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996), counted in work (rows, or tokens).

    ``turn`` of a client is the work it has been given; the least is next. Who comes back after a pause begins where the
    others are, so that nobody saves up. However much one client sends, and in however many shapes, another's next entry
    waits for about as much work of each client as it has itself, and for the batch that was begun before.
    """

    __slots__ = ("_now", "_sweep_at", "_turns")

    def __init__(self) -> None:
        self._turns: dict[str, float] = {}
        self._now = 0.0  # the turn of the latest batch's first client: nobody who waits is behind it
        self._sweep_at = _MANY

    def enter(self, client: str) -> None:
        """Note that a client has something waiting."""
        if self._turns.get(client, -1.0) < self._now:
            self._turns[client] = self._now
            if len(self._turns) > self._sweep_at:
                self._sweep()

    def turn(self, client: str) -> float:
        """Return whose turn it is before whose: the least is next. It never falls."""
        return self._turns.get(client, self._now)

    def begin(self, client: str) -> None:
        """Note whose entry a batch begins with."""
        self._now = max(self._now, self.turn(client))

    def charge(self, client: str, work: float) -> None:
        """Note that a client was given so much of a batch."""
        self._turns[client] = self.turn(client) + work

    def _sweep(self) -> None:
        """Forget who is not ahead of the others; asked for again, they begin where they were."""
        self._turns = {client: turn for client, turn in self._turns.items() if turn > self._now}
        self._sweep_at = max(_MANY, 2 * len(self._turns))
