"""CoDel load shedding: a burst is served, a standing queue is kept short."""

from __future__ import annotations

import asyncio

import pytest

from lathe.server.batching.load_shedding import ControlledDelay
from lathe.server.batching.policy import BatchPolicy
from lathe.server.errors import Shed
from tests.server.batching.batcher_bench import Bench, run_scenario
from tests.server.fakes import doubler
from tests.server.running import rows


def test_a_queue_is_standing_after_an_interval_without_being_empty() -> None:
    delay = ControlledDelay(target=0.02, interval=0.1)
    delay.empty(10.0)
    assert delay.latest(10.1, batch=0.0) == float("-inf")
    assert delay.latest(10.2, batch=0.0) == pytest.approx(10.18)
    assert delay.latest(10.2, batch=0.05) == pytest.approx(10.15)  # a request within one batch's time is not late
    delay.empty(10.2)
    assert delay.latest(10.25, batch=0.0) == float("-inf")


@pytest.mark.parametrize("interval", [0.05, 10.0])
def test_late_requests_are_shed_only_from_a_standing_queue(interval: float) -> None:
    stands = interval < 1.0

    async def scenario(bench: Bench) -> None:
        bench.batcher.configure(BatchPolicy(delay_target=0.1, delay_interval=interval))
        for index in range(100):  # so that one slow run changes the expected duration of a batch only a little
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

    bench = run_scenario(scenario, doubler(max_batch=1))
    assert bench.stats.failures == ({"shed": 1} if stands else {})


def test_a_batch_is_filled_up_after_shedding() -> None:
    model = doubler(max_batch=4)

    async def scenario(bench: Bench) -> None:
        for index in range(200):
            await bench.y(rows(1, start=index))
        bench.batcher.configure(BatchPolicy(delay_target=0.1, delay_interval=0.05))
        running = await bench.hold()
        staged = [bench.submit(rows(1))[1] for _ in range(4)]
        await asyncio.sleep(0)  # they are the next batch, whatever arrives
        stale = [bench.submit(rows(1))[1] for _ in range(3)]
        await asyncio.sleep(0.3)
        fresh = [bench.submit(rows(1))[1] for _ in range(3)]
        bench.model.gate.set()
        assert all([isinstance(await future, Shed) for future in stale])
        assert all([isinstance(await future, dict) for future in (running, *staged, *fresh)])

    run_scenario(scenario, model)
    assert model.batches[-2:] == [4, 3]
