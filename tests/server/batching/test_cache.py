"""Where the response cache is on, it answers equal requests and no others."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from lathe.server.access.authority import Authority
from lathe.server.batching import cache_lookup
from lathe.server.batching.entry import Entry
from lathe.server.batching.policy import BatchPolicy
from lathe.server.batching.response_cache import ResponseCache, inputs_digest
from lathe.server.errors import Internal, Overloaded
from lathe.server.scheduling.pool import WorkerPool
from lathe.server.serving.dataplane import DataPlane
from lathe.server.serving.servable import Servable, ServableFactory
from lathe.server.settings import Settings
from lathe.server.telemetry.statistics import StatsBook
from lathe.server.types import InferRequest, ModelRef, Tensors
from tests.server.fakes import FakeModel, FakeRegistry, doubler
from tests.server.running import rows

Ask = Callable[[np.ndarray], Awaitable[np.ndarray]]


def run_scenario(
    model: FakeModel, scenario: Callable[[Servable, Ask], Awaitable[None]], cache_bytes: int = 1 << 20
) -> None:
    async def run() -> None:
        pool, registry = WorkerPool(1), FakeRegistry()
        servable = ServableFactory(Settings(), pool, StatsBook()).make(ModelRef("m", 1), model)
        servable.configure(BatchPolicy(), cache_bytes=cache_bytes)
        registry.add(servable)
        plane = DataPlane(registry, Authority("127.0.0.1"))

        async def ask(x: np.ndarray) -> np.ndarray:
            return (await plane.infer(InferRequest("m", {"x": x}))).outputs["y"]

        try:
            await scenario(servable, ask)
            await servable.batcher.drained()
        finally:
            pool.close()

    asyncio.run(run())


def test_an_equal_request_is_not_executed_again() -> None:
    model = doubler()

    async def scenario(servable: Servable, ask: Ask) -> None:
        for _ in range(3):
            np.testing.assert_array_equal(await ask(rows(2)), rows(2) * 2)
        np.testing.assert_array_equal(await ask(rows(2, start=1)), rows(2, start=1) * 2)
        described = servable.stats.describe()["inference_stats"]
        assert isinstance(described, dict)
        assert (described["cache_hit"]["count"], described["cache_miss"]["count"]) == (2, 2)

    run_scenario(model, scenario)
    assert model.batches == [2, 2]


def test_requests_whose_texts_are_truncated_differently_have_different_answers() -> None:
    model = doubler()

    async def scenario(servable: Servable, _ask: Ask) -> None:
        for most in (0, 3, 4, 3):
            entry = Entry({"x": rows(2)}, servable.signature.group_of({"x": rows(2)}))
            entry.most_tokens = most
            servable.submit(entry)
            await servable.batcher.drained()

    run_scenario(model, scenario)
    assert model.batches == [2, 2, 2]


def test_without_a_configuration_nothing_is_cached() -> None:
    model = doubler()

    async def scenario(servable: Servable, ask: Ask) -> None:
        await ask(rows(1))
        await ask(rows(1))

    run_scenario(model, scenario, cache_bytes=0)
    assert model.batches == [1, 1]


def test_failures_are_not_cached() -> None:
    model = doubler()
    sound = model.function

    def fail(tensors: Tensors) -> Tensors:
        raise RuntimeError

    async def scenario(servable: Servable, ask: Ask) -> None:
        model.function = fail
        with pytest.raises(Internal):
            await ask(rows(1))
        model.function = sound
        np.testing.assert_array_equal(await ask(rows(1)), rows(1) * 2)

    run_scenario(model, scenario)


def test_a_cached_answer_does_not_change_with_its_batch() -> None:
    async def scenario(servable: Servable, ask: Ask) -> None:
        answer = await ask(rows(1))
        answer[:] = 99
        np.testing.assert_array_equal(await ask(rows(1)), rows(1) * 2)

    run_scenario(doubler(), scenario)


def test_a_caller_cancelled_before_its_cached_answer_leaves_nothing() -> None:
    async def scenario(servable: Servable, ask: Ask) -> None:
        await ask(rows(1))
        leaving = asyncio.ensure_future(ask(rows(1)))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        np.testing.assert_array_equal(await ask(rows(1)), rows(1) * 2)
        assert servable.in_flight == 0

    run_scenario(doubler(), scenario)


def test_the_cache_is_bounded_and_evicts_the_least_recently_used() -> None:
    cache = ResponseCache(3 * (256 + 400))
    outputs = {"y": np.zeros(100, np.float32)}
    for key in (b"a", b"b", b"c"):
        cache.put(key, outputs)
    assert cache.get(b"a") is not None
    cache.put(b"d", outputs)
    assert [key for key in (b"a", b"b", b"c", b"d") if cache.get(key) is not None] == [b"a", b"c", b"d"]
    cache.put(b"too large", {"y": np.zeros(10_000, np.float32)})
    assert len(cache) == 3
    assert cache.nbytes == 3 * (256 + 400)


def test_the_cache_is_freed_with_its_model() -> None:
    """Even if a connection remembers the version that answered it last."""

    async def scenario(servable: Servable, ask: Ask) -> None:
        await ask(rows(1))
        assert servable.lookup is not None and len(servable.lookup.cache) == 1
        cache = weakref.ref(servable.lookup.cache)
        await servable.retire()
        assert cache() is None

    run_scenario(doubler(), scenario)


LARGE = 1 << 14  # columns: a row of this size is looked up on a thread


def test_large_requests_are_looked_up_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def digest(inputs: Tensors) -> bytes:
        threads.append(threading.current_thread() is threading.main_thread())
        return inputs_digest(inputs)

    monkeypatch.setattr(cache_lookup, "inputs_digest", digest)
    model = doubler(LARGE)
    x = np.arange(2 * LARGE, dtype=np.float32).reshape(2, LARGE)

    async def scenario(servable: Servable, ask: Ask) -> None:
        for _ in range(3):
            np.testing.assert_array_equal(await ask(x), x * 2)
            await asyncio.gather(*servable._beside)  # until the answer is stored
        assert servable.stats.cache_hit.count == 2

    run_scenario(model, scenario)
    assert model.batches == [2]
    assert threads == [False] * 3


def test_a_request_cancelled_during_its_look_up_leaves_nothing() -> None:
    model = doubler(LARGE)
    x = np.ones((2, LARGE), np.float32)

    async def scenario(servable: Servable, ask: Ask) -> None:
        leaving = asyncio.ensure_future(ask(x))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await servable.retire()
        assert servable.in_flight == 0

    run_scenario(model, scenario)
    assert model.batches == []


def test_a_version_is_closed_after_the_running_look_ups() -> None:
    model = doubler(LARGE)
    x = np.ones((2, LARGE), np.float32)

    async def scenario(servable: Servable, ask: Ask) -> None:
        asked = asyncio.ensure_future(ask(x))
        await asyncio.sleep(0)
        servable.configure(BatchPolicy(), cache_bytes=0)
        await servable.retire()
        np.testing.assert_array_equal(await asked, x * 2)

    run_scenario(model, scenario)
    assert model.closed


def test_refusals_of_large_requests_reach_their_callers() -> None:
    model = doubler(LARGE)

    async def scenario(servable: Servable, ask: Ask) -> None:
        servable.batcher.admission.limit(1, None)
        model.gate.clear()
        first = asyncio.ensure_future(ask(np.zeros((2, LARGE), np.float32)))
        await asyncio.to_thread(model.entered.wait, 20)
        with pytest.raises(Overloaded):
            await ask(np.ones((2, LARGE), np.float32))
        model.gate.set()
        await first

    run_scenario(model, scenario)


def test_different_requests_have_different_keys() -> None:
    x = np.arange(4, dtype=np.float32)
    strings = np.array([b"ab", b"c"], object)
    requests: list[Tensors] = [
        {"x": x},
        {"z": x},
        {"x": x.reshape(2, 2)},
        {"x": x.view(np.int32)},
        {"x": x[::-1]},
        {"x": np.array([0.0, 1, 2, -3], np.float32)},
        {"x": x, "z": x},
        {"x": np.zeros((0, 4), np.float32)},
        {"x": np.zeros((0, 5), np.float32)},
        {"x": strings},
        {"x": np.array([b"a", b"bc"], object)},
    ]
    assert len({inputs_digest(request) for request in requests}) == len(requests)
    assert inputs_digest({"x": x, "z": x + 1}) == inputs_digest({"z": x + 1, "x": x.copy()})
