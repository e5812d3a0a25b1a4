"""Scenarios from end to end against a fake server, which can be configured to misbehave."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import orjson
import pytest

from loadtest import zoo
from loadtest.__main__ import main
from loadtest.admin import difference
from loadtest.rollback import rollback
from loadtest.scenarios import ramp, steady
from tests.loadtest.fake_server import Answer, Call, run, serving


@dataclass
class StandIn:
    """The zoo's mlp behind the calls that scenarios make; the last entry of `history` is live."""

    lag: float = 0.0  # seconds for which the old version still answers after a switch was acknowledged
    refuse_every: int = 0  # every n-th request gets 503
    bound_factor: float = 1.0  # factor on every output
    sessions: dict[int, onnxruntime.InferenceSession] = field(default_factory=dict)
    history: list[int] = field(default_factory=list)
    answering: int = 0
    batches: Counter[int] = field(default_factory=Counter)

    async def handle(self, call: Call) -> Answer:
        match call.path.split("?")[0].split("/")[1:]:
            case ["v2", "models", _, "infer"]:
                return self.infer(call)
            case ["v2", "models", _]:
                return 200, orjson.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 256]}]})
            case ["v2", "models", _, "stats"]:
                listed = [{"batch_size": k, "compute_infer": {"count": n}} for k, n in self.batches.items()]
                return 200, orjson.dumps({"model_stats": [{"batch_stats": listed}]})
            case ["api", "v1", "models", _, "versions"]:
                return self.publish(call.body)
            case ["api", "v1", "models", _, "aliases", "live"]:
                return self.move([*self.history, orjson.loads(call.body)["version"]])
            case ["api", "v1", "models", _, "rollback"]:
                return self.move(self.history[:-1])
        return 404, b'{"error": "unknown path"}'

    def publish(self, model: bytes) -> Answer:
        version = len(self.sessions) + 1
        self.sessions[version] = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        return self.move([*self.history, version])

    def move(self, history: list[int]) -> Answer:
        self.history = history
        if self.lag and self.answering:
            asyncio.get_running_loop().call_later(self.lag, setattr, self, "answering", history[-1])
        else:
            self.answering = history[-1]
        return 200, orjson.dumps({"version": history[-1]})

    def infer(self, call: Call) -> Answer:
        self.batches[1] += 1
        if self.refuse_every and self.batches[1] % self.refuse_every == 0:
            return 503, b'{"error": "overloaded"}'
        x = np.frombuffer(call.body[int(call.headers["inference-header-content-length"]) :], np.float32)
        y = self.sessions[self.answering].run(None, {"x": x.reshape(-1, 256)})[0] * self.bound_factor
        output: dict[str, Any] = {"name": "y", "datatype": "FP32", "shape": y.shape, "data": y.ravel().tolist()}
        return 200, orjson.dumps({"model_version": str(self.answering), "outputs": [output]})


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "mlp.onnx"
    path.write_bytes(zoo.model("mlp").SerializeToString())
    return str(path)


def switching(stand_in: StandIn, model: str) -> dict[str, bool]:
    """The promises of a short rollback run."""
    report = run(rollback, stand_in.handle, onnx=model, rate=300.0, switches=4, cycles=2, requests=150)
    assert {kind: len(times) for kind, times in report.calls_ms.items()} == {"upload": 3, "alias": 2, "rollback": 4}
    return {verdict.promise: verdict.held for verdict in report.verdicts}


def test_rollback_passes_on_a_correct_server(model: str) -> None:
    promises = switching(StandIn(), model)
    assert len(promises) == 4
    assert all(promises.values()), promises


def test_rollback_notices_a_server_that_acknowledges_too_early(model: str) -> None:
    assert not switching(StandIn(lag=0.03), model)["no request fails or is refused"]


def test_rollback_notices_wrong_values(model: str) -> None:
    assert not switching(StandIn(bound_factor=1.01), model)["no request fails or is refused"]


def test_rollback_notices_a_single_refusal(model: str) -> None:
    assert not switching(StandIn(refuse_every=100), model)["no request fails or is refused"]


def serving_mlp(**options: Any) -> StandIn:
    stand_in = StandIn(**options)
    stand_in.publish(zoo.model("mlp").SerializeToString())
    return stand_in


def test_steady_reports_rate_latency_and_batches() -> None:
    (phase,) = run(steady, serving_mlp().handle, model="m", rate=200.0, seconds=0.5).phases
    assert phase.sent == phase.accepted
    assert phase.sent == pytest.approx(100, abs=40)
    assert phase.batches == {1: phase.sent}
    assert 0 < phase.latency.p50 <= phase.latency.p999 <= phase.latency.worst


def test_ramp_reports_every_step_and_the_climb() -> None:
    report = run(ramp, serving_mlp().handle, model="m", rate=300.0, seconds=0.2)
    assert [round(phase.offered, -1) > 0 for phase in report.phases] == [True] * 7
    assert report.phases[-1].name == "climb to 300/s"
    assert report.held


def test_the_command_line_ends_with_2_when_the_model_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def unknown(_call: Call) -> Answer:
        return 404, b'{"error": "no model of that name"}'

    async def drive() -> int:
        async with serving(unknown) as url:
            return await asyncio.to_thread(main, ["steady", "--url", url, "--out", str(tmp_path)])

    assert asyncio.run(drive()) == 2
    assert "no model of that name" in capsys.readouterr().out


def test_difference_is_the_increase_of_a_counter() -> None:
    assert difference({1: 5, 8: 3, 2: 1}, {1: 2, 2: 1}) == {1: 3, 8: 3}
