"""Traffic in turns, with something beside it and without: the ratio says what that something cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
import pytest

from loadtest.connection import Target
from loadtest.disturbed import SLOW, disturbed, slow_clients
from loadtest.scenario import Options, Report
from tests.loadtest.fake import Answer, Call, serving


class Server:
    """Answers after `delay` seconds."""

    delay = 0.001

    async def handle(self, call: Call) -> Answer:
        if call.path.endswith("/infer"):
            await asyncio.sleep(self.delay)
            output = {"name": "y", "datatype": "FP32", "shape": [1], "data": [0.0]}
            return 200, orjson.dumps({"model_version": "1", "outputs": [output]})
        if call.path.endswith("/stats"):
            return 200, orjson.dumps({"model_stats": [{"batch_stats": []}]})
        return 200, orjson.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]})


@pytest.mark.parametrize(("delay", "held"), [(0.001, True), (1.0, False)])
def test_a_disturbance_that_costs_the_others_too_much_is_told(delay: float, held: bool) -> None:
    server = Server()

    @asynccontextmanager
    async def disturbance() -> AsyncIterator[None]:
        server.delay = delay
        yield
        server.delay = 0.001

    async def drive() -> Report:
        async with serving(server.handle) as url:
            report = Report("disturbed", {})
            options = Options(url=url, model="m", connections=16, rate=100.0, seconds=0.3)
            await disturbed(options, report, "trouble", disturbance, 10.0)
            return report

    report = asyncio.run(drive())
    assert [phase.name for phase in report.phases] == ["quiet", "trouble"] * 5
    assert [verdict.held for verdict in report.verdicts] == [held, True]


def test_slow_clients_are_there_and_come_again_when_they_are_dropped() -> None:
    arrived = 0

    async def drop(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal arrived
        arrived += 1
        writer.close()

    async def drive() -> None:
        server = await asyncio.start_server(drop, "127.0.0.1", 0, backlog=SLOW)
        port = server.sockets[0].getsockname()[1]
        async with server, slow_clients(Target(f"http://127.0.0.1:{port}"), "m"):
            await asyncio.sleep(2.5)

    asyncio.run(drive())
    assert arrived > SLOW
