"""Requests that have a deadline: refused before work, left out of a batch, or a reason to make it smaller."""

from __future__ import annotations

import asyncio
import time

import pytest

from server.errors import DeadlineExceeded
from tests.server.data.bench import Bench, play
from tests.server.data.fakes import doubler
from tests.server.data.running import rows


def test_a_deadline_that_passes_while_waiting() -> None:
    model = doubler()

    async def scene(bench: Bench) -> None:
        first = await bench.hold()
        _, late = bench.submit(rows(1), timeout=0.02)
        _, patient = bench.submit(rows(1), timeout=10)
        assert isinstance(await late, DeadlineExceeded)  # while the model is held
        model.gate.set()
        await first
        assert isinstance(await patient, dict)

    bench = play(scene, model)
    assert model.batches == [1, 1]
    assert bench.stats.failures == {"deadline_exceeded": 1}


def test_a_deadline_that_cannot_be_met_is_refused_before_work() -> None:
    model = doubler()
    model.function = lambda tensors: (time.sleep(0.02), {"y": tensors["x"]})[1]

    async def scene(bench: Bench) -> None:
        await bench.y(rows(1))
        with pytest.raises(DeadlineExceeded):
            bench.submit(rows(1), timeout=0.001)

    play(scene, model)
    assert len(model.batches) == 1


def test_a_deadline_that_the_queue_ahead_makes_impossible_is_refused_at_the_door() -> None:
    model = doubler(max_batch=2)
    model.function = lambda tensors: (time.sleep(0.02 * len(tensors["x"])), {"y": tensors["x"]})[1]

    async def scene(bench: Bench) -> None:
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

    play(scene, model)


def test_one_that_is_too_late_does_not_make_the_others_batch_small() -> None:
    model = doubler(max_batch=8)
    model.function = lambda tensors: (time.sleep(0.05), {"y": tensors["x"]})[1]

    async def scene(bench: Bench) -> None:
        for count in (1, 2, 4, 8):
            await bench.y(rows(count))
        first = await bench.hold()
        late = bench.submit(rows(1), timeout=0.4)[1]
        others = [bench.submit(rows(1))[1] for _ in range(4)]
        await asyncio.sleep(0.33)  # the first takes 0.05 more, so what is left is less than one execution
        model.gate.set()
        assert isinstance(await late, DeadlineExceeded)
        await asyncio.gather(first, *others)

    play(scene, model)
    assert model.batches[-2:] == [1, 4]


def test_a_near_deadline_makes_the_batch_smaller() -> None:
    model = doubler(max_batch=8)
    model.function = lambda tensors: (time.sleep(0.02 * len(tensors["x"])), {"y": tensors["x"]})[1]

    async def scene(bench: Bench) -> None:
        for count in (1, 4, 2, 6):
            await bench.y(rows(count))
        first = await bench.hold()
        waiting = [bench.submit(rows(1), timeout=0.13 if index == 0 else 60)[1] for index in range(8)]
        model.gate.set()
        await first
        assert all(isinstance(outcome, dict) for outcome in await asyncio.gather(*waiting))

    bench = play(scene, model)
    assert bench.stats.released["deadline"] == 1
    assert 1 <= model.batches[5] < 8


def test_whom_a_stall_has_made_late_is_not_run_any_more() -> None:
    """Staged behind a run that takes much longer than any before: told so, while its siblings are run."""
    model = doubler(max_batch=2)

    async def scene(bench: Bench) -> None:
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

    bench = play(scene, model)
    assert model.batches[-2:] == [1, 1]
    assert bench.stats.failures == {"deadline_exceeded": 1}


def test_a_deadline_counts_from_when_the_running_batch_should_end() -> None:
    """What runs has been running for long, so that a request behind it is taken in although its time is short."""
    model = doubler(max_batch=8)

    async def scene(bench: Bench) -> None:
        for count in (1, 8, 2, 6):
            bench.batcher.cost.add(count, 0.1 * count)  # with headroom 0.12 s a row
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

    play(scene, model)
