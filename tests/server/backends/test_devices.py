"""Models on devices, served by the server; `simulated` is a device that every machine has."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from typer.testing import CliRunner

from lathe.core.compiler.child_stages import main as child
from lathe.core.kernels.reference.cpu import ReferenceKernel
from lathe.core.runtime.device.device import MemoryInfo
from lathe.core.runtime.device.simulated import SimulatedDevice
from lathe.server.backends.base import devices, lost_reason
from lathe.server.backends.graph import GraphBackend
from lathe.server.cli.app import app
from lathe.server.errors import OutOfMemory, Unavailable
from tests.server.backends.test_graph_backend import dense
from tests.server.running import infer_request, rows, serving, tensor_of


def compile_for(folder: Path, *flags: str) -> Path:
    (folder / "model.onnx").write_bytes(dense())
    assert child(["parse", str(folder / "model.onnx"), str(folder / "ir")]) == 0
    flags = ("--threads", "1", "--max-batch", "8", *flags)
    assert child(["compile", str(folder / "ir"), str(folder / "artifact"), *flags]) == 0
    return folder / "artifact"


def test_a_model_on_a_device_answers_and_names_its_device(tmp_path: Path) -> None:
    model = GraphBackend().load(compile_for(tmp_path, "--device", "simulated:1"), 1)
    model.gate = threading.Event()  # type: ignore[attr-defined]  # what `serving` opens at the end
    oracle = onnxruntime.InferenceSession(dense())
    with serving({"dense": model}) as running, running.connect() as raw:
        for count in (1, 3, 8):
            raw.send(infer_request("dense", rows(count)))
            expected = oracle.run(None, {"x": rows(count)})[0]
            np.testing.assert_allclose(tensor_of(raw.answer()), expected, atol=1e-6)
        raw.send(b"GET /v2/models/dense/config HTTP/1.1\r\nHost: localhost\r\n\r\n")
        config: dict[str, Any] = json.loads(raw.answer().body)
    assert config["instance_group"] == [{"count": 1, "kind": "KIND_GPU", "gpus": [1]}]


def test_a_model_on_a_device_uses_no_host_memory(tmp_path: Path) -> None:
    needs = GraphBackend().needs(compile_for(tmp_path, "--device", "simulated"))
    assert (needs.weights, needs.run) == (0, 0)


def test_a_run_beyond_a_models_device_memory_runs_on_the_processor(tmp_path: Path) -> None:
    artifact = compile_for(tmp_path, "--device", "simulated", "--device-memory", "16")
    model = GraphBackend().load(artifact, 1)
    try:
        assert devices(model) == ()
        assert GraphBackend().needs(artifact).weights > 0
    finally:
        model.close()


def test_a_device_without_memory_refuses_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = compile_for(tmp_path, "--device", "simulated:2")
    monkeypatch.setattr(SimulatedDevice, "memory", lambda self: MemoryInfo(300, 1 << 30))
    with pytest.raises(OutOfMemory, match=r"needs \d+ bytes for batches of up to 8 .*simulated:2 has 300 free"):
        GraphBackend().load(artifact, 1)
    status = child(["compile", str(tmp_path / "ir"), str(tmp_path / "again"), "--device", "simulated:2"])
    assert status == 5
    assert "simulated:2 has 300 free" in json.loads(capsys.readouterr().out)["error"]


def test_after_a_device_fault_a_reloaded_model_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, artifact = GraphBackend(), compile_for(tmp_path, "--device", "simulated:3")
    model, other = backend.load(artifact, 1), backend.load(artifact, 1)
    with monkeypatch.context() as broken:
        broken.setattr(ReferenceKernel, "run", lambda *_: 1 / 0)
        with pytest.raises(Unavailable, match="simulated:3 was lost: ZeroDivisionError"):
            model.execute({"x": rows(2)})
    assert "simulated:3 was lost" in lost_reason(model) and lost_reason(model) == lost_reason(other)
    model.close()
    with pytest.raises(Unavailable, match="sessions that ran there still hold"):
        backend.load(artifact, 1)
    other.close()
    again = backend.load(artifact, 1)
    try:
        (got,) = again.execute({"x": rows(2)}).values()
        expected = onnxruntime.InferenceSession(dense()).run(None, {"x": rows(2)})[0]
        np.testing.assert_allclose(got, expected, atol=1e-6)
        assert lost_reason(again) == ""
    finally:
        again.close()


def test_a_server_does_not_start_without_its_device(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "--model-repo", str(tmp_path), "--device", "cuda:99"])
    assert result.exit_code == 1
    assert "cuda:99" in result.output
