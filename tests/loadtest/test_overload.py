"""The overload scenarios, against a fake server that answers one request after the other."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import orjson
import pytest

from loadtest import overload, publishing
from loadtest.arrivals import constant
from loadtest.pacing import Pacer
from loadtest.scenario import Report
from loadtest.stats import Log, Phase, summarise
from tests.loadtest.fake_server import Answer, Call, run


@dataclass
class Kiosk:
    """Takes ten milliseconds per request; two may wait, and it refuses the others at once or with a delay."""

    hesitates: float = 0.0  # seconds before a refusal
    compiles: float = 0.0  # seconds per publication
    waiting: int = 0
    answered: int = 0
    published: int = 0

    async def handle(self, call: Call) -> Answer:
        match call.path.split("?")[0].split("/")[1:]:
            case ["v2", "models", _, "infer"]:
                return await self.infer()
            case ["v2", "models", _]:
                return 200, orjson.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]})
            case ["v2", "models", _, "stats"]:
                infer = {"count": self.answered, "ns": self.answered * 20_000_000}
                return 200, orjson.dumps(
                    {"model_stats": [{"batch_stats": [{"batch_size": 8, "compute_infer": infer}]}]}
                )
        await asyncio.sleep(self.compiles)
        self.published += 1
        return 200, orjson.dumps({"version": self.published})

    async def infer(self) -> Answer:
        if self.waiting > 2:
            await asyncio.sleep(self.hesitates)
            return 503, b'{"error": "overloaded"}'
        self.waiting += 1
        await asyncio.sleep(0.01 * self.waiting)
        self.waiting -= 1
        self.answered += 1
        return 200, b"{}"


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FIT": 0.05, "STORMS": 1, "RECOVERY": 0.1}.items():
        monkeypatch.setattr(overload, name, value)
    for name, value in {"TIMES": 1, "BEFORE": 0.1, "PAUSE": 0.0, "ENDLESS": 100_000}.items():
        monkeypatch.setattr(publishing, name, value)
    monkeypatch.setattr(overload.zoo, "convolution_stack", lambda depth: overload.zoo.model("lenet"))


def test_slow_refusals_fail() -> None:
    slow = run(overload.overload, Kiosk(hesitates=0.2).handle, connections=2, seconds=0.1)
    assert [phase.name.split()[0] for phase in slow.phases] == ["overload", "afterwards"]
    promises = {verdict.promise: verdict.held for verdict in slow.verdicts}
    assert promises["a batch takes about 20 ms"]
    assert not promises["refusal p99 within 50 ms"]


@pytest.mark.parametrize(("batch_ms", "depths"), [(10, [12, 24, 48, 96]), (80, [12, 3, 1, 1]), (20, [12])])
def test_the_report_has_the_depth_of_the_model_that_was_loaded_last(
    monkeypatch: pytest.MonkeyPatch, batch_ms: int, depths: list[int]
) -> None:
    uploaded: list[int] = []

    def stack(depth: int) -> onnx.ModelProto:
        uploaded.append(depth)
        return overload.zoo.model("lenet")

    class Fixed(Kiosk):
        async def handle(self, call: Call) -> Answer:
            if call.path.endswith("/stats"):
                infer = {"count": self.answered, "ns": self.answered * batch_ms * 1_000_000}
                sizes = [{"batch_size": 8, "compute_infer": infer}]
                return 200, orjson.dumps({"model_stats": [{"batch_stats": sizes}]})
            return await super().handle(call)

    monkeypatch.setattr(overload.zoo, "convolution_stack", stack)
    report = run(overload.overload, Fixed().handle, connections=2, seconds=0.1)
    assert uploaded == depths
    assert report.verdicts[0].measured == f"{batch_ms}.0 ms, {depths[-1]} layers"


def phase_of(throughput: float) -> Phase:
    log = Log.of(np.zeros(1))
    log.done[:] = log.sent[:] = 0.0
    return replace(summarise("p", log, 1.0), throughput=throughput)


def test_goodput_is_compared_with_the_capacity_before_and_after() -> None:
    report = Report("r", {})
    overload._promise_goodput(report, [phase_of(95), phase_of(50), phase_of(190)], [100, 100, 100, 300])
    (verdict,) = report.verdicts
    assert (verdict.held, verdict.measured) == (True, "95% (95%, 50%, 95%) of 100/s")
    overload._promise_goodput(report, [phase_of(95)], [100, 120])
    assert not report.verdicts[1].held


@pytest.mark.parametrize(("compiles", "limit", "held"), [(0.0, 5000.0, True), (0.15, 100.0, False)])
def test_publications_are_timed_idle_and_under_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles: float, limit: float, held: bool
) -> None:
    monkeypatch.setattr(publishing, "LIMIT_MS", limit)
    path = tmp_path / "lenet.onnx"
    path.write_bytes(overload.zoo.model("lenet").SerializeToString())
    kiosk = Kiosk(compiles=compiles)
    report = run(publishing.publishing, kiosk.handle, connections=2, onnx=str(path))
    assert {kind: len(times) for kind, times in report.calls_ms.items()} == {
        "publish, idle": 1,
        "publish, full load": 1,
    }
    assert kiosk.published == 2
    assert kiosk.answered
    assert [verdict.held for verdict in report.verdicts] == [held, True, True]


def test_requests_due_within_a_tick_leave_together_and_never_early() -> None:
    fired: list[tuple[int, int, float]] = []
    pacer_start: list[float] = []

    async def drive() -> None:
        def fire(first: int, last: int) -> None:
            fired.append((first, last, time.monotonic()))

        pacer = Pacer(constant(1000, 0.2), fire, tick=0.05)
        pacer.start()
        await pacer.finished.wait()
        pacer_start.append(pacer.start_time)

    asyncio.run(drive())
    assert [last for _, last, _ in fired][-1] == 200
    assert [first for first, *_ in fired[1:]] == [last for _, last, _ in fired[:-1]]
    assert len(fired) <= 6
    assert all(last - 1 <= (when - pacer_start[0]) * 1000 for _, last, when in fired)
