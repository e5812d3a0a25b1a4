"""Traffic in alternating windows with and without a disturbance; the ratio of latencies is its cost."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import orjson
import pytest

from loadtest import background_process as background
from loadtest import zoo
from loadtest.arrivals import Times
from loadtest.background_process import background_process
from loadtest.interference import measure_interference
from loadtest.scenario import Options, Report, Traffic
from loadtest.slow_clients import ASKED
from loadtest.stats import Log, Phase, summarise
from tests.loadtest.fake_server import Answer, Call, serving


@pytest.fixture(autouse=True)
def _usual_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """With idle priority a process may not run at all beside other tests."""
    monkeypatch.setattr(background, "_set_idle_priority", lambda _pid: None)


class Server:
    """Counts its answers during and outside of the disturbance."""

    trouble = False

    def __init__(self) -> None:
        self.answered: Counter[bool] = Counter()

    async def handle(self, call: Call) -> Answer:
        if call.path.endswith("/infer"):
            self.answered[self.trouble] += 1
            output = {"name": "y", "datatype": "FP32", "shape": [1], "data": [0.0]}
            return 200, orjson.dumps({"model_version": "1", "outputs": [output]})
        if call.path.endswith("/stats"):
            return 200, orjson.dumps({"model_stats": [{"batch_stats": []}]})
        return 200, orjson.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]})

    @asynccontextmanager
    async def disturbance(self) -> AsyncIterator[None]:
        self.trouble = True
        yield
        self.trouble = False

    def measured(self, limit: float) -> Report:
        """The report where the 99th percentile may be `limit` times that without the disturbance."""

        async def drive() -> Report:
            async with serving(self.handle) as url:
                report = Report("disturbed", {})
                options = Options(url=url, model="m", connections=16, rate=100.0, seconds=0.1)
                await measure_interference(options, report, "trouble", self.disturbance, limit)
                return report

        return asyncio.run(drive())


def test_windows_with_and_without_the_disturbance_alternate() -> None:
    server = Server()
    report = server.measured(limit=math.inf)
    assert [phase.name for phase in report.phases] == ["quiet", "trouble"] * 5
    for name, trouble in (("quiet", False), ("trouble", True)):
        assert server.answered[trouble] == sum(phase.sent for phase in report.phases if phase.name == name) > 0
    assert [verdict.held for verdict in report.verdicts] == [True, True]


@pytest.mark.parametrize(("ratios", "held"), [((9, 1, 9, 1, 2), True), ((9, 1, 9, 1, 3), False)])
def test_the_median_ratio_of_adjacent_windows_decides(
    ratios: tuple[float, ...], held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the machine itself changes from one pair of windows to the next."""
    quiet = (1.0, 50.0, 2.0, 100.0, 5.0)
    latencies = iter([ms for base, ratio in zip(quiet, ratios, strict=True) for ms in (base, base * ratio)])

    async def scripted(_: Traffic, name: str, due: Times, seconds: float) -> Phase:
        log = Log.of(np.zeros(1))
        log.taken[:], log.sent[:], log.done[:], log.status[:] = 0.0, 0.0, next(latencies) / 1e3, 200
        return summarise(name, log, seconds)

    monkeypatch.setattr(Traffic, "phase", scripted)
    ratio, failures = Server().measured(limit=2.5).verdicts
    assert (ratio.held, failures.held) == (held, True)


@pytest.mark.slow
def test_slow_clients_connect_and_reconnect_when_they_are_dropped() -> None:
    count, arrivals = 50, asyncio.Queue[None]()

    async def drop(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrivals.put_nowait(None)
        writer.close()

    async def drive() -> None:
        server = await asyncio.start_server(drop, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, background_process("loadtest.slow_clients", url, "m", str(count)), asyncio.timeout(60):
            for _ in range(2 * count):
                await arrivals.get()

    asyncio.run(drive())


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(1 << 16)
    except ConnectionError:
        return b""


@pytest.mark.slow
def test_slow_clients_are_slow_in_four_ways() -> None:
    said: list[bytearray] = []
    unread: list[int] = []
    heard, gone = asyncio.Queue[None](), asyncio.Queue[None]()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said.append(text := bytearray())
        while data := await _read(reader):
            if data.startswith(b"GET"):
                writer.write(bytes(8 << 20))
                await asyncio.sleep(2.5)  # the client reads a byte per second in this time
                unread.append(writer.transport.get_write_buffer_size())
            text += data
            heard.put_nowait(None)
        writer.transport.abort()
        gone.put_nowait(None)

    async def drive() -> None:
        server = await asyncio.start_server(listen, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, asyncio.timeout(60), background_process("loadtest.slow_clients", url, "m", "4"):
            while sum(b"x-slow: a" in text or b'{"inputs":a' in text for text in said) < 2 or not unread:
                await heard.get()
        for _ in said:
            await gone.get()

    asyncio.run(drive())
    silent, reads, *sends = sorted(map(bytes, said))
    assert silent == b""
    assert reads.count(b"GET /openapi.json") == reads.count(b"\r\n\r\n") == ASKED
    assert all(text.startswith(b"POST /v2/models/m/infer") for text in sends)
    assert sorted(b"\r\n\r\n" in text for text in sends) == [False, True]
    assert unread[0] > 1 << 20


def test_versions_are_uploaded_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(zoo.model("mlp").SerializeToString())
    uploads = asyncio.Queue[bytes]()

    async def handle(call: Call) -> Answer:
        uploads.put_nowait(call.body)
        return 200, b"{}"

    async def drive() -> tuple[list[bytes], int]:
        file = str(tmp_path / "model.onnx")
        async with (
            asyncio.timeout(60),
            serving(handle) as url,
            background_process("loadtest.uploads", url, "m", file) as work,
        ):
            return [await uploads.get() for _ in range(3)], work.done

    (first, second, _), live = asyncio.run(drive())
    assert first != second
    assert live >= 1


def test_a_running_upload_ends_before_the_next_window(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(zoo.model("mlp").SerializeToString())
    begun, ended = asyncio.Event(), Counter[str]()

    async def handle(_: Call) -> Answer:
        begun.set()
        await asyncio.sleep(0.3)
        ended["uploads"] += 1
        return 200, b"{}"

    async def drive() -> int:
        file = str(tmp_path / "model.onnx")
        async with asyncio.timeout(60), serving(handle) as url:
            async with background_process("loadtest.uploads", url, "m", file) as work:
                await begun.wait()
            return ended["uploads"] if work.done == ended["uploads"] else -1

    assert asyncio.run(drive()) >= 1


def test_the_end_of_a_disturbance_is_reported() -> None:
    async def drive() -> None:
        async with background_process("loadtest.uploads", "http://127.0.0.1:1", "m", "/dev/null") as work:
            await work.ended.wait()

    with pytest.raises(RuntimeError, match=r"loadtest\.uploads ended by itself: (.|\n)*Error"):
        asyncio.run(asyncio.wait_for(drive(), 60))


def test_a_disturbance_that_does_not_begin_is_reported() -> None:
    async def drive() -> None:
        async with background_process("loadtest.uploads", "not a url", "m", "/dev/null"):
            pass

    with pytest.raises(RuntimeError, match="expected http"):
        asyncio.run(asyncio.wait_for(drive(), 60))
