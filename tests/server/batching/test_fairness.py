"""Busy models and busy clients leave other models and clients their share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np

from lathe.server.batching.entry import Entry, Outcome
from lathe.server.batching.policy import BatchPolicy
from lathe.server.scheduling.pool import WorkerPool
from lathe.server.serving.servable import Servable, ServableFactory
from lathe.server.settings import Settings
from lathe.server.telemetry.statistics import StatsBook
from lathe.server.types import ModelRef, Tensors, TensorSpec
from tests.server.fakes import FakeModel, doubler
from tests.server.running import rows


def slow(seconds: float, **options: int) -> FakeModel:
    def run(tensors: Tensors) -> Tensors:
        time.sleep(seconds)
        return {"y": tensors["x"] * 2}

    model = doubler(**options)
    model.function = run
    return model


def submit(servable: Servable, client: str = "", count: int = 1, done: Callable[[Outcome], None] | None = None) -> None:
    x = {"x": rows(count)}
    entry = Entry(x, servable.signature.group_of(x), done or (lambda outcome: None))
    entry.client = client
    servable.submit(entry)


def test_two_busy_models_leave_a_worker_to_the_third() -> None:
    """Each has full batches waiting all the time, so neither would ever give up its worker by itself."""

    async def scenario() -> None:
        pool = WorkerPool(2)
        factory = ServableFactory(Settings(inline_budget_us=0), pool, StatsBook())
        busy = [factory.make(ModelRef(name, 1), slow(0.03, max_batch=2)) for name in "ab"]
        third = factory.make(ModelRef("c", 1), doubler())
        for count in (2, 60):  # the 60 arrive while the first are run, so the next batch is always ready in time
            for servable in busy:
                for _ in range(count):
                    submit(servable)
            await asyncio.sleep(0.01)
        answered = asyncio.Event()
        submit(third, done=lambda outcome: answered.set())
        await asyncio.wait_for(answered.wait(), 20)
        assert all(servable.in_flight > 40 for servable in busy)  # both are still busy
        for servable in busy:
            await servable.batcher.drained()
        await asyncio.to_thread(pool.close)

    asyncio.run(scenario())


def test_a_client_with_a_long_queue_does_not_hold_up_another() -> None:
    """A sends 64 requests, then B two: B's are in the next batches, though A came first."""
    order: list[str] = []

    async def scenario() -> None:
        pool = WorkerPool(1)
        model = doubler(max_batch=4)
        servable = ServableFactory(Settings(inline_budget_us=0), pool, StatsBook()).make(ModelRef("m", 1), model)
        model.gate.clear()
        submit(servable, "a")
        await asyncio.to_thread(model.entered.wait, 20)
        for client, count in (("a", 64), ("b", 2)):
            for _ in range(count):
                submit(servable, client, done=lambda outcome, client=client: order.append(client))
        model.gate.set()
        await servable.batcher.drained()
        await asyncio.to_thread(pool.close)

    asyncio.run(scenario())
    assert len(order) == 66
    assert max(place for place, client in enumerate(order) if client == "b") < 12  # one batch was formed before


def test_shares_are_of_rows_not_of_requests() -> None:
    """A's requests have four rows each, B's one: of the first rows answered both have about half."""
    order: list[tuple[str, int]] = []

    async def scenario() -> None:
        pool = WorkerPool(1)
        model = doubler(max_batch=8)
        servable = ServableFactory(Settings(inline_budget_us=0), pool, StatsBook()).make(ModelRef("m", 1), model)
        model.gate.clear()
        submit(servable, "a", 4)
        await asyncio.to_thread(model.entered.wait, 20)
        for _ in range(40):
            submit(servable, "a", 4, done=lambda outcome: order.append(("a", 4)))
        for _ in range(40):
            submit(servable, "b", 1, done=lambda outcome: order.append(("b", 1)))
        model.gate.set()
        await servable.batcher.drained()
        await asyncio.to_thread(pool.close)

    asyncio.run(scenario())
    until_b_is_done = order[: max(place for place, (client, _) in enumerate(order) if client == "b") + 1]
    share = sum(count for client, count in until_b_is_done if client == "a")
    assert 24 <= share <= 64, share  # B had 40


def test_requests_of_one_client_are_served_in_order() -> None:
    answers: list[float] = []

    async def scenario() -> None:
        pool = WorkerPool(1)
        model = doubler(max_batch=4)
        servable = ServableFactory(Settings(inline_budget_us=0), pool, StatsBook()).make(ModelRef("m", 1), model)
        for start in range(50):
            x = {"x": rows(1, start=start)}
            done = lambda outcome: answers.append(float(outcome["y"][0, 0]))  # noqa: E731 - one line, used once
            servable.submit(Entry(x, servable.signature.group_of(x), done))
        await servable.batcher.drained()
        await asyncio.to_thread(pool.close)

    asyncio.run(scenario())
    np.testing.assert_array_equal(answers, np.arange(50) * 2)


def order_of(arrivals: list[tuple[str, int, int]], policy: BatchPolicy | None = None) -> list[str]:
    """The clients in the order of their answers; each arrival is a client, the width of its one row, a priority."""
    order: list[str] = []
    spec = TensorSpec("x", "FP32", (-1, -1))
    model = FakeModel(lambda t: {"y": t["x"]}, [spec], [TensorSpec("y", "FP32", (-1, -1))], max_batch=4)

    async def scenario() -> None:
        pool = WorkerPool(1)
        servable = ServableFactory(Settings(inline_budget_us=0), pool, StatsBook()).make(ModelRef("m", 1), model)
        servable.configure(policy or BatchPolicy())
        model.gate.clear()
        submit(servable, "first")
        await asyncio.to_thread(model.entered.wait, 20)
        for client, width, priority in arrivals:
            x = {"x": rows(1, width)}
            tell = lambda outcome, client=client: order.append(client)  # noqa: E731 - one line, used once
            entry = Entry(x, servable.signature.group_of(x), tell, priority=priority)
            entry.client = client
            servable.submit(entry)
        model.gate.set()
        await servable.batcher.drained()
        await asyncio.to_thread(pool.close)

    asyncio.run(scenario())
    assert sorted(order) == sorted(client for client, _, _ in arrivals)
    return order


def test_requests_of_another_shape_do_not_wait_for_a_long_queue() -> None:
    order = order_of([("a", 4, 0)] * 64 + [("b", 5, 0)] * 2)
    assert max(place for place, client in enumerate(order) if client == "b") < 12  # one batch was formed before


def test_many_shapes_do_not_get_a_client_a_larger_share() -> None:
    """A's requests have sixteen shapes, B's one: for every batch of A's, B gets one of its own."""
    order = order_of([("a", 100 + index % 16, 0) for index in range(64)] + [("b", 116, 0)] * 16)
    last = max(place for place, client in enumerate(order) if client == "b")
    assert order[: last + 1].count("a") <= 28


def test_shares_count_work_where_lengths_vary() -> None:
    """A's rows are four times as long as B's: among the first answers A has about a fourth as many as B."""
    order = order_of([("a", 400, 0)] * 20 + [("b", 100, 0)] * 20)
    last = max(place for place, client in enumerate(order) if client == "b")
    assert 4 <= order[:last].count("a") <= 12


def test_a_client_with_a_starving_queue_does_not_starve_others() -> None:
    """A's queue is so long that it counts as starving; B's urgent requests of another shape still get their share."""
    levels = BatchPolicy(priority_levels=2, default_priority=1, starvation=0.0)
    order = order_of([("a", 4, 2)] * 64 + [("b", 5, 1)] * 2, levels)
    assert max(place for place, client in enumerate(order) if client == "b") < 12
