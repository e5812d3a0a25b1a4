"""One version's queue and what leaves it: no waiting while idle, the largest fitting batch under load.

Everything here runs on the event loop; only the execution itself may happen on a worker thread. Unless the policy says
otherwise one batch of a version runs at a time, so what arrives meanwhile forms the next one. Once that one is full it
cannot grow any more: it is staged beside the running one, so that the worker goes on without waiting for a busy loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic, time
from typing import NamedTuple

from server.backends.base import LoadedModel
from server.batching.admission import Admission
from server.batching.cost import CostModel
from server.batching.delay import ControlledDelay
from server.batching.entry import Entry, State
from server.batching.execution import Execute, Ran, run
from server.batching.policy import BatchPolicy
from server.batching.queue import Queue
from server.batching.split import split
from server.errors import DeadlineExceeded, Overloaded, ServerError, Shed
from server.scheduling.pool import WorkerPool
from server.telemetry.statistics import Statistics

WAKING = 0.002  # seconds by which a timer may be late
HEADROOM = 1.2  # on expected times: who would be answered only just in time is better told so at once

log = logging.getLogger("lathe.batching")


class Finished(NamedTuple):
    """A batch as it was formed, the entries of it that were run, and what came of them."""

    batch: list[Entry]
    entries: list[Entry]
    ran: Ran | None  # None: all callers had left


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
        self.stats = stats
        self.queue = Queue()
        self._execute = execute
        self._pool = pool
        self._inline_budget = inline_budget if _has_known_shapes(model) else 0.0  # seconds
        self._loop = asyncio.get_running_loop()
        self.policy = BatchPolicy()
        self._max_rows = model.max_batch if model.batchable else 1
        self._delay: ControlledDelay | None = None
        self._delayed: asyncio.TimerHandle | None = None  # requests are held back until then
        self._running = 0  # workers that have this batcher's job, at most the policy's instances
        self._staged: deque[list[Entry]] = deque()  # batches a worker has yet to take, at most one
        self._woken = False
        self._drained: asyncio.Event | None = None
        self._rows = 0  # waiting or running

    def configure(self, policy: BatchPolicy) -> None:
        """Batch as this says from now on."""
        self.policy = policy
        most = self.model.max_batch if self.model.batchable else 1
        self._max_rows = min(policy.max_rows or most, most)
        self.queue.starvation = policy.starvation if policy.priority_levels else math.inf
        self._control_delay(policy)
        self._hold_until(None)
        self._wake()

    def _control_delay(self, policy: BatchPolicy) -> None:
        target, interval, before = policy.delay_target, policy.delay_interval, self._delay
        if target is None:
            self._delay = None
        elif before is None or (before.target, before.interval) != (target, interval):
            self._delay = ControlledDelay(target, interval)
            self._delay.empty(monotonic())

    # requests come in, and may leave early

    def submit(self, entry: Entry) -> None:
        """Queue a request; raises Overloaded or DeadlineExceeded at the door, before any work is spent on it."""
        if entry.group.rows > self._max_rows:
            self._submit_parts(entry)
            return
        now = monotonic()
        entry.priority = self.policy.level(entry.priority)
        try:
            if self.policy.latency_target is not None:
                self._check_target(entry, self.policy.latency_target, now)
            if entry.deadline is not None:
                self._check_deadline(entry, entry.deadline, now)
            self.admission.enter(entry.nbytes, now)
        except ServerError as error:
            self.stats.refused(error.code)
            raise
        if self._delay is not None and not len(self.queue):
            self._delay.empty(now)
        entry.since = now
        self._rows += entry.rows
        self.queue.push(entry)
        if not self._woken and (self._is_idle or self._is_next_full()):
            self._woken = True
            self._loop.call_soon(self._next)

    def cancel(self, entry: Entry) -> None:
        """The caller left: a waiting request costs nothing more, a running one is not answered."""
        if entry.parts:
            for part in entry.parts:
                self.cancel(part)
        if entry.state is State.DONE:
            return
        waiting = entry.state is State.WAITING and not entry.parts
        self.stats.cancelled += 1
        entry.abandon()
        if waiting:
            self._withdraw(entry)

    async def drained(self) -> None:
        """Return once nothing is queued or running."""
        if self.admission.items:
            self._drained = self._drained or asyncio.Event()
            await self._drained.wait()

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

    def _check_deadline(self, entry: Entry, deadline: float, now: float) -> None:
        if now + self.expected(entry.rows) > deadline:
            raise DeadlineExceeded(
                "the request's timeout is shorter than its wait and execution are expected to take",
                retry_after=self.admission.retry_after(now),
            )
        entry.timer = self._loop.call_later(max(0.0, deadline - now), self._expire, entry)

    def _check_target(self, entry: Entry, target: float, now: float) -> None:
        """Keep out whom the target cannot be kept for: behind a longer queue everybody would be late."""
        expected = self.expected(entry.rows)
        if self._rows and expected > target:
            raise Overloaded(
                f"the request would be answered after {expected * 1e3:.0f} ms, the model's latency target is "
                f"{target * 1e3:.0f} ms",
                retry_after=self.admission.retry_after(now),
            )

    def expected(self, rows: int) -> float:
        """Return the seconds until ``rows`` more have been answered, behind all that is here, in full batches."""
        batches, rest = divmod(self._rows + rows, self._max_rows)
        batches //= self.policy.instances
        return HEADROOM * (batches * self.cost.predict(self._max_rows) + (self.cost.predict(rest) if rest else 0.0))

    def _expire(self, entry: Entry) -> None:
        if entry.state is State.WAITING:  # a running one is answered, late or not
            self._refuse(entry, _too_late())
            self._withdraw(entry)

    def _withdraw(self, entry: Entry) -> None:
        self.queue.forget()
        self._leave([entry])

    def _refuse(self, entry: Entry, error: ServerError) -> None:
        self.stats.refused(error.code)
        entry.finish(error)

    # batches go out

    def _next(self) -> None:
        """Run the next batch, here if it is expected to be short, else on a worker; or stage it there."""
        self._woken = False
        if not self._is_idle and not self._is_next_full():
            return
        if self.policy.waits and self._is_idle and self._holds_back():
            return
        batch = self._form()
        if not batch:
            return
        if not self._running and self._runs_here(batch):
            self._back(self._run(batch))
            self._wake()
            return
        for entry in batch:
            entry.state = State.STAGED
        self._staged.append(batch)
        if self._is_idle:
            self._hand_out()
            self._wake()  # there may be another instance

    @property
    def _is_idle(self) -> bool:
        """Whether one more batch may run now."""
        return self._running < self.policy.instances

    def _hand_out(self) -> None:
        self._running += 1
        self._pool.submit(self._work, self._back, self._ended)

    def _holds_back(self) -> bool:
        """Whether what waits shall wait for more; if so, until when is seen to."""
        now = monotonic()
        waiting = self.queue.next(now)
        if not waiting or self.policy.is_enough(sum(entry.rows for entry in waiting), self._max_rows):
            return False
        left = min(self._latest_start(entry) for entry in waiting) - now
        if left <= 0:
            return False
        self._hold_until(self._loop.time() + left)
        return True

    def _latest_start(self, entry: Entry) -> float:
        """When a request that waits for others is to run all the same (monotonic seconds)."""
        ends = [entry.deadline] if entry.deadline is not None else []
        if self.policy.latency_target is not None:
            ends.append(entry.since + self.policy.latency_target)
        needed = 2 * HEADROOM * self.cost.predict(entry.rows) + WAKING
        return min([entry.since + self.policy.max_delay, *(end - needed for end in ends)])

    def _hold_until(self, when: float | None) -> None:
        if self._delayed is not None:
            self._delayed.cancel()
        self._delayed = self._loop.call_at(when, self._delay_passed) if when is not None else None

    def _delay_passed(self) -> None:
        self._delayed = None
        self._wake()

    def _is_next_full(self) -> bool:
        return not self._staged and len(self.queue) >= self._max_rows

    def _wake(self) -> None:
        if len(self.queue) and not self._woken:
            self._woken = True
            self._loop.call_soon(self._next)

    def _work(self) -> Iterator[Finished]:
        """On a worker: run what is staged. A busy model goes back to the end of the line while others wait in it."""
        while batch := self._take_staged():
            yield self._run(batch)
            if self._pool.wanted:
                return

    def _take_staged(self) -> list[Entry] | None:
        try:
            return self._staged.popleft()
        except IndexError:  # looking first would not do: the workers of several instances may look at once
            return None

    def _run(self, batch: list[Entry]) -> Finished:
        """Run a batch without those whose callers have left by now; from here on leaving makes no difference."""
        tensors = [entry.inputs for entry in batch]  # taken before looking: who leaves is first marked, then emptied
        present = [index for index, entry in enumerate(batch) if entry.state is not State.DONE]
        entries = [batch[index] for index in present]
        for entry in entries:
            entry.start()
        if not entries:
            return Finished(batch, entries, None)
        return Finished(
            batch,
            entries,
            self._execute(self.model, [tensors[index] for index in present], [entry.rows for entry in entries]),
        )

    def _back(self, finished: Finished) -> None:
        """A batch is done: let the next one be staged first, then answer this one."""
        if self._running and self._is_next_full():
            self._next()
        if finished.ran is not None:
            self._answer(finished.entries, finished.ran)
        self._leave(finished.batch)

    def _ended(self) -> None:
        """The worker found nothing staged any more."""
        self._running -= 1
        if self._staged:  # staged since it looked
            self._hand_out()
        elif len(self.queue):
            self._next()

    def _form(self) -> list[Entry]:
        """Take the next batch, small enough for the nearest deadline in it, and for the latency target."""
        while batch := self.queue.take(self._limit(), monotonic()):
            if self._delay is not None and self._shed(self._delay, batch):
                continue
            deadlines = [entry.deadline for entry in batch if entry.deadline is not None]
            if not deadlines:
                return self._fit_target(batch)
            rows = self.cost.rows_within((min(deadlines) - monotonic()) / HEADROOM, self._max_rows)
            batch = self._cut(batch, rows)
            if batch:
                return batch
        return []

    def _limit(self) -> int:
        """The most rows the next batch may have."""
        if not self.policy.preferred:
            return self._max_rows
        waiting = sum(entry.rows for entry in self.queue.next(monotonic()))
        return self.policy.most(waiting, self._max_rows)

    def _fit_target(self, batch: list[Entry]) -> list[Entry]:
        """Make a batch smaller if its oldest request then meets the latency target; if it cannot, size is no help."""
        target = self.policy.latency_target
        if target is not None:
            left = min(entry.since for entry in batch) + target - monotonic()
            rows = self.cost.rows_within(left / HEADROOM, self._max_rows) or self._max_rows
            if sum(entry.rows for entry in batch) > rows:
                return self._keep(batch, rows, "target")
        self._note_release(batch)
        return batch

    def _cut(self, batch: list[Entry], rows: int) -> list[Entry]:
        """Keep what fits into ``rows``; the rest waits on. A deadline that cannot be met at all is refused now."""
        if sum(entry.rows for entry in batch) <= rows:
            self._note_release(batch)
            return batch
        late = [entry for entry in batch if self._is_late(entry)]
        if late:
            self._drop(batch, late, _too_late)
            return []  # the rest may have more time
        return self._keep(batch, rows, "deadline")

    def _shed(self, delay: ControlledDelay, batch: list[Entry]) -> bool:
        """Drop who has waited too long in a standing queue; say whether there was anybody."""
        now = monotonic()
        latest = delay.latest(now, HEADROOM * self.cost.predict(self._max_rows))
        stale = [entry for entry in batch if entry.since < latest]
        if stale:
            after = self.admission.retry_after(now)
            self._drop(batch, stale, lambda: Shed("waited too long in a queue that stays full", retry_after=after))
        return bool(stale)

    def _drop(self, batch: list[Entry], some: list[Entry], reason: Callable[[], ServerError]) -> None:
        """Refuse some of what was just taken; the rest waits on."""
        gone = set(map(id, some))
        self.queue.put_back([entry for entry in batch if id(entry) not in gone])
        for entry in some:
            self._refuse(entry, reason())
        self._leave(some)

    def _keep(self, batch: list[Entry], rows: int, reason: str) -> list[Entry]:
        """Return what fits into ``rows``, at least one; the rest waits on."""
        kept = 1
        while kept < len(batch) and sum(entry.rows for entry in batch[: kept + 1]) <= rows:
            kept += 1
        self.queue.put_back(batch[kept:])
        self.stats.released[reason] += 1
        return batch[:kept]

    def _is_late(self, entry: Entry) -> bool:
        return entry.deadline is not None and monotonic() + HEADROOM * self.cost.predict(entry.rows) > entry.deadline

    def _note_release(self, batch: list[Entry]) -> None:
        if len(self.queue) == 0:
            reason = "idle"
        elif sum(entry.rows for entry in batch) >= self._max_rows:
            reason = "full"
        elif sum(entry.rows for entry in batch) in self.policy.preferred:
            reason = "preferred"
        else:
            reason = "incompatible"
        self.stats.released[reason] += 1

    def _runs_here(self, batch: list[Entry]) -> bool:
        """Short work is done at once on this thread, unless a worker's run could make it wait for the compute team."""
        if not self._inline_budget or self._pool.busy or not self.cost.trusted:
            return False
        return self.cost.predict(sum([entry.rows for entry in batch])) <= self._inline_budget

    # outcomes go back

    def _answer(self, batch: list[Entry], ran: Ran) -> None:
        self._record(batch, ran)
        for entry, outcome in zip(batch, ran.outcomes, strict=True):
            entry.ran = ran
            try:
                entry.finish(outcome)
            except Exception:
                log.exception("an answer could not be delivered")
        self.admission.drain.add(len(batch), ran.scattered)

    def _record(self, batch: list[Entry], ran: Ran) -> None:
        stats = self.stats
        failed = 0
        for outcome in ran.outcomes:
            if isinstance(outcome, Exception):
                failed += 1
                stats.failures[outcome.code if isinstance(outcome, ServerError) else "internal"] += 1
                log.warning("%s: %s", stats.ref, outcome, exc_info=outcome.__cause__)
        stats.last_inference_ms = int(time() * 1000)
        stats.ran(ran, [ran.started - entry.since for entry in batch], failed)
        if not failed:
            self.cost.add(ran.rows, ran.scattered - ran.started)

    def _leave(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._rows -= entry.rows
            self.admission.leave(entry.nbytes)
        if self._drained is not None and not self.admission.items:
            self._drained.set()
            self._drained = None


def _too_late() -> DeadlineExceeded:
    return DeadlineExceeded("the request's timeout passed while it waited")


def _has_known_shapes(model: LoadedModel) -> bool:
    """Whether every execution looks the same but for its rows; a shape seen first may have to be compiled."""
    return all(-1 not in spec.shape[1 if model.batchable else 0 :] for spec in model.inputs)
