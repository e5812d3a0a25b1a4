"""Decides which requests enter the queue of one version, and refuses the requests that do not run."""

from __future__ import annotations

import asyncio
from time import monotonic

from lathe.server.batching.admission import Admission
from lathe.server.batching.backlog import displaced
from lathe.server.batching.batch_former import Reason, timeout_passed
from lathe.server.batching.cost_model import CostModel
from lathe.server.batching.dispatcher import Dispatcher
from lathe.server.batching.entry import DONE, STAGED, WAITING, Entry
from lathe.server.batching.policy import BatchPolicy
from lathe.server.batching.queue import Queue
from lathe.server.batching.signature import BatchGroup
from lathe.server.errors import DeadlineExceeded, Overloaded, ServerError
from lathe.server.telemetry.statistics import Statistics


class AdmissionControl:
    """Checks new requests, and refuses or cancels requests that wait in the queue of one version.

    A refused request leaves the queue before its callback is called: the callback may cancel or submit other requests.
    """

    __slots__ = ("_admission", "_cost", "_dispatch", "_max_rows", "_policy", "_queue", "_stats", "skips_checks")

    def __init__(
        self, admission: Admission, queue: Queue, cost: CostModel, dispatch: Dispatcher, stats: Statistics
    ) -> None:
        self._admission = admission
        self._queue = queue
        self._cost = cost
        self._dispatch = dispatch
        self._stats = stats
        self._max_rows = 1
        self._policy = BatchPolicy()
        self.skips_checks = self._policy.needs_no_checks  # of requests without a deadline, while there is room

    def configure(self, policy: BatchPolicy, max_rows: int) -> None:
        """Apply a policy to the requests that follow; `max_rows`: the most rows of one batch."""
        self._policy = policy
        self._max_rows = max_rows
        self.skips_checks = policy.needs_no_checks

    def admit(self, entry: Entry, now: float) -> None:
        """Count a request in, set its priority level, and start the timer of its deadline; the caller queues it.

        Requests of the clients with most of the queue may be dropped to make room; their callers get Overloaded.
        Overloaded or DeadlineExceeded if this one is refused, which is counted in the statistics.
        """
        entry.priority = self._policy.level(entry.priority)
        refusal = self._refusal(entry.group, entry.nbytes, entry.deadline, now, entry.client, entry.priority)
        if refusal is None and not self._make_room(entry.nbytes):
            refusal = self._admission.refusal(entry.nbytes, now)
        if refusal is not None:
            self._stats.refused(refusal.code)
            raise refusal
        if entry.deadline is not None:
            wait = max(0.0, entry.deadline - now)
            entry.timer = asyncio.get_running_loop().call_later(wait, self._expire, entry)
        self._admission.enter(entry.nbytes)

    def turn_away(
        self, group: BatchGroup, nbytes: int, deadline: float | None, now: float, client: str, priority: int = 0
    ) -> ServerError | None:
        """The error that refuses a request at time `now`, counted in the statistics; None if it may be queued.

        `priority`: what the request asks for; 0: the default of the policy.
        """
        refusal = self._refusal(group, nbytes, deadline, now, client, self._policy.level(priority))
        if refusal is not None:
            self._stats.refused(refusal.code)
        return refusal

    def _refusal(
        self, group: BatchGroup, nbytes: int, deadline: float | None, now: float, client: str, level: int
    ) -> ServerError | None:
        admission = self._admission
        full = admission.refusal(nbytes, now)
        if full is not None and self._queue.is_entitled(client, nbytes, admission):
            full = None  # other clients make room
        target = self._policy.latency_target
        if full is not None or (deadline is None and target is None):
            return full
        expected = self._expected(group.rows or 1, group.work, level)
        if deadline is not None and now + expected > deadline:
            return DeadlineExceeded(
                "the request's timeout is shorter than its wait and execution are expected to take",
                retry_after=admission.retry_after(now),
            )
        if target is not None and admission.items and expected > target:  # later requests would be late as well
            return Overloaded(
                f"the request would be answered after {expected * 1e3:.0f} ms, the model's latency target is "
                f"{target * 1e3:.0f} ms",
                retry_after=admission.retry_after(now),
            )
        return None

    def expected(self, rows: int, work: float | None = None, priority: int = 0) -> float:
        """The seconds until a request of `rows` (at least 1) that is queued now would be answered.

        Assumes that the queued requests that are not less urgent run before it (`Queue.ahead`) in full batches, of
        which `instances` run at once, and adds the fixed time of a batch for each further shape among them. 0 without
        measurements. `work` is the request's work; None: the mean work of that number of rows. `priority` is as in
        `turn_away`.
        """
        return self._expected(rows, work, self._policy.level(priority))

    def _expected(self, rows: int, work: float | None, level: int) -> float:
        cost, now = self._cost, monotonic()
        rows_ahead, work_ahead, shapes = self._queue.ahead(level, now)
        waiting = rows_ahead + rows
        work_per_row = (work_ahead + (cost.mean_work(rows) if work is None else work)) / waiting
        batches, rest = divmod(waiting, self._max_rows)
        own = batches // self._policy.instances * cost.least_bound(self._max_rows * work_per_row)
        own += cost.least_bound(rest * work_per_row) if rest else 0.0
        own += max(0, shapes - batches - bool(rest)) * cost.bound(0)  # more batches, as shapes do not mix
        return self._dispatch.remaining(now) + own

    def _make_room(self, nbytes: int) -> bool:
        """Drop requests of the clients with most of the queue until one more of `nbytes` fits.

        False if no more can be dropped before it fits.
        """
        while not self._admission.has_room(nbytes):
            missing, _ = self._admission.missing(nbytes)
            entry = self._queue.entry_to_drop(by_bytes=missing <= 0)
            if entry is None:
                return False
            self._refuse_waiting(entry, displaced)
        return True

    def cancel(self, entry: Entry) -> None:
        """Cancel a request whose caller left: it leaves the queue or, once staged or running, is not answered."""
        for part in entry.parts:
            self.cancel(part)
        if entry.state is DONE:
            return
        is_queued = entry.state is WAITING and not entry.parts
        self._stats.cancelled += 1
        entry.abandon()
        if is_queued:
            self._queue.forget(entry)
            self._admission.leave(entry.nbytes)

    def refuse(self, entries: list[Entry], reason: Reason) -> None:
        """Answer with an error requests that are no longer queued; they stay counted in the admission."""
        for entry in entries:
            if entry.state is WAITING:
                entry.state = STAGED  # the callback of another one may cancel it: it must not leave the queue again
        after = self._admission.retry_after(monotonic())
        for entry in entries:
            if entry.state is not DONE:
                error = reason(after)
                self._stats.refused(error.code)
                entry.finish(error)

    def refuse_taken(self, entries: list[Entry], reason: Reason) -> None:
        """Answer with an error requests that were taken out of the queue, and count them out."""
        self.refuse(entries, reason)
        self._admission.leave(sum([entry.nbytes for entry in entries]), len(entries))

    def _refuse_waiting(self, entry: Entry, reason: Reason) -> None:
        entry.state = STAGED
        self._queue.forget(entry)
        self.refuse_taken([entry], reason)

    def _expire(self, entry: Entry) -> None:
        if entry.state is WAITING:  # a running request is answered, even if late
            self._refuse_waiting(entry, timeout_passed)
