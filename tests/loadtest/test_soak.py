"""The soak scenario notices growth of memory, descriptors and failures, and nothing else."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

import numpy as np
import orjson
import pytest

from loadtest import soak as scenario
from loadtest import zoo
from loadtest.connection import Target
from loadtest.scenario import Options, Report
from loadtest.soak import Watch, check_gauges, invalid_requests, soak
from tests.loadtest.fake_server import Answer, Call, serving


@dataclass
class Server:
    """Answers every call, with the faults that a test sets."""

    leak: float = 0.0  # MiB of memory per sample
    handles: int = 0  # descriptors per sample
    looks: int = 0
    versions: int = 0
    fails: bool = False
    last_version: float = math.inf

    async def handle(self, call: Call) -> Answer:
        refusals = {(path, body): status for path, body, status in invalid_requests()}
        if status := refusals.get((call.path, call.body)):
            return status, b"{}"
        match call.path.split("?")[0].split("/")[1:]:
            case ["metrics"]:
                self.looks += 1
                return 200, self.metrics()
            case ["v2", "models", _]:
                return 200, orjson.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]})
            case ["v2", "models", "m", "infer"]:
                return (500 if self.fails else 200), b"{}"
            case ["api", "v1", "models", _, "versions"]:
                self.versions += 1
                if self.versions > self.last_version:
                    return 503, b'{"error": "no more"}'
        return 200, orjson.dumps({"version": self.versions})

    def metrics(self) -> bytes:
        memory = 2**20 * (300 + self.leak * self.looks)
        return (
            f"process_resident_memory_bytes {memory}\nprocess_open_fds {30 + self.handles * self.looks}\n"
            "lathe_threads 12.0\n"
        ).encode()


@pytest.fixture
def short_soak(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A soak of one second with many samples; returns the file from which its versions are made."""
    monkeypatch.setattr(scenario, "SAMPLE", 0.02)
    monkeypatch.setattr(scenario, "PAUSE", 0.01)
    path = tmp_path_factory.mktemp("soak") / "mlp.onnx"
    path.write_bytes(zoo.model("mlp").SerializeToString())
    return str(path)


def promises(server: Server, onnx: str) -> dict[str, bool]:
    async def drive() -> Report:
        async with serving(server.handle) as url:
            report = Report("soak", {})
            await soak(Options(url=url, model="m", onnx=onnx, seconds=1.0, rate=50, connections=2), report)
            return report

    return {verdict.promise.split(":")[0]: verdict.held for verdict in asyncio.run(drive()).verdicts}


def test_a_steady_server_passes(short_soak: str) -> None:
    server = Server()
    found = promises(server, short_soak)
    assert found == dict.fromkeys(["no request fails", "resident memory", "file descriptors", "threads"], True)
    assert server.versions > 2
    assert server.looks > 10


def test_a_leak_of_memory_is_noticed(short_soak: str) -> None:
    found = promises(Server(leak=0.01), short_soak)
    assert (found["resident memory"], found["file descriptors"]) == (False, True)


def test_a_leak_of_descriptors_is_noticed(short_soak: str) -> None:
    assert not promises(Server(handles=1), short_soak)["file descriptors"]


def test_conditions_that_cannot_improve_end_the_run_at_once(short_soak: str) -> None:
    async def drive() -> None:
        async with serving(Server(last_version=1).handle) as url:
            options = Options(url=url, model="m", onnx=short_soak, seconds=600.0, rate=50, connections=2)
            await soak(options, Report("soak", {}))

    with pytest.raises(RuntimeError, match="no more"):
        asyncio.run(drive())


def test_failures_are_noticed(short_soak: str) -> None:
    assert not promises(Server(fails=True), short_soak)["no request fails"]


@pytest.mark.parametrize(("per_hour", "held"), [(0.0, True), (4.0, True), (6.0, False), (60.0, False)])
def test_noise_and_spikes_neither_hide_nor_make_a_slope(per_hour: float, held: bool) -> None:
    rng = np.random.default_rng(0)
    watch = Watch(Target("http://127.0.0.1:1"), [2.0 * index for index in range(900)])
    hours = np.array(watch.times) / 3600
    memory = 300 + per_hour * hours + rng.normal(0, 0.3, 900)
    memory[rng.choice(900, 40, replace=False)] += 200
    memory[:200] -= np.linspace(80, 0, 200)  # warming up
    watch.samples = {name: [12.0] * 900 for name in watch.samples}
    watch.samples["process_resident_memory_bytes"] = list(memory * 2**20)
    report = Report("soak", {})
    check_gauges(watch, report)
    assert [verdict.held for verdict in report.verdicts] == [held, True, True]
