"""SIGTERM to a real process: unready at once; accepted requests are answered; stalled clients delay nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from lathe.server.serve import make_server
from lathe.server.settings import Settings
from tests.server.fakes import application
from tests.server.running import Raw, infer_request, request, rows, tensor_of


@contextmanager
def process(seconds: float) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-m", "tests.server.standalone", str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as running:
        try:
            assert running.stdout is not None
            yield running, int(running.stdout.readline())
        finally:
            running.kill()


@pytest.mark.sample(2)
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_stops_with_success(sig: signal.Signals) -> None:
    with process(0) as (running, port), Raw(port) as idle:
        idle.send(request("GET", "/v2/health/ready"))
        assert idle.answer().status == 200
        running.send_signal(sig)
        assert running.wait(10) == 0
        assert idle.is_closed()


def test_accepted_requests_are_answered() -> None:
    with process(0.5) as (running, port), Raw(port) as direct, Raw(port) as pipelined, Raw(port) as waiting:
        direct.send(infer_request("doubler", rows(1)))
        pipelined.send(infer_request("doubler", rows(1)) + request("GET", "/v2/health/ready"))
        waiting.send(request("GET", "/v2"))
        assert waiting.answer().status == 200
        running.send_signal(signal.SIGTERM)
        answer = direct.answer()
        np.testing.assert_array_equal(tensor_of(answer), rows(1) * 2)
        assert answer.headers["connection"] == "close"
        np.testing.assert_array_equal(tensor_of(pipelined.answer()), rows(1) * 2)
        ready = pipelined.answer()
        assert (ready.status, ready.headers["connection"]) == (503, "close")
        assert waiting.is_closed()
        assert running.wait(10) == 0


@pytest.mark.slow
def test_stalled_clients_do_not_delay_the_end() -> None:
    """Half a head, half a body (direct and for the application), and a client that never reads its answers."""
    half = infer_request("doubler", rows(1))
    with process(0) as (running, port), Raw(port) as a, Raw(port) as b, Raw(port) as c, Raw(port) as deaf:
        a.send(half[:30])
        b.send(half[:-5])
        c.send(request("POST", "/v2/repository/index", b"{}")[:-1])
        deaf.socket.settimeout(0.3)
        with pytest.raises(TimeoutError):
            deaf.send(infer_request("doubler", rows(2000)) * 1000)
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0


@pytest.mark.parametrize("seconds", [0.2, 1.9, 20.0])
def test_the_server_drains_for_exactly_the_time_that_is_set(seconds: float) -> None:
    """uvicorn asks for whole seconds; a time below one is no full second."""
    settings = Settings(port=0, drain_timeout=seconds)
    app, _, _ = application(settings, {})
    assert make_server(app, settings).config.timeout_graceful_shutdown == seconds
