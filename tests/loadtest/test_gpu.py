"""The measurement of GPUs, tried on a simulated one: what it finds wrong it says, and without a GPU it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from core.errors import UnsupportedError
from core.runtime import devices
from core.runtime.machine import Peaks
from loadtest import gpu, gpu_models, gpu_training
from loadtest.gpu_report import InProcesses, Report
from tests.core.cuda.fake_driver import FakeDriver, FakeGpu


def test_agreement_is_reported_by_model_and_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "simulated", "--only", "agreement", "--models", "mlp,gru", "--out", str(tmp_path / "full")]
    assert gpu.main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "full").read_text()
    assert json.loads((tmp_path / "full.json").read_text())["broken"] == []
    assert "simulated:0, cpu" not in printed and "ok      agreement in bfloat16" in printed


def test_what_does_not_agree_breaks_the_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "TOLERANCES", {"float32": 1e-12})
    arguments = ["--device", "simulated", "--only", "agreement", "--models", "mlp", "--out", str(tmp_path / "full")]
    assert gpu.main(arguments) == 1
    assert "BROKEN  agreement in float32" in capsys.readouterr().out


def test_without_a_gpu_it_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(name: str) -> Any:
        raise UnsupportedError(f"device '{name}' needs NVIDIA's driver")

    monkeypatch.setattr(gpu, "open_device", none)
    monkeypatch.chdir(tmp_path)
    assert gpu.main([], here()) == 2 and gpu.main(["--only", "speed"]) == 2
    assert "no GPU to measure: device 'cuda' needs NVIDIA's driver" in capsys.readouterr().err


def test_speed_overhead_and_ceilings_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a model of one layer: the large ones take a simulated device seconds."""
    monkeypatch.setitem(gpu_models.LARGE, "small", gpu_models.Large(_small, (3, 8, 8), (2,)))
    report = Report(tmp_path / "full")
    gpu.overhead(report, "simulated")
    most = gpu.ceilings(report, "simulated", 32, 4096)
    gpu.speed(report, "simulated", [gpu.Case("small", 2, "bfloat16")], most, 0.01)
    assert report.broken == [] and len(report.summary) >= 4
    assert "FusedConv" in report.out.read_text()


def _small(b: gpu_models.Writer, x: Any) -> Any:
    return b.pool_and_classify(b.relu(b.conv(x, 3, 4, 3)), 4, 2)


def here(*arguments: str) -> gpu.Run:
    """Parts in this process, which is how a fake driver can be what they run on."""

    def run(part: str, out: Path) -> int:
        return gpu.main([*arguments, "--only", part, "--out", str(out)])

    return run


@pytest.mark.parametrize("broken", [False, True], ids=["whole", "with a driver that fails"])
def test_everything_in_one_call_on_a_fake_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: bool
) -> None:
    """What fails is said, and what does not fail is measured all the same."""
    driver = FakeDriver(total=1 << 28)
    monkeypatch.setitem(devices._open, "cuda:0", FakeGpu(driver))
    monkeypatch.setitem(gpu_models.LARGE, "small", gpu_models.Large(_small, (3, 8, 8), (2,)))
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)  # no PyTorch, wherever this runs
    monkeypatch.setattr(gpu_training, "find_spec", lambda name: None)
    monkeypatch.setattr(gpu, "MOST_OVERHEAD", 1e6)  # of a driver in Python
    if broken:
        monkeypatch.setattr(gpu, "_step_seconds", lambda *_: 1 / 0)
    arguments = [
        "--models", "mlp", "--large", "small", "--batches", "2", "--precisions", "tf32", "--product", "32",
        "--copy", "4096", "--slice", "0.01",
    ]  # fmt: skip
    out = tmp_path / "report.txt"
    assert gpu.main([*arguments, "--out", str(out)], here(*arguments)) == int(broken)
    printed = capsys.readouterr().out
    table = printed[printed.rindex("agreement in float32") - 8 :].splitlines()
    assert [line.split()[0] for line in table if line.startswith("BROKEN")] == ["BROKEN"] * (2 if broken else 0)
    assert any("training agrees in bfloat16" in line and line.startswith("ok") for line in table)
    assert any("host overhead per run" in line for line in table)
    assert "cuda:0: GpuTarget(arch=86" in printed
    if broken:
        assert any("ceilings: ZeroDivisionError" in line for line in table)
    else:
        assert any("copy" in line for line in table) and "small, batch 2, tf32: steps" in out.read_text()


def test_parts_that_die_or_take_too_long_are_said_to_be_lost(tmp_path: Path) -> None:
    script = tmp_path / "dying.py"
    script.write_text("import os, sys, time\ntime.sleep(60) if 'slow' in sys.argv else os.abort()\n")
    report = Report(tmp_path / "report.txt")
    for part, status in (("dead", -6), ("slow", 124)):
        run = InProcesses("dying", (), limit=0.5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(tmp_path))
            found = run(part, tmp_path / part)
        assert found == status
        report.take(part, tmp_path / part, found)
    assert report.broken == [
        "dead: ended with status -6 and no conclusions", "slow: ended with status 124 and no conclusions"
    ]  # fmt: skip


def test_what_a_part_has_found_before_it_dies_is_kept(tmp_path: Path) -> None:
    """As the mean over cases, of which there is one for all that were measured by then."""
    part = Report(tmp_path / "part")
    part.conclude("a product", None)
    for cases, ahead in ((1, 0.5), (2, 1.25)):
        part.conclude(f"ahead by {ahead} over {cases} cases", ahead > 1, about="ahead")
    report = Report(tmp_path / "report.txt")
    report.take("speed", tmp_path / "part", 124)
    assert [line.split(maxsplit=1)[1] for line in report.summary[:2]] == ["a product", "ahead by 1.25 over 2 cases"]
    assert report.broken == ["speed: ended with status 124 before its end"]


def test_a_peer_that_does_not_run_costs_its_own_figure_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch without CUDA raises when it is asked for a GPU, and one whose compiler fails has its eager figure."""

    def peers(*_: Any) -> dict[str, Any]:
        return {"eager": lambda: np.ones((2, 2), np.float32), "compiled": lambda: 1 / 0}

    monkeypatch.setitem(sys.modules, "loadtest.gpu_torch", SimpleNamespace(peers=peers))
    monkeypatch.setattr(gpu, "find_spec", lambda name: name)
    monkeypatch.setitem(gpu_models.LARGE, "small", gpu_models.Large(_small, (3, 8, 8), (2,)))
    monkeypatch.setitem(devices._open, "cuda:0", FakeGpu(FakeDriver(total=1 << 28)))
    report, case = Report(tmp_path / "full"), gpu.Case("small", 2, "bfloat16")
    gpu.speed(report, "cuda", [case], {"bfloat16": Peaks(1e12, 1e11)}, 0.01)
    assert any(f"compiled, {case}: ZeroDivisionError" in line for line in report.summary)
    assert any("ahead of PyTorch's best" in line and "over 1 cases" in line for line in report.summary)


def test_a_sanitizer_that_takes_too_long_leaves_the_others_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\ncase $2 in memcheck) sleep 30;; esac\n")
    tool.chmod(0o755)
    monkeypatch.setattr(gpu, "TOOLKIT", str(tmp_path))
    monkeypatch.setattr(gpu.shutil, "which", lambda name, path=None: path and str(tool))
    monkeypatch.setattr(gpu, "SANITIZER_SECONDS", 0.5)
    report = Report(tmp_path / "full")
    gpu.sanitizer(report, "cuda", tmp_path / "out")
    marks = [(line.split()[0], line.split()[2].rstrip(",")) for line in report.summary]
    assert marks == [("-", "memcheck")] * 2 + [("ok", "racecheck")] * 2


def test_speed_alone_measures_the_ceilings_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_models.LARGE, "small", gpu_models.Large(_small, (3, 8, 8), (2,)))
    arguments = ["--device", "simulated", "--only", "speed", "--large", "small", "--batches", "2", "--precisions",
                 "tf32", "--product", "32", "--copy", "4096", "--slice", "0.01", "--tune", "off"]  # fmt: skip
    assert gpu.main([*arguments, "--out", str(tmp_path / "new" / "full")]) == 0
    assert "small, batch 2, tf32: steps" in (tmp_path / "new" / "full").read_text()


def test_one_model_that_fails_loses_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_training, "TOLERANCES", {"float32": 1e-4})
    report = Report(tmp_path / "full")
    gpu_training.agreement(report, "simulated", ["nothing", "mlp"])
    assert report.broken == ["training nothing in float32: KeyError: 'nothing'"]
    assert "mlp                  float32" in report.out.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "minilm"])
def test_the_large_models_are_what_onnx_runtime_takes_them_for(name: str) -> None:
    model = gpu_models.onnx_of(name)
    x = np.random.default_rng(0).standard_normal((2, *gpu_models.LARGE[name].shape)).astype(np.float32)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": x})
    assert result.shape == (2, *gpu_models.LARGE[name].output) and np.isfinite(result).all() and result.std() > 0
