"""Dynamic batching for one model version: an idle version runs requests at once, a busy one collects the next batch.

Everything here runs on the event loop's thread; only the execution of a batch may move to a worker thread. By default
one batch of a version runs at a time, and requests that arrive meanwhile form the next batch. A next batch that is
already full is staged, so that the worker takes it without waiting for a busy event loop.

A batcher is a state machine: `mode.py` lists its modes and transitions. `submit` queues a request and, if the mode says
so, schedules `_next`. `_next` forms the next batch, and runs it on this thread, stages it for a worker, or delays it.
Everything else is a separate object: checks and refusals (`AdmissionControl`), the choice of the requests
(`BatchFormer`), workers (`Dispatcher`), answers and measurements (`Delivery`).
"""

from __future__ import annotations

import asyncio
import math
from time import monotonic

from lathe.server.backends.base import LoadedModel
from lathe.server.batching.admission import Admission
from lathe.server.batching.admission_control import AdmissionControl
from lathe.server.batching.batch_former import BatchFormer, timeout_passed
from lathe.server.batching.coalesced_batch import CoalescedBatch
from lathe.server.batching.cost_model import CostModel
from lathe.server.batching.delivery import Delivery
from lathe.server.batching.dispatcher import Dispatcher, FinishedBatch
from lathe.server.batching.entry import Entry
from lathe.server.batching.execution import Execute, run
from lathe.server.batching.inline_budget import InlineBudget, has_known_shapes
from lathe.server.batching.mode import BUSY, DELAYING, FORMING, IDLE, SCHEDULED
from lathe.server.batching.policy import BatchPolicy
from lathe.server.batching.queue import Queue
from lathe.server.batching.request_split import split_request
from lathe.server.batching.signature import BatchGroup
from lathe.server.batching.single_batches import SingleBatches
from lathe.server.errors import ServerError
from lathe.server.scheduling.pool import WorkerPool
from lathe.server.telemetry.statistics import Statistics


class Batcher:
    """Queues requests for one model and executes them in batches."""

    def __init__(
        self,
        model: LoadedModel,
        admission: Admission,
        pool: WorkerPool,
        stats: Statistics,
        inline_budget: float,
        execute: Execute = run,
    ) -> None:
        """`inline_budget`: seconds that a batch may take on the event loop's thread; 0: all run on workers.

        `execute` runs the requests of a batch that come from the queue: `run`, `run_packed` or `run_each`. Needs a
        running event loop. Takes a tenant of the pool, which `close` releases.
        """
        cost, max_rows, tenant = CostModel(), model.max_batch if model.batchable else 1, pool.tenant(stats.ref.name)
        self.admission = admission
        self.queue = Queue()
        self.mode = IDLE
        self._due: asyncio.Handle | None = None  # calls `_on_due`; set while SCHEDULED or DELAYING
        self._loop = asyncio.get_running_loop()
        self._coalesced: CoalescedBatch | None = None  # tried before the queue when the next batch is formed
        self._budget = InlineBudget(model, pool, inline_budget)
        self._singles = SingleBatches(self._loop)
        self._dispatch = Dispatcher(model, cost, pool, execute, self._on_finished, self._on_worker_free, tenant)
        self._control = AdmissionControl(admission, self.queue, cost, self._dispatch, stats)
        self._former = BatchFormer(self.queue, cost, max_rows, self._control.refuse_taken, stats.released)
        self._delivery = Delivery(stats, cost, self._budget, admission.drain, has_known_shapes(model))
        self._control.configure(self.policy, max_rows)

    @property
    def policy(self) -> BatchPolicy:
        """How requests are batched."""
        return self._former.policy

    @property
    def cost(self) -> CostModel:
        """The cost model: the seconds from the start of a batch until the event loop has its results."""
        return self._delivery.cost

    @property
    def stats(self) -> Statistics:
        """The counters of the version."""
        return self._delivery.stats

    def configure(self, policy: BatchPolicy) -> None:
        """Apply a policy to the requests that wait and to all that follow."""
        self._former.configure(policy)
        self._control.configure(policy, self._former.max_rows)
        self._dispatch.instances = policy.instances
        self._dispatch.share(policy.compute_share)
        self.queue.starvation = policy.starvation if policy.priority_levels else math.inf
        if self.mode is not FORMING and self.mode is not SCHEDULED:
            self._cancel_due()
            self._enter_next_mode(True)

    # requests

    def submit(self, entry: Entry) -> None:
        """Queue a request, in parts if it has more rows than one batch; may run it before returning.

        Overloaded or DeadlineExceeded if the request cannot be admitted; then it has not run. If a part is refused, all
        parts are cancelled, but parts before it may have run.
        """
        if entry.group.rows > self._former.max_rows:
            self._submit_parts(entry)
            return
        entry.since = now = monotonic()
        needs_checks = not self._control.skips_checks or entry.deadline is not None or entry.priority
        if needs_checks or not self.admission.admit(entry.nbytes):
            self._control.admit(entry, now)
            self._former.expect(now)
        self.queue.push(entry)
        mode = self.mode
        if mode is IDLE or mode is DELAYING or (mode is BUSY and self._is_next_full()):
            if entry.at_once and self._singles.can_skip_collecting:
                self._next()
            else:
                self._schedule()

    def submit_coalesced(self, requests: CoalescedBatch) -> None:
        """Take a new coalesced batch, to run it unqueued or to queue its requests.

        This happens in the next iteration of the event loop, until which the owner may add requests. While requests
        come one by one (`SingleBatches`), it happens before this call returns.
        """
        self._coalesced = requests
        mode = self.mode
        if mode is not SCHEDULED and mode is not FORMING:
            if self._singles.can_skip_collecting:
                self._next()
            else:
                self._schedule()

    def _submit_parts(self, entry: Entry) -> None:
        try:
            for part in split_request(entry, self._former.max_rows, self.cancel):
                self.submit(part)
                entry.parts.append(part)
        except ServerError:
            entry.abandon()
            for part in entry.parts:
                self.cancel(part)
            raise

    def turn_away(
        self, group: BatchGroup, nbytes: int, deadline: float | None, now: float, client: str, priority: int = 0
    ) -> ServerError | None:
        """The error that refuses a request at time `now`, counted in the statistics; None if it may be queued.

        `deadline` and `now` in monotonic seconds; `nbytes`: the bytes of its inputs; `priority`: as the request asks.
        """
        return self._control.turn_away(group, nbytes, deadline, now, client, priority)

    def expected(self, rows: int, work: float | None = None, priority: int = 0) -> float:
        """The seconds until a request of `rows` that is queued now would be answered, after all that is ahead of it.

        `work`: its cost units; None: the mean work of that number of rows. `priority`: as the request asks.
        """
        return self._control.expected(rows, work, priority)

    def cancel(self, entry: Entry) -> None:
        """Cancel a request whose caller left: it leaves the queue or, once staged or running, is not answered."""
        self._control.cancel(entry)

    async def drained(self) -> None:
        """Wait until nothing is queued or running."""
        await self.admission.drained()

    def close(self) -> None:
        """Give back the version's place in the worker pool. It must be drained, and no request may be submitted later.

        The last version of a model to do so also removes the model's compute share.
        """
        self._dispatch.close()

    # when the next batch is formed

    def _schedule(self) -> None:
        self.mode = SCHEDULED
        if self._due is not None:
            self._cancel_due()
        self._due = self._loop.call_soon(self._on_due)

    def _delay(self, seconds: float) -> None:
        self.mode = DELAYING
        self._due = self._loop.call_later(seconds, self._on_due)

    def _on_due(self) -> None:
        self._due = None
        self._next()

    def _cancel_due(self) -> None:
        """Cancel the scheduled call of `_on_due`, if there is one: another event came before it."""
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _on_worker_free(self) -> None:
        """Run what waits, as a worker has become free."""
        if len(self.queue):
            self._next()
        elif self.mode is BUSY and self._dispatch.is_idle:
            self.mode = IDLE

    def _on_finished(self, finished: FinishedBatch) -> None:
        """Answer a batch that has ended; before that, stage a full next batch, so that its worker need not wait."""
        if self._dispatch.running and self._is_next_full():
            self._next()
        if finished.late:
            self._control.refuse(finished.late, timeout_passed)
        if finished.ran is not None:
            self._delivery.answer(finished.entries, finished.ran)
        batch = finished.batch
        self.admission.leave(sum([entry.nbytes for entry in batch]), len(batch))

    def _is_next_full(self) -> bool:
        return not self._dispatch.staged and len(self.queue) >= self._former.max_rows

    def _enter_next_mode(self, is_another_possible: bool) -> None:
        """Set the mode after a batch is formed: SCHEDULED if another one can be formed, otherwise IDLE or BUSY.

        `is_another_possible`: another batch may be formed although no instance is free.
        """
        dispatch = self._dispatch
        is_idle = dispatch.running < dispatch.instances
        if self._coalesced is not None or (len(self.queue) and (is_idle or is_another_possible)):
            self._schedule()
        else:
            self.mode = IDLE if is_idle else BUSY

    # the next batch

    def _next(self) -> None:
        """Form the next batch and run it, stage it or delay it; then wait for the event that forms another."""
        self.mode = FORMING
        if self._due is not None:
            self._cancel_due()
        dispatch, requests = self._dispatch, self._coalesced
        was_idle, self._coalesced = dispatch.running < dispatch.instances, None
        try:
            if requests is None:
                self._form(was_idle)
            elif not self._run_coalesced(requests):
                requests.queue()
                self._form(was_idle)
            if self.mode is FORMING or self._coalesced is not None:
                # A worker may have taken the batch by the next iteration; then a full one can be staged behind it.
                self._enter_next_mode(was_idle)
        finally:
            if self.mode is FORMING:  # an error: the next request forms a batch
                self.mode = IDLE

    def _form(self, is_idle: bool) -> None:
        """Form a batch: run it on this thread if it is expected to be short, otherwise stage it for a worker.

        Forms none while the batching delay lasts, or while no instance is free and the next batch is not full.
        """
        dispatch, former = self._dispatch, self._former
        if not is_idle and not self._is_next_full():
            return
        if is_idle and former.has_delay and (seconds := former.remaining_delay(monotonic())) > 0:
            self._delay(seconds)
            return
        batch = former.form(0.0 if is_idle else dispatch.remaining(monotonic()))
        if not batch:
            return
        is_usual = not batch[0].group.optional  # otherwise the request is alone and may need a compilation
        if is_usual and not dispatch.running and self._budget.allows(sum([entry.rows for entry in batch])):
            self._on_finished(dispatch.run(batch))
            self._singles.add(len(batch))
        else:
            dispatch.stage(batch)
            self._singles.reset()

    def _run_coalesced(self, requests: CoalescedBatch) -> bool:
        """Run a coalesced batch unqueued and return True; False if its requests have to be queued."""
        rows, count, dispatch = requests.rows, len(requests.since), self._dispatch
        if len(self.queue) or dispatch.running or not self._control.skips_checks or self._former.has_delay:
            return False
        if not 0 < rows <= self._former.max_rows or not self._budget.allows(rows):
            return False
        if not self.admission.has_room(requests.nbytes, count) or not requests.is_plain():
            return False
        try:
            stacked = requests.stack()
        except MemoryError:
            return False  # in the queue, smaller batches may still succeed
        ran = run(dispatch.model, [stacked], [rows])
        outputs = ran.outcomes[0]
        if isinstance(outputs, Exception) or any(array.shape[:1] != (rows,) for array in outputs.values()):
            return False  # queued again: when run alone, only the requests at fault fail
        self._delivery.stats.released["idle"] += 1
        self._delivery.record(ran, requests.since)
        requests.answer(outputs)
        self.admission.drain.add(count, ran.scattered)
        self._singles.add(count)
        return True
