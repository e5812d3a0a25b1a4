"""Cancelled requests cost nothing and do not harm the other requests of a batch."""

from __future__ import annotations

import asyncio
import gc
import threading

import numpy as np

from lathe.server.batching.entry import Entry
from tests.server.batching.batcher_bench import Bench, run_scenario
from tests.server.fakes import doubler
from tests.server.running import rows


def test_cancelled_requests_are_not_run_and_leave_nothing() -> None:
    model = doubler(max_batch=8)

    async def scenario(bench: Bench) -> None:
        first = await bench.hold()
        entries = [bench.submit(rows(1, start=index)) for index in range(2000)]
        for index, (entry, _) in enumerate(entries):
            if index % 500:
                bench.batcher.cancel(entry)
                bench.batcher.cancel(entry)  # a second cancel changes nothing
        assert bench.batcher.admission.items == 5
        model.gate.set()
        await first
        for index, (_, future) in enumerate(entries):
            if index % 500 == 0:
                outcome = await future
                assert isinstance(outcome, dict)
                np.testing.assert_array_equal(outcome["y"], rows(1, start=index) * 2)
            else:
                assert not future.done()

    bench = run_scenario(scenario, model)
    assert model.batches == [1, 4]
    assert bench.stats.cancelled == 1996


def test_cancelling_a_running_request_leaves_its_batch() -> None:
    model = doubler()

    async def scenario(bench: Bench) -> None:
        await bench.hold()
        entry, future = bench.submit(rows(1))
        _, sibling = bench.submit(rows(1, start=9))
        model.gate.set()
        await asyncio.sleep(0)
        bench.batcher.cancel(entry)
        outcome = await sibling
        assert isinstance(outcome, dict)
        np.testing.assert_array_equal(outcome["y"], rows(1, start=9) * 2)
        assert not future.done()

    run_scenario(scenario, model)


def test_cancelling_a_split_request_cancels_its_parts() -> None:
    model = doubler(max_batch=8)

    async def scenario(bench: Bench) -> None:
        first = await bench.hold()
        entry, future = bench.submit(rows(100))
        assert bench.batcher.admission.items == 1 + 13
        bench.batcher.cancel(entry)
        assert bench.batcher.admission.items == 1
        model.gate.set()
        await first
        assert not future.done()

    run_scenario(scenario, model)
    assert model.batches == [1]


def test_a_request_cancelled_before_the_worker_begins_does_not_harm_the_batch() -> None:
    model = doubler()

    async def scenario(bench: Bench) -> None:
        free = threading.Event()
        for _ in range(2):  # both workers
            bench.pool.submit(lambda: iter([free.wait(10)]), lambda _: None, lambda: None)
        leaving, _ = bench.submit(rows(1))
        _, staying = bench.submit(rows(1, start=5))
        await asyncio.sleep(0.01)  # the batch is formed, and waits for a worker
        bench.batcher.cancel(leaving)
        free.set()
        outcome = await staying
        assert isinstance(outcome, dict)
        np.testing.assert_array_equal(outcome["y"], rows(1, start=5) * 2)

    bench = run_scenario(scenario, model)
    assert model.batches == [1]
    assert bench.stats.failures == {}


def test_ten_thousand_cancelled_requests_leave_nothing() -> None:
    """Requests are cancelled while they wait, are staged or run; the timers of their deadlines are cancelled too."""
    model = doubler(max_batch=8)
    generator = np.random.default_rng(0)

    def entries() -> int:
        gc.collect()
        return sum(isinstance(found, Entry) for found in gc.get_objects())

    async def scenario(bench: Bench) -> None:
        before, timers = entries(), len(bench.timers)
        left = 0
        while left < 10_000:
            model.gate.clear()
            running = [bench.submit(rows(1), timeout=600)[0] for _ in range(4)]
            await asyncio.sleep(0)
            waiting = [bench.submit(rows(1), timeout=600)[0] for _ in range(60)]  # eight of them are staged
            staying = bench.submit(rows(1, start=3))[1]
            await asyncio.sleep(0)
            leaving = [*running, *waiting]
            generator.shuffle(leaving)  # type: ignore[arg-type]
            for entry in leaving:
                bench.batcher.cancel(entry)
            left += len(leaving)
            model.gate.set()
            outcome = await staying
            assert isinstance(outcome, dict)
            np.testing.assert_array_equal(outcome["y"], rows(1, start=3) * 2)
            await bench.batcher.drained()
        del entry, running, waiting, leaving, staying, outcome
        await asyncio.sleep(0.05)
        assert bench.stats.cancelled == left
        assert entries() <= before + 1  # a worker may still refer to its last one
        assert len(bench.timers) - timers < 300  # asyncio removes cancelled timers once half of all are cancelled

    run_scenario(scenario, model, patience=100)
    assert sum(model.batches) < 2_500  # of 10,000: only those that had begun
