"""Dynamic batching for one model version: an idle version runs requests at once, a busy one collects the next batch.

Everything here runs on the event loop's thread; only the execution of a batch may move to a worker thread. By default
one batch of a version runs at a time, and requests that arrive meanwhile form the next batch. A next batch that is
already full is staged, so that the worker takes it without waiting for a busy event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from time import monotonic, time

from lathe.server.backends.base import LoadedModel, PlacedModel, as_endless
from lathe.server.batching.admission import Admission
from lathe.server.batching.backlog import displaced
from lathe.server.batching.batch_former import BatchFormer, Reason, timeout_passed
from lathe.server.batching.coalesced_batch import CoalescedBatch
from lathe.server.batching.cost_model import CostModel
from lathe.server.batching.dispatcher import Dispatcher, FinishedBatch
from lathe.server.batching.entry import DONE, WAITING, Entry
from lathe.server.batching.execution import BatchResult, Execute, run
from lathe.server.batching.policy import BatchPolicy
from lathe.server.batching.queue import Queue
from lathe.server.batching.request_split import split_request
from lathe.server.batching.signature import BatchGroup
from lathe.server.errors import DeadlineExceeded, Overloaded, ServerError
from lathe.server.scheduling.pool import WorkerPool
from lathe.server.telemetry.logs import log_fields
from lathe.server.telemetry.statistics import Statistics

log = logging.getLogger("lathe.batching")

_WATCH_INTERVAL = 0.2  # seconds between two checks for executions to interrupt
_INTERRUPT_DELAY = 1.0  # seconds after a request's deadline before its execution may be interrupted

# After this many consecutive batches of one request, all run on the event loop's thread, a request runs in `submit`
# itself instead of in a `call_soon` callback that would collect further requests. This happens at most once per
# iteration of the event loop: requests read in the same iteration still share a batch.
SINGLE_BATCHES = 8


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
        self.model = model
        self.admission = admission
        self.cost = CostModel()
        # Decides whether a batch is short enough for the event loop's thread. Apart from `cost`, because the times of a
        # worker contain waits for the interpreter lock: small models would seem large and stay on the workers.
        self._inline_cost = CostModel()
        self._is_host_only = isinstance(model, PlacedModel) and not model.devices
        self.stats = stats
        self.queue = Queue()
        self.policy = BatchPolicy()
        self._max_rows = model.max_batch if model.batchable else 1
        self._former = BatchFormer(self.queue, self.cost, self._max_rows, self._refuse_taken, stats.released)
        tenant = pool.tenant(stats.ref.name)
        self._dispatch = Dispatcher(model, self.cost, pool, execute, self._on_finished, self._on_worker_free, tenant)
        self._pool = pool
        self._counts_rows = _has_known_shapes(model)
        self._interruptible = as_endless(model)
        self._inline_budget = inline_budget if self._counts_rows and self._interruptible is None else 0.0  # seconds
        self._watches_runs = False  # `_interrupt_abandoned` is scheduled
        self._loop = asyncio.get_running_loop()
        self._delay_timer: asyncio.TimerHandle | None = None  # ends the batching delay of an idle version
        self._is_scheduled = False  # `_next` is scheduled with `call_soon`
        self._skips_checks = self.policy.needs_no_checks
        self._single_batches = 0  # consecutive batches of one request that ran on this thread
        self._is_new_iteration = True  # a new iteration of the event loop has begun since such a batch
        self._coalesced: CoalescedBatch | None = None
        self._drained: asyncio.Event | None = None

    def configure(self, policy: BatchPolicy) -> None:
        """Apply a policy to the requests that wait and to all that follow."""
        self.policy = policy
        self._former.configure(policy)
        self._max_rows = self._former.max_rows
        self._dispatch.instances = policy.instances
        self._dispatch.share(policy.compute_share)
        self._skips_checks = policy.needs_no_checks
        self.queue.starvation = policy.starvation if policy.priority_levels else math.inf
        self._hold_until(None)
        self._schedule()

    # admission, cancellation and expiry of requests

    def submit(self, entry: Entry) -> None:
        """Queue a request, in parts if it has more rows than one batch; may run it before returning.

        Overloaded or DeadlineExceeded if it cannot be admitted; then no work was spent on it.
        """
        if entry.group.rows > self._max_rows:
            self._submit_parts(entry)
            return
        entry.since = now = monotonic()
        if not self._skips_checks or entry.deadline is not None or not self.admission.admit(entry.nbytes):
            self._check(entry, now)
            self.admission.enter(entry.nbytes)
        self.queue.push(entry)
        if not self._is_scheduled and (self._dispatch.is_idle or self._is_next_full()):
            if self._single_batches >= SINGLE_BATCHES and entry.at_once and self._is_new_iteration:
                self._next()
                return
            self._is_scheduled = True
            self._loop.call_soon(self._next)

    def submit_coalesced(self, requests: CoalescedBatch) -> None:
        """Take a new coalesced batch: the next iteration of the event loop runs it unqueued, or queues its requests.

        Its owner may add requests until then.
        """
        self._coalesced = requests
        if not self._is_scheduled:
            if self._single_batches >= SINGLE_BATCHES and self._is_new_iteration:
                self._next()
                return
            self._is_scheduled = True
            self._loop.call_soon(self._next)

    def _check(self, entry: Entry, now: float) -> None:
        """Apply the checks that most requests skip: full queue, expected wait, timeout, priority; may raise."""
        refusal = self.turn_away(entry.group, entry.nbytes, entry.deadline, now, entry.client)
        if refusal is None and not self._make_room(entry.nbytes):
            refusal = self.admission.refusal(entry.nbytes, now)
        if refusal is not None:
            raise refusal
        if entry.deadline is not None:
            entry.timer = self._loop.call_later(max(0.0, entry.deadline - now), self._expire, entry)
        entry.priority = self.policy.level(entry.priority)
        self._former.expect(now)

    def _make_room(self, nbytes: int) -> bool:
        """Drop requests of the clients with most of the queue until `nbytes` more fit; False if they do not."""
        while not self.admission.has_room(nbytes):
            missing, _ = self.admission.missing(nbytes)
            entry = self.queue.entry_to_drop(by_bytes=missing <= 0)
            if entry is None:
                return False
            self._refuse([entry], displaced)
            self._withdraw(entry)
        return True

    def turn_away(
        self, group: BatchGroup, nbytes: int, deadline: float | None, now: float, client: str
    ) -> ServerError | None:
        """The error that refuses a request at this time, counted in the statistics; None if it may be queued."""
        refusal = self._refusal(group, nbytes, deadline, now, client)
        if refusal is not None:
            self.stats.refused(refusal.code)
        return refusal

    def _refusal(
        self, group: BatchGroup, nbytes: int, deadline: float | None, now: float, client: str
    ) -> ServerError | None:
        full = self.admission.refusal(nbytes, now)
        if full is not None and self.queue.is_entitled(client, nbytes, self.admission):
            full = None  # other clients make room
        target = self.policy.latency_target
        if full is not None or (deadline is None and target is None):
            return full
        expected = self.expected(group.rows or 1, group.work)
        if deadline is not None and now + expected > deadline:
            return DeadlineExceeded(
                "the request's timeout is shorter than its wait and execution are expected to take",
                retry_after=self.admission.retry_after(now),
            )
        if target is not None and self.admission.items and expected > target:  # later requests would be late as well
            return Overloaded(
                f"the request would be answered after {expected * 1e3:.0f} ms, the model's latency target is "
                f"{target * 1e3:.0f} ms",
                retry_after=self.admission.retry_after(now),
            )
        return None

    def expected(self, rows: int, work: float | None = None) -> float:
        """The seconds until a request of `rows` (at least 1) that is queued now would be answered.

        Assumes that everything queued runs before it, in full batches of equal shapes. `work` is the request's work;
        None: the mean work of that number of rows.
        """
        cost, queue = self.cost, self.queue
        waiting = queue.rows + rows
        work_per_row = (queue.work + (cost.mean_work(rows) if work is None else work)) / waiting
        batches, rest = divmod(waiting, self._max_rows)
        own = batches // self.policy.instances * cost.bound(self._max_rows * work_per_row)
        own += cost.bound(rest * work_per_row) if rest else 0.0
        own += max(0, queue.shapes - batches - bool(rest)) * cost.bound(0)  # more batches, as shapes do not mix
        return self._dispatch.remaining(monotonic()) + own

    def cancel(self, entry: Entry) -> None:
        """Cancel a request whose caller left: a waiting one leaves the queue, a running one is not answered."""
        if entry.parts:
            for part in entry.parts:
                self.cancel(part)
        if entry.state is DONE:
            return
        waiting = entry.state is WAITING and not entry.parts
        self.stats.cancelled += 1
        entry.abandon()
        if waiting:
            self._withdraw(entry)

    async def drained(self) -> None:
        """Wait until nothing is queued or running."""
        if self.admission.items:
            self._drained = self._drained or asyncio.Event()
            await self._drained.wait()

    def close(self) -> None:
        """Release the model's share of the workers. The batcher must be drained; no request may be submitted later."""
        self._dispatch.close()

    def _submit_parts(self, entry: Entry) -> None:
        try:
            for part in split_request(entry, self._max_rows, self.cancel):
                self.submit(part)
                entry.parts.append(part)
        except ServerError:
            entry.abandon()
            for part in entry.parts:
                self.cancel(part)
            raise

    def _expire(self, entry: Entry) -> None:
        if entry.state is WAITING:  # a running request is answered, even if late
            self._refuse([entry], timeout_passed)
            self._withdraw(entry)

    def _withdraw(self, entry: Entry) -> None:
        self.queue.forget(entry)
        self._release([entry])

    def _refuse_taken(self, entries: list[Entry], reason: Reason) -> None:
        """Refuse requests that were already taken out of the queue."""
        self._refuse(entries, reason)
        self._release(entries)

    def _refuse(self, entries: list[Entry], reason: Reason) -> None:
        after = self.admission.retry_after(monotonic())
        for entry in entries:
            if entry.state is not DONE:
                error = reason(after)
                self.stats.refused(error.code)
                entry.finish(error)

    # execution of batches

    def _next(self) -> None:
        """Run the next batch: on this thread if it is expected to be short, otherwise on a worker; or stage it."""
        if self._coalesced is not None and self._end_coalesced(self._coalesced):
            return
        self._is_scheduled = False
        dispatch = self._dispatch
        is_idle = dispatch.is_idle
        if not is_idle and not self._is_next_full():
            return
        if self.policy.has_delay and is_idle and self._starts_delay():
            return
        batch = self._former.form(0.0 if is_idle else dispatch.remaining(monotonic()))
        if not batch:
            return
        is_usual = not batch[0].group.optional  # otherwise the request is alone and may need a compilation
        if is_usual and not dispatch.running and self._can_run_inline(sum([entry.rows for entry in batch])):
            self._on_finished(dispatch.run(batch))
            self._note_inline_run(len(batch))
            self._schedule()
            return
        self._single_batches = 0
        dispatch.stage(batch)
        if self._interruptible is not None and not self._watches_runs:
            self._watches_runs = True
            self._loop.call_later(_WATCH_INTERVAL, self._interrupt_abandoned)
        if is_idle:
            self._schedule()  # another instance may be idle

    def _end_coalesced(self, requests: CoalescedBatch) -> bool:
        """Run a coalesced batch unqueued and return True; if that is not possible, queue its requests: False."""
        self._coalesced = None
        self._is_scheduled = True  # requests queued meanwhile must not schedule `_next`: the caller goes on with it
        try:
            ran = self._run_coalesced(requests)
            if not ran:
                requests.queue()
        finally:
            self._is_scheduled = False
        return ran

    def _run_coalesced(self, requests: CoalescedBatch) -> bool:
        rows, count, dispatch = requests.rows, len(requests.since), self._dispatch
        if len(self.queue) or dispatch.running or not self._skips_checks or self.policy.has_delay:
            return False
        if not 0 < rows <= self._max_rows or not self._can_run_inline(rows):
            return False
        if not self.admission.has_room(requests.nbytes, count) or not requests.is_plain():
            return False
        try:
            stacked = requests.stack()
        except MemoryError:
            return False  # in the queue, smaller batches may still succeed
        ran = run(self.model, [stacked], [rows])
        outputs = ran.outcomes[0]
        if isinstance(outputs, Exception) or any(array.shape[:1] != (rows,) for array in outputs.values()):
            return False  # queued again: when run alone, only the requests at fault fail
        self.stats.released["idle"] += 1
        self._record(ran, requests.since)
        requests.answer(outputs)
        self.admission.drain.add(count, ran.scattered)
        self._note_inline_run(count)
        return True

    def _note_inline_run(self, requests: int) -> None:
        """Note that a batch of this number of requests ran on the event loop's thread."""
        self._single_batches = self._single_batches + 1 if requests == 1 else 0
        if self._single_batches >= SINGLE_BATCHES and self._is_new_iteration:
            self._is_new_iteration = False
            self._loop.call_soon(self._on_iteration)

    def _on_iteration(self) -> None:
        self._is_new_iteration = True

    def _interrupt_abandoned(self) -> None:
        """Interrupt executions that may never end when every request of their batch is cancelled or timed out."""
        self._watches_runs = bool(self._dispatch.running)
        if not self._watches_runs or self._interruptible is None:
            return
        self._loop.call_later(_WATCH_INTERVAL, self._interrupt_abandoned)
        # Runs are read before batches: if a thread starts another batch in between, its run number here is outdated,
        # and interrupting an ended run does nothing.
        runs, batches, past = self._interruptible.runs(), self._dispatch.running_batches, monotonic() - _INTERRUPT_DELAY
        for thread, batch in batches:
            if thread in runs and all(_is_abandoned(entry, past) for entry in batch):
                self._interruptible.interrupt(runs[thread])

    def _starts_delay(self) -> bool:
        """Whether the waiting requests are delayed for further ones; if so, starts the timer that ends the delay."""
        seconds = self._former.remaining_delay(monotonic())
        if seconds > 0:
            self._hold_until(self._loop.time() + seconds)
        return seconds > 0

    def _hold_until(self, when: float | None) -> None:
        if self._delay_timer is not None:
            self._delay_timer.cancel()
        self._delay_timer = self._loop.call_at(when, self._delay_passed) if when is not None else None

    def _delay_passed(self) -> None:
        self._delay_timer = None
        self._schedule()

    def _is_next_full(self) -> bool:
        return not self._dispatch.staged and len(self.queue) >= self._max_rows

    def _schedule(self) -> None:
        if len(self.queue) and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._next)

    def _on_worker_free(self) -> None:
        """Run what waits, as a worker has become free."""
        if len(self.queue):
            self._next()

    def _can_run_inline(self, rows: int) -> bool:
        """Whether a batch of `rows` runs on the event loop's thread: it is expected to be short, no worker is busy (its
        run could hold the compute thread pool), and no model has a promised share of the workers' time."""
        pool = self._pool
        if not self._inline_budget or pool.busy or pool.shared or not self._inline_cost.is_trusted:
            return False
        return self._inline_cost.predict(rows) <= self._inline_budget

    # answers

    def _on_finished(self, finished: FinishedBatch) -> None:
        """Answer a batch that has ended; before that, stage the next batch so that the worker need not wait."""
        if self._dispatch.running and self._is_next_full():
            self._next()
        if finished.late:
            self._refuse(finished.late, timeout_passed)
        if finished.ran is not None:
            self._answer(finished.entries, finished.ran)
        self._release(finished.batch)

    def _answer(self, batch: list[Entry], ran: BatchResult) -> None:
        work = None if self._counts_rows else sum([entry.work for entry in batch])
        self._record(ran, [entry.since for entry in batch], work, not batch[0].group.optional)
        for entry, outcome in zip(batch, ran.outcomes, strict=True):
            entry.ran = ran
            if isinstance(outcome, Exception):
                self._log_failure(entry, outcome)
            try:
                entry.finish(outcome)
            except Exception:
                log.exception("an answer could not be delivered")
        self.admission.drain.add(len(batch), ran.scattered)

    def _record(self, ran: BatchResult, since: list[float], work: int | None = None, is_usual: bool = True) -> None:
        """Count a batch whose requests were queued at these times (`since`, monotonic seconds).

        The cost models learn only from usual batches: others may contain a compilation.
        """
        stats = self.stats
        failed = 0
        for outcome in ran.outcomes:
            if isinstance(outcome, Exception):
                failed += 1
                stats.failures[_code(outcome)] += 1
        stats.last_inference_ms = int(time() * 1000)
        stats.ran(ran, [ran.started - came for came in since], failed)
        work = ran.rows if work is None else work
        stats.work += work
        if not failed and is_usual:
            seconds = monotonic() - ran.started  # until now: callers also wait for a busy event loop
            self.cost.add(ran.rows, seconds, work)
            if self._inline_budget:
                self._inline_cost.add(ran.rows, min(seconds, ran.busy) if self._is_host_only else seconds)

    def _log_failure(self, entry: Entry, error: Exception) -> None:
        ref = self.stats.ref
        fields = log_fields(**ref.fields, request_id=entry.id, trace_id=entry.trace, code=_code(error))
        log.warning("%s: %s", ref, error, exc_info=error.__cause__, extra=fields)

    def _release(self, entries: list[Entry]) -> None:
        self.admission.leave(sum([entry.nbytes for entry in entries]), len(entries))
        if self._drained is not None and not self.admission.items:
            self._drained.set()
            self._drained = None


def _code(error: Exception) -> str:
    return error.code if isinstance(error, ServerError) else "internal"


def _is_abandoned(entry: Entry, past: float) -> bool:
    return entry.state is DONE or (entry.deadline is not None and entry.deadline < past)


def _has_known_shapes(model: LoadedModel) -> bool:
    """Whether the number of rows is the only dynamic extent; otherwise a new shape may need a compilation."""
    return all(-1 not in spec.shape[1 if model.batchable else 0 :] for spec in model.inputs)
