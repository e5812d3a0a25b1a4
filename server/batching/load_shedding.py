"""CoDel load shedding: drops requests that waited longer than the target while the queue does not empty."""

from __future__ import annotations


class ControlledDelay:
    """Distinguishes standing queues from bursts: B. Maurer, "Fail at Scale" (ACM Queue 13(8), 2015), after CoDel.

    A queue that was empty within the last `interval` is a burst and drains without help. Otherwise it is standing: it
    only makes all requests late, so requests that waited longer than `target` are dropped. Times are monotonic seconds.
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
        """Requests that arrived before this time are dropped; -inf: none is.

        `batch`: the seconds that the largest batch takes. Waiting for one batch to end never makes a request stale,
        whatever the target.
        """
        stands = now - self._emptied > self.interval
        return now - max(self.target, batch) if stands else float("-inf")
