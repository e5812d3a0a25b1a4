"""The scenario `json` against a fake server that reports the processor time of requests of each form."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnxruntime
import orjson
import pytest

from loadtest.json_bodies import json
from loadtest.scenario import Report
from tests.loadtest.fake_server import Answer, Call, run

SECONDS = 0.2  # seconds of each of the 28 windows


@dataclass
class Lenet:
    """Returns the input; its processor time grows by the configured cost of each request's form."""

    json_costs: float  # relative to the cost of a binary request
    bound_factor: float = 1.0  # factor on the outputs of JSON requests
    refuses: bool = False  # refuse JSON requests
    has_metrics: bool = True
    session: onnxruntime.InferenceSession | None = None
    spent: float = 0.0
    forms: list[tuple[bool, str]] = field(default_factory=list)

    async def handle(self, call: Call) -> Answer:
        match call.path.split("?")[0].split("/")[1:]:
            case ["v2", "models", _, "infer"]:
                return self.infer(call)
            case ["v2", "models", _]:
                return 200, orjson.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 1, 28, 28]}]})
            case ["api", "v1", "models", _, "versions"]:
                self.session = onnxruntime.InferenceSession(call.body, providers=["CPUExecutionProvider"])
                return 200, b'{"version": 1}'
            case ["metrics"]:
                figure = b"process_cpu_seconds_total %.9f\n" % self.spent if self.has_metrics else b""
                return 200, b"# HELP other\nother 1.0\n" + figure
        return 404, b'{"error": "unknown path"}'

    def infer(self, call: Call) -> Answer:
        assert self.session is not None
        size = call.headers.get("inference-header-content-length")
        if size is None:
            document = orjson.loads(call.body)
            x = np.array(document["inputs"][0]["data"], np.float32)
        else:
            document = orjson.loads(call.body[: int(size)])
            x = np.frombuffer(call.body[int(size) :], np.float32)
        self.forms.append((size is None, document.get("id", "")))
        if self.refuses and size is None:
            return 400, b'{"error": "no JSON here"}'
        self.spent += 1e-3 * (self.json_costs if size is None else 1.0)
        name = self.session.get_inputs()[0].name
        y = self.session.run(None, {name: x.reshape(1, 1, 28, 28)})[0] * (self.bound_factor if size is None else 1.0)
        output = {"name": "y", "datatype": "FP32", "shape": y.shape, "data": y.ravel().tolist()}
        return 200, orjson.dumps({"model_version": "1", "outputs": [output]})


def run_json_scenario(server: Lenet) -> Report:
    return run(json, server.handle, seconds=SECONDS)


@pytest.mark.slow
def test_json_at_more_than_half_the_speed_keeps_the_promise() -> None:
    server = Lenet(json_costs=1.5)
    report = run_json_scenario(server)
    assert report.held
    figures, share, _ = report.verdicts
    assert share.measured.startswith("0.67 (0.67,")
    assert figures.measured.startswith(
        "binary 1000.0 us (1.00), JSON 1500.0 us (0.67), JSON, all digits 1500.0 us (0.67)"
    )
    assert len(report.phases) == 28 and all(phase.accepted for phase in report.phases)
    kinds = {(is_json, bool(id)) for is_json, id in server.forms}
    assert kinds == {(False, False), (True, False), (True, True)}
    assert len({id for _, id in server.forms}) > 8  # the ids of requests differ


@pytest.mark.slow
def test_json_at_a_third_of_the_speed_breaks_it() -> None:
    report = run_json_scenario(Lenet(json_costs=3.0))
    (broken,) = [verdict for verdict in report.verdicts if not verdict.held]
    assert broken.promise == "JSON at 0.5 of the speed of binary, by processor time"
    assert broken.measured.startswith("0.33 (0.33,")


@pytest.mark.parametrize(
    ("server", "error"),
    [
        (Lenet(1.0, bound_factor=1.01), "JSON: the answer is 0.01"),
        (Lenet(1.0, refuses=True), 'JSON: HTTP 400: b\'{"error": "no JSON here"}\''),
        (Lenet(1.0, has_metrics=False), "says no process_cpu_seconds_total"),
    ],
)
def test_conditions_that_invalidate_the_figure_end_the_run(server: Lenet, error: str) -> None:
    with pytest.raises(RuntimeError) as raised:
        run_json_scenario(server)
    assert error in str(raised.value)
