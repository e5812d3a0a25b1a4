"""Requests that equal the previous one on their connection are recognised by their first bytes."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import struct
import threading
import time
from typing import Any

import numpy as np
import pytest

from lathe.server.access.quotas import Quota, Quotas
from lathe.server.access.scopes import Scope
from lathe.server.api.connection.outbox import Outbox
from lathe.server.api.connection.request_template import RequestTemplate
from lathe.server.batching.admission import Admission
from lathe.server.batching.batcher import Batcher
from lathe.server.batching.entry import DirectEntry, Outcome
from lathe.server.batching.inline_budget import InlineBudget
from lathe.server.batching.mode import Mode
from lathe.server.batching.signature import Signature
from lathe.server.batching.single_batches import SINGLE_BATCHES
from lathe.server.errors import Forbidden, Unauthorized
from lathe.server.scheduling.pool import WorkerPool
from lathe.server.telemetry.statistics import Statistics
from lathe.server.types import ModelRef, Tensors
from tests.server.fakes import adder, doubler
from tests.server.running import RequestMaker, each_form, request, rows, serving, tensor_of, wait_for


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> list[RequestTemplate]:
    """The templates of the requests that were recognised as repeated."""
    found: list[RequestTemplate] = []
    repeat = Outbox.repeat

    def noting(outbox: Outbox, template: RequestTemplate, data: bytes, request: bytes) -> None:
        found.append(template)
        repeat(outbox, template, data, request)

    monkeypatch.setattr(Outbox, "repeat", noting)
    return found


@each_form
def test_equal_requests_are_parsed_once_and_answered_by_their_own_tensors(
    repeats: list[RequestTemplate], asked: RequestMaker
) -> None:
    with serving({"doubler": doubler()}) as running, running.connect() as raw:
        for index in range(8):
            raw.send(asked("doubler", rows(2, start=index)))
            np.testing.assert_array_equal(tensor_of(raw.answer()), rows(2, start=index) * 2)
    assert len(repeats) == 5  # the parser reads the first, and two more must be equal


@each_form
def test_different_requests_between_equal_ones_are_parsed(repeats: list[RequestTemplate], asked: RequestMaker) -> None:
    with serving({"doubler": doubler(max_batch=16)}) as running, running.connect() as raw:
        for index in range(12):
            count = 3 if index % 4 == 3 else 2
            raw.send(asked("doubler", rows(count, start=index)))
            np.testing.assert_array_equal(tensor_of(raw.answer()), rows(count, start=index) * 2)
            if index % 5 == 4:
                raw.send(request("GET", "/v2/models/doubler/ready"))
                assert raw.answer().status == 200
    assert 0 < len(repeats) < 12


@each_form
def test_a_repeated_request_may_arrive_in_pieces(repeats: list[RequestTemplate], asked: RequestMaker) -> None:
    data = asked("doubler", rows(1))
    with serving({"doubler": doubler()}) as running, running.connect() as raw:
        for cut in (0, 0, 0, 0, 10, len(data) - 1, data.index(b"\r\n\r\n") + 20):
            raw.send(data[:cut])
            time.sleep(0.01)
            raw.send(data[cut:])
            np.testing.assert_array_equal(tensor_of(raw.answer()), rows(1) * 2)
    assert repeats


@each_form
def test_a_repeated_request_is_answered_by_the_current_version(
    repeats: list[RequestTemplate], asked: RequestMaker
) -> None:
    """Another version, an unloaded model, a full queue, and the first version again."""
    model, other = doubler(), doubler()
    other.function = lambda tensors: {"y": tensors["x"] * 3}
    data = asked("doubler", rows(1))
    with serving({"doubler": model, "other": other}, queue_items=2) as running, running.connect() as raw:

        def ask(times: int = 1) -> list[object]:
            answers = []
            for _ in range(times):
                raw.send(data)
                answer = raw.answer()
                answers.append(float(tensor_of(answer)[0, 1]) if answer.status == 200 else answer.status)
            return answers

        registry, value = running.registry, float(rows(1)[0, 1])
        assert ask(5) == [value * 2] * 5
        first, second = registry.found["doubler"][""], registry.found["other"][""]
        registry.found["doubler"][""] = second
        assert ask(5) == [value * 3] * 5
        # the first of the five notices the change
        assert [template.servable for template in repeats] == [first] * 3 + [second] * 2
        registry.found["doubler"][""] = first
        registry.is_unloaded.add("doubler")
        assert ask(2) == [503, 503]
        registry.is_unloaded.clear()
        assert ask(3) == [value * 2] * 3
        repeats.clear()
        first.batcher.admission.items = 2
        assert ask() == [503]
        running.engine.plane.refusing_ticks = 0
        assert ask() == [503]
        first.batcher.admission.items = 0
        assert ask(2) == [value * 2] * 2
    assert [template.servable for template in repeats] == [first] * 2  # not while requests are being refused


@each_form
def test_repeated_requests_are_authorized_and_charged_each_time(
    repeats: list[RequestTemplate], asked: RequestMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two requests a key is revoked, or reaches its quota."""
    data = asked("doubler", rows(1), Authorization="Bearer key")
    refusals: list[Exception] = []

    def check(authorization: str, scope: Scope, model: str) -> str:
        assert (authorization, scope, model) == ("Bearer key", Scope.INFER, "doubler")
        if refusals:
            raise refusals[0]
        return "its id"

    with serving({"doubler": doubler()}) as running, running.connect() as raw:
        plane = running.engine.plane
        monkeypatch.setattr(plane.authority, "check", check)

        def ask() -> int:
            raw.send(data)
            return raw.answer().status

        assert [ask() for _ in range(4)] == [200] * 4
        for error, status in ((Unauthorized("no"), 401), (Forbidden("no"), 403)):
            refusals[:] = [error]
            assert [ask(), ask()] == [status] * 2
        refusals.clear()
        quotas = Quotas(Quota(rate=0.001, burst=2))
        monkeypatch.setattr(plane, "quotas", quotas)
        assert [ask() for _ in range(4)] == [200, 200, 429, 429]
        assert set(quotas._full_at) == {"its id"}
    assert len(repeats) >= 8


def test_repeated_json_is_checked_in_full() -> None:
    """Values that are equal in Python are not always equal JSON."""
    sound = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    others: list[dict[str, Any]] = [
        {"shape": [True, 4]},
        {"shape": [1.0, 4]},
        {"data": 0},
        {"data": [[1, 2, 3]]},
        {"data": [1, 2, 3, True]},
        {"data": [1, 2, 3, None]},
        {"data": None},
        {"parameters": {"binary_data_size": 16}},
    ]
    with serving({"doubler": doubler()}) as running:
        for start in range(3):
            values = [start, 0.5, float("inf"), 4]
            answer = running.infer("doubler", {"inputs": [{**sound, "data": values}]})
            assert answer.status == 200
            assert answer.json["outputs"][0]["data"] == [2 * value for value in values]
        for other in others:
            for _ in range(2):
                assert running.infer("doubler", {"inputs": [{**sound, **other}]}).status == 400, other
        assert running.infer("doubler", {"inputs": [sound], "parameters": {"timeout": None}}).status == 200
        assert running.infer("doubler", {"inputs": [sound], "parameters": {"timeout": math.nan}}).status == 400
        assert running.infer("doubler", {"inputs": [sound]}).json["outputs"][0]["data"] == [2, 4, 6, 8]


def test_json_data_beside_binary_data_are_read_each_time(repeats: list[RequestTemplate]) -> None:
    """Equal bytes before the binary data hold equal JSON data, but no template may be made of them."""
    inside = {"name": "a", "datatype": "INT32", "shape": [1, 16], "data": list(range(16))}
    outside = {"name": "b", "datatype": "INT32", "shape": [1, 16], "parameters": {"binary_data_size": 64}}
    head = json.dumps({"inputs": [inside, outside], "parameters": {"binary_data_output": True}}).encode()
    with serving({"adder": adder()}) as running, running.connect() as raw:
        for start in range(6):
            values = np.full((1, 16), start, np.int32)
            fields = {"Inference-Header-Content-Length": str(len(head))}
            raw.send(request("POST", "/v2/models/adder/infer", head + values.tobytes(), fields))
            answer = raw.answer()
            assert answer.status == 200
            assert np.frombuffer(answer.body[-128:-64], np.int32).tolist() == [start + value for value in range(16)]
    assert not repeats


@each_form
def test_refused_requests_of_a_disconnected_client_leave_nothing(asked: RequestMaker) -> None:
    """They were never queued, so there is nothing to remove from the queue."""
    model, data = doubler(), asked("doubler", rows(1))
    with serving({"doubler": model}, queue_items=2, inline_budget_us=0, max_pipeline=64) as running:
        servable = running.registry.resolve("doubler")
        assert running.ask_raw(data).status == 200
        model.gate.clear()
        with running.connect() as leaves:
            leaves.send(data * 40)
            wait_for(lambda: servable.stats.failures["overloaded"] >= 38)
            leaves.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset
        wait_for(lambda: not running.server.server_state.connections)
        model.gate.set()
        wait_for(lambda: servable.in_flight <= 0)
        assert servable.in_flight == 0
        assert [running.ask_raw(data).status for _ in range(3)] == [200] * 3


def test_many_deadlines_that_pass_in_the_queue_leave_nothing() -> None:
    """So many that the queue removes the places of the cancelled entries."""

    async def scenario(batcher: Batcher, signature: Signature) -> None:
        model.gate.clear()
        outcomes: list[Outcome] = []
        for timeout in (None, *[0.01] * 200):
            x = {"x": rows(1)}
            deadline = None if timeout is None else time.monotonic() + timeout
            batcher.submit(DirectEntry(x, signature.group_of(x), outcomes.append, deadline))
        await asyncio.to_thread(wait_for, lambda: (len(batcher.queue), batcher.queue.rows) == (0, 0))
        assert len(outcomes) >= 200 - 2 * model.max_batch  # of the others, one batch runs and one is staged behind it

    model = doubler()
    batcher = with_batcher(scenario, model)
    assert (len(batcher.queue), batcher.queue.rows, batcher.admission.items) == (0, 0, 0)


def test_consecutive_single_requests_run_in_the_submitting_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InlineBudget, "allows", lambda budget, rows: True)  # however long the machine takes
    model = doubler()

    async def scenario(batcher: Batcher, signature: Signature) -> None:
        outcomes: list[Outcome] = []

        def submit(kind: type[DirectEntry] = DirectEntry) -> int:
            x = {"x": rows(1)}
            batcher.submit(kind(x, signature.group_of(x), outcomes.append))
            return len(outcomes)

        for number in range(SINGLE_BATCHES):
            assert submit() == number
            await asyncio.sleep(0.001)
        assert submit() == SINGLE_BATCHES + 1
        time.sleep(0.001)  # noqa: ASYNC251 (as long as reading the next one takes)
        assert [submit() for _ in range(3)] == [
            SINGLE_BATCHES + 1
        ] * 3  # these requests come in the same turn of the loop
        await asyncio.sleep(0.001)
        assert model.batches == [1] * (SINGLE_BATCHES + 1) + [3]
        assert submit() == SINGLE_BATCHES + 4  # not before the batcher sees that requests come one by one again

    with_batcher(scenario, model, inline=1.0)


@pytest.mark.parametrize(("devices", "here"), [((), True), (("cuda:0",), False), (None, False)])
def test_waiting_for_the_interpreter_lock_does_not_count_as_cost(devices: tuple[str, ...] | None, here: bool) -> None:
    """For a model that computes only on the host's processor, the thread's processor time is the cost."""
    model, threads = doubler(), []

    def late(tensors: Tensors) -> Tensors:
        threads.append(threading.get_ident())
        time.sleep(0.02)  # as if another thread held the interpreter lock
        return {"y": tensors["x"] * 2}

    model.function = late
    if devices is not None:
        model.devices, model.lost = devices, ""  # type: ignore[attr-defined]

    async def scenario(batcher: Batcher, signature: Signature) -> None:
        for _ in range(8):
            outcomes: list[Outcome] = []
            x = {"x": rows(1)}
            batcher.submit(DirectEntry(x, signature.group_of(x), outcomes.append))
            await asyncio.to_thread(wait_for, lambda: outcomes and batcher.mode is Mode.IDLE)  # noqa: B023 (waited for)

    with_batcher(scenario, model, inline=0.01)
    assert threads[0] != threading.get_ident()  # no cost was known then
    assert (threads[-1] == threading.get_ident()) is here


def with_batcher(scenario, model, inline: float = 0.0) -> Batcher:  # type: ignore[no-untyped-def]
    """Run a scenario with a batcher around a model, then let the model finish."""

    async def run() -> Batcher:
        pool = WorkerPool(1)
        batcher = Batcher(model, Admission(1000, 1 << 30), pool, Statistics(ModelRef("m", 1)), inline)
        try:
            await scenario(batcher, Signature(model.inputs, model.outputs, model.batchable))
            model.gate.set()
            await asyncio.wait_for(batcher.drained(), 20)
        finally:
            model.gate.set()
            pool.close()
        return batcher

    return asyncio.run(run())
