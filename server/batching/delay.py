"""Who has waited too long in a queue that does not empty is told so, while an answer is still of use to others."""

from __future__ import annotations


class ControlledDelay:
    """Tells standing queues from bursts, as in B. Maurer, "Fail at Scale" (ACM Queue 13(8), 2015), after CoDel.

    A queue that was empty within the last ``interval`` is a burst and works off by itself. One that was not stands: it
    makes everybody late for nothing, so nobody stays in it for longer than ``target``. Times are monotonic seconds.
    """

    __slots__ = ("_emptied", "interval", "target")

    def __init__(self, target: float, interval: float) -> None:
        self.target = target
        self.interval = interval
        self._emptied = 0.0

    def empty(self, now: float) -> None:
        """Note that nothing waits."""
        self._emptied = now

    def latest(self, now: float, batch: float) -> float:
        """Return when what is taken now must have come, -inf for any time.

        ``batch``: seconds that the largest batch takes. Who waited for one to end is not late, whatever the target.
        """
        stands = now - self._emptied > self.interval
        return now - max(self.target, batch) if stands else float("-inf")
