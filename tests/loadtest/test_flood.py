"""The flood scenario: passes a server that shares fairly between clients, and fails one that does not."""

from __future__ import annotations

import asyncio

import pytest

from loadtest import flood as module
from loadtest.flood import flood
from loadtest.scenario import Options, Report
from tests.loadtest.fake_server import Answer, Call
from tests.loadtest.fake_server import run as run_against
from tests.server.fakes import doubler
from tests.server.running import serving


@pytest.fixture(autouse=True)
def few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECTIONS", 120)


@pytest.mark.slow
def test_lathe_serves_a_client_during_a_flood() -> None:
    with serving({"doubler": doubler()}, max_connections=32, max_client_connections=8) as running:
        report = Report("flood", {})
        asyncio.run(flood(Options(url=f"http://{running.address}", model="doubler", seconds=2.0), report))
        assert running.server.lifespan.state["hub"].slots.evicted > 50, "the flood came"
    (verdict,) = report.verdicts
    assert verdict.held, verdict.measured


@pytest.mark.slow
def test_a_server_that_refuses_the_client_fails() -> None:
    async def full(call: Call) -> Answer:
        return (200, b"{}") if call.path == "/v2/health/live" else (503, b"{}")

    (verdict,) = run_against(flood, full, model="m", seconds=0.3).verdicts
    assert not verdict.held
    assert "503" in verdict.measured
