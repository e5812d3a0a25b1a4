"""Traffic in turns, with something beside it and without: the ratio says what that something cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest

from loadtest import zoo
from loadtest.beside import beside
from loadtest.disturbed import disturbed
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


@pytest.mark.parametrize(("delay", "held"), [(0.001, True), (0.2, False)])
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
    count, arrivals = 50, asyncio.Queue[None]()

    async def drop(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrivals.put_nowait(None)
        writer.close()

    async def drive() -> None:
        server = await asyncio.start_server(drop, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, beside("loadtest.slow_clients", url, "m", str(count)), asyncio.timeout(60):
            for _ in range(2 * count):
                await arrivals.get()

    asyncio.run(drive())


def test_half_of_the_slow_clients_say_a_byte_a_second() -> None:
    said = asyncio.Queue[bytes]()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said.put_nowait(await reader.read())
        writer.close()

    async def drive() -> list[bytes]:
        server = await asyncio.start_server(listen, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, asyncio.timeout(60):
            async with beside("loadtest.slow_clients", url, "m", "4"):
                await asyncio.sleep(1.6)
            return [await said.get() for _ in range(4)]

    texts = sorted(asyncio.run(drive()))
    assert texts[:2] == [b"", b""]
    assert all(text.startswith(b"POST /v2/models/m/infer") and b"\r\n\r\n" not in text for text in texts[2:])
    assert any(text.endswith(b"x-slow: a") for text in texts)


def test_versions_are_uploaded_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(zoo.model("mlp").SerializeToString())
    uploads = asyncio.Queue[bytes]()

    async def handle(call: Call) -> Answer:
        uploads.put_nowait(call.body)
        return 200, b"{}"

    async def drive() -> tuple[list[bytes], int]:
        file = str(tmp_path / "model.onnx")
        async with asyncio.timeout(60), serving(handle) as url, beside("loadtest.uploads", url, "m", file) as work:
            return [await uploads.get() for _ in range(3)], work.done

    (first, second, _), live = asyncio.run(drive())
    assert first != second
    assert live >= 1


def test_what_ends_beside_the_traffic_is_told() -> None:
    async def drive() -> None:
        async with beside("loadtest.uploads", "http://127.0.0.1:1", "m", "/dev/null") as work:
            await work.ended.wait()

    with pytest.raises(RuntimeError, match=r"loadtest\.uploads ended by itself: (.|\n)*Error"):
        asyncio.run(asyncio.wait_for(drive(), 60))


def test_what_does_not_begin_is_told() -> None:
    async def drive() -> None:
        async with beside("loadtest.uploads", "not a url", "m", "/dev/null"):
            pass

    with pytest.raises(RuntimeError, match="expected http"):
        asyncio.run(asyncio.wait_for(drive(), 60))
