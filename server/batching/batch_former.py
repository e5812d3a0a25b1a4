"""Forms the next batch from the waiting requests, and drops requests that cannot be answered in time."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TypeAlias

from lathe.server.batching.cost_model import CostModel
from lathe.server.batching.entry import Entry
from lathe.server.batching.load_shedding import ControlledDelay
from lathe.server.batching.policy import BatchPolicy
from lathe.server.batching.queue import Queue
from lathe.server.errors import DeadlineExceeded, ServerError, Shed

TIMER_SLACK = 0.002  # seconds by which a timer may be late

Reason: TypeAlias = Callable[[float], ServerError]  # the error of a refusal; its argument is `retry_after` in seconds
RefuseEntries: TypeAlias = Callable[[list[Entry], Reason], None]


class BatchFormer:
    """Takes batches from a queue, as large as the nearest deadline allows, or without deadlines the latency target.

    A batch is not made smaller if its oldest request would miss the latency target even alone.
    """

    def __init__(
        self, queue: Queue, cost: CostModel, limit: int, refuse: RefuseEntries, released: dict[str, int]
    ) -> None:
        """`limit`: the most rows that the model takes. `refuse` answers dropped requests with an error.

        `released` counts the batches by the reason why they are not larger.
        """
        self.policy = BatchPolicy()
        self.has_delay = self.policy.has_delay
        self.max_rows = limit
        self._limit = limit
        self._queue = queue
        self._cost = cost
        self._refuse = refuse
        self._released = released
        self._delay: ControlledDelay | None = None

    def configure(self, policy: BatchPolicy) -> None:
        """Apply a policy to the batches that follow."""
        self.policy = policy
        self.has_delay = policy.has_delay
        self.max_rows = min(policy.max_rows or self._limit, self._limit)
        target, interval, before = policy.delay_target, policy.delay_interval, self._delay
        if target is None:
            self._delay = None
        elif before is None or (before.target, before.interval) != (target, interval):
            self._delay = ControlledDelay(target, interval)
            self._delay.empty(monotonic())

    def expect(self, now: float) -> None:
        """Note that a request is about to be queued: tells load shedding that the queue was empty until now."""
        if self._delay is not None and not len(self._queue):
            self._delay.empty(now)

    def form(self, wait: float) -> list[Entry]:
        """Take the next batch, which will start in `wait` seconds.

        Refuses requests that waited too long (load shedding) or cannot meet their deadline. Empty if no request is
        left.
        """
        while batch := self._queue.take(
            self._preferred_rows() if self.policy.preferred else self.max_rows, monotonic()
        ):
            if self._delay is not None and self._shed(self._delay, batch):
                continue
            deadlines = [entry.deadline for entry in batch if entry.deadline is not None]
            if not deadlines:
                return self._fit_target(batch, wait)
            start = monotonic() + wait
            batch = self._fit_deadline(batch, min(deadlines) - start, start)
            if batch:
                return batch
        return []

    def remaining_delay(self, now: float) -> float:
        """The seconds that the waiting requests are still to be delayed for further ones; 0 or less: run them now."""
        waiting = self._queue.next(now)
        if not waiting or self.policy.is_large_enough(sum(entry.rows for entry in waiting), self.max_rows):
            return 0.0
        return min(self._latest_start(entry) for entry in waiting) - now

    def _latest_start(self, entry: Entry) -> float:
        """When a delayed request has to start even if no further ones arrive (monotonic seconds)."""
        ends = [entry.deadline] if entry.deadline is not None else []
        if self.policy.latency_target is not None:
            ends.append(entry.since + self.policy.latency_target)
        needed = 2 * self._cost.bound(entry.work) + TIMER_SLACK
        return min([entry.since + self.policy.max_delay, *(end - needed for end in ends)])

    def _preferred_rows(self) -> int:
        """The most rows that the next batch may have, if some sizes are preferred."""
        waiting = self._queue.next(monotonic())
        return self.policy.most((entry.rows for entry in waiting), self.max_rows)

    def _fit_target(self, batch: list[Entry], wait: float) -> list[Entry]:
        """Shrink a batch, and put the rest back, if that lets its oldest request meet the latency target.

        Otherwise return the batch unchanged.
        """
        target = self.policy.latency_target
        if target is not None:
            left = min(entry.since for entry in batch) + target - monotonic() - wait
            if self._duration_bound(batch[:1]) <= left < self._duration_bound(batch):
                return self._shrink(batch, left, "target")
        self._note_release(batch)
        return batch

    def _fit_deadline(self, batch: list[Entry], seconds: float, start: float) -> list[Entry]:
        """Shrink a batch to what can be executed in `seconds`, and put the rest back.

        If requests cannot meet their deadline even alone, refuses them, puts back all others and returns [].
        """
        if self._cost.least_bound(sum([entry.work for entry in batch])) <= seconds:
            self._note_release(batch)
            return batch
        late = [entry for entry in batch if self._is_late(entry, start)]
        if late:
            self._drop(batch, late, timeout_passed)
            return []  # the other requests may have later deadlines: form again
        return self._shrink(batch, seconds, "deadline")

    def _duration_bound(self, batch: list[Entry]) -> float:
        return self._cost.bound(sum([entry.work for entry in batch]))

    def _is_late(self, entry: Entry, start: float) -> bool:
        return entry.deadline is not None and start + self._cost.least_bound(entry.work) > entry.deadline

    def _shed(self, delay: ControlledDelay, batch: list[Entry]) -> bool:
        """Drop the requests of a batch that waited too long in a standing queue; True if there were any."""
        latest = delay.latest(monotonic(), self._cost.bound(max(self.max_rows, self._cost.largest_work)))
        stale = [entry for entry in batch if entry.since < latest]
        if stale:
            self._drop(batch, stale, _waited_too_long)
        return bool(stale)

    def _drop(self, batch: list[Entry], some: list[Entry], reason: Reason) -> None:
        """Refuse `some` requests of a batch that was just taken, and put the others back."""
        gone = set(map(id, some))
        self._queue.put_back([entry for entry in batch if id(entry) not in gone])
        self._refuse(some, reason)

    def _shrink(self, batch: list[Entry], seconds: float, reason: str) -> list[Entry]:
        """The requests that can be executed in `seconds`, at least one; the others are put back."""
        kept = 1
        while kept < len(batch) and self._duration_bound(batch[: kept + 1]) <= seconds:
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


def timeout_passed(retry_after: float) -> DeadlineExceeded:
    """The error for a request whose timeout passed in the queue."""
    return DeadlineExceeded("the request's timeout passed while it waited", retry_after=retry_after)


def _waited_too_long(retry_after: float) -> Shed:
    return Shed("waited too long in a queue that does not empty", retry_after=retry_after)
