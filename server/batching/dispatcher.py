"""Executes formed batches: on the calling thread, or staged for a worker thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic
from typing import NamedTuple

from lathe.server.backends.base import LoadedModel, as_endless, with_recording
from lathe.server.batching.abandoned_runs import AbandonedRuns
from lathe.server.batching.cost_model import CostModel
from lathe.server.batching.entry import DONE, STAGED, Entry
from lathe.server.batching.execution import BatchResult, Execute, RecordedKernels, run_padded
from lathe.server.scheduling.pool import WorkerPool
from lathe.server.scheduling.tenants import Tenant
from lathe.server.types import Tensors


class FinishedBatch(NamedTuple):
    """A batch that has ended: as it was formed, the entries that ran, those that did not, and the outcomes."""

    batch: list[Entry]  # all entries
    entries: list[Entry]  # entries that ran
    late: list[Entry]  # entries that could no longer meet their deadline and did not run
    ran: BatchResult | None  # the outcomes of `entries`; None: nothing ran


class Dispatcher:
    """Runs batches: on the calling thread (`run`), or staged for workers, of which at most `instances` have jobs.

    A worker takes a staged batch without waiting for a busy event loop. On the event loop, `back` takes each result of
    a worker, and `ended` is called when a worker has become free and nothing is staged.
    """

    def __init__(
        self,
        model: LoadedModel,
        cost: CostModel,
        pool: WorkerPool,
        execute: Execute,
        back: Callable[[FinishedBatch], None],
        ended: Callable[[], None],
        tenant: Tenant,
    ) -> None:
        self.instances = 1
        self.running = 0  # workers with a job of this model, at most `instances`
        self.staged: deque[list[Entry]] = deque()  # batches that wait for a worker
        self.model = model
        self._cost = cost
        self._pool = pool
        self._execute = execute
        self._on_finished = back
        self._on_free = ended
        self._tenant = tenant
        # By the id of a batch: its start (monotonic seconds), its work, its thread and its entries.
        self._running: dict[int, tuple[float, int, int, list[Entry]]] = {}
        endless = as_endless(model)
        self._abandoned = None if endless is None else AbandonedRuns(endless, self)

    @property
    def is_idle(self) -> bool:
        """Whether fewer than `instances` workers have a job of this model."""
        return self.running < self.instances

    @property
    def running_batches(self) -> list[tuple[int, list[Entry]]]:
        """The batches that workers run now, each with the id of its thread."""
        return [(thread, batch) for *_, thread, batch in list(self._running.values())]

    def remaining(self, now: float) -> float:
        """The seconds until another batch can start: until an instance is free, and the staged batches have run."""
        bound, begun = self._cost.bound, list(self._running.values())  # a copy: workers change the dictionary
        staged = sum(bound(sum(entry.work for entry in batch)) for batch in tuple(self.staged))
        if len(begun) < self.instances:
            return staged
        return staged + max(0.0, min(began + bound(work) - now for began, work, *_ in begun))

    def stage(self, batch: list[Entry]) -> None:
        """Queue a batch for a worker: a free one if there is one, otherwise the next that becomes free."""
        for entry in batch:
            entry.state = STAGED
        self.staged.append(batch)
        if self.is_idle:
            self._submit_job()
        if self._abandoned is not None:
            self._abandoned.watch()

    def share(self, share: float | None) -> None:
        """Set the model's share of the workers' time under contention; see `scheduling.tenants`."""
        if share != self._tenant.share:
            self._pool.promise(self._tenant, share)

    def close(self) -> None:
        """Give back the version's place in the worker pool. Nothing may be staged later."""
        self._pool.let_go(self._tenant)

    def _submit_job(self) -> None:
        self.running += 1
        self._pool.submit(self._run_staged, self._on_finished, self._on_job_ended, self._tenant)

    def _on_job_ended(self) -> None:
        """A worker has ended its job."""
        self.running -= 1
        if self.staged:  # staged after the worker's last check
            self._submit_job()
        else:
            self._on_free()

    def _run_staged(self) -> Iterator[FinishedBatch]:
        """The job of a worker: run staged batches. While other jobs want the worker, this one ends after its batch."""
        while batch := self._take_staged():
            work = sum([entry.work for entry in batch])
            self._running[id(batch)] = monotonic(), work, threading.get_ident(), batch
            try:
                finished = self.run(batch)
            finally:
                del self._running[id(batch)]
            yield finished
            del batch, finished  # otherwise the arrays would live on while this thread waits
            if self._pool.wanted:
                return

    def _take_staged(self) -> list[Entry] | None:
        try:
            return self.staged.popleft()
        except IndexError:  # checking first would be a race between the workers of several instances
            return None

    def run(self, batch: list[Entry]) -> FinishedBatch:
        """Run a batch on this thread, without the entries that are cancelled or late.

        An entry that is cancelled after this check runs all the same, and its outcome is dropped.
        """
        # Read before the states: a cancelled entry is first marked as done, and then loses its inputs.
        tensors = [entry.inputs for entry in batch]
        late = self._late(batch)
        entries = batch
        if late or [entry for entry in batch if entry.state is DONE]:
            chosen = [index for index, entry in enumerate(batch) if entry.state is not DONE and entry not in late]
            entries, tensors = [batch[index] for index in chosen], [tensors[index] for index in chosen]
        if not entries:
            return FinishedBatch(batch, entries, late, None)
        traced = padded = False
        for entry in entries:
            entry.start()
            if entry.trace:
                traced = True
            if entry.padded is not None:
                padded = True
        execute = self._execute_recorded if traced else self._execute
        if padded:
            execute = partial(run_padded, execute, [entry.padded for entry in entries])
        return FinishedBatch(batch, entries, late, execute(self.model, tensors, [entry.rows for entry in entries]))

    def _execute_recorded(self, model: LoadedModel, inputs: list[Tensors], rows: list[int]) -> BatchResult:
        kernels = RecordedKernels()
        ran = self._execute(with_recording(model, kernels.runs), inputs, rows)
        ran.kernels = kernels
        return ran

    def _late(self, batch: list[Entry]) -> list[Entry]:
        """The entries whose deadline would pass before the bound on the end of the batch, if it starts now."""
        deadlines = [entry.deadline for entry in batch if entry.deadline is not None]
        if not deadlines:
            return []
        end = monotonic() + self._cost.least_bound(sum(entry.work for entry in batch))
        return [entry for entry in batch if entry.deadline is not None and entry.deadline < end]
