"""The batching settings of a model's owner: delay, preferred sizes, priorities, a latency target."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from lathe.server.batching.entry import Entry, Outcome
from lathe.server.batching.policy import BatchPolicy
from lathe.server.errors import DeadlineExceeded, Overloaded
from lathe.server.types import Tensors
from tests.server.batching.batcher_bench import Bench, Scenario, run_scenario
from tests.server.fakes import FakeModel, doubler, echo
from tests.server.running import rows

LONG = 5.0  # seconds; a delay that these tests never wait for


def run_with_policy(policy: BatchPolicy, scenario: Scenario, model: FakeModel) -> Bench:
    async def configured(bench: Bench) -> None:
        bench.batcher.configure(policy)
        await scenario(bench)

    return run_scenario(configured, model)


def submit(bench: Bench, priority: int, start: float = 0.0, width: int = 4, n: int = 1) -> asyncio.Future[Outcome]:
    future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    x = rows(n, width, start=start)
    entry = Entry({"x": x}, bench.signature.group_of({"x": x}), future.set_result, None, priority)
    bench.batcher.submit(entry)
    return future


def test_an_idle_model_waits_for_a_preferred_size_and_leaves_the_rest() -> None:
    model = doubler(max_batch=8)

    async def scenario(bench: Bench) -> None:
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

    bench = run_with_policy(BatchPolicy(preferred=(4, 6), max_delay=LONG), scenario, model)
    assert model.batches == [4, 1]
    assert bench.stats.released["preferred"] == 1


@pytest.mark.parametrize(
    ("waiting", "batches"),
    [
        ((1, 3), [4]),  # no preferred size is reached: all of them
        ((1, 5), [6]),
        ((2, 3, 2), [2, 5]),
        ((3, 3, 3), [6, 3]),
        ((7, 2), [7, 2]),  # 9 would be too many
        ((1, 1, 1, 1, 1, 1, 1), [6, 1]),
    ],
)
def test_requests_of_several_rows_add_up_to_a_preferred_size(waiting: tuple[int, ...], batches: list[int]) -> None:
    """As in Triton's tests of its batcher: sizes 2 and 6 are preferred, 8 is the largest."""
    model = doubler(max_batch=8)

    async def scenario(bench: Bench) -> None:
        first = await bench.hold()
        futures = [submit(bench, 0, n=count) for count in waiting]
        model.gate.set()
        await asyncio.gather(first, *futures)

    run_with_policy(BatchPolicy(preferred=(2, 6), max_delay=0.05), scenario, model)
    assert model.batches == [1, *batches]


def test_after_the_delay_the_waiting_requests_run() -> None:
    model = doubler(max_batch=8)

    async def scenario(bench: Bench) -> None:
        started = time.monotonic()
        await asyncio.gather(submit(bench, 0), submit(bench, 0, start=1))
        assert 0.045 <= time.monotonic() - started < LONG

    run_with_policy(BatchPolicy(max_delay=0.05), scenario, model)
    assert model.batches == [2]


def test_a_full_batch_does_not_wait() -> None:
    model = doubler(max_batch=4)

    async def scenario(bench: Bench) -> None:
        await asyncio.wait_for(asyncio.gather(*(submit(bench, 0, start=i) for i in range(4))), LONG / 2)

    run_with_policy(BatchPolicy(max_delay=LONG), scenario, model)
    assert model.batches == [4]


def test_a_cancelled_request_does_not_count_towards_a_preferred_size() -> None:
    model = doubler(max_batch=4)

    async def scenario(bench: Bench) -> None:
        entry, _ = bench.submit(rows(1))
        bench.batcher.cancel(entry)
        await asyncio.sleep(0.03)

    run_with_policy(BatchPolicy(max_delay=0.01), scenario, model)
    assert model.batches == []


def order_of_execution(model: FakeModel) -> list[float]:
    """Record the order in which rows are run: each row begins with its number."""
    seen: list[float] = []
    plain = model.function

    def run(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        seen.extend(tensors["x"][:, 0].tolist())
        return plain(tensors)

    model.function = run  # type: ignore[assignment]
    return seen


def test_urgent_requests_run_first_and_others_fill_their_batch() -> None:
    model = doubler(max_batch=3)
    seen = order_of_execution(model)

    async def scenario(bench: Bench) -> None:
        first = await bench.hold()
        asked = [(3, 10), (2, 20), (1, 30), (0, 40), (1, 50), (99, 60)]
        waiting = [submit(bench, priority, start=start) for priority, start in asked]
        model.gate.set()
        await asyncio.gather(first, *waiting)

    run_with_policy(BatchPolicy(priority_levels=3, default_priority=2, starvation=LONG), scenario, model)
    assert seen[1:] == [30, 50, 20, 40, 60, 10]
    assert model.batches == [1, 3, 3]


def test_the_least_urgent_request_does_not_starve() -> None:
    model = doubler(max_batch=1)
    seen = order_of_execution(model)

    async def scenario(bench: Bench) -> None:
        first = await bench.hold()
        late = submit(bench, 2, start=99)
        await asyncio.sleep(0.03)
        waiting = [submit(bench, 1, start=index) for index in range(5)]
        model.gate.set()
        await asyncio.gather(first, late, *waiting)

    run_with_policy(BatchPolicy(priority_levels=2, default_priority=1, starvation=0.02), scenario, model)
    assert seen[1] == 99


def test_less_urgent_requests_do_not_count_into_the_expected_time() -> None:
    """Otherwise their backlog would refuse an urgent request with a deadline that it can meet."""
    model = echo("FP32")

    async def scenario(bench: Bench) -> None:
        for _ in range(20):
            bench.batcher.cost.add(1, 0.1)
        waiting = [await bench.hold(), *(submit(bench, 2) for _ in range(40))]
        assert bench.batcher.expected(1, priority=1) < 1.0 < bench.batcher.expected(1, priority=2)
        assert bench.batcher.expected(1) == pytest.approx(bench.batcher.expected(1, priority=2), rel=0.1)
        entry = Entry(
            {"x": rows(1)}, bench.signature.group_of({"x": rows(1)}), lambda _: None, time.monotonic() + 1.0, 2
        )
        with pytest.raises(DeadlineExceeded):
            bench.batcher.submit(entry)
        urgent = Entry(
            {"x": rows(1)}, bench.signature.group_of({"x": rows(1)}), lambda _: None, time.monotonic() + 1.0, 1
        )
        bench.batcher.submit(urgent)
        bench.batcher.queue.starvation = 0.0  # each less urgent request has waited too long: it goes first
        assert bench.batcher.expected(1, priority=1) > 1.0
        bench.batcher.cancel(urgent)
        model.gate.set()
        await asyncio.gather(*waiting)
        assert bench.batcher.queue.ahead(1, 0.0) == bench.batcher.queue.ahead(2, 0.0) == (0, 0, 0)

    run_with_policy(BatchPolicy(priority_levels=2, default_priority=2, starvation=LONG, max_rows=1), scenario, model)


def test_without_levels_all_requests_are_equal() -> None:
    model = echo("FP32")

    async def scenario(bench: Bench) -> None:
        held = await bench.hold()
        order: list[int] = []
        waiting = [submit(bench, priority) for priority in (3, 0, 2, 1)]
        for place, future in enumerate(waiting):
            future.add_done_callback(lambda _, place=place: order.append(place))
        model.gate.set()
        await asyncio.gather(held, *waiting)
        assert order == [0, 1, 2, 3]

    run_with_policy(BatchPolicy(max_rows=1), scenario, model)


def test_a_policy_may_limit_batches_below_the_compiled_size() -> None:
    model = doubler(max_batch=8)

    async def scenario(bench: Bench) -> None:
        first = await bench.hold()
        waiting = [submit(bench, 0) for _ in range(6)]
        model.gate.set()
        await asyncio.gather(first, *waiting)
        np.testing.assert_array_equal(await bench.y(rows(5)), rows(5) * 2)  # split and joined

    run_with_policy(BatchPolicy(max_rows=4), scenario, model)
    assert model.batches == [1, 4, 2, 4, 1]


def learn(bench: Bench) -> None:
    """Teach the cost model one second per row, so that the test's own delays do not matter."""
    for count in (1, 8, 2, 6):
        bench.batcher.cost.add(count, float(count))


def test_batches_are_sized_for_the_latency_target() -> None:
    model = doubler(max_batch=8)

    async def scenario(bench: Bench) -> None:
        learn(bench)
        first = await bench.hold()
        waiting = [submit(bench, 0, start=index) for index in range(6)]
        bench.batcher.configure(BatchPolicy(latency_target=4.5))  # 3 rows: 3 s, with headroom 3.6; 4 would take 4.8
        model.gate.set()
        await asyncio.gather(first, *waiting)

    bench = run_scenario(scenario, model)
    assert bench.stats.released["target"] >= 1
    assert model.batches[:2] == [1, 3]


def test_requests_that_would_miss_the_latency_target_are_refused() -> None:
    model = doubler(max_batch=8)

    async def scenario(bench: Bench) -> None:
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

    bench = run_scenario(scenario, model)
    assert bench.stats.failures["overloaded"] == 31


def test_a_deadline_ends_the_delay() -> None:
    model = doubler(max_batch=8)

    async def scenario(bench: Bench) -> None:
        bench.batcher.cost.add(1, 0.01)
        outcome = await asyncio.wait_for(bench.submit(rows(1), timeout=1.0)[1], LONG)
        assert isinstance(outcome, dict), outcome

    run_with_policy(BatchPolicy(max_delay=10 * LONG), scenario, model)
    assert model.batches == [1]


def test_a_shorter_delay_takes_effect_at_once() -> None:
    model = doubler(max_batch=8)

    async def scenario(bench: Bench) -> None:
        waiting = submit(bench, 0)
        await asyncio.sleep(0.01)
        bench.batcher.configure(BatchPolicy(max_delay=0.02))
        await asyncio.wait_for(waiting, LONG / 2)

    run_with_policy(BatchPolicy(max_delay=LONG), scenario, model)


def test_a_preferred_size_above_the_largest_batch_is_not_waited_for() -> None:
    model = doubler(max_batch=4)

    async def scenario(bench: Bench) -> None:
        await asyncio.wait_for(asyncio.gather(*(submit(bench, 0, start=i) for i in range(4))), LONG / 2)

    run_with_policy(BatchPolicy(preferred=(16,), max_delay=LONG), scenario, model)
    assert model.batches == [4]


def test_batches_run_on_several_instances_up_to_the_limit() -> None:
    """Two batches meet inside the model, each waiting for the other; a third one does not start."""
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

    async def scenario(bench: Bench) -> None:
        outcomes = await asyncio.gather(*(submit(bench, 0, start=index) for index in range(40)))
        for index, outcome in enumerate(outcomes):
            assert isinstance(outcome, dict)
            np.testing.assert_array_equal(outcome["y"], rows(1, start=index) * 2)
        await bench.batcher.drained()

    run_with_policy(BatchPolicy(instances=2), scenario, model)
    assert model.batches == [1] * 40
    assert most == [2]
