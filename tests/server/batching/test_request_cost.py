"""The expected time of a request, which counts its work where its shape varies in more than its rows."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from lathe.server.batching.policy import BatchPolicy
from lathe.server.batching.signature import Signature
from lathe.server.errors import DeadlineExceeded
from lathe.server.types import TensorSpec
from tests.server.batching.batcher_bench import Bench, run_scenario
from tests.server.fakes import adder, doubler, echo
from tests.server.running import infer_request, rows, serving
from tests.server.telemetry.test_metrics import Scrape

PIXELS = TensorSpec("image", "UINT8", (-1, -1, -1, 3))
TOKENS = TensorSpec("ids", "INT64", (-1, -1))
STATES = TensorSpec("states", "FP32", (-1, -1, 768))
RECORD = TensorSpec("record", "FP32", (4, -1))


@pytest.mark.parametrize(
    ("specs", "shapes", "batchable", "work"),
    [
        ([TensorSpec("x", "FP32", (-1, 224))], [(5, 224)], True, 5),
        ([PIXELS], [(2, 10, 20, 3)], True, 400),
        ([TOKENS, STATES], [(3, 7), (3, 7, 768)], True, 21),
        ([RECORD], [(4, 9)], False, 9),
        ([TensorSpec("x", "FP32", (4, 4))], [(4, 4)], False, 1),
    ],
)
def test_the_work_of_a_request(
    specs: list[TensorSpec], shapes: list[tuple[int, ...]], batchable: bool, work: int
) -> None:
    given = {spec.name: (spec.datatype, shape) for spec, shape in zip(specs, shapes, strict=True)}
    for ragged in (False, True):
        assert Signature(specs, [], batchable, ragged).group(given).work == work


def learn(bench: Bench) -> None:
    """Teach the cost model one millisecond per element."""
    for width in (10, 200, 50, 400):
        bench.batcher.cost.add(1, width / 1000, width)


def test_a_deadline_is_judged_by_the_length_of_the_request() -> None:
    async def scenario(bench: Bench) -> None:
        learn(bench)
        assert isinstance(await bench.submit(rows(1, 20), timeout=0.5)[1], dict)
        with pytest.raises(DeadlineExceeded):
            bench.submit(rows(1, 2000), timeout=0.5)

    run_scenario(scenario, echo("FP32"))


def test_a_time_that_is_only_extrapolated_refuses_nothing() -> None:
    """Runs of one short row do not show what a thousand times as much takes; 64 times as much is extrapolated."""

    async def scenario(bench: Bench) -> None:
        for _ in range(20):
            bench.batcher.cost.add(1, 0.01, 10)
        with pytest.raises(DeadlineExceeded):
            bench.submit(rows(1, 500), timeout=0.4)
        assert isinstance(await bench.submit(rows(1, 10_000), timeout=2.0)[1], dict)

    run_scenario(scenario, echo("FP32"))


def test_waiting_requests_count_by_their_length() -> None:
    model = echo("FP32")

    async def scenario(bench: Bench) -> None:
        learn(bench)
        waiting = [await bench.hold(), *(bench.submit(rows(1, 100))[1] for _ in range(5))]
        assert bench.batcher.queue.work == 500
        bound = bench.batcher.cost.bound
        assert bound(510) <= bench.batcher.expected(1, 10) <= bound(510) + bound(4)  # bound(4): the running batch
        entry, _ = bench.submit(rows(1, 100))
        bench.batcher.cancel(entry)
        assert bench.batcher.queue.work == 500
        model.gate.set()
        await asyncio.gather(*waiting)
        assert bench.batcher.queue.work == 0

    run_scenario(scenario, model)


@pytest.mark.parametrize(("width", "batch"), [(100, 6), (1000, 3), (9000, 6)])
def test_the_latency_target_limits_a_batch_by_its_lengths(width: int, batch: int) -> None:
    """Where not even one request would be in time, the target does not limit the batch."""
    model = echo("FP32")

    async def scenario(bench: Bench) -> None:
        learn(bench)
        waiting = [await bench.hold(), *(bench.submit(rows(1, width))[1] for _ in range(6))]
        bench.batcher.configure(BatchPolicy(latency_target=4.5))
        model.gate.set()
        await asyncio.gather(*waiting)

    run_scenario(scenario, model)
    assert model.batches[:2] == [1, batch]


def test_the_cost_model_is_in_the_metrics() -> None:
    with serving({"long": echo("FP32"), "pair": adder(), "new": doubler()}) as running:
        for width in (4, 4, 4, 100, 4, 4):
            assert running.ask_raw(infer_request("long", rows(2, width))).status == 200
        scrape = Scrape(running)
        cost = running.registry.resolve("long").batcher.cost
        assert cost is not None and cost.largest_work == 200
        assert scrape.get("lathe_work_total", model="long", version="1") == 2 * (5 * 4 + 100)
        assert scrape.get("lathe_cost_fixed_seconds", model="long") == pytest.approx(cost.fixed)
        assert scrape.get("lathe_cost_work_seconds", model="long") == pytest.approx(cost.each)
        assert scrape.get("lathe_cost_stretch", model="long") >= 1.2
    assert 'lathe_cost_fixed_seconds{model="new"' not in scrape.text  # no cost is known yet
    assert np.isfinite(cost.bound(1))
