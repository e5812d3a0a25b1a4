"""The measurement of GPUs, tried on a simulated one: what it finds wrong it says, and without a GPU it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from core.errors import UnsupportedError
from loadtest import gpu, gpu_models


def test_agreement_is_reported_by_model_and_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "simulated", "--only", "agreement", "--models", "mlp,gru", "--out", str(tmp_path / "full")]
    assert gpu.main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "full").read_text()
    assert "simulated:0, cpu" in printed and "ok      agreement in bfloat16" in printed


def test_what_does_not_agree_breaks_the_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "TOLERANCES", {"float32": 1e-12})
    arguments = ["--device", "simulated", "--only", "agreement", "--models", "mlp", "--out", str(tmp_path / "full")]
    assert gpu.main(arguments) == 1
    assert "BROKEN  agreement in float32" in capsys.readouterr().out


def test_without_a_gpu_it_refuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def none(name: str) -> Any:
        raise UnsupportedError(f"device '{name}' needs NVIDIA's driver")

    monkeypatch.setattr(gpu, "open_device", none)
    assert gpu.main([]) == 2
    assert "no GPU to measure: device 'cuda' needs NVIDIA's driver" in capsys.readouterr().err


def test_speed_overhead_and_ceilings_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a model of one layer: the large ones take a simulated device seconds."""
    monkeypatch.setitem(gpu_models.LARGE, "small", gpu_models.Large(_small, (3, 8, 8), (2,)))
    report = gpu.Report(tmp_path / "full")
    gpu.overhead(report, "simulated")
    most = gpu.ceilings(report, "simulated", 32, 4096)
    gpu.speed(report, "simulated", [gpu.Case("small", 2, "bfloat16")], most, 0.01)
    assert report.broken == [] and len(report.summary) >= 4
    assert "FusedConv" in report.out.read_text()


def _small(b: gpu_models.Writer, x: Any) -> Any:
    return b.pool_and_classify(b.relu(b.conv(x, 3, 4, 3)), 4, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "minilm"])
def test_the_large_models_are_what_onnx_runtime_takes_them_for(name: str) -> None:
    model = gpu_models.onnx_of(name)
    x = np.random.default_rng(0).standard_normal((2, *gpu_models.LARGE[name].shape)).astype(np.float32)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": x})
    assert result.shape == (2, *gpu_models.LARGE[name].output) and np.isfinite(result).all() and result.std() > 0
