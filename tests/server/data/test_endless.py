"""Executions that may go on for ever: broken off once nobody can wait for them any more, and no longer than that."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import pytest

from server.backends.graph import GraphModel
from server.batching import batcher
from server.batching.policy import BatchPolicy
from server.errors import BrokenOff
from server.scheduling import servable as scheduling
from server.scheduling.servable import Servable
from server.types import ModelRef, Tensors
from tests.core.runtime.test_control import endless
from tests.server.data.fakes import FakeModel, doubler
from tests.server.data.running import infer_request, rows, serving, tensor_of, wait_for
from tests.server.data.test_batcher import Bench, play
from tests.server.data.test_graph_backend import load


class Endless(FakeModel):
    """y = 2 * x; rows that begin with 7 go on until they are broken off."""

    may_not_end = True

    def __init__(self) -> None:
        plain = doubler()
        super().__init__(self.go_round, plain.inputs, plain.outputs)
        self.stop = threading.Event()
        self.broken_off = 0

    def go_round(self, inputs: Tensors) -> Tensors:
        if (inputs["x"][:, 0] == 7).any():
            self.stop.clear()
            assert self.stop.wait(20)
            self.broken_off += 1
            raise BrokenOff("as told")
        return {"y": inputs["x"] * 2}

    def interrupt(self, threads: Collection[int] | None = None) -> None:
        self.stop.set()


FOREVER = rows(1, start=7)


def test_what_nobody_waits_for_any_more_is_broken_off() -> None:
    """Its caller has left, or its deadline is over; neighbours in the batch are not run again for it."""
    model = Endless()

    async def scene(bench: Bench) -> None:
        entry, _ = bench.submit(FOREVER)
        await asyncio.to_thread(model.entered.wait, 10)
        bench.batcher.cancel(entry)
        np.testing.assert_array_equal(await bench.y(rows(1)), rows(1) * 2)
        late = bench.submit(FOREVER, timeout=0.1)[1]
        assert isinstance(await late, BrokenOff)

    play(scene, model)
    assert model.broken_off == 2
    assert model.batches == [1, 1, 1]


def test_what_somebody_waits_for_goes_on() -> None:
    model = Endless()

    async def scene(bench: Bench) -> None:
        future = bench.submit(FOREVER)[1]
        bench.submit(FOREVER, timeout=0.01)
        await asyncio.sleep(1.6)
        assert not future.done()
        model.interrupt()
        assert isinstance(await future, BrokenOff)

    play(scene, model)


def test_what_waits_for_a_worker_is_not_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may begin at any moment."""
    monkeypatch.setattr(batcher, "_LOOK", 0.01)
    model, free = Endless(), threading.Event()
    interrupts: list[None] = []
    model.interrupt = lambda threads=None: interrupts.append(None)  # type: ignore[method-assign]

    async def scene(bench: Bench) -> None:
        for _ in range(2):
            bench.pool.submit(lambda: iter([free.wait(20)]), lambda _: None, lambda: None)
        future = bench.submit(rows(1))[1]
        await asyncio.sleep(0.1)
        assert not interrupts
        free.set()
        assert isinstance(await future, dict)

    play(scene, model)


def test_of_several_instances_only_the_one_that_is_given_up_is_broken_off() -> None:
    """While others are waited for at any moment."""
    model = Endless()
    told: list[Collection[int] | None] = []

    def interrupt(threads: Collection[int] | None = None) -> None:
        told.append(threads)
        model.stop.set()

    model.interrupt = interrupt  # type: ignore[method-assign]

    async def scene(bench: Bench) -> None:
        bench.batcher.configure(BatchPolicy(instances=2))
        entry, _ = bench.submit(FOREVER)
        await asyncio.to_thread(model.entered.wait, 10)
        model.gate.clear()
        other = bench.submit(rows(1))[1]
        await asyncio.to_thread(wait_for, lambda: len(bench.batcher._dispatch.under_way) == 2)
        threads = [thread for thread, batch in bench.batcher._dispatch.under_way if entry in batch]
        bench.batcher.cancel(entry)
        await asyncio.to_thread(wait_for, lambda: told)
        assert told == [set(threads)] and not other.done()
        model.gate.set()
        assert isinstance(await other, dict)

    play(scene, model)


def test_a_model_is_let_go_though_an_execution_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "_LAST", 0.1)
    model = Endless()

    async def scene(bench: Bench) -> None:
        waiting = [bench.submit(FOREVER)[1] for _ in range(3)]
        await asyncio.wait_for(Servable(ModelRef("m", 1), model, bench.batcher).retire(), 15)
        assert [type(outcome) for outcome in await asyncio.gather(*waiting)] == [BrokenOff] * 3

    play(scene, model)
    assert model.closed


@pytest.fixture
def looping(tmp_path: Path) -> Iterator[GraphModel]:
    made = load(endless(), tmp_path)
    yield made
    made.close()


class Served(FakeModel):
    """A compiled model."""

    def __init__(self, model: GraphModel) -> None:
        super().__init__(model.execute, model.inputs, model.outputs, batchable=False)
        self.may_not_end, self.interrupt = model.may_not_end, model.interrupt


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
        assert (status, b"was broken off" in body) == (503, True)
        assert time.monotonic() - began > 1
        with running.connect() as raw:
            raw.send(infer_request("doubler", rows(1)))
            np.testing.assert_array_equal(tensor_of(raw.answer()), rows(1) * 2)  # the only worker is free again
        wait_for(lambda: ask(3)[0] == 200)
