"""Batches that are formed: run here, or staged for a worker that takes them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic
from typing import NamedTuple

from server.backends.base import LoadedModel, recorded
from server.batching.cost import CostModel
from server.batching.entry import DONE, STAGED, Entry
from server.batching.execution import Execute, Kernels, Ran, run_padded
from server.scheduling.pool import WorkerPool
from server.scheduling.tenants import Tenant
from server.types import Tensors


class Finished(NamedTuple):
    """A batch as it was formed, the entries of it that were run or not, and what came of them."""

    batch: list[Entry]
    entries: list[Entry]
    late: list[Entry]  # whose deadline could not be met any more, so they were not run
    ran: Ran | None  # None: nobody was left to run for


class Dispatch:
    """Runs batches, at most ``instances`` at once. One more may be staged, so that a worker goes on without waiting for
    a busy event loop; ``back`` takes each result on the loop, ``ended`` is called there when a worker has stopped."""

    def __init__(
        self,
        model: LoadedModel,
        cost: CostModel,
        pool: WorkerPool,
        execute: Execute,
        back: Callable[[Finished], None],
        ended: Callable[[], None],
        tenant: Tenant,
    ) -> None:
        self.instances = 1
        self.running = 0  # workers that have this model's job, at most ``instances``
        self.staged: deque[list[Entry]] = deque()  # batches a worker has yet to take, at most one
        self._model = model
        self._cost = cost
        self._pool = pool
        self._execute = execute
        self._back = back
        self._after = ended
        self._tenant = tenant
        # By batch: since when it runs, how much work it is, and on which thread.
        self._begun: dict[int, tuple[float, int, int, list[Entry]]] = {}

    @property
    def is_idle(self) -> bool:
        """Whether one more batch may run now."""
        return self.running < self.instances

    @property
    def under_way(self) -> list[tuple[int, list[Entry]]]:
        """The batches that workers run now, each with its thread."""
        return [(thread, batch) for *_, thread, batch in list(self._begun.values())]

    def remaining(self, now: float) -> float:
        """Return the seconds until the next batch can begin: what runs has to end, and what is staged goes before."""
        bound, begun = self._cost.bound, list(self._begun.values())  # workers may change it meanwhile
        staged = sum(bound(sum(entry.work for entry in batch)) for batch in tuple(self.staged))
        if len(begun) < self.instances:
            return staged
        return staged + max(0.0, min(began + bound(work) - now for began, work, *_ in begun))

    def stage(self, batch: list[Entry]) -> None:
        """Let a worker run a batch: one that is free, else the next to be."""
        for entry in batch:
            entry.state = STAGED
        self.staged.append(batch)
        if self.is_idle:
            self._hand_out()

    def share(self, share: float | None) -> None:
        """Take no more than this share of the workers' time while others want it; see ``scheduling.tenants``."""
        if share != self._tenant.share:
            self._pool.promise(self._tenant, share)

    def close(self) -> None:
        """Nothing is staged any more."""
        self._pool.let_go(self._tenant)

    def _hand_out(self) -> None:
        self.running += 1
        self._pool.submit(self._work, self._back, self._ended, self._tenant)

    def _ended(self) -> None:
        """The worker found nothing staged any more."""
        self.running -= 1
        if self.staged:  # staged since it looked
            self._hand_out()
        else:
            self._after()

    def _work(self) -> Iterator[Finished]:
        """On a worker: run what is staged. A busy model goes back to the end of the line while others wait in it."""
        while batch := self._take_staged():
            work = sum([entry.work for entry in batch])
            self._begun[id(batch)] = monotonic(), work, threading.get_ident(), batch
            try:
                finished = self.run(batch)
            finally:
                del self._begun[id(batch)]
            yield finished
            del batch, finished  # nothing of a batch outlives it while this thread waits
            if self._pool.wanted:
                return

    def _take_staged(self) -> list[Entry] | None:
        try:
            return self.staged.popleft()
        except IndexError:  # looking first would not do: the workers of several instances may look at once
            return None

    def run(self, batch: list[Entry]) -> Finished:
        """Run a batch on this thread, for those who are still there; from here on leaving changes nothing."""
        tensors = [entry.inputs for entry in batch]  # taken before looking: who leaves is first marked, then emptied
        late = self._late(batch)
        entries = batch
        if late or [entry for entry in batch if entry.state is DONE]:
            chosen = [index for index, entry in enumerate(batch) if entry.state is not DONE and entry not in late]
            entries, tensors = [batch[index] for index in chosen], [tensors[index] for index in chosen]
        if not entries:
            return Finished(batch, entries, late, None)
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
        return Finished(batch, entries, late, execute(self._model, tensors, [entry.rows for entry in entries]))

    def _execute_recorded(self, model: LoadedModel, inputs: list[Tensors], rows: list[int]) -> Ran:
        kernels = Kernels()
        ran = self._execute(recorded(model, kernels.runs), inputs, rows)
        ran.kernels = kernels
        return ran

    def _late(self, batch: list[Entry]) -> list[Entry]:
        """Whom an answer will not reach in time, as what ran before took longer than it should have."""
        deadlines = [entry.deadline for entry in batch if entry.deadline is not None]
        if not deadlines:
            return []
        end = monotonic() + self._cost.bound(sum(entry.work for entry in batch))
        return [entry for entry in batch if entry.deadline is not None and entry.deadline < end]
