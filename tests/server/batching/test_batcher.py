"""Batching: which requests share an execution, and that no request harms another."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from lathe.server.batching.entry import Entry, Outcome
from lathe.server.errors import Internal, Overloaded, TooLarge
from lathe.server.types import Tensors, TensorSpec
from tests.server.batching.batcher_bench import Bench, run_scenario
from tests.server.fakes import FakeModel, doubler, softmax_over_batch
from tests.server.running import rows


def test_an_idle_model_runs_at_once() -> None:
    model = doubler()

    async def scenario(bench: Bench) -> None:
        for index in range(3):
            np.testing.assert_array_equal(await bench.y(rows(1, start=index)), rows(1, start=index) * 2)

    bench = run_scenario(scenario, model)
    assert model.batches == [1, 1, 1]
    assert bench.stats.released == {"idle": 3}


def test_requests_that_wait_are_batched_together() -> None:
    model = doubler(max_batch=8)

    async def scenario(bench: Bench) -> None:
        first = await bench.hold()
        waiting = [bench.submit(rows(1 + index % 2, start=index))[1] for index in range(7)]
        model.gate.set()
        await first
        for index, future in enumerate(waiting):
            outcome = await future
            assert isinstance(outcome, dict)
            np.testing.assert_array_equal(outcome["y"], rows(1 + index % 2, start=index) * 2)

    bench = run_scenario(scenario, model)
    assert model.batches == [1, 7, 3]  # 1+2+1+2+1 rows, then those that did not fit
    assert bench.stats.inference_count == 11
    assert bench.stats.success.count == 8


def test_different_inner_shapes_never_share_a_batch() -> None:
    spec = TensorSpec("x", "FP32", (-1, -1))
    model = FakeModel(lambda t: {"y": t["x"] * 2}, [spec], [TensorSpec("y", "FP32", (-1, -1))])

    async def scenario(bench: Bench) -> None:
        first = await bench.hold()
        waiting = [(width, bench.submit(rows(1, width))[1]) for width in (4, 5, 4, 5, 4)]
        model.gate.set()
        await first
        for width, future in waiting:
            outcome = await future
            assert isinstance(outcome, dict)
            np.testing.assert_array_equal(outcome["y"], rows(1, width) * 2)

    run_scenario(scenario, model)
    assert model.batches == [1, 3, 2]


def test_dependent_rows_are_never_batched() -> None:
    model = softmax_over_batch()

    async def scenario(bench: Bench) -> None:
        x = rows(3, 2)
        answers = await asyncio.gather(*(bench.y(x + index) for index in range(6)))
        for answer in answers:
            np.testing.assert_allclose(answer.sum(axis=0), 1, rtol=1e-6)

    run_scenario(scenario, model)
    assert model.batches == [3] * 6


def test_a_large_request_is_split_and_joined() -> None:
    model = doubler(max_batch=8)

    async def scenario(bench: Bench) -> None:
        np.testing.assert_array_equal(await bench.y(rows(20)), rows(20) * 2)

    run_scenario(scenario, model)
    assert sum(model.batches) == 20
    assert max(model.batches) <= 8


def test_a_request_that_fails_does_not_fail_its_batch() -> None:
    def run(tensors: Tensors) -> Tensors:
        if (tensors["x"] < 0).any():
            raise ValueError("a secret path")
        return {"y": tensors["x"] * 2}

    model = doubler()
    model.function = run

    async def scenario(bench: Bench) -> None:
        first = await bench.hold()
        waiting = [bench.submit(rows(1, start=-100 if index == 2 else index))[1] for index in range(5)]
        model.gate.set()
        await first
        for index, future in enumerate(waiting):
            outcome = await future
            if index == 2:
                assert isinstance(outcome, Internal)
                assert "secret" not in outcome.message
            else:
                assert isinstance(outcome, dict)
                np.testing.assert_array_equal(outcome["y"], rows(1, start=index) * 2)

    bench = run_scenario(scenario, model)
    assert bench.stats.fail.count == 1
    assert bench.stats.failures == {"internal": 1}
    assert bench.stats.success.count == 5


def test_outputs_without_a_batch_axis_do_not_mix_requests() -> None:
    """A model that wrongly claims independent rows: each request still gets its own result."""
    model = doubler()
    model.function = lambda tensors: {"y": tensors["x"].sum(axis=0, keepdims=True)}

    async def scenario(bench: Bench) -> None:
        first = await bench.hold()
        waiting = [bench.submit(rows(1, start=index))[1] for index in range(3)]
        model.gate.set()
        await first
        for index, future in enumerate(waiting):
            outcome = await future
            assert isinstance(outcome, dict)
            np.testing.assert_array_equal(outcome["y"], rows(1, start=index))

    run_scenario(scenario, model)


def test_nan_stays_in_its_own_request() -> None:
    model = doubler()

    async def scenario(bench: Bench) -> None:
        first = await bench.hold()
        inputs = [np.full((1, 4), value, np.float32) for value in (1, np.nan, np.inf, 2)]
        waiting = [bench.submit(x)[1] for x in inputs]
        model.gate.set()
        await first
        for x, future in zip(inputs, waiting, strict=True):
            outcome = await future
            assert isinstance(outcome, dict)
            np.testing.assert_array_equal(outcome["y"], x * 2)

    run_scenario(scenario, model)
    assert model.batches == [1, 4]


def test_a_split_request_with_too_large_outputs_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lathe.server.batching.request_split.MAX_JOINED_BYTES", 3 * rows(8).nbytes)
    model = doubler(max_batch=8)

    async def scenario(bench: Bench) -> None:
        assert isinstance(await bench.submit(rows(24))[1], dict)
        outcome = await bench.submit(rows(100))[1]
        assert isinstance(outcome, TooLarge)
        assert "the outputs of 100 rows are larger than 384 bytes" in str(outcome)
        assert bench.batcher.admission.items <= 2  # the running and the staged part; the others were withdrawn

    run_scenario(scenario, model)
    assert sum(model.batches) < 24 + 100


@pytest.mark.parametrize("extents", [lambda rows: (rows, rows), lambda rows: (1, 4), lambda rows: ()])
def test_outputs_of_parts_that_do_not_fit_together_are_an_error(extents: Callable[[int], tuple[int, ...]]) -> None:
    """Without the check one row would be repeated for all, or the caller would wait for ever."""
    model = doubler(max_batch=8)
    model.function = lambda inputs: {"y": np.ones(extents(len(inputs["x"])), np.float32)}

    async def scenario(bench: Bench) -> None:
        outcome = await bench.submit(rows(20))[1]
        assert isinstance(outcome, Internal)
        assert "do not fit together" in str(outcome)

    run_scenario(scenario, model)


def test_a_full_queue_refuses_new_requests() -> None:
    model = doubler()

    async def scenario(bench: Bench) -> None:
        for _ in range(10):
            await bench.y(rows(1))
        await bench.hold()
        for _ in range(4):
            bench.submit(rows(1))
        with pytest.raises(Overloaded, match="5 of 5 requests") as refused:
            bench.submit(rows(1))
        assert refused.value.retry_after is not None
        assert 0 < refused.value.retry_after < 60
        with pytest.raises(Overloaded):
            bench.submit(rows(30))  # is split into parts, none of which stays queued
        assert bench.batcher.admission.items == 5

    bench = run_scenario(scenario, model, items=5)
    assert bench.stats.failures == {"overloaded": 2}


def test_a_split_request_that_fits_only_in_part_is_refused_whole() -> None:
    model = doubler(max_batch=2)

    async def scenario(bench: Bench) -> None:
        first = await bench.hold()
        with pytest.raises(Overloaded):
            bench.submit(rows(20))
        assert bench.batcher.admission.items == 1
        model.gate.set()
        await first

    run_scenario(scenario, model, items=5)
    assert model.batches == [1]


def test_the_queue_is_bounded_in_bytes_but_accepts_one_large_request() -> None:
    model = doubler(max_batch=64)

    async def scenario(bench: Bench) -> None:
        await bench.y(rows(50))
        await bench.hold()
        bench.submit(rows(5))
        with pytest.raises(Overloaded, match="96 of 100 bytes"):
            bench.submit(rows(1))

    run_scenario(scenario, model, nbytes=100)


def test_a_full_batch_is_staged_behind_the_running_one() -> None:
    """The worker gets its next batch even if the event loop is busy; a request cancelled by then is not run."""
    model = doubler(max_batch=4)

    async def scenario(bench: Bench) -> None:
        first = await bench.hold()
        waiting = [bench.submit(rows(1, start=index)) for index in range(10)]
        await asyncio.sleep(0.01)
        assert len(bench.batcher.queue) == 6  # the other four are staged
        bench.batcher.cancel(waiting[1][0])
        bench.batcher.cancel(waiting[8][0])
        model.gate.set()
        time.sleep(0.1)  # noqa: ASYNC251  (the loop is busy)
        assert model.batches == [1, 3]
        await first
        for index, (_, future) in enumerate(waiting):
            if index not in (1, 8):
                outcome = await future
                assert isinstance(outcome, dict)
                np.testing.assert_array_equal(outcome["y"], rows(1, start=index) * 2)

    bench = run_scenario(scenario, model)
    assert model.batches == [1, 3, 4, 1]
    assert bench.stats.cancelled == 2


def test_short_executions_run_on_the_event_loop() -> None:
    model = doubler()
    threads: list[int] = []

    def run(tensors: Tensors) -> Tensors:
        threads.append(threading.get_ident())
        return {"y": tensors["x"]}

    model.function = run

    async def scenario(bench: Bench) -> None:
        for _ in range(10):
            await bench.y(rows(1))

    run_scenario(scenario, model, inline=0.5)
    assert len(set(threads)) >= 2  # first on workers, until its cost was known
    assert threads[-1] == threading.get_ident()


def test_an_exception_in_a_callback_harms_no_other_request() -> None:
    model = doubler()

    async def scenario(bench: Bench) -> None:
        def explode(_outcome: Outcome) -> None:
            raise RuntimeError("the receiver is broken")

        x = rows(1)
        bench.batcher.submit(Entry({"x": x}, bench.signature.group_of({"x": x}), explode))
        np.testing.assert_array_equal(await bench.y(rows(1, start=3)), rows(1, start=3) * 2)

    run_scenario(scenario, model)


@pytest.mark.slow
def test_ten_thousand_batches_with_failing_and_cancelled_requests() -> None:
    """Any mix of failing, cancelled and normal requests: the normal ones get exactly their own rows."""
    generator = np.random.default_rng(0)

    def run(tensors: Tensors) -> Tensors:
        if (tensors["x"][:, 0] == -1).any():
            raise ValueError("poison")
        return {"y": tensors["x"] * 2}

    model = doubler(max_batch=8)
    model.function = run

    async def scenario(bench: Bench) -> None:
        for _ in range(10_000):
            fates = generator.choice(["good", "poison", "leaves"], 6, p=[0.8, 0.1, 0.1])
            started = []
            for fate in fates:
                x = generator.random((1, 4), np.float32)
                if fate == "poison":
                    x[0, 0] = -1
                started.append((fate, x, *bench.submit(x)))
            await asyncio.sleep(0)
            for fate, _, entry, _ in started:
                if fate == "leaves":
                    bench.batcher.cancel(entry)
            for fate, x, _, future in started:
                if fate == "good":
                    outcome = await future
                    assert isinstance(outcome, dict)
                    np.testing.assert_array_equal(outcome["y"], x * 2)
                elif fate == "poison":
                    assert isinstance(await future, Internal)

    run_scenario(scenario, model, patience=300)
