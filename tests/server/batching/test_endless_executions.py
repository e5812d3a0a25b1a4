"""Executions that may not end: interrupted once no caller waits for them any more, and not before."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from lathe.server.app import create_app
from lathe.server.backends.graph import GraphModel
from lathe.server.batching import abandoned_runs
from lathe.server.batching.abandoned_runs import AbandonedRuns
from lathe.server.batching.execution import Execute, gather, run, run_packed
from lathe.server.batching.policy import BatchPolicy
from lathe.server.errors import ExecutionInterrupted
from lathe.server.serve import make_server
from lathe.server.serving.servable import Servable
from lathe.server.settings import Settings
from lathe.server.types import ModelRef, Tensors
from tests.core.runtime.test_interrupt import endless
from tests.server.backends.test_graph_backend import load
from tests.server.batching.batcher_bench import Bench, run_scenario
from tests.server.fakes import FakeModel, doubler
from tests.server.running import infer_request, rows, serving, tensor_of, wait_for
from tests.server.server_thread import in_a_thread, until


class Endless(FakeModel):
    """y = 2 * x; rows that begin with 7 run until they are interrupted."""

    may_not_end = True

    def __init__(self) -> None:
        plain = doubler()
        super().__init__(self.go_round, plain.inputs, plain.outputs)
        self.broken_off = 0
        self.numbers = count(1)
        self.running_batches: dict[
            int, tuple[int, threading.Event]
        ] = {}  # by thread: the run, and the event that ends it

    def go_round(self, inputs: Tensors) -> Tensors:
        run = self.running_batches[threading.get_ident()] = next(self.numbers), threading.Event()
        try:
            if (inputs["x"][:, 0] == 7).any():
                assert run[1].wait(20)
                self.broken_off += 1
                raise ExecutionInterrupted("as told")
        finally:
            del self.running_batches[threading.get_ident()]
        return {"y": inputs["x"] * 2}

    def runs(self) -> dict[int, int]:
        return {thread: number for thread, (number, _) in dict(self.running_batches).items()}

    def interrupt(self, run: int | None = None) -> None:
        for number, stop in list(self.running_batches.values()):
            if run in (None, number):
                stop.set()


FOREVER = rows(1, start=7)


def test_an_execution_that_no_caller_waits_for_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller disconnected or its deadline passed; other requests of the batch are not run again because of it."""
    monkeypatch.setattr(abandoned_runs, "INTERRUPT_DELAY", 0.05)
    model = Endless()

    async def scenario(bench: Bench) -> None:
        entry, _ = bench.submit(FOREVER)
        await asyncio.to_thread(model.entered.wait, 10)
        bench.batcher.cancel(entry)
        np.testing.assert_array_equal(await bench.y(rows(1)), rows(1) * 2)
        late = bench.submit(FOREVER, timeout=0.1)[1]
        assert isinstance(await late, ExecutionInterrupted)

    run_scenario(scenario, model)
    assert model.broken_off == 2
    assert model.batches == [1, 1, 1]


def test_an_execution_that_a_caller_waits_for_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abandoned_runs, "WATCH_INTERVAL", 0.01)
    monkeypatch.setattr(abandoned_runs, "INTERRUPT_DELAY", 0.05)
    model = Endless()

    async def scenario(bench: Bench) -> None:
        future = bench.submit(FOREVER)[1]
        bench.submit(FOREVER, timeout=0.01)
        await asyncio.sleep(0.2)
        assert not future.done()
        model.interrupt()
        assert isinstance(await future, ExecutionInterrupted)

    run_scenario(scenario, model)


def test_a_batch_that_waits_for_a_worker_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may begin at any moment."""
    monkeypatch.setattr(abandoned_runs, "WATCH_INTERVAL", 0.01)
    model, free = Endless(), threading.Event()
    interrupts: list[int | None] = []
    model.interrupt = interrupts.append  # type: ignore[method-assign]

    async def scenario(bench: Bench) -> None:
        for _ in range(2):
            bench.pool.submit(lambda: iter([free.wait(20)]), lambda _: None, lambda: None)
        future = bench.submit(rows(1))[1]
        await asyncio.sleep(0.1)
        assert not interrupts
        free.set()
        assert isinstance(await future, dict)

    run_scenario(scenario, model)


def test_only_the_abandoned_one_of_several_executions_is_interrupted() -> None:
    """Callers wait for the other executions all the time."""
    model = Endless()

    async def scenario(bench: Bench) -> None:
        bench.batcher.configure(BatchPolicy(instances=2))
        entry, _ = bench.submit(FOREVER)
        await asyncio.to_thread(wait_for, lambda: len(model.runs()) == 1)
        other = bench.submit(FOREVER)[1]
        await asyncio.to_thread(wait_for, lambda: len(model.runs()) == 2)
        bench.batcher.cancel(entry)
        await asyncio.to_thread(wait_for, lambda: len(model.runs()) == 1)
        await asyncio.sleep(0.5)
        assert not other.done() and model.broken_off == 1
        model.interrupt()
        assert isinstance(await other, ExecutionInterrupted)

    run_scenario(scenario, model)


def test_the_interruption_does_not_hit_the_threads_next_batch() -> None:
    """The next batch may begin between the check for abandoned runs and the interruption."""
    model = Endless()
    told: list[int | None] = []

    async def scenario(bench: Bench) -> None:
        entry, _ = bench.submit(FOREVER)
        await asyncio.to_thread(wait_for, lambda: len(model.runs()) == 1)
        ((thread, first),) = model.runs().items()
        futures = [bench.submit(FOREVER)[1] for _ in range(model.max_batch)]  # a full batch, which is staged
        interrupt = model.interrupt

        def slowly(run: int | None = None) -> None:
            told.append(run)
            model.running_batches[thread][1].set()
            wait_for(lambda: model.runs().get(thread, first) != first)
            interrupt(run)

        model.interrupt = slowly  # type: ignore[method-assign]
        bench.batcher.cancel(entry)
        await asyncio.to_thread(wait_for, lambda: told)
        model.interrupt = interrupt  # type: ignore[method-assign]
        await asyncio.sleep(0.5)
        assert told == [first] and not any(future.done() for future in futures)
        model.interrupt()
        assert [type(outcome) for outcome in await asyncio.gather(*futures)] == [ExecutionInterrupted] * model.max_batch

    run_scenario(scenario, model)


def test_a_model_whose_runs_always_end_has_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every busy model would have a timer."""
    looks: list[AbandonedRuns] = []
    monkeypatch.setattr(abandoned_runs, "WATCH_INTERVAL", 0.01)
    monkeypatch.setattr(AbandonedRuns, "_interrupt", lambda self: looks.append(self))

    async def scenario(bench: Bench) -> None:
        bench.model.gate.clear()
        future = bench.submit(rows(1))[1]
        await asyncio.sleep(0.1)
        bench.model.gate.set()
        assert isinstance(await future, dict)

    run_scenario(scenario, doubler())
    assert not looks
    run_scenario(scenario, Endless())
    assert looks


@pytest.mark.parametrize("execute", [run, run_packed], ids=["stacked", "packed"])
def test_other_requests_of_an_interrupted_batch_are_not_run_again(execute: Execute) -> None:
    """Each of them alone could take as long."""
    calls: list[int] = []

    class Packing(FakeModel):
        packs, packing_reason = True, ""

        def tokens(self, inputs: Tensors) -> int:
            return 1

        def execute_packed(self, requests: list[Tensors]) -> list[Tensors]:
            return [self.execute(gather(requests))]

    def go_round(inputs: Tensors) -> Tensors:
        calls.append(len(inputs["x"]))
        raise ExecutionInterrupted("as told")

    plain = doubler()
    found = execute(Packing(go_round, plain.inputs, plain.outputs), [{"x": rows(1)}, {"x": rows(1)}], [1, 1])
    assert [type(outcome) for outcome in found.outcomes] == [ExecutionInterrupted] * 2
    assert calls == [2]


def test_a_model_is_closed_although_an_execution_does_not_end() -> None:
    model = Endless()

    async def scenario(bench: Bench) -> None:
        waiting = [bench.submit(FOREVER)[1] for _ in range(3)]
        await asyncio.wait_for(Servable(ModelRef("m", 1), model, bench.batcher).retire(0.1), 15)
        assert [type(outcome) for outcome in await asyncio.gather(*waiting)] == [ExecutionInterrupted] * 3

    run_scenario(scenario, model)
    assert model.closed


def test_closing_waits_for_an_ending_execution_without_polling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = doubler()
    looks: list[Any] = []
    wait = asyncio.wait

    def counted(*waited: Any, **options: Any) -> Any:
        looks.append(options)
        return wait(*waited, **options)

    async def scenario(bench: Bench) -> None:
        running = await bench.hold()
        monkeypatch.setattr(asyncio, "wait", counted)
        retiring = asyncio.ensure_future(Servable(ModelRef("m", 1), model, bench.batcher).retire(0.0))
        await asyncio.sleep(0.1)
        assert not retiring.done()
        model.gate.set()
        await retiring
        assert isinstance(running.result(), dict)

    run_scenario(scenario, model)
    assert model.closed
    assert len(looks) <= 2


@pytest.fixture
def looping(tmp_path: Path) -> Iterator[GraphModel]:
    made = load(endless(), tmp_path)
    yield made
    made.close()


class Served(FakeModel):
    """A compiled model."""

    def __init__(self, model: GraphModel) -> None:
        super().__init__(model.execute, model.inputs, model.outputs, batchable=False)
        self.may_not_end, self.interrupt, self.runs = model.may_not_end, model.interrupt, model.runs


def test_a_loop_over_http_ends_with_its_deadline(looping: GraphModel) -> None:
    def ask(trips: int, timeout: int = 0) -> tuple[int, bytes]:
        document = {
            "inputs": [
                {"name": "m", "shape": [], "datatype": "INT64", "data": [trips]},
                {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [0, 0, 0, 0]},
            ],
            "parameters": {"timeout": timeout} if timeout else {},
        }
        answer = running.infer("loop", document)
        return answer.status, answer.body

    with serving({"loop": Served(looping), "doubler": doubler()}, workers=1) as running:
        assert ask(3)[0] == 200
        began = time.monotonic()
        status, body = ask(1 << 62, timeout=200_000)
        assert (status, b"was interrupted" in body) == (503, True)
        assert time.monotonic() - began > 1
        with running.connect() as raw:
            raw.send(infer_request("doubler", rows(1)))
            np.testing.assert_array_equal(tensor_of(raw.answer()), rows(1) * 2)  # the only worker is free again
        wait_for(lambda: ask(3)[0] == 200)


def test_a_server_that_stops_interrupts_endless_executions(tmp_path: Path) -> None:
    """The caller gets an error, after the time that accepted requests get."""
    folder = tmp_path / "repo" / "loop" / "1"
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(endless())
    settings = Settings(port=0, model_repo=tmp_path / "repo", threads=1, drain_timeout=1)
    server = make_server(create_app(settings), settings)
    tensors = [
        {"name": "m", "shape": [], "datatype": "INT64", "data": [1 << 62]},
        {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [0, 0, 0, 0]},
    ]
    with ThreadPoolExecutor(1) as pool:
        with in_a_thread(server) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            until(lambda: client.get("/v2/models/loop/ready").status_code == 200)
            url = f"{client.base_url}/v2/models/loop/infer"
            asking = pool.submit(httpx.post, url, json={"inputs": tensors}, timeout=60)
            pending = 'nv_inference_pending_request_count{model="loop",version="1"} 1'
            until(lambda: pending in client.get("/metrics").text)
        answer = asking.result(30)
    assert (answer.status_code, "was interrupted" in answer.text) == (503, True)
