"""Batching: what shares an execution, what never does, and that no request harms another."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from server.batching.admission import Admission
from server.batching.batcher import Batcher
from server.batching.entry import Entry, Outcome
from server.batching.signature import Signature
from server.errors import DeadlineExceeded, Internal, Overloaded, TooLarge
from server.scheduling.pool import WorkerPool
from server.telemetry.statistics import Statistics
from server.types import ModelRef, Tensors, TensorSpec
from tests.server.data.fakes import FakeModel, doubler, softmax_over_batch
from tests.server.data.running import rows


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
        """What the event loop has to do later."""
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
        """Occupy the model until its gate opens."""
        self.model.gate.clear()
        self.model.entered.clear()
        future = self.submit(rows(1))[1]
        assert await asyncio.to_thread(self.model.entered.wait, 10)
        return future


Scene = Callable[[Bench], Awaitable[None]]


def play(scene: Scene, model: FakeModel, patience: float = 20, **options: Any) -> Bench:
    """Run a scene, which may take so many seconds; afterwards nothing may be left behind."""

    async def run() -> Bench:
        bench = Bench(model, **options)
        try:
            await asyncio.wait_for(scene(bench), patience)
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


def test_an_idle_model_runs_at_once() -> None:
    model = doubler()

    async def scene(bench: Bench) -> None:
        for index in range(3):
            np.testing.assert_array_equal(await bench.y(rows(1, start=index)), rows(1, start=index) * 2)

    bench = play(scene, model)
    assert model.batches == [1, 1, 1]
    assert bench.stats.released == {"idle": 3}


def test_what_waited_runs_together() -> None:
    model = doubler(max_batch=8)

    async def scene(bench: Bench) -> None:
        first = await bench.hold()
        waiting = [bench.submit(rows(1 + index % 2, start=index))[1] for index in range(7)]
        model.gate.set()
        await first
        for index, future in enumerate(waiting):
            outcome = await future
            assert isinstance(outcome, dict)
            np.testing.assert_array_equal(outcome["y"], rows(1 + index % 2, start=index) * 2)

    bench = play(scene, model)
    assert model.batches == [1, 7, 3]  # 1+2+1+2+1 rows, then what did not fit
    assert bench.stats.inference_count == 11
    assert bench.stats.success.count == 8


def test_incompatible_shapes_never_share_a_batch() -> None:
    spec = TensorSpec("x", "FP32", (-1, -1))
    model = FakeModel(lambda t: {"y": t["x"] * 2}, [spec], [TensorSpec("y", "FP32", (-1, -1))])

    async def scene(bench: Bench) -> None:
        first = await bench.hold()
        waiting = [(width, bench.submit(rows(1, width))[1]) for width in (4, 5, 4, 5, 4)]
        model.gate.set()
        await first
        for width, future in waiting:
            outcome = await future
            assert isinstance(outcome, dict)
            np.testing.assert_array_equal(outcome["y"], rows(1, width) * 2)

    play(scene, model)
    assert model.batches == [1, 3, 2]


def test_dependent_rows_are_never_batched() -> None:
    model = softmax_over_batch()

    async def scene(bench: Bench) -> None:
        x = rows(3, 2)
        answers = await asyncio.gather(*(bench.y(x + index) for index in range(6)))
        for answer in answers:
            np.testing.assert_allclose(answer.sum(axis=0), 1, rtol=1e-6)

    play(scene, model)
    assert model.batches == [3] * 6


def test_a_large_request_is_cut_and_joined() -> None:
    model = doubler(max_batch=8)

    async def scene(bench: Bench) -> None:
        np.testing.assert_array_equal(await bench.y(rows(20)), rows(20) * 2)

    play(scene, model)
    assert sum(model.batches) == 20
    assert max(model.batches) <= 8


def test_one_poisoned_request_fails_alone() -> None:
    def run(tensors: Tensors) -> Tensors:
        if (tensors["x"] < 0).any():
            raise ValueError("a secret path")
        return {"y": tensors["x"] * 2}

    model = doubler()
    model.function = run

    async def scene(bench: Bench) -> None:
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

    bench = play(scene, model)
    assert bench.stats.fail.count == 1
    assert bench.stats.failures == {"internal": 1}
    assert bench.stats.success.count == 5


def test_outputs_without_the_batch_axis_do_not_mix_requests() -> None:
    """A model that wrongly claims independent rows: each request still gets an answer of its own."""
    model = doubler()
    model.function = lambda tensors: {"y": tensors["x"].sum(axis=0, keepdims=True)}

    async def scene(bench: Bench) -> None:
        first = await bench.hold()
        waiting = [bench.submit(rows(1, start=index))[1] for index in range(3)]
        model.gate.set()
        await first
        for index, future in enumerate(waiting):
            outcome = await future
            assert isinstance(outcome, dict)
            np.testing.assert_array_equal(outcome["y"], rows(1, start=index))

    play(scene, model)


def test_nan_stays_with_its_request() -> None:
    model = doubler()

    async def scene(bench: Bench) -> None:
        first = await bench.hold()
        inputs = [np.full((1, 4), value, np.float32) for value in (1, np.nan, np.inf, 2)]
        waiting = [bench.submit(x)[1] for x in inputs]
        model.gate.set()
        await first
        for x, future in zip(inputs, waiting, strict=True):
            outcome = await future
            assert isinstance(outcome, dict)
            np.testing.assert_array_equal(outcome["y"], x * 2)

    play(scene, model)
    assert model.batches == [1, 4]


def test_cancelled_requests_cost_nothing_and_leave_nothing() -> None:
    model = doubler(max_batch=8)

    async def scene(bench: Bench) -> None:
        first = await bench.hold()
        entries = [bench.submit(rows(1, start=index)) for index in range(2000)]
        for index, (entry, _) in enumerate(entries):
            if index % 500:
                bench.batcher.cancel(entry)
                bench.batcher.cancel(entry)  # leaving twice is leaving once
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

    bench = play(scene, model)
    assert model.batches == [1, 4]
    assert bench.stats.cancelled == 1996


def test_cancelling_a_running_request_leaves_its_siblings() -> None:
    model = doubler()

    async def scene(bench: Bench) -> None:
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

    play(scene, model)


def test_cancelling_a_cut_request_cancels_its_parts() -> None:
    model = doubler(max_batch=8)

    async def scene(bench: Bench) -> None:
        first = await bench.hold()
        entry, future = bench.submit(rows(100))
        assert bench.batcher.admission.items == 1 + 13
        bench.batcher.cancel(entry)
        assert bench.batcher.admission.items == 1
        model.gate.set()
        await first
        assert not future.done()

    play(scene, model)
    assert model.batches == [1]


def test_an_answer_of_parts_that_grows_too_large_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.batching.split.LARGEST", 3 * rows(8).nbytes)
    model = doubler(max_batch=8)

    async def scene(bench: Bench) -> None:
        assert isinstance(await bench.submit(rows(24))[1], dict)
        outcome = await bench.submit(rows(100))[1]
        assert isinstance(outcome, TooLarge)
        assert "the outputs of 100 rows are larger than 384 bytes" in str(outcome)
        assert bench.batcher.admission.items <= 2  # what runs or is about to; the rest was withdrawn

    play(scene, model)
    assert sum(model.batches) < 24 + 100


def test_a_full_queue_refuses_at_the_door() -> None:
    model = doubler()

    async def scene(bench: Bench) -> None:
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
            bench.submit(rows(30))  # cut into parts, none of which stays behind
        assert bench.batcher.admission.items == 5

    bench = play(scene, model, items=5)
    assert bench.stats.failures == {"overloaded": 2}


def test_a_cut_request_that_fits_only_in_part_is_refused_whole() -> None:
    model = doubler(max_batch=2)

    async def scene(bench: Bench) -> None:
        first = await bench.hold()
        with pytest.raises(Overloaded):
            bench.submit(rows(20))
        assert bench.batcher.admission.items == 1
        model.gate.set()
        await first

    play(scene, model, items=5)
    assert model.batches == [1]


def test_the_queue_is_bounded_in_bytes_but_one_large_request_passes() -> None:
    model = doubler(max_batch=64)

    async def scene(bench: Bench) -> None:
        await bench.y(rows(50))
        await bench.hold()
        bench.submit(rows(5))
        with pytest.raises(Overloaded, match="96 of 100 bytes"):
            bench.submit(rows(1))

    play(scene, model, nbytes=100)


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


def test_a_caller_that_leaves_before_a_worker_begins_does_not_spoil_the_batch() -> None:
    model = doubler()

    async def scene(bench: Bench) -> None:
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

    bench = play(scene, model)
    assert model.batches == [1]
    assert bench.stats.failures == {}


def test_a_full_batch_is_staged_behind_the_running_one() -> None:
    """The worker has its next batch at hand, however busy the event loop; who leaves it then still costs nothing."""
    model = doubler(max_batch=4)

    async def scene(bench: Bench) -> None:
        first = await bench.hold()
        waiting = [bench.submit(rows(1, start=index)) for index in range(10)]
        await asyncio.sleep(0.01)
        assert len(bench.batcher.queue) == 6  # four are staged
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

    bench = play(scene, model)
    assert model.batches == [1, 3, 4, 1]
    assert bench.stats.cancelled == 2


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


def test_short_work_runs_on_the_event_loop() -> None:
    model = doubler()
    threads: list[int] = []

    def run(tensors: Tensors) -> Tensors:
        threads.append(threading.get_ident())
        return {"y": tensors["x"]}

    model.function = run

    async def scene(bench: Bench) -> None:
        for _ in range(10):
            await bench.y(rows(1))

    play(scene, model, inline=0.5)
    assert len(set(threads)) >= 2  # first on workers, until its cost was known
    assert threads[-1] == threading.get_ident()


def test_an_answer_that_cannot_be_delivered_harms_nobody() -> None:
    model = doubler()

    async def scene(bench: Bench) -> None:
        def explode(_outcome: Outcome) -> None:
            raise RuntimeError("the receiver is broken")

        x = rows(1)
        bench.batcher.submit(Entry({"x": x}, bench.signature.group_of({"x": x}), explode))
        np.testing.assert_array_equal(await bench.y(rows(1, start=3)), rows(1, start=3) * 2)

    play(scene, model)


@pytest.mark.slow
def test_ten_thousand_batches_with_poison_and_departures() -> None:
    """Any mix of failing, leaving and well-behaved requests: the latter get exactly their own rows."""
    generator = np.random.default_rng(0)

    def run(tensors: Tensors) -> Tensors:
        if (tensors["x"][:, 0] == -1).any():
            raise ValueError("poison")
        return {"y": tensors["x"] * 2}

    model = doubler(max_batch=8)
    model.function = run

    async def scene(bench: Bench) -> None:
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

    play(scene, model, patience=300)


def test_ten_thousand_who_leave_leave_nothing() -> None:
    """While they wait, while they are staged and while they run; with deadlines, whose timers go, too."""
    model = doubler(max_batch=8)
    generator = np.random.default_rng(0)

    def entries() -> int:
        gc.collect()
        return sum(isinstance(found, Entry) for found in gc.get_objects())

    async def scene(bench: Bench) -> None:
        before, timers = entries(), len(bench.timers)
        left = 0
        while left < 10_000:
            model.gate.clear()
            running = [bench.submit(rows(1), timeout=600)[0] for _ in range(4)]
            await asyncio.sleep(0)
            waiting = [bench.submit(rows(1), timeout=600)[0] for _ in range(60)]  # of which eight are staged
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
        assert entries() <= before + 1  # a worker may not have let go of its last one
        assert len(bench.timers) - timers < 300  # asyncio sweeps once half of them are cancelled

    play(scene, model, patience=100)
    assert sum(model.batches) < 2_500  # of 10,000: those that had begun


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
