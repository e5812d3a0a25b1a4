"""A full server refuses at once, says when to retry, and serves the requests it accepted."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from lathe.server.types import Tensors
from tests.server.fakes import FakeModel, doubler
from tests.server.running import Running, infer_request, rows, serving, tensor_of, wait_for


def test_a_full_queue_answers_503_at_once_with_retry_after() -> None:
    model = doubler()
    with serving({"doubler": model}, queue_items=3, inline_budget_us=0) as running, running.connect() as first:
        model.gate.clear()
        first.send(infer_request("doubler", rows(1)) * 3)
        servable = running.registry.resolve("doubler")
        wait_for(lambda: servable.in_flight == 3)
        for transport in ("", "?asgi"):  # answered while the model is held
            answer = running.ask_raw(infer_request("doubler", rows(1), path=f"/v2/models/doubler/infer{transport}"))
            assert answer.status == 503
            assert "3 of 3 requests" in answer.error
            assert int(answer.headers["retry-after"]) >= 1
        model.gate.set()
        for _ in range(3):
            np.testing.assert_array_equal(tensor_of(first.answer()), rows(1) * 2)
        assert running.ask_raw(infer_request("doubler", rows(1))).status == 200


def test_a_full_queue_of_one_model_does_not_affect_another() -> None:
    busy, idle = doubler(), doubler()
    with serving({"busy": busy, "idle": idle}, queue_items=1, inline_budget_us=0) as running:
        busy.gate.clear()
        with running.connect() as first:
            first.send(infer_request("busy", rows(1)))
            wait_for(busy.entered.is_set)
            assert running.ask_raw(infer_request("busy", rows(1))).status == 503
            np.testing.assert_array_equal(tensor_of(running.ask_raw(infer_request("idle", rows(1)))), rows(1) * 2)
            busy.gate.set()
            assert first.answer().status == 200


def test_unfinished_bodies_are_bounded_over_all_connections() -> None:
    data = infer_request("doubler", rows(40_000))
    with serving({"doubler": doubler(max_batch=65536)}, max_receiving=2 << 20) as running:
        assert running.ask_raw(data).status == 200
        with running.connect() as first, running.connect() as second:
            first.send(data[:-100])
            hub = running.hub
            wait_for(lambda: hub.ledger.held > 600_000)
            second.send(data)
            answer = second.answer()
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            first.send(data[-100:])
            np.testing.assert_array_equal(tensor_of(first.answer()), rows(40_000) * 2)
        wait_for(lambda: hub.ledger.held == 0)
        with running.connect() as leaves:
            leaves.send(data[:-100])
            wait_for(lambda: hub.ledger.held > 600_000)
        wait_for(lambda: hub.ledger.held == 0)


@contextmanager
def slow_clients(running: Running) -> Iterator[None]:
    """Two hundred connections that say nothing, and as many that stop in the middle of a head."""
    with ExitStack() as open_ones:
        for index in range(400):
            client = open_ones.enter_context(socket.create_connection(("127.0.0.1", running.port)))
            if index % 2:
                client.send(b"POST /v2/models/doubler/infer HTTP/1.1\r\nHost: localhost\r\n")
        yield


def test_other_clients_are_answered_beside_silent_and_trickling_ones() -> None:
    with serving({"doubler": doubler()}, header_timeout=60) as running, slow_clients(running):
        assert running.ask_raw(infer_request("doubler", rows(1))).status == 200
        connections = running.server.server_state.connections
        wait_for(lambda: len(connections) == 400)


@pytest.mark.slow
def test_silent_and_trickling_clients_are_closed_at_the_header_deadline() -> None:
    with serving({"doubler": doubler()}, header_timeout=0.2) as running, slow_clients(running):
        connections = running.server.server_state.connections
        wait_for(lambda: not connections)
        assert running.ask_raw(infer_request("doubler", rows(1))).status == 200


@contextmanager
def overloaded_server(**settings: object) -> Iterator[tuple[Running, FakeModel, bytes]]:
    """A server whose model is busy and whose queue is full, and a request whose head the server remembers."""
    model, data = doubler(max_batch=65536), infer_request("doubler", rows(40_000))
    with (
        serving({"doubler": model}, queue_items=1, inline_budget_us=0, **settings) as running,
        running.connect() as first,
    ):
        assert running.ask_raw(data).status == 200
        model.entered.clear()
        model.gate.clear()
        first.send(data)
        wait_for(model.entered.is_set)
        yield running, model, data
        model.gate.set()
        assert first.answer().status == 200


def refusals(running: Running) -> int:
    return running.registry.resolve("doubler").stats.failures["overloaded"]


def test_an_overloaded_server_refuses_without_reading_the_body() -> None:
    with overloaded_server() as (running, model, data), running.connect() as client:
        client.send(data)
        assert client.answer().status == 503
        before = refusals(running)
        # makes the refusal count for long; the last refusal has set it for one second
        running.engine.plane.refusing_ticks = 1000
        client.send(data[:1000])
        answer = client.answer()
        assert (answer.status, "1 of 1 requests" in answer.error) == (503, True)
        assert int(answer.headers["retry-after"]) >= 1
        assert "connection" not in answer.headers
        assert running.hub.ledger.held == 0
        assert refusals(running) == before + 1
        model.gate.set()
        wait_for(lambda: running.registry.resolve("doubler").in_flight == 0)
        client.send(data[1000:] + data)  # the rest of the refused request, then one that is accepted
        np.testing.assert_array_equal(tensor_of(client.answer()), rows(40_000) * 2)


def test_the_rest_of_a_refused_body_has_a_deadline() -> None:
    with overloaded_server(body_timeout=0.5) as (running, _, data), running.connect() as client:
        client.send(data)
        assert client.answer().status == 503
        running.engine.plane.refusing_ticks = 1000
        client.send(data[:1000])
        assert client.answer().status == 503
        assert client.is_closed()


def test_answers_keep_their_order_while_some_are_refused() -> None:
    """On one connection: a request that waits, then requests that are refused. The refusals come after its answer."""
    model = doubler()
    with serving({"doubler": model}, queue_items=1, inline_budget_us=0) as running, running.connect() as client:
        assert running.ask_raw(infer_request("doubler", rows(1))).status == 200
        model.entered.clear()
        model.gate.clear()
        client.send(infer_request("doubler", rows(1)))
        wait_for(model.entered.is_set)
        client.send(infer_request("doubler", rows(1)) * 3)
        wait_for(lambda: refusals(running) == 3)
        model.gate.set()
        assert [client.answer().status for _ in range(4)] == [200, 503, 503, 503]


def test_long_timeouts_are_accepted_while_short_ones_are_refused() -> None:
    def slowly(tensors: Tensors) -> Tensors:
        time.sleep(0.02)
        return {"y": tensors["x"] * 2}

    model = doubler(max_batch=1)
    model.function = slowly
    with serving({"doubler": model}, inline_budget_us=0) as running:
        for _ in range(10):
            assert running.ask_raw(infer_request("doubler", rows(1))).status == 200
        with running.connect() as first, running.connect() as client:
            first.send(infer_request("doubler", rows(1)) * 50)
            wait_for(lambda: running.registry.resolve("doubler").in_flight > 30)
            hurried, patient = (infer_request("doubler", rows(1), timeout=t) for t in (50_000, 60_000_000))
            for _ in range(3):
                client.send(hurried)
                answer = client.answer()
                assert (answer.status, "shorter than its wait" in answer.error) == (503, True)
            client.send(patient)
            np.testing.assert_array_equal(tensor_of(client.answer()), rows(1) * 2)
