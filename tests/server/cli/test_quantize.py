"""`lathe quantize`: a smaller file that ONNX Runtime reads, and one line for each mistake."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from lathe.server.cli.app import app


def lathe(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["quantize", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    np.savez(tmp_path / "rows.npz", image=load_digits().images[:64, None].astype(np.float32))
    return tmp_path / "rows.npz"


def test_the_bundled_digits(project: Path, tmp_path: Path, calibration: Path) -> None:
    model = project / "model_repo" / "digits" / "2" / "model.onnx"
    status, said = lathe(model, "--data", calibration, "-o", tmp_path / "small.onnx")
    assert status == 0, said
    assert "instead of" in said
    assert "probabilities" in said
    assert (tmp_path / "small.onnx").stat().st_size < 0.5 * model.stat().st_size
    rows = load_digits().images[:, None].astype(np.float32)
    scores = ort.InferenceSession(tmp_path / "small.onnx").run(None, {"image": rows})[0]
    assert (scores.argmax(axis=1) == load_digits().target).mean() > 0.95


def test_a_budget_of_error_reports_each_product(project: Path, tmp_path: Path, calibration: Path) -> None:
    model = project / "model_repo" / "digits" / "2" / "model.onnx"
    status, said = lathe(model, "--data", calibration, "--budget", "2%", "-o", tmp_path / "small.onnx")
    assert status == 0, said
    words = said.split()
    assert all(name in words for name in ("c1", "c2", "d1", "logits", "int8"))
    rows = load_digits().images[:, None].astype(np.float32)
    scores = ort.InferenceSession(tmp_path / "small.onnx").run(None, {"image": rows})[0]
    assert (scores.argmax(axis=1) == load_digits().target).mean() > 0.95


@pytest.mark.parametrize("method", ["nearest", "gptq", "awq"])
def test_weights_of_four_bits(project: Path, tmp_path: Path, calibration: Path, method: str) -> None:
    model = project / "model_repo" / "digits" / "2" / "model.onnx"
    data = [] if method == "nearest" else ["--data", calibration]
    data += ["--activations", "int8"] if method == "awq" else []
    status, said = lathe(model, "--weights", method, *data, "-o", tmp_path / "small.onnx")
    assert status == 0, said
    assert (b"lathe.rows" in (tmp_path / "small.onnx").read_bytes()) == (method == "awq")
    assert (tmp_path / "small.onnx").stat().st_size < 0.8 * model.stat().st_size
    rows = load_digits().images[:, None].astype(np.float32)
    scores = ort.InferenceSession(tmp_path / "small.onnx").run(None, {"image": rows})[0]
    assert (scores.argmax(axis=1) == load_digits().target).mean() > 0.95


@pytest.mark.parametrize("options", [["--dynamic"], ["--equalize", "--per-tensor", "--rounding", "adaround"]])
def test_other_ways_to_int8(project: Path, tmp_path: Path, calibration: Path, options: list[str]) -> None:
    model = project / "model_repo" / "digits" / "2" / "model.onnx"
    data = [] if "--dynamic" in options else ["--data", calibration]
    status, said = lathe(model, *options, *data, "-o", tmp_path / "small.onnx")
    assert status == 0, said
    assert (tmp_path / "small.onnx").stat().st_size < 0.5 * model.stat().st_size
    rows = load_digits().images[:, None].astype(np.float32)
    scores = ort.InferenceSession(tmp_path / "small.onnx").run(None, {"image": rows})[0]
    assert (scores.argmax(axis=1) == load_digits().target).mean() > 0.95


def test_data_are_needed_unless_weights_are_rounded_to_the_nearest(project: Path, tmp_path: Path) -> None:
    model = project / "model_repo" / "digits" / "2" / "model.onnx"
    learned = ["--weights", "nearest", "--rounding", "adaround"]
    for options in ([], ["--weights", "gptq"], ["--weights", "awq"], learned):
        status, said = lathe(model, "-o", tmp_path / "small.onnx", *options)
        assert status == 1 and "--data: expected a .npz file" in said
        assert not (tmp_path / "small.onnx").exists()


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            ["--calibration", "kl"],
            "calibration: expected 'min-max', 'moving-average', 'percentile', 'entropy' or 'mse', got 'kl'",
        ),
        (["--skip", "nothing"], "skip: expected names of nodes, got nothing"),
        (["--dynamic", "--weights", "nearest"], "--dynamic: expected neither --weights nor --budget"),
        (
            ["--dynamic", "--rounding", "adaround"],
            "rounding: expected 'nearest', 'stochastic', 'floor' or 'ceil', got 'adaround'",
        ),
        (["--percentile", "5"], "percentile: expected more than 50, got 5.0"),
        (["--data", "text"], "expected a .npz file of arrays"),
        (["--data", "other"], "data: expected arrays image, got none for image"),
        (["--budget", "much"], "--budget: expected a percentage above 0 such as 1%, got 'much'"),
        (["--budget", "0"], "--budget: expected a percentage above 0 such as 1%, got '0'"),
        (["--budget", "1%", "--weights", "nearest"], "--budget: expected int8 products, got --weights"),
        (["--weights", "round"], "--weights: expected one of nearest, gptq, awq, got 'round'"),
        (["--weights", "gptq", "--bits", "3"], "bits: expected 2, 4 or 8, got 3"),
        (["--weights", "awq", "--block", "33"], "block: expected 0, 16, 32, 64, 128 or 256, got 33"),
        (
            ["--weights", "nearest", "--rounding", "up"],
            "rounding: expected 'nearest', 'stochastic', 'floor', 'ceil' or 'adaround', got 'up'",
        ),
        (["--weights", "nearest", "--data", "other"], "data: expected arrays image, got none for image"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(
    project: Path, tmp_path: Path, calibration: Path, options: list[str], complaint: str
) -> None:
    (tmp_path / "text").write_text("rows")
    np.savez(tmp_path / "other.npz", pixels=np.zeros((3, 1, 8, 8), np.float32))
    names = {"text": tmp_path / "text", "other": tmp_path / "other.npz"}
    model, small = project / "model_repo" / "digits" / "2" / "model.onnx", tmp_path / "small.onnx"
    status, said = lathe(model, "--data", calibration, "-o", small, *(names.get(option, option) for option in options))
    assert status == 1
    assert complaint in " ".join(said.split())
    assert not small.exists()
