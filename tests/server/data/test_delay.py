"""Controlled delay: a burst is worked off, a standing queue is kept short."""

from __future__ import annotations

import asyncio

import pytest

from server.batching.delay import ControlledDelay
from server.batching.policy import BatchPolicy
from server.errors import Shed
from tests.server.data.bench import Bench, play
from tests.server.data.fakes import doubler
from tests.server.data.running import rows


def test_a_queue_stands_once_it_was_not_empty_for_an_interval() -> None:
    delay = ControlledDelay(target=0.02, interval=0.1)
    delay.empty(10.0)
    assert delay.latest(10.1, batch=0.0) == float("-inf")
    assert delay.latest(10.2, batch=0.0) == pytest.approx(10.18)
    assert delay.latest(10.2, batch=0.05) == pytest.approx(10.15)  # nobody is late for one batch
    delay.empty(10.2)
    assert delay.latest(10.25, batch=0.0) == float("-inf")


@pytest.mark.parametrize("interval", [0.05, 10.0])
def test_who_waited_too_long_is_shed_only_from_a_standing_queue(interval: float) -> None:
    stands = interval < 1.0

    async def scene(bench: Bench) -> None:
        bench.batcher.configure(BatchPolicy(delay_target=0.1, delay_interval=interval))
        for index in range(100):  # so that one slow run does not count for much in what a batch is taken to last
            await bench.y(rows(1, start=index))
        running = await bench.hold()
        staged, stale = bench.submit(rows(1))[1], bench.submit(rows(1))[1]
        await asyncio.sleep(0.3)
        fresh = bench.submit(rows(1))[1]
        bench.model.gate.set()
        for future in (running, staged, fresh):
            assert isinstance(await future, dict)
        outcome = await stale
        assert isinstance(outcome, Shed) == stands, outcome
        if isinstance(outcome, Shed):
            assert 0 < (outcome.retry_after or 0) < 60

    bench = play(scene, doubler(max_batch=1))
    assert bench.stats.failures == ({"shed": 1} if stands else {})


def test_the_rest_of_a_batch_is_filled_up_again() -> None:
    model = doubler(max_batch=4)

    async def scene(bench: Bench) -> None:
        for index in range(200):
            await bench.y(rows(1, start=index))
        bench.batcher.configure(BatchPolicy(delay_target=0.1, delay_interval=0.05))
        running = await bench.hold()
        staged = [bench.submit(rows(1))[1] for _ in range(4)]
        await asyncio.sleep(0)  # they are the next batch whatever comes
        stale = [bench.submit(rows(1))[1] for _ in range(3)]
        await asyncio.sleep(0.3)
        fresh = [bench.submit(rows(1))[1] for _ in range(3)]
        bench.model.gate.set()
        assert all([isinstance(await future, Shed) for future in stale])
        assert all([isinstance(await future, dict) for future in (running, *staged, *fresh)])

    play(scene, model)
    assert model.batches[-2:] == [4, 3]
