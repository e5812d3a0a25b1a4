"""Requests in pipelines: order, batching, deadlines, cancellation, failures, traces."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lathe.server.access.authority import Authority
from lathe.server.batching.entry import Entry
from lathe.server.batching.policy import BatchPolicy
from lathe.server.errors import DeadlineExceeded, Internal, Overloaded, Unavailable
from lathe.server.pipelines.definition import Definition, StepDef
from lathe.server.pipelines.pipeline import BuiltinStage, ModelInterface, ModelStage, Pipeline
from lathe.server.pipelines.type_check import check_step, declared_types, topological_order
from lathe.server.scheduling.pool import WorkerPool
from lathe.server.serving.dataplane import DataPlane
from lathe.server.serving.servable import Servable, ServableFactory
from lathe.server.settings import Settings
from lathe.server.telemetry.statistics import StatsBook
from lathe.server.telemetry.tracing import Tracing
from lathe.server.types import InferRequest, ModelRef, Tensors, TensorSpec
from tests.server.fakes import FakeModel, FakeRegistry, doubler


@dataclass
class Setup:
    """Models and one pipeline over them, named p."""

    registry: FakeRegistry
    plane: DataPlane
    factory: ServableFactory
    book: StatsBook
    models: dict[str, FakeModel]
    pipeline: Servable = field(init=False)

    async def ask(self, rows: int = 1, start: float = 0.0, **more: Any) -> np.ndarray:
        x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4) + np.float32(start)
        return (await self.plane.infer(InferRequest("p", {"x": x}, **more))).outputs["y"]


@asynccontextmanager
async def setup(steps: list[dict[str, Any]], outputs: str = "y", **models: FakeModel) -> AsyncIterator[Setup]:
    settings, pool, book, registry = Settings(), WorkerPool(2), StatsBook(), FakeRegistry()
    factory = ServableFactory(settings, pool, book)
    for name, model in models.items():
        registry.add(factory.make(ModelRef(name, 1), model))
    found = Setup(registry, DataPlane(registry, Authority("127.0.0.1", None)), factory, book, models)
    found.pipeline = factory.make(ModelRef("p", 1), chained(steps, outputs, registry, models))
    registry.add(found.pipeline)
    try:
        yield found
    finally:
        for model in models.values():
            model.gate.set()
        await found.pipeline.retire()
        await asyncio.gather(*(servable.retire() for servable in registry.servables() if servable.ref.name != "p"))
        await asyncio.to_thread(pool.close)


def chained(steps: list[dict[str, Any]], output: str, registry: FakeRegistry, models: dict[str, FakeModel]) -> Pipeline:
    definition = Definition(inputs=["x"], outputs=[output], step=tuple(StepDef(**step) for step in steps))
    types, stages = declared_types(definition), []
    for step in topological_order(definition):
        model = models[step.model or step.builtin or ""]
        if step.builtin:
            stages.append(BuiltinStage(step, model, alone=True, inline=False))
        else:
            stages.append(ModelStage(step, "p", registry, ModelInterface.of(model)))
        check_step(step, stages[-1].interface, types)
    return Pipeline(stages, [types["x"]], [types[output]])


def step(name: str, source: str, to: str, kind: str = "model", model: str = "") -> dict[str, Any]:
    return {"name": name, kind: model or name, "inputs": {"x": source}, "outputs": {"y": to}}


CHAIN = [step("a", "x", "m"), step("b", "m", "y")]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - worker threads make it true, too
            await asyncio.sleep(0.001)


def adder(offset: float) -> FakeModel:
    spec = TensorSpec("x", "FP32", (-1, 4))
    return FakeModel(lambda t: {"y": t["x"] + np.float32(offset)}, [spec], [TensorSpec("y", "FP32", (-1, 4))])


def test_tensors_are_passed_on_without_copies() -> None:
    seen: list[Tensors] = []
    made: list[np.ndarray] = []

    def note(tensors: Tensors) -> Tensors:
        seen.append(tensors)
        made.append(tensors["x"] + 1)
        return {"y": made[-1]}

    async def scenario() -> None:
        a, b = doubler(), doubler()
        a.function = b.function = note
        async with setup(CHAIN, a=a, b=b) as world:
            x = np.ones((2, 4), np.float32)
            outputs = (await world.plane.infer(InferRequest("p", {"x": x}))).outputs
            assert seen[0]["x"] is x
            assert outputs["y"][0, 0] == 3.0
            assert seen[1]["x"] is made[0]

    asyncio.run(scenario())


def test_branches_run_concurrently_and_join() -> None:
    """y = (x + 1) + (x + 2), the two sums on two workers: neither can end unless both have begun."""
    meeting = threading.Barrier(2, timeout=20)

    def waits(offset: float) -> FakeModel:
        model = adder(offset)
        model.function = lambda t: (meeting.wait(), {"y": t["x"] + np.float32(offset)})[1]
        return model

    spec = [TensorSpec(name, "FP32", (-1, 4)) for name in ("l", "r")]
    join = FakeModel(lambda t: {"y": t["l"] + t["r"]}, spec, [TensorSpec("y", "FP32", (-1, 4))])
    steps = [
        {"name": "join", "model": "join", "inputs": {"l": "p1", "r": "p2"}, "outputs": {"y": "y"}},
        step("one", "x", "p1"),
        step("two", "x", "p2"),
    ]

    async def scenario() -> None:
        async with setup(steps, one=waits(1), two=waits(2), join=join) as world:
            np.testing.assert_array_equal(await world.ask(), [[3, 5, 7, 9]])

    asyncio.run(scenario())


def test_each_stage_batches_its_waiting_requests() -> None:
    async def scenario() -> None:
        a, b = doubler(), doubler(max_batch=4)
        async with setup(CHAIN, a=a, b=b) as world:
            b.gate.clear()
            first = asyncio.create_task(world.ask())
            await asyncio.to_thread(b.entered.wait, 20)
            rest = [asyncio.create_task(world.ask(start=n)) for n in range(6)]
            await until(lambda: world.registry.resolve("b").in_flight == 7)
            b.gate.set()
            answers = await asyncio.gather(first, *rest)
            assert b.batches == [1, 4, 2]
            for start, answer in enumerate(answers[1:]):
                np.testing.assert_array_equal(answer, (np.arange(4) + start)[None] * 4)

    asyncio.run(scenario())


def test_a_request_larger_than_any_stages_batch_is_split_and_joined() -> None:
    async def scenario() -> None:
        async with setup(CHAIN, a=doubler(max_batch=8), b=doubler(max_batch=3)) as world:
            np.testing.assert_array_equal(await world.ask(20), np.arange(80).reshape(20, 4) * 4)

    asyncio.run(scenario())


def test_a_cancelled_request_is_removed_from_every_queue() -> None:
    async def scenario() -> None:
        a, b = doubler(), doubler()
        async with setup(CHAIN, a=a, b=b) as world:
            b.gate.clear()
            busy = asyncio.create_task(world.ask())
            await asyncio.to_thread(b.entered.wait, 20)
            leaving = asyncio.create_task(world.ask())
            queue = world.registry.resolve("b").batcher.queue
            await until(lambda: len(queue) == 1)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            assert (len(queue), world.pipeline.in_flight, world.pipeline.stats.cancelled) == (0, 1, 1)
            b.gate.set()
            await busy
            assert b.batches == [1]
            assert world.pipeline.in_flight == 0

    asyncio.run(scenario())


def test_a_deadline_holds_in_a_later_stage() -> None:
    async def scenario() -> None:
        a, b = doubler(), doubler()
        async with setup(CHAIN, a=a, b=b) as world:
            b.gate.clear()
            busy = asyncio.create_task(world.ask())
            await asyncio.to_thread(b.entered.wait, 20)
            with pytest.raises(DeadlineExceeded, match="step 'b': the request's timeout passed while it waited"):
                await world.ask(deadline=monotonic() + 0.05)
            b.gate.set()
            await busy
            assert world.pipeline.stats.failures["deadline_exceeded"] == 1

    asyncio.run(scenario())


def test_a_deadline_that_all_steps_together_cannot_meet_is_refused_at_once() -> None:
    async def scenario() -> None:
        a, b = doubler(), doubler()
        async with setup(CHAIN, a=a, b=b) as world:
            for name in ("a", "b"):
                for rows in (1, 2, 3, 4, 5):
                    world.registry.resolve(name).batcher.cost.add(rows, 0.01 * rows)
            with pytest.raises(DeadlineExceeded, match="than the expected time of the pipeline's steps"):
                await world.ask(deadline=monotonic() + 0.015)  # enough for either step, not for both
            assert a.batches == []

    asyncio.run(scenario())


def test_the_priority_counts_at_each_stage() -> None:
    async def scenario() -> None:
        a, b = doubler(), doubler(max_batch=1)
        async with setup(CHAIN, a=a, b=b) as world:
            world.registry.resolve("b").configure(BatchPolicy(priority_levels=2, default_priority=2))
            b.gate.clear()
            order: list[str] = []

            async def ask(name: str, priority: int) -> None:
                await world.ask(priority=priority)
                order.append(name)

            tasks = [asyncio.create_task(ask("first", 0))]
            await asyncio.to_thread(b.entered.wait, 20)
            for name, priority in (("next", 0), ("later", 0), ("urgent", 1)):
                tasks.append(asyncio.create_task(ask(name, priority)))
                await until(lambda: world.registry.resolve("b").in_flight == len(tasks))
            b.gate.set()
            await asyncio.gather(*tasks)
            assert order.index("urgent") < order.index("later")

    asyncio.run(scenario())


def test_a_failing_step_fails_only_its_request_and_is_named() -> None:
    def picky(tensors: Tensors) -> Tensors:
        if (tensors["x"] >= 100).any():
            raise RuntimeError("too much")
        return {"y": tensors["x"] * 2}

    async def scenario() -> None:
        a, b = doubler(), doubler()
        b.function = picky
        async with setup(CHAIN, a=a, b=b) as world:
            outcomes = await asyncio.gather(*(world.ask(start=start) for start in (0, 100, 1)), return_exceptions=True)
            assert isinstance(outcomes[1], Internal)
            assert outcomes[1].message == "step 'b': the model failed to execute (RuntimeError)"
            np.testing.assert_array_equal(outcomes[0], [[0, 4, 8, 12]])
            np.testing.assert_array_equal(outcomes[2], [[4, 8, 12, 16]])
            assert world.pipeline.in_flight == 0

    asyncio.run(scenario())


def test_a_full_stage_refuses_and_the_other_branch_is_cancelled() -> None:
    steps = [
        {"name": "join", "model": "join", "inputs": {"l": "p1", "r": "p2"}, "outputs": {"y": "y"}},
        step("one", "x", "p1"),
        step("two", "x", "p2"),
    ]
    spec = [TensorSpec(name, "FP32", (-1, 4)) for name in ("l", "r")]
    join = FakeModel(lambda t: {"y": t["l"] + t["r"]}, spec, [TensorSpec("y", "FP32", (-1, 4))])

    async def scenario() -> None:
        one, two = doubler(), doubler()
        async with setup(steps, one=one, two=two, join=join) as world:
            two.gate.clear()
            busy = asyncio.create_task(world.ask())
            await asyncio.to_thread(two.entered.wait, 20)
            world.registry.resolve("two").batcher.admission.limit(1, None)
            with pytest.raises(Overloaded, match="step 'two': the queue is full") as raised:
                await world.ask()
            assert raised.value.retry_after
            assert world.pipeline.in_flight == 1
            two.gate.set()
            await busy
            assert sum(one.batches) == 1

    asyncio.run(scenario())


def test_a_full_pipeline_is_shared_between_clients() -> None:
    """One client once had all six places, and the requests of another were refused until one was free."""

    async def scenario() -> None:
        a = doubler()
        async with setup([step("a", "x", "y")], a=a) as world:
            a.gate.clear()
            world.pipeline.batcher.admission.limit(6, None)
            x = np.ones((1, 4), np.float32)
            group = world.pipeline.signature.group_of({"x": x})

            def ask(client: str) -> asyncio.Task[Tensors]:
                asked = world.plane.execute(world.pipeline, {"x": x}, group, None, client=client)
                return asyncio.create_task(asked)

            mine = [ask("mine") for _ in range(6)]
            await until(lambda: world.pipeline.in_flight == 6)
            others = [ask("other") for _ in range(4)]
            await asyncio.wait(others[3:], timeout=20)
            with pytest.raises(Overloaded, match="the queue is full: 6 of 6"):
                await others[3]
            for task in mine[3:]:
                with pytest.raises(Overloaded, match="made room for another"):
                    await task
            a.gate.set()
            for task in mine[:3] + others[:3]:
                assert (await task)["y"].tolist() == [[2.0] * 4]

    asyncio.run(scenario())


def test_a_built_in_step_does_not_block_the_loop_and_survives_its_callers() -> None:
    async def scenario() -> None:
        slow, b = doubler(), doubler()
        steps = [step("slow", "x", "m", "builtin"), step("b", "m", "y")]
        async with setup(steps, slow=slow, b=b) as world:
            world.registry.found.pop("slow")  # the pipeline has its own reference
            slow.gate.clear()
            leaving = asyncio.create_task(world.ask())
            await asyncio.to_thread(slow.entered.wait, 20)  # and this loop still runs
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            retiring = asyncio.create_task(world.pipeline.retire())
            await asyncio.sleep(0.02)
            assert not slow.closed  # it still runs
            slow.gate.set()
            await retiring
            assert slow.closed

    asyncio.run(scenario())


def test_a_trace_shows_each_step() -> None:
    async def scenario() -> None:
        async with setup(CHAIN, a=doubler(), b=doubler()) as world:
            exporter = InMemorySpanExporter()
            world.plane.tracing = Tracing("", 1.0, exporter)
            await world.ask()
            world.plane.tracing._provider.force_flush()
            spans = {span.name: span for span in exporter.get_finished_spans()}
            assert {"infer p", "step a", "step b", "queue", "execute"} <= spans.keys()
            for name in ("step a", "step b"):
                assert spans[name].parent.span_id == spans["infer p"].context.span_id
                assert spans[name].attributes == {"lathe.model": name[-1], "lathe.version": 1}
            assert spans["step a"].end_time <= spans["step b"].start_time
            world.plane.tracing.close()

    asyncio.run(scenario())


def test_a_step_answered_from_a_cache_is_in_the_trace() -> None:
    async def scenario() -> None:
        a = doubler()
        async with setup(CHAIN, a=a, b=doubler()) as world:
            world.registry.resolve("a").configure(BatchPolicy(), cache_bytes=10_000)
            await world.ask()
            exporter = InMemorySpanExporter()
            world.plane.tracing = Tracing("", 1.0, exporter)
            await world.ask()
            world.plane.tracing._provider.force_flush()
            spans = {span.name: span for span in exporter.get_finished_spans()}
            assert a.batches == [1]
            assert spans["infer p"].start_time - 1_000_000 <= spans["step a"].start_time <= spans["step a"].end_time
            world.plane.tracing.close()

    asyncio.run(scenario())


def test_a_reset_during_a_waiting_step_counts_as_begun() -> None:
    """The connection asks a request whether dropping it would lose work."""

    async def scenario() -> None:
        a, b = doubler(), doubler()
        async with setup(CHAIN, a=a, b=b) as world:
            b.gate.clear()
            servable = world.pipeline
            x = {"x": np.ones((1, 4), np.float32)}
            entry = Entry(x, servable.signature.group_of(x), lambda outcome: None)
            servable.submit(entry)
            assert entry.is_waiting
            await asyncio.to_thread(b.entered.wait, 20)
            assert not entry.is_waiting
            servable.cancel(entry)
            assert servable.in_flight == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_a_request_is_refused_while_the_model_of_a_step_is_not_loaded(timeout: float | None) -> None:
    async def scenario() -> None:
        async with setup(CHAIN, a=doubler(), b=doubler()) as world:
            await world.registry.unload("b")
            with pytest.raises(Unavailable, match="step 'b': model 'b' is not loaded"):
                await world.ask(deadline=None if timeout is None else monotonic() + timeout)
            group = world.pipeline.signature.group_of({"x": np.ones((1, 4), np.float32)})
            error = world.pipeline.turn_away(group, 16, timeout, "")
            assert (error is None) == (timeout is None)
            assert world.pipeline.in_flight == 0
            await world.registry.load("b")
            np.testing.assert_array_equal(await world.ask(), [[0, 4, 8, 12]])

    asyncio.run(scenario())
