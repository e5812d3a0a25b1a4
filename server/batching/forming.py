"""Which of the waiting requests make up the next batch, and whom it is too late for."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TypeAlias

from server.batching.cost import CostModel
from server.batching.delay import ControlledDelay
from server.batching.entry import Entry
from server.batching.policy import BatchPolicy
from server.batching.queue import Queue
from server.errors import DeadlineExceeded, ServerError, Shed

WAKING = 0.002  # seconds by which a timer may be late

Reason: TypeAlias = Callable[[float], ServerError]  # of when to come back, in seconds
Refuse: TypeAlias = Callable[[list[Entry], Reason], None]


class Former:
    """Takes batches from a queue: the largest that fits, in the nearest deadline and in the latency target."""

    def __init__(self, queue: Queue, cost: CostModel, limit: int, refuse: Refuse, released: dict[str, int]) -> None:
        """``limit``: the most rows that the model takes; ``refuse`` tells some of who waited that they waited in vain;
        ``released`` counts why batches were let go."""
        self.policy = BatchPolicy()
        self.max_rows = limit
        self._limit = limit
        self._queue = queue
        self._cost = cost
        self._refuse = refuse
        self._released = released
        self._delay: ControlledDelay | None = None

    def configure(self, policy: BatchPolicy) -> None:
        """Form batches as this says from now on."""
        self.policy = policy
        self.max_rows = min(policy.max_rows or self._limit, self._limit)
        target, interval, before = policy.delay_target, policy.delay_interval, self._delay
        if target is None:
            self._delay = None
        elif before is None or (before.target, before.interval) != (target, interval):
            self._delay = ControlledDelay(target, interval)
            self._delay.empty(monotonic())

    def expect(self, now: float) -> None:
        """A request is about to be queued."""
        if self._delay is not None and not len(self._queue):
            self._delay.empty(now)

    def form(self, wait: float) -> list[Entry]:
        """Take the next batch, which will begin after ``wait`` seconds; empty when nothing waits any more."""
        while batch := self._queue.take(self._most(), monotonic()):
            if self._delay is not None and self._shed(self._delay, batch):
                continue
            deadlines = [entry.deadline for entry in batch if entry.deadline is not None]
            if not deadlines:
                return self._fit_target(batch, wait)
            start = monotonic() + wait
            batch = self._cut(batch, min(deadlines) - start, start)
            if batch:
                return batch
        return []

    def held_for(self, now: float) -> float:
        """Return the seconds that what waits shall wait for more, 0 or less when it shall not."""
        waiting = self._queue.next(now)
        if not waiting or self.policy.is_enough(sum(entry.rows for entry in waiting), self.max_rows):
            return 0.0
        return min(self._latest_start(entry) for entry in waiting) - now

    def _latest_start(self, entry: Entry) -> float:
        """When a request that waits for others is to run all the same (monotonic seconds)."""
        ends = [entry.deadline] if entry.deadline is not None else []
        if self.policy.latency_target is not None:
            ends.append(entry.since + self.policy.latency_target)
        needed = 2 * self._cost.bound(entry.work) + WAKING
        return min([entry.since + self.policy.max_delay, *(end - needed for end in ends)])

    def _most(self) -> int:
        """The most rows the next batch may have."""
        if not self.policy.preferred:
            return self.max_rows
        waiting = self._queue.next(monotonic())
        return self.policy.most((entry.rows for entry in waiting), self.max_rows)

    def _fit_target(self, batch: list[Entry], wait: float) -> list[Entry]:
        """Make a batch smaller if its oldest request then meets the latency target; if it cannot, size is no help."""
        target = self.policy.latency_target
        if target is not None:
            left = min(entry.since for entry in batch) + target - monotonic() - wait
            if self._lasts(batch[:1]) <= left < self._lasts(batch):
                return self._keep(batch, left, "target")
        self._note_release(batch)
        return batch

    def _cut(self, batch: list[Entry], seconds: float, start: float) -> list[Entry]:
        """Keep what can be done in ``seconds``; the rest waits on. A deadline that cannot be met at all is refused
        now."""
        if self._lasts(batch) <= seconds:
            self._note_release(batch)
            return batch
        late = [entry for entry in batch if self._is_late(entry, start)]
        if late:
            self._drop(batch, late, too_late)
            return []  # the rest may have more time
        return self._keep(batch, seconds, "deadline")

    def _lasts(self, batch: list[Entry]) -> float:
        return self._cost.bound(sum([entry.work for entry in batch]))

    def _is_late(self, entry: Entry, start: float) -> bool:
        return entry.deadline is not None and start + self._cost.bound(entry.work) > entry.deadline

    def _shed(self, delay: ControlledDelay, batch: list[Entry]) -> bool:
        """Drop who has waited too long in a standing queue; say whether there was anybody."""
        latest = delay.latest(monotonic(), self._cost.bound(max(self.max_rows, self._cost.largest)))
        stale = [entry for entry in batch if entry.since < latest]
        if stale:
            self._drop(batch, stale, _stale)
        return bool(stale)

    def _drop(self, batch: list[Entry], some: list[Entry], reason: Reason) -> None:
        """Refuse some of what was just taken; the rest waits on."""
        gone = set(map(id, some))
        self._queue.put_back([entry for entry in batch if id(entry) not in gone])
        self._refuse(some, reason)

    def _keep(self, batch: list[Entry], seconds: float, reason: str) -> list[Entry]:
        """Return what can be done in ``seconds``, at least one; the rest waits on."""
        kept = 1
        while kept < len(batch) and self._lasts(batch[: kept + 1]) <= seconds:
            kept += 1
        self._queue.put_back(batch[kept:])
        self._released[reason] += 1
        return batch[:kept]

    def _note_release(self, batch: list[Entry]) -> None:
        self._released[self._reason(batch) if len(self._queue) else "idle"] += 1

    def _reason(self, batch: list[Entry]) -> str:
        rows = sum(entry.rows for entry in batch)
        if rows >= self.max_rows:
            return "full"
        return "preferred" if rows in self.policy.preferred else "incompatible"


def too_late(retry_after: float) -> DeadlineExceeded:
    """Return what is said to a request whose time ended before its turn came."""
    return DeadlineExceeded("the request's timeout passed while it waited", retry_after=retry_after)


def _stale(retry_after: float) -> Shed:
    return Shed("waited too long in a queue that stays full", retry_after=retry_after)
