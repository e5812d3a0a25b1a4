"""A full server says so at once, says when to come back, and serves those it took in."""

from __future__ import annotations

import socket
import time

import numpy as np

from tests.server.data.fakes import doubler
from tests.server.data.running import infer_request, rows, serving, tensor_of, wait_for


def test_a_full_queue_answers_503_at_once_with_retry_after() -> None:
    model = doubler()
    with serving({"doubler": model}, queue_items=3, inline_budget_us=0) as running, running.connect() as first:
        model.gate.clear()
        first.send(infer_request("doubler", rows(1)) * 3)
        servable = running.registry.resolve("doubler")
        wait_for(lambda: servable.in_flight == 3)
        began = time.monotonic()
        for transport in ("", "?asgi"):
            answer = running.ask_raw(infer_request("doubler", rows(1), path=f"/v2/models/doubler/infer{transport}"))
            assert answer.status == 503
            assert "3 of 3 requests" in answer.error
            assert int(answer.headers["retry-after"]) >= 1
        assert time.monotonic() - began < 0.5
        model.gate.set()
        for _ in range(3):
            np.testing.assert_array_equal(tensor_of(first.answer()), rows(1) * 2)
        assert running.ask_raw(infer_request("doubler", rows(1))).status == 200


def test_one_models_full_queue_is_not_anothers() -> None:
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
    with serving({"doubler": doubler(max_batch=65536)}, max_receiving=1 << 20) as running:
        assert running.ask_raw(data).status == 200
        with running.connect() as first, running.connect() as second:
            first.send(data[:-100])
            hub = running.hub
            wait_for(lambda: hub.held > 600_000)
            second.send(data)
            answer = second.answer()
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            first.send(data[-100:])
            np.testing.assert_array_equal(tensor_of(first.answer()), rows(40_000) * 2)
        wait_for(lambda: hub.held == 0)
        with running.connect() as leaves:
            leaves.send(data[:-100])
            wait_for(lambda: hub.held > 600_000)
        wait_for(lambda: hub.held == 0)


def test_silent_and_trickling_clients_do_not_slow_the_others() -> None:
    """Two hundred of each; all are gone after the header deadline."""
    with serving({"doubler": doubler()}, header_timeout=1) as running:
        slow = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(400)]
        for client in slow[::2]:
            client.send(b"POST /v2/models/doubler/infer HTTP/1.1\r\nHost: a\r\n")
        with running.connect() as good:
            times = []
            for _ in range(200):
                began = time.monotonic()
                good.send(infer_request("doubler", rows(1)))
                assert good.answer().status == 200
                times.append(time.monotonic() - began)
        assert sorted(times)[180] < 0.02
        hub_connections = running.server.server_state.connections
        wait_for(lambda: len(hub_connections) == 0, seconds=5)
        for client in slow:
            client.close()
