"""Requests with a deadline: refused before work, left out of a batch, or a reason for a smaller batch."""

from __future__ import annotations

import asyncio
import time

import pytest

from lathe.server.errors import DeadlineExceeded
from tests.server.batching.batcher_bench import Bench, run_scenario
from tests.server.fakes import doubler
from tests.server.running import rows


def test_a_request_whose_deadline_passes_in_the_queue_is_not_run() -> None:
    model = doubler()

    async def scenario(bench: Bench) -> None:
        first = await bench.hold()
        _, late = bench.submit(rows(1), timeout=0.02)
        _, patient = bench.submit(rows(1), timeout=10)
        assert isinstance(await late, DeadlineExceeded)  # while the model is held
        model.gate.set()
        await first
        assert isinstance(await patient, dict)

    bench = run_scenario(scenario, model)
    assert model.batches == [1, 1]
    assert bench.stats.failures == {"deadline_exceeded": 1}


def test_a_deadline_that_cannot_be_met_is_refused_before_work() -> None:
    model = doubler()
    model.function = lambda tensors: (time.sleep(0.02), {"y": tensors["x"]})[1]

    async def scenario(bench: Bench) -> None:
        await bench.y(rows(1))
        with pytest.raises(DeadlineExceeded):
            bench.submit(rows(1), timeout=0.001)

    run_scenario(scenario, model)
    assert len(model.batches) == 1


def test_a_deadline_that_the_queue_makes_impossible_is_refused_at_once() -> None:
    model = doubler(max_batch=2)
    model.function = lambda tensors: (time.sleep(0.02 * len(tensors["x"])), {"y": tensors["x"]})[1]

    async def scenario(bench: Bench) -> None:
        for count in (1, 2, 1, 2):
            await bench.y(rows(count))
        ahead = [await bench.hold(), *(bench.submit(rows(1))[1] for _ in range(9))]  # 10 rows: about 0.2 s
        with pytest.raises(DeadlineExceeded) as refused:
            bench.submit(rows(1), timeout=0.1)
        assert refused.value.retry_after is not None
        patient = bench.submit(rows(1), timeout=5)[1]
        model.gate.set()
        assert all(isinstance(outcome, dict) for outcome in await asyncio.gather(*ahead, patient))
        await bench.submit(rows(1), timeout=0.1)[1]  # the queue is empty again

    run_scenario(scenario, model)


def test_a_request_that_is_too_late_does_not_shrink_the_batch() -> None:
    model = doubler(max_batch=8)
    model.function = lambda tensors: (time.sleep(0.05), {"y": tensors["x"]})[1]

    async def scenario(bench: Bench) -> None:
        for count in (1, 2, 4, 8):
            await bench.y(rows(count))
        first = await bench.hold()
        late = bench.submit(rows(1), timeout=0.4)[1]
        others = [bench.submit(rows(1))[1] for _ in range(4)]
        await asyncio.sleep(0.33)  # the first takes 0.05 s more, so less than one execution is left
        model.gate.set()
        assert isinstance(await late, DeadlineExceeded)
        await asyncio.gather(first, *others)

    run_scenario(scenario, model)
    assert model.batches[-2:] == [1, 4]


def test_a_near_deadline_makes_the_batch_smaller() -> None:
    model = doubler(max_batch=8)
    model.function = lambda tensors: (time.sleep(0.02 * len(tensors["x"])), {"y": tensors["x"]})[1]

    async def scenario(bench: Bench) -> None:
        for count in (1, 4, 2, 6):
            await bench.y(rows(count))
        first = await bench.hold()
        waiting = [bench.submit(rows(1), timeout=0.13 if index == 0 else 60)[1] for index in range(8)]
        model.gate.set()
        await first
        assert all(isinstance(outcome, dict) for outcome in await asyncio.gather(*waiting))

    bench = run_scenario(scenario, model)
    assert bench.stats.released["deadline"] == 1
    assert 1 <= model.batches[5] < 8


def test_requests_made_late_by_a_stall_are_not_run() -> None:
    """They are staged behind an unusually long run: each gets its error, and the others are run."""
    model = doubler(max_batch=2)

    async def scenario(bench: Bench) -> None:
        for index in range(40):
            await bench.y(rows(1 + index % 2))
        first = await bench.hold()
        hurried, patient = bench.submit(rows(1), timeout=0.2)[1], bench.submit(rows(1), timeout=60)[1]
        await asyncio.sleep(0.01)
        assert len(bench.batcher.queue) == 0  # both are staged
        await asyncio.sleep(0.3)
        model.gate.set()
        assert isinstance(await hurried, DeadlineExceeded)
        assert isinstance(await patient, dict)
        await first

    bench = run_scenario(scenario, model)
    assert model.batches[-2:] == [1, 1]
    assert bench.stats.failures == {"deadline_exceeded": 1}


def test_a_deadline_counts_from_the_expected_end_of_the_running_batch() -> None:
    """The batch has been running for long, so a request behind it is accepted although its time is short."""
    model = doubler(max_batch=8)

    async def scenario(bench: Bench) -> None:
        for count in (1, 8, 2, 6):
            bench.batcher.cost.add(count, 0.1 * count)  # 0.12 s per row with headroom
        model.gate.clear()
        first = bench.submit(rows(8))[1]
        assert await asyncio.to_thread(model.entered.wait, 10)
        with pytest.raises(DeadlineExceeded):
            bench.submit(rows(1), timeout=0.7)
        await asyncio.sleep(0.5)
        second = bench.submit(rows(1), timeout=0.7)[1]
        model.gate.set()
        assert isinstance(await first, dict)
        assert isinstance(await second, dict)

    run_scenario(scenario, model)
