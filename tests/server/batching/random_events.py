"""Random events on a batcher, step by step and without threads; checks after each of them what must always hold."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import numpy as np

from lathe.server.batching.admission import Admission
from lathe.server.batching.batcher import Batcher
from lathe.server.batching.entry import DirectEntry, Entry, Outcome
from lathe.server.batching.policy import BatchPolicy
from lathe.server.batching.signature import BatchGroup, Signature
from lathe.server.batching.single_batches import SINGLE_BATCHES
from lathe.server.errors import DeadlineExceeded, Internal, Overloaded, ServerError, Shed
from lathe.server.scheduling.tenants import Tenant
from lathe.server.telemetry.statistics import Statistics
from lathe.server.types import ModelRef, Tensors
from tests.server.fakes import FakeModel, doubler, echo
from tests.server.running import rows

POISON = -1.0  # a row that begins with it makes the execution fail
MAX_ITEMS = 24  # bound of the queue
MAX_BATCH = 4  # rows
DELAY = 0.002  # seconds, the longest batching delay
REFUSALS = (DeadlineExceeded, Overloaded, Shed)


class SteppedPool:
    """A worker pool without threads: `step` lets a worker run its next batch, or end."""

    def __init__(self) -> None:
        self.busy = 0
        self.shared = False
        self.wanted = False
        self.jobs: list[tuple[Iterator[Any], Callable[[Any], None], Callable[[], None]]] = []

    def tenant(self, model: str) -> Tenant:
        return Tenant(model)

    def let_go(self, tenant: Tenant) -> None:
        pass

    def promise(self, tenant: Tenant, share: float | None) -> None:
        tenant.share = share

    def submit(
        self,
        job: Callable[[], Iterator[Any]],
        result: Callable[[Any], None],
        ended: Callable[[], None],
        tenant: Tenant | None = None,
    ) -> None:
        self.busy += 1
        self.jobs.append((job(), result, ended))

    def step(self, place: int) -> None:
        """Run the next batch of a job; its result, or the end of the job, is called by the event loop's next turn."""
        loop, (batches, result, ended) = asyncio.get_running_loop(), self.jobs[place]
        for finished in batches:
            loop.call_soon(result, finished)
            return
        del self.jobs[place]
        loop.call_soon(self._end, ended)

    def _end(self, ended: Callable[[], None]) -> None:
        self.busy -= 1
        ended()


@dataclass(eq=False)
class Request:
    """A request that was submitted, and what has become of it."""

    x: np.ndarray
    entry: Entry | None = None  # None: in a coalesced batch
    outcomes: list[Outcome] = field(default_factory=list)
    has_left: bool = False


class Coalesced:
    """Requests that arrive together: a `CoalescedBatch` like that of the server's connections."""

    def __init__(self, events: RandomEvents) -> None:
        self.events = events
        self.waiting: list[Request] = []
        self.since: list[float] = []
        self.plain = True

    def join(self, request: Request) -> None:
        self.waiting.append(request)
        self.since.append(monotonic())
        if len(self.waiting) == 1:
            self.events.batcher.submit_coalesced(self)

    def leave(self, request: Request) -> None:
        place = self.waiting.index(request)
        del self.waiting[place], self.since[place]

    @property
    def rows(self) -> int:
        return sum(len(request.x) for request in self.waiting)

    @property
    def nbytes(self) -> int:
        return sum(request.x.nbytes for request in self.waiting)

    def is_plain(self) -> bool:
        return self.plain

    def stack(self) -> Tensors:
        if self.events.random.random() < 0.05:
            raise MemoryError
        return {"x": np.concatenate([request.x for request in self.waiting])}

    def answer(self, outputs: Tensors) -> None:
        self.events.counts["coalesced"] += 1
        at = 0
        for request in self._take():
            self.events.on_outcome(request, {"y": outputs["y"][at : at + len(request.x)]})
            at += len(request.x)

    def queue(self) -> None:
        for request in self._take():
            self.events.queue(request, DirectEntry)

    def _take(self) -> list[Request]:
        waiting, self.waiting, self.since = self.waiting, [], []
        return waiting


class RandomEvents:
    """A batcher and the events that happen to it, chosen by a seed."""

    def __init__(self, seed: int, inline: bool, check_mode: Callable[[Batcher], None] = lambda batcher: None) -> None:
        """`inline`: batches are short enough for the event loop's thread; then all requests have equal inner shapes.

        `check_mode` is called after each event.
        """
        self.random = random.Random(seed)
        self.inline = inline
        self.check_mode = check_mode
        self.model = self._model()
        self.pool = SteppedPool()
        self.signature = Signature(self.model.inputs, self.model.outputs, self.model.batchable)
        self.batcher = Batcher(
            self.model,
            Admission(MAX_ITEMS, 1 << 20),
            self.pool,  # type: ignore[arg-type]
            Statistics(ModelRef("m", 1)),
            1e9 if inline else 0.0,
        )
        self.policy = BatchPolicy()
        self.limit = 1  # batches that may run at once
        self.coalesced = Coalesced(self)
        self.requests: list[Request] = []
        self.drains: list[asyncio.Task[None]] = []
        self.counts: Counter[str] = Counter()
        self.load = 1.0  # factor on the number of requests; below 1 the batcher is often idle
        self.depth = 0  # events inside of events
        self.is_resting = False

    def _model(self) -> FakeModel:
        def double(tensors: Tensors) -> Tensors:
            if (tensors["x"][:, 0] == POISON).any():
                raise ValueError("poison")
            return {"y": tensors["x"] * 2}

        model = doubler(max_batch=MAX_BATCH) if self.inline else echo("FP32", max_batch=MAX_BATCH)
        model.function = double
        return model

    # events

    async def run(self, count: int) -> None:
        """Let this number of events happen, then let all requests come to an end."""
        for number in range(count):
            if number % 50 == 0:
                self.load = self.random.choice([0.1, 0.4, 1.0])
            self.happen()
            self.check()
            pause = self.random.random()
            if pause < 0.004:
                await asyncio.sleep(DELAY)
            elif pause < 0.006:
                await self.come_one_by_one()
            elif pause < 0.02:
                await self.rest()
            elif pause < 0.6:
                await asyncio.sleep(0)
        await self.end()

    def happen(self) -> None:
        """One random event."""
        events: list[tuple[Callable[[], None], float]] = [
            (self.submit, 8 * self.load),
            (self.join, 4 * self.load),
            (self.burst, 0.3 * self.load),
            (self.step, 7),
            (self.cancel, 2),
            (self.drain, 0.3),
            (self.configure, 0.3),
            (self.occupy, 0.3),
        ]
        choices, weights = zip(*events, strict=True)
        self.random.choices(choices, weights)[0]()

    def submit(self) -> None:
        """Submit a request: of one batch's rows or more, one of two shapes, sometimes alone or with a timeout."""
        self.queue(Request(self._rows()), self.random.choice([Entry, DirectEntry, DirectEntry]))

    def burst(self) -> None:
        """Submit more requests than the queue takes."""
        for _ in range(MAX_ITEMS + 2):
            self.queue(Request(rows(1)), Entry)

    async def come_one_by_one(self) -> None:
        """Submit enough requests, each in an iteration of its own, for the next ones to run at once."""
        for _ in range(2 * SINGLE_BATCHES):
            self.queue(Request(rows(1)), DirectEntry)
            await asyncio.sleep(0)
            self.check()

    def join(self) -> None:
        """Add requests to the next coalesced batch."""
        self.coalesced.plain = self.random.random() < 0.9
        for _ in range(self.random.choice([1, 1, 2, 4])):
            request = Request(rows(1, start=POISON if self.random.random() < 0.03 else self.random.randrange(9)))
            self.requests.append(request)
            self.coalesced.join(request)

    def step(self) -> None:
        """Let a worker continue."""
        if self.pool.jobs:
            self.pool.step(self.random.randrange(len(self.pool.jobs)))

    def occupy(self) -> None:
        """Let other models want a worker, or have a share of them, or no longer."""
        self.pool.wanted, self.pool.shared = self.random.random() < 0.5, self.random.random() < 0.2

    def cancel(self) -> None:
        """A caller leaves: of a request that waits, is staged or runs, or that was answered before."""
        recent = self.requests[-40:]
        if not recent:
            return
        request = self.random.choice(recent)
        if request.entry is not None:
            self.batcher.cancel(request.entry)
        elif request in self.coalesced.waiting:
            self.coalesced.leave(request)
        else:
            return  # about to be queued or answered
        request.has_left = not request.outcomes

    def configure(self) -> None:
        """Change the policy: for one half of the time it is the default."""
        choose = self.random.choice
        policy = BatchPolicy(
            max_rows=choose([None, 1, 2, 3]),
            preferred=choose([(), (), (2,), (3, 4)]),
            max_delay=choose([0.0, 0.0, DELAY / 4, DELAY]),
            latency_target=choose([None, None, None, 0.05]),
            priority_levels=choose([0, 0, 3]),
            instances=choose([1, 1, 2, 3]),
            delay_target=choose([None, None, 0.0005]),
            delay_interval=0.001,
        )
        self.policy = BatchPolicy() if self.random.random() < 0.5 else policy
        self.limit = max(self.policy.instances, self.pool.busy)
        self.batcher.configure(self.policy)

    def drain(self) -> None:
        """Begin to wait until nothing is queued or running."""
        self.drains.append(asyncio.ensure_future(self.batcher.drained()))

    def _rows(self) -> np.ndarray:
        start = POISON if self.random.random() < 0.03 else self.random.randrange(9)
        return rows(self.random.choice([1, 1, 1, 2, 3, 9]), 4 if self.inline else self.random.choice([4, 5]), start)

    def queue(self, request: Request, kind: type[Entry]) -> None:
        """Submit a request to the batcher; one that is refused is forgotten."""
        group = self.signature.group_of({"x": request.x})
        if len(request.x) <= MAX_BATCH and self.random.random() < 0.05:
            # runs alone; where shapes are packed, its key is that of other requests
            group = BatchGroup(0, self.random.choice([(), group.key]), group.work, True)
        timeout = self.random.choice([None, None, None, None, 0.0002, 0.002, 10.0])
        deadline = None if timeout is None else monotonic() + timeout
        priority = self.random.randrange(4)
        entry = kind({"x": request.x}, group, lambda outcome: self.on_outcome(request, outcome), deadline, priority)
        entry.client = self.random.choice("aab")
        known, counted = request in self.requests, self.batcher.stats.fail.count
        try:
            self.batcher.submit(entry)
        except REFUSALS as error:
            self.counts["refused"] += 1
            assert self.batcher.stats.fail.count > counted, "a refusal is not in the statistics"
            if known:  # a coalesced one: its caller gets the error
                self.on_outcome(request, error)
            return
        request.entry = entry
        if not known:
            self.requests.append(request)

    def on_outcome(self, request: Request, outcome: Outcome) -> None:
        """Take an outcome; sometimes another event happens before the batcher gets control back."""
        request.outcomes.append(outcome)
        self.counts[type(outcome).__name__] += 1
        if not self.is_resting and self.depth < 3 and self.random.random() < 0.05:
            self.depth += 1
            self.random.choice([self.submit, self.join, self.cancel, self.configure])()
            self.depth -= 1

    # what must hold

    def check(self) -> None:
        """What holds at every time: bounds of the ledger and of the batches that run at once."""
        self.check_mode(self.batcher)
        admission, queue, policy = self.batcher.admission, self.batcher.queue, self.policy
        self.limit = max(policy.instances, min(self.limit, self.pool.busy))
        assert len(self.pool.jobs) <= self.pool.busy <= self.limit
        assert 0 <= len(queue) <= admission.items <= MAX_ITEMS
        assert queue.rows >= len(queue) and admission.nbytes >= 0

    async def rest(self) -> None:
        """Let the event loop run until no callback is due; a request that still waits must have a reason."""
        self.is_resting = True
        for _ in range(2 * MAX_ITEMS):
            await asyncio.sleep(0)
        self.is_resting = False
        if not self.policy.has_delay and self.pool.busy < self.policy.instances:
            assert len(self.batcher.queue) == 0, "requests wait although a worker is free"
        assert not self.coalesced.waiting, "a coalesced batch was forgotten"
        self.counts["rested"] += 1

    async def end(self) -> None:
        """Let the workers run; afterwards every request has its outcome and the batcher is empty."""
        until = monotonic() + 20
        drained = asyncio.ensure_future(self.batcher.drained())
        while not drained.done() or self.pool.busy or self.coalesced.waiting or self.batcher.admission.items:
            assert monotonic() < until, "the batcher does not drain"
            self.step()
            await asyncio.sleep(0 if self.pool.jobs else DELAY / 4)
            self.check()
        await self.rest()
        await asyncio.wait_for(asyncio.gather(*self.drains), 5)
        admission, queue = self.batcher.admission, self.batcher.queue
        assert (admission.items, admission.nbytes) == (0, 0)
        assert (len(queue), queue.rows, queue.work) == (0, 0, 0)
        for request in self.requests:
            self.check_outcome(request)

    def check_outcome(self, request: Request) -> None:
        """A request has exactly one outcome, its own; none if its caller left before."""
        if request.has_left:
            assert not request.outcomes
            return
        (outcome,) = request.outcomes
        if isinstance(outcome, Exception):
            assert isinstance(outcome, ServerError)
            assert isinstance(outcome, (Internal, *REFUSALS))
            assert not isinstance(outcome, Internal) or request.x[0, 0] == POISON
        else:
            assert request.x[0, 0] != POISON
            np.testing.assert_array_equal(outcome["y"], request.x * 2)
