"""The wall clock jumps by days while a server runs, without effect on deadlines, batches and connections."""

from __future__ import annotations

import itertools
import json
import time

import pytest

from tests.server.fakes import doubler
from tests.server.running import infer_request, request, rows, serving

DAY = 86_400.0


def request_with_timeout(microseconds: int) -> bytes:
    """A request with a timeout in microseconds."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    document = {"inputs": [tensor], "parameters": {"timeout": microseconds}}
    return request("POST", "/v2/models/doubler/infer", json.dumps(document).encode())


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the wall clock is three days ahead or behind."""
    real, jumps = time.time, itertools.cycle((3 * DAY, -3 * DAY))
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))


@pytest.mark.usefixtures("jumping")
@pytest.mark.parametrize("inline", [0, 10_000])
def test_deadlines_do_not_follow_the_wall_clock(inline: int) -> None:
    patience = {"header_timeout": 2, "keep_alive": 2}
    with serving({"doubler": doubler()}, inline_budget_us=inline, **patience) as running, running.connect() as raw:
        for _ in range(200):
            raw.send(request_with_timeout(1_000_000))
            assert raw.answer().status == 200
        time.sleep(0.5)  # idle for less than the keep-alive timeout
        raw.send(infer_request("doubler", rows(1)))
        assert raw.answer().status == 200


@pytest.mark.usefixtures("jumping")
def test_a_deadline_still_passes() -> None:
    """The test above could not fail if deadlines did not exist."""
    model = doubler()
    model.gate.clear()
    with (
        serving({"doubler": model}, inline_budget_us=0) as running,
        running.connect() as busy,
        running.connect() as raw,
    ):
        busy.send(infer_request("doubler", rows(1)))
        assert model.entered.wait(30)  # otherwise both might share a batch
        raw.send(request_with_timeout(50_000))
        assert raw.answer().status in (503, 504)
        model.gate.set()
        assert busy.answer().status == 200
