"""One version's queue and what leaves it: no waiting while idle, the largest fitting batch under load.

Everything here runs on the event loop; only the execution itself may happen on a worker thread. Unless the policy says
otherwise one batch of a version runs at a time, so what arrives meanwhile forms the next one. Once that one is full it
cannot grow any more: it is staged beside the running one, so that the worker goes on without waiting for a busy loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from time import monotonic, time

from server.backends.base import LoadedModel, PlacedModel, endless
from server.batching.admission import Admission
from server.batching.backlog import put_out
from server.batching.cost import CostModel
from server.batching.dispatch import Dispatch, Finished
from server.batching.entry import DONE, WAITING, Entry
from server.batching.execution import Execute, Ran, run
from server.batching.forming import Former, Reason, too_late
from server.batching.policy import BatchPolicy
from server.batching.queue import Queue
from server.batching.round import Round
from server.batching.signature import Group
from server.batching.split import split
from server.errors import DeadlineExceeded, Overloaded, ServerError
from server.scheduling.pool import WorkerPool
from server.telemetry.logs import about
from server.telemetry.statistics import Statistics

log = logging.getLogger("lathe.batching")

_LOOK = 0.2  # seconds between two looks at what workers run
_LATE = 1.0  # seconds that a request's deadline has passed when what runs for it is broken off

# A request runs without a look at what else has come, if so many batches before it were of one, and the event loop has
# been round since the last: those of one turn belong together, however long reading each of them takes.
LONELY = 8


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
        # What batches would take here: a worker that waits for the interpreter of a busy event loop, time after time,
        # would else make small models seem large, and so wait on.
        self._cost_here = CostModel()
        self._is_host_only = isinstance(model, PlacedModel) and not model.devices
        self.stats = stats
        self.queue = Queue()
        self.policy = BatchPolicy()
        self._max_rows = model.max_batch if model.batchable else 1
        self._former = Former(self.queue, self.cost, self._max_rows, self._turn_out, stats.released)
        tenant = pool.tenant(stats.ref.name)
        self._dispatch = Dispatch(model, self.cost, pool, execute, self._back, self._resume, tenant)
        self._pool = pool
        self._counts_rows = _has_known_shapes(model)
        self._endless = endless(model)
        self._inline_budget = inline_budget if self._counts_rows and self._endless is None else 0.0  # seconds
        self._overseen = False
        self._loop = asyncio.get_running_loop()
        self._delayed: asyncio.TimerHandle | None = None  # requests are held back until then
        self._woken = False
        self._simple = self.policy.takes_all
        self._lonely = 0  # batches in a row that were run here and had one request
        self._turned = True  # the event loop has been round since
        self._round: Round | None = None
        self._drained: asyncio.Event | None = None

    def configure(self, policy: BatchPolicy) -> None:
        """Batch as this says from now on."""
        self.policy = policy
        self._former.configure(policy)
        self._max_rows = self._former.max_rows
        self._dispatch.instances = policy.instances
        self._dispatch.share(policy.compute_share)
        self._simple = policy.takes_all
        self.queue.starvation = policy.starvation if policy.priority_levels else math.inf
        self._hold_until(None)
        self._wake()

    # requests come in, and may leave early

    def submit(self, entry: Entry) -> None:
        """Queue a request; raises Overloaded or DeadlineExceeded at the door, before any work is spent on it."""
        if entry.group.rows > self._max_rows:
            self._submit_parts(entry)
            return
        entry.since = now = monotonic()
        if not self._simple or entry.deadline is not None or not self.admission.admit(entry.nbytes):
            self._examine(entry, now)
            self.admission.enter(entry.nbytes)
        self.queue.push(entry)
        if not self._woken and (self._dispatch.is_idle or self._is_next_full()):
            if self._lonely >= LONELY and entry.at_once and self._turned:
                self._next()
                return
            self._woken = True
            self._loop.call_soon(self._next)

    def bring(self, requests: Round) -> None:
        """A round begins, which may still grow: run it once the event loop has been round, or queue it."""
        self._round = requests
        if not self._woken:
            if self._lonely >= LONELY and self._turned:
                self._next()
                return
            self._woken = True
            self._loop.call_soon(self._next)

    def _examine(self, entry: Entry, now: float) -> None:
        """See to all that most requests do not need."""
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
        """Put out requests of who has most of the queue, for one of a client who has less; say if there is room."""
        while not self.admission.has_room(nbytes):
            missing, _ = self.admission.missing(nbytes)
            entry = self.queue.surplus(by_bytes=missing <= 0)
            if entry is None:
                return False
            self._refuse([entry], put_out)
            self._withdraw(entry)
        return True

    def turn_away(
        self, group: Group, nbytes: int, deadline: float | None, now: float, client: str
    ) -> ServerError | None:
        """Refuse a request that comes now if it has to be: counts it and returns why; None if it may be queued."""
        refusal = self._refusal(group, nbytes, deadline, now, client)
        if refusal is not None:
            self.stats.refused(refusal.code)
        return refusal

    def _refusal(
        self, group: Group, nbytes: int, deadline: float | None, now: float, client: str
    ) -> ServerError | None:
        full = self.admission.refusal(nbytes, now)
        if full is not None and self.queue.is_entitled(client, nbytes, self.admission):
            full = None
        target = self.policy.latency_target
        if full is not None or (deadline is None and target is None):
            return full
        expected = self.expected(group.rows or 1, group.work)
        if deadline is not None and now + expected > deadline:
            return DeadlineExceeded(
                "the request's timeout is shorter than its wait and execution are expected to take",
                retry_after=self.admission.retry_after(now),
            )
        if target is not None and self.admission.items and expected > target:  # all behind it would be late, too
            return Overloaded(
                f"the request would be answered after {expected * 1e3:.0f} ms, the model's latency target is "
                f"{target * 1e3:.0f} ms",
                retry_after=self.admission.retry_after(now),
            )
        return None

    def expected(self, rows: int, work: float | None = None) -> float:
        """Return the seconds within which ``rows`` more, one or more, would be answered, behind all that is here, in
        full batches of equal shapes. ``work``: theirs, else what so many rows mostly are."""
        cost, queue = self.cost, self.queue
        waiting = queue.rows + rows
        each = (queue.work + (cost.work_of(rows) if work is None else work)) / waiting  # row's work
        batches, rest = divmod(waiting, self._max_rows)
        own = batches // self.policy.instances * cost.bound(self._max_rows * each)
        own += cost.bound(rest * each) if rest else 0.0
        own += max(0, queue.shapes - batches - bool(rest)) * cost.bound(0)  # batches that shapes of their own make more
        return self._dispatch.remaining(monotonic()) + own

    def cancel(self, entry: Entry) -> None:
        """The caller left: a waiting request costs nothing more, a running one is not answered."""
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
        """Return once nothing is queued or running."""
        if self.admission.items:
            self._drained = self._drained or asyncio.Event()
            await self._drained.wait()

    def close(self) -> None:
        """All is drained and nobody submits any more."""
        self._dispatch.close()

    def _submit_parts(self, entry: Entry) -> None:
        try:
            for part in split(entry, self._max_rows, self.cancel):
                self.submit(part)
                entry.parts.append(part)
        except ServerError:
            entry.abandon()
            for part in entry.parts:
                self.cancel(part)
            raise

    def _expire(self, entry: Entry) -> None:
        if entry.state is WAITING:  # a running one is answered, late or not
            self._refuse([entry], too_late)
            self._withdraw(entry)

    def _withdraw(self, entry: Entry) -> None:
        self.queue.forget(entry)
        self._leave([entry])

    def _turn_out(self, entries: list[Entry], reason: Reason) -> None:
        """Refuse some who have waited, and are in the queue no more."""
        self._refuse(entries, reason)
        self._leave(entries)

    def _refuse(self, entries: list[Entry], reason: Reason) -> None:
        after = self.admission.retry_after(monotonic())
        for entry in entries:
            if entry.state is not DONE:
                error = reason(after)
                self.stats.refused(error.code)
                entry.finish(error)

    # batches go out

    def _next(self) -> None:
        """Run the next batch, here if it is expected to be short, else on a worker; or stage it there."""
        if self._round is not None and self._end_round(self._round):
            return
        self._woken = False
        dispatch = self._dispatch
        is_idle = dispatch.is_idle
        if not is_idle and not self._is_next_full():
            return
        if self.policy.waits and is_idle and self._holds_back():
            return
        batch = self._former.form(0.0 if is_idle else dispatch.remaining(monotonic()))
        if not batch:
            return
        is_usual = not batch[0].group.optional  # else it is alone in its batch, and may have to be compiled
        if is_usual and not dispatch.running and self._runs_here(sum([entry.rows for entry in batch])):
            self._back(dispatch.run(batch))
            self._note_size(len(batch))
            self._wake()
            return
        self._lonely = 0
        dispatch.stage(batch)
        if self._endless is not None and not self._overseen:
            self._overseen = True
            self._loop.call_later(_LOOK, self._oversee)
        if is_idle:
            self._wake()  # there may be another instance

    def _end_round(self, requests: Round) -> bool:
        """Run what came together if nothing else is here, and say so; else queue it."""
        self._round = None
        self._woken = True  # whatever is queued meanwhile
        try:
            ran = self._run_round(requests)
            if not ran:
                requests.queue()
        finally:
            self._woken = False
        return ran

    def _run_round(self, requests: Round) -> bool:
        rows, count, dispatch = requests.rows, len(requests.since), self._dispatch
        if len(self.queue) or dispatch.running or not self._simple or self.policy.waits:
            return False
        if not 0 < rows <= self._max_rows or not self._runs_here(rows):
            return False
        if not self.admission.has_room(requests.nbytes, count) or not requests.is_plain():
            return False
        try:
            stacked = requests.stack()
        except MemoryError:
            return False  # for all of them at once
        ran = run(self.model, [stacked], [rows])
        outputs = ran.outcomes[0]
        if isinstance(outputs, Exception) or any(array.shape[:1] != (rows,) for array in outputs.values()):
            return False  # who is at fault shows when each runs alone
        self.stats.released["idle"] += 1
        self._record(ran, requests.since)
        requests.answer(outputs)
        self.admission.drain.add(count, ran.scattered)
        self._note_size(count)
        return True

    def _note_size(self, requests: int) -> None:
        """A batch of so many ran here."""
        self._lonely = self._lonely + 1 if requests == 1 else 0
        if self._lonely >= LONELY and self._turned:
            self._turned = False
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turned = True

    def _oversee(self) -> None:
        """What may run for ever is broken off once nobody waits for any of its batch."""
        self._overseen = bool(self._dispatch.running)
        if not self._overseen or self._endless is None:
            return
        self._loop.call_later(_LOOK, self._oversee)
        # In this order: a thread that has gone on to another batch in between is in another run by then.
        runs, batches, past = self._endless.runs(), self._dispatch.under_way, monotonic() - _LATE
        for thread, batch in batches:
            if thread in runs and all(_is_given_up(entry, past) for entry in batch):
                self._endless.interrupt(runs[thread])

    def _holds_back(self) -> bool:
        """Whether what waits shall wait for more; if so, until when is seen to."""
        seconds = self._former.held_for(monotonic())
        if seconds > 0:
            self._hold_until(self._loop.time() + seconds)
        return seconds > 0

    def _hold_until(self, when: float | None) -> None:
        if self._delayed is not None:
            self._delayed.cancel()
        self._delayed = self._loop.call_at(when, self._delay_passed) if when is not None else None

    def _delay_passed(self) -> None:
        self._delayed = None
        self._wake()

    def _is_next_full(self) -> bool:
        return not self._dispatch.staged and len(self.queue) >= self._max_rows

    def _wake(self) -> None:
        if len(self.queue) and not self._woken:
            self._woken = True
            self._loop.call_soon(self._next)

    def _resume(self) -> None:
        """A worker has stopped."""
        if len(self.queue):
            self._next()

    def _runs_here(self, rows: int) -> bool:
        """Short work is done at once on this thread, unless a worker's run could make it wait for the compute team, or
        it has to be counted."""
        pool = self._pool
        if not self._inline_budget or pool.busy or pool.shared or not self._cost_here.trusted:
            return False
        return self._cost_here.predict(rows) <= self._inline_budget

    # outcomes go back

    def _back(self, finished: Finished) -> None:
        """A batch is done: let the next one be staged first, then answer this one."""
        if self._dispatch.running and self._is_next_full():
            self._next()
        if finished.late:
            self._refuse(finished.late, too_late)
        if finished.ran is not None:
            self._answer(finished.entries, finished.ran)
        self._leave(finished.batch)

    def _answer(self, batch: list[Entry], ran: Ran) -> None:
        work = None if self._counts_rows else sum([entry.work for entry in batch])
        self._record(ran, [entry.since for entry in batch], work, not batch[0].group.optional)
        for entry, outcome in zip(batch, ran.outcomes, strict=True):
            entry.ran = ran
            if isinstance(outcome, Exception):
                self._complain(entry, outcome)
            try:
                entry.finish(outcome)
            except Exception:
                log.exception("an answer could not be delivered")
        self.admission.drain.add(len(batch), ran.scattered)

    def _record(self, ran: Ran, since: list[float], work: int | None = None, is_usual: bool = True) -> None:
        """Count a batch whose requests were queued at these times. What is not usual says nothing of the time that
        others take."""
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
            seconds = monotonic() - ran.started  # until now: a busy loop makes callers wait, too
            self.cost.add(ran.rows, seconds, work)
            if self._inline_budget:
                self._cost_here.add(ran.rows, min(seconds, ran.busy) if self._is_host_only else seconds)

    def _complain(self, entry: Entry, error: Exception) -> None:
        ref = self.stats.ref
        fields = about(**ref.fields, request_id=entry.id, trace_id=entry.trace, code=_code(error))
        log.warning("%s: %s", ref, error, exc_info=error.__cause__, extra=fields)

    def _leave(self, entries: list[Entry]) -> None:
        self.admission.leave(sum([entry.nbytes for entry in entries]), len(entries))
        if self._drained is not None and not self.admission.items:
            self._drained.set()
            self._drained = None


def _code(error: Exception) -> str:
    return error.code if isinstance(error, ServerError) else "internal"


def _is_given_up(entry: Entry, past: float) -> bool:
    return entry.state is DONE or (entry.deadline is not None and entry.deadline < past)


def _has_known_shapes(model: LoadedModel) -> bool:
    """Whether every execution looks the same but for its rows; a shape seen first may have to be compiled."""
    return all(-1 not in spec.shape[1 if model.batchable else 0 :] for spec in model.inputs)
