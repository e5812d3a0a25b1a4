"""What a model's owner may say about batching: delay, preferred sizes, priorities, a latency target."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from server.batching.entry import Entry, Outcome
from server.batching.policy import BatchPolicy
from server.errors import Overloaded
from server.types import Tensors
from tests.server.data.bench import Bench, Scene, play
from tests.server.data.fakes import FakeModel, doubler
from tests.server.data.running import rows

LONG = 5.0  # seconds nobody waits for in these tests


def play_with(policy: BatchPolicy, scene: Scene, model: FakeModel) -> Bench:
    async def configured(bench: Bench) -> None:
        bench.batcher.configure(policy)
        await scene(bench)

    return play(configured, model)


def submit(bench: Bench, priority: int, start: float = 0.0, width: int = 4, n: int = 1) -> asyncio.Future[Outcome]:
    future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    x = rows(n, width, start=start)
    entry = Entry({"x": x}, bench.signature.group_of({"x": x}), future.set_result, None, priority)
    bench.batcher.submit(entry)
    return future


def test_an_idle_model_waits_for_a_preferred_size_and_leaves_the_rest() -> None:
    model = doubler(max_batch=8)

    async def scene(bench: Bench) -> None:
        waiting = [submit(bench, 0, start=index) for index in range(3)]
        await asyncio.sleep(0.02)
        assert model.batches == []
        waiting += [submit(bench, 0, start=index) for index in (3, 4)]
        for index, future in enumerate(waiting[:4]):
            outcome = await asyncio.wait_for(future, LONG / 2)
            assert isinstance(outcome, dict)
            np.testing.assert_array_equal(outcome["y"], rows(1, start=index) * 2)
        bench.batcher.configure(BatchPolicy())
        await waiting[4]

    bench = play_with(BatchPolicy(preferred=(4, 6), max_delay=LONG), scene, model)
    assert model.batches == [4, 1]
    assert bench.stats.released["preferred"] == 1


@pytest.mark.parametrize(
    ("waiting", "batches"),
    [
        ((1, 3), [4]),  # none of the preferred sizes: all of them
        ((1, 5), [6]),
        ((2, 3, 2), [2, 5]),
        ((3, 3, 3), [6, 3]),
        ((7, 2), [7, 2]),  # 9 would be too many
        ((1, 1, 1, 1, 1, 1, 1), [6, 1]),
    ],
)
def test_requests_of_several_rows_make_up_a_preferred_size_or_go_together(
    waiting: tuple[int, ...], batches: list[int]
) -> None:
    """As in Triton's tests of its batcher: sizes 2 and 6 are preferred, 8 is the largest."""
    model = doubler(max_batch=8)

    async def scene(bench: Bench) -> None:
        first = await bench.hold()
        futures = [submit(bench, 0, n=count) for count in waiting]
        model.gate.set()
        await asyncio.gather(first, *futures)

    play_with(BatchPolicy(preferred=(2, 6), max_delay=0.05), scene, model)
    assert model.batches == [1, *batches]


def test_after_the_delay_what_is_there_goes() -> None:
    model = doubler(max_batch=8)

    async def scene(bench: Bench) -> None:
        started = time.monotonic()
        await asyncio.gather(submit(bench, 0), submit(bench, 0, start=1))
        assert 0.045 <= time.monotonic() - started < LONG

    play_with(BatchPolicy(max_delay=0.05), scene, model)
    assert model.batches == [2]


def test_a_full_batch_does_not_wait() -> None:
    model = doubler(max_batch=4)

    async def scene(bench: Bench) -> None:
        await asyncio.wait_for(asyncio.gather(*(submit(bench, 0, start=i) for i in range(4))), LONG / 2)

    play_with(BatchPolicy(max_delay=LONG), scene, model)
    assert model.batches == [4]


def test_who_leaves_is_not_waited_with() -> None:
    model = doubler(max_batch=4)

    async def scene(bench: Bench) -> None:
        entry, _ = bench.submit(rows(1))
        bench.batcher.cancel(entry)
        await asyncio.sleep(0.03)

    play_with(BatchPolicy(max_delay=0.01), scene, model)
    assert model.batches == []


def order_of_execution(model: FakeModel) -> list[float]:
    """Record which rows were run in which order: each row begins with its number."""
    seen: list[float] = []
    plain = model.function

    def run(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        seen.extend(tensors["x"][:, 0].tolist())
        return plain(tensors)

    model.function = run  # type: ignore[assignment]
    return seen


def test_the_urgent_goes_first_and_less_urgent_fill_its_batch() -> None:
    model = doubler(max_batch=3)
    seen = order_of_execution(model)

    async def scene(bench: Bench) -> None:
        first = await bench.hold()
        asked = [(3, 10), (2, 20), (1, 30), (0, 40), (1, 50), (99, 60)]
        waiting = [submit(bench, priority, start=start) for priority, start in asked]
        model.gate.set()
        await asyncio.gather(first, *waiting)

    play_with(BatchPolicy(priority_levels=3, default_priority=2, starvation=LONG), scene, model)
    assert seen[1:] == [30, 50, 20, 40, 60, 10]
    assert model.batches == [1, 3, 3]


def test_the_least_urgent_is_not_left_waiting_for_ever() -> None:
    model = doubler(max_batch=1)
    seen = order_of_execution(model)

    async def scene(bench: Bench) -> None:
        first = await bench.hold()
        late = submit(bench, 2, start=99)
        await asyncio.sleep(0.03)
        waiting = [submit(bench, 1, start=index) for index in range(5)]
        model.gate.set()
        await asyncio.gather(first, late, *waiting)

    play_with(BatchPolicy(priority_levels=2, default_priority=1, starvation=0.02), scene, model)
    assert seen[1] == 99


def test_a_batch_may_be_smaller_than_the_model_was_compiled_for() -> None:
    model = doubler(max_batch=8)

    async def scene(bench: Bench) -> None:
        first = await bench.hold()
        waiting = [submit(bench, 0) for _ in range(6)]
        model.gate.set()
        await asyncio.gather(first, *waiting)
        np.testing.assert_array_equal(await bench.y(rows(5)), rows(5) * 2)  # cut up and joined

    play_with(BatchPolicy(max_rows=4), scene, model)
    assert model.batches == [1, 4, 2, 4, 1]


def learn(bench: Bench) -> None:
    """Let the batcher believe that a row takes a second, so that a test's own delays do not matter."""
    for count in (1, 8, 2, 6):
        bench.batcher.cost.add(count, float(count))


def test_batches_are_sized_for_the_latency_target() -> None:
    model = doubler(max_batch=8)

    async def scene(bench: Bench) -> None:
        learn(bench)
        first = await bench.hold()
        waiting = [submit(bench, 0, start=index) for index in range(6)]
        bench.batcher.configure(BatchPolicy(latency_target=4.5))  # 3 rows: 3 s, with headroom 3.6; 4 would take 4.8
        model.gate.set()
        await asyncio.gather(first, *waiting)

    bench = play(scene, model)
    assert bench.stats.released["target"] >= 1
    assert model.batches[:2] == [1, 3]


def test_whom_the_target_cannot_be_kept_for_is_refused_at_the_door() -> None:
    model = doubler(max_batch=8)

    async def scene(bench: Bench) -> None:
        learn(bench)
        bench.batcher.configure(BatchPolicy(latency_target=12.5))
        first = await bench.hold()
        admitted, refused = list[asyncio.Future[Outcome]](), list[Overloaded]()
        for _ in range(40):
            try:
                admitted.append(submit(bench, 0))
            except Overloaded as error:
                refused.append(error)
        model.gate.set()
        await asyncio.gather(first, *admitted)
        assert (len(admitted), len(refused)) == (9, 31)  # with the first, ten rows take 10 s, with headroom 12
        assert "latency target is 12500 ms" in refused[0].message
        assert refused[0].retry_after is not None

    bench = play(scene, model)
    assert bench.stats.failures["overloaded"] == 31


def test_a_deadline_ends_the_delay() -> None:
    model = doubler(max_batch=8)

    async def scene(bench: Bench) -> None:
        bench.batcher.cost.add(1, 0.01)
        outcome = await asyncio.wait_for(bench.submit(rows(1), timeout=0.3)[1], LONG / 2)
        assert isinstance(outcome, dict), outcome

    play_with(BatchPolicy(max_delay=LONG), scene, model)
    assert model.batches == [1]


def test_a_shorter_delay_counts_at_once() -> None:
    model = doubler(max_batch=8)

    async def scene(bench: Bench) -> None:
        waiting = submit(bench, 0)
        await asyncio.sleep(0.01)
        bench.batcher.configure(BatchPolicy(max_delay=0.02))
        await asyncio.wait_for(waiting, LONG / 2)

    play_with(BatchPolicy(max_delay=LONG), scene, model)


def test_a_preferred_size_beyond_the_largest_batch_is_not_waited_for() -> None:
    model = doubler(max_batch=4)

    async def scene(bench: Bench) -> None:
        await asyncio.wait_for(asyncio.gather(*(submit(bench, 0, start=i) for i in range(4))), LONG / 2)

    play_with(BatchPolicy(preferred=(16,), max_delay=LONG), scene, model)
    assert model.batches == [4]


def test_instances_run_batches_at_the_same_time_and_no_more_than_are_allowed() -> None:
    """Two batches meet inside the model, each waiting for the other; a third is not there."""
    meeting, running, most = threading.Barrier(2, timeout=20), [0], [0]
    counting = threading.Lock()

    def meet(tensors: Tensors) -> Tensors:
        with counting:
            running[0] += 1
            most[0] = max(most[0], running[0])
        meeting.wait()
        with counting:
            running[0] -= 1
        return {"y": tensors["x"] * 2}

    model = doubler(max_batch=1)
    model.function = meet

    async def scene(bench: Bench) -> None:
        outcomes = await asyncio.gather(*(submit(bench, 0, start=index) for index in range(40)))
        for index, outcome in enumerate(outcomes):
            assert isinstance(outcome, dict)
            np.testing.assert_array_equal(outcome["y"], rows(1, start=index) * 2)
        await bench.batcher.drained()

    play_with(BatchPolicy(instances=2), scene, model)
    assert model.batches == [1] * 40
    assert most == [2]
