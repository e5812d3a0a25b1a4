"""Models get their compute share of the workers' time while other models want it, and all of it otherwise."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import pytest

from lathe.server.batching.policy import BatchPolicy
from lathe.server.scheduling.pool import WorkerPool
from lathe.server.scheduling.tenants import MAX_CHARGE, Tenant, Tenants
from lathe.server.serving.servable import Servable, ServableFactory
from lathe.server.settings import Settings
from lathe.server.telemetry.statistics import StatsBook
from lathe.server.types import ModelRef
from tests.server.batching.test_fairness import slow, submit


@dataclass(order=True)
class Batch:
    """A running batch in the simulation, ordered by its end."""

    ends: float
    order: int
    tenant: Tenant = field(compare=False)
    seconds: float = field(compare=False)


class Simulation:
    """Workers on a simulated clock; each model always has a next batch, from `since` until `until`."""

    def __init__(self, workers: int) -> None:
        self.tenants = Tenants(workers)
        self.workers = workers
        self.now = 0.0
        self.used: Counter[str] = Counter()  # seconds of worker time, by model
        self._models: dict[Tenant, tuple[Callable[[float], bool], float]] = {}
        self._running: list[Batch] = []
        self._taken: list[Tenant] = []  # models whose job was handed out and waits for a worker
        self._order = count()

    def add(self, name: str, share: float | None, batch: float, wants: Callable[[float], bool] | None = None) -> None:
        """Add a model with batches of this duration in seconds; `wants` says at which times it has one."""
        self._models[Tenant(name, share)] = (wants or (lambda now: True), batch)

    def run(self, until: float) -> Counter[str]:
        """Run until this time; return the seconds that each model used since the last call."""
        self.used.clear()
        while self.now < until:
            self._offer()
            if self._running:
                self._end(heapq.heappop(self._running))
            else:
                self.now += 0.001
        return self.used

    def _offer(self) -> None:
        for tenant, (wants, _) in self._models.items():
            if not tenant.wants and wants(self.now):
                self.tenants.enter(tenant, tenant)
        while (tenant := self.tenants.next()) is not None:
            self._taken.append(tenant)
        while self._taken and len(self._running) < self.workers:
            tenant = self._taken.pop(0)
            seconds = self._models[tenant][1]
            heapq.heappush(self._running, Batch(self.now + seconds, next(self._order), tenant, seconds))

    def _end(self, batch: Batch) -> None:
        self.now = batch.ends
        self.used[batch.tenant.name] += batch.seconds
        self.tenants.charge(batch.tenant, batch.seconds)
        self.tenants.leave(batch.tenant)


def shares(used: Counter[str]) -> dict[str, float]:
    return {name: seconds / used.total() for name, seconds in used.items()}


@pytest.mark.sample(3)
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("batches", [(0.02, 0.02), (0.05, 0.004), (0.004, 0.05)])
def test_two_models_divide_the_time_by_their_shares(workers: int, batches: tuple[float, float]) -> None:
    """Whatever the duration of their batches, and although each could have its own worker."""
    world = Simulation(workers)
    world.add("small", 0.2, batches[0])
    world.add("large", None, batches[1])
    assert shares(world.run(60)) == pytest.approx({"small": 0.2, "large": 0.8}, abs=0.01)


def test_a_model_alone_uses_all_of_the_time() -> None:
    """When the other model is back, this one gets only its share again, and owes nothing for the time before."""
    world = Simulation(2)
    world.add("small", 0.1, 0.02)
    world.add("other", None, 0.02, lambda now: 20 <= now < 40)
    assert world.run(20) == {"small": pytest.approx(20, abs=0.1)}
    assert shares(world.run(22)) == pytest.approx({"small": 0.1, "other": 0.9}, abs=0.05)  # from the first second on
    assert shares(world.run(40)) == pytest.approx({"small": 0.1, "other": 0.9}, abs=0.01)
    used = world.run(60)
    assert used["small"] == pytest.approx(20, abs=0.1)


def test_an_idle_model_saves_up_no_time() -> None:
    world = Simulation(1)
    world.add("a", 0.5, 0.01)
    world.add("b", 0.5, 0.01, lambda now: now >= 30)
    world.run(30)
    assert shares(world.run(31)) == pytest.approx({"a": 0.5, "b": 0.5}, abs=0.05)


def test_the_remaining_time_is_divided_equally() -> None:
    world = Simulation(1)
    world.add("a", 0.5, 0.01)
    world.add("b", 0.3, 0.03)
    world.add("c", None, 0.02)
    world.add("d", None, 0.005)
    assert shares(world.run(100)) == pytest.approx({"a": 0.5, "b": 0.3, "c": 0.1, "d": 0.1}, abs=0.01)


def test_shares_of_more_than_all_are_scaled_down() -> None:
    """Shares are then fractions of their sum, and no model starves."""
    world = Simulation(1)
    world.add("a", 1.0, 0.01)
    world.add("b", 1.0, 0.02)
    world.add("c", None, 0.01)
    found = shares(world.run(200))
    assert found == pytest.approx({"a": 0.4975, "b": 0.4975, "c": 0.005}, abs=0.005)
    assert found["c"] > 0


def test_without_shares_no_model_is_held_back() -> None:
    """Each gets a worker, whatever the duration of its batches."""
    world = Simulation(2)
    world.add("a", None, 0.05)
    world.add("b", None, 0.01)
    assert shares(world.run(60)) == pytest.approx({"a": 0.5, "b": 0.5}, abs=0.01)


def test_no_worker_is_idle_while_a_model_below_its_share_waits() -> None:
    """Some waiting model may always run: the workers are never all idle."""
    world = Simulation(2)
    world.add("a", 0.05, 0.2)
    world.add("b", 0.05, 0.001)
    world.add("c", 0.9, 0.01)
    used = world.run(100)
    assert used.total() >= 100
    assert shares(used) == pytest.approx({"a": 0.05, "b": 0.05, "c": 0.9}, abs=0.02)


def test_a_batch_that_waited_for_its_code_is_not_charged_in_full() -> None:
    tenants, a, b = Tenants(1), Tenant("a", 0.5), Tenant("b", 0.5)
    for tenant in (a, b):
        tenants.enter(tenant, tenant)
    assert tenants.next() is a
    tenants.charge(a, 100.0)
    tenants.leave(a)
    behind = 0
    tenants.enter(a, a)
    while (tenant := tenants.next()) is b:
        tenants.charge(b, 1.0)
        tenants.leave(b)
        tenants.enter(b, b)
        behind += 1
    assert tenant is a and behind == MAX_CHARGE


async def part_of_the_small_one(workers: int, inline_us: int, seconds: float, share: float) -> float:
    """The fraction of executions of the model with that compute share, of two models that both want all the time."""
    pool = WorkerPool(workers)
    factory = ServableFactory(Settings(inline_budget_us=inline_us), pool, StatsBook())
    models = {name: slow(seconds, max_batch=1) for name in ("small", "large")}
    servables = {name: factory.make(ModelRef(name, 1), model) for name, model in models.items()}
    servables["small"].configure(BatchPolicy(compute_share=share))
    enough = asyncio.Event()
    for servable in servables.values():
        for index in range(400):
            last = index == 360 and servable is servables["large"]
            submit(servable, done=(lambda outcome: enough.set()) if last else None)
    await asyncio.wait_for(enough.wait(), 60)
    done = {name: len(model.batches) for name, model in models.items()}
    await finish(servables, pool)
    return done["small"] / sum(done.values())


def test_on_real_threads_a_small_share_leaves_the_rest_to_others() -> None:
    """Two workers, so that each model could have its own; the ratio of executions is that of the shares."""
    assert 0.15 < asyncio.run(part_of_the_small_one(2, 0, 0.004, 0.2)) < 0.25


def test_shares_hold_for_models_that_would_run_on_the_event_loop() -> None:
    """Otherwise they would run on the event loop, where models take turns regardless of their shares."""
    assert 0.2 < asyncio.run(part_of_the_small_one(1, 100_000, 0.002, 0.25)) < 0.3


def test_a_share_ends_with_its_model() -> None:
    async def scenario() -> None:
        pool = WorkerPool(1)
        factory = ServableFactory(Settings(), pool, StatsBook())
        servable, other = (factory.make(ModelRef("a", version), slow(0.001)) for version in (1, 2))
        servable.configure(BatchPolicy(compute_share=0.5))
        assert pool.shared
        servable.configure(BatchPolicy())
        assert not pool.shared
        servable.configure(BatchPolicy(compute_share=0.5))
        await servable.retire()
        assert pool.shared
        await other.retire()
        assert not pool.shared
        await asyncio.to_thread(pool.close)

    asyncio.run(scenario())


async def finish(servables: dict[str, Servable], pool: WorkerPool) -> None:
    for servable in servables.values():
        await servable.batcher.drained()
    await asyncio.to_thread(pool.close)
