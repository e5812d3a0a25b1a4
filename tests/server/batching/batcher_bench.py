"""A batcher with a fake model and worker threads, and `run_scenario`, which runs a test on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from lathe.server.batching.admission import Admission
from lathe.server.batching.batcher import Batcher
from lathe.server.batching.entry import Entry, Outcome
from lathe.server.batching.signature import Signature
from lathe.server.scheduling.pool import WorkerPool
from lathe.server.telemetry.statistics import Statistics
from lathe.server.types import ModelRef
from tests.server.fakes import FakeModel
from tests.server.running import rows


class Bench:
    """A batcher around a fake model, with its worker threads."""

    def __init__(self, model: FakeModel, items: int = 10_000, nbytes: int = 1 << 30, inline: float = 0) -> None:
        self.model = model
        self.pool = WorkerPool(2)
        self.stats = Statistics(ModelRef("m", 1))
        self.batcher = Batcher(model, Admission(items, nbytes), self.pool, self.stats, inline)
        self.signature = Signature(model.inputs, model.outputs, model.batchable)

    @property
    def timers(self) -> list[Any]:
        """The event loop's scheduled timers."""
        return asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined, no-any-return]

    def submit(self, x: np.ndarray, timeout: float | None = None) -> tuple[Entry, asyncio.Future[Outcome]]:
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        deadline = None if timeout is None else time.monotonic() + timeout
        entry = Entry({"x": x}, self.signature.group_of({"x": x}), future.set_result, deadline)
        self.batcher.submit(entry)
        return entry, future

    async def y(self, x: np.ndarray) -> np.ndarray:
        outcome = await self.submit(x)[1]
        assert isinstance(outcome, dict), outcome
        return outcome["y"]

    async def hold(self) -> asyncio.Future[Outcome]:
        """Occupy the model until its gate opens; returns the future of the request that occupies it."""
        self.model.gate.clear()
        self.model.entered.clear()
        future = self.submit(rows(1))[1]
        assert await asyncio.to_thread(self.model.entered.wait, 10)
        return future


Scenario = Callable[[Bench], Awaitable[None]]


def run_scenario(scenario: Scenario, model: FakeModel, patience: float = 20, **options: Any) -> Bench:
    """Run a scenario for at most `patience` seconds; afterwards no request may be left in the batcher."""

    async def run() -> Bench:
        bench = Bench(model, **options)
        try:
            await asyncio.wait_for(scenario(bench), patience)
            model.gate.set()
            await asyncio.wait_for(bench.batcher.drained(), 20)
        finally:
            model.gate.set()
            bench.pool.close()
        await asyncio.sleep(0)
        assert (bench.batcher.admission.items, bench.batcher.admission.nbytes) == (0, 0)
        assert (len(bench.batcher.queue), bench.batcher.queue.rows, bench.batcher.queue.work) == (0, 0, 0)
        return bench

    return asyncio.run(run())
