"""`lathe prune`: a smaller file that ONNX Runtime reads, and one line for each mistake."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from lathe.server.cli.app import app


def lathe(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["prune", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.fixture
def model(project: Path) -> Path:
    return project / "model_repo" / "digits" / "2" / "model.onnx"


def run(path: Path) -> np.ndarray:
    rows = load_digits().images[:, None].astype(np.float32)
    return np.asarray(ort.InferenceSession(path).run(None, {"image": rows})[0])


def test_half_of_the_channels_of_the_bundled_digits(model: Path, tmp_path: Path) -> None:
    status, said = lathe(model, "--channels", "50%", "-o", tmp_path / "small.onnx")
    assert status == 0, said
    words = said.split()
    assert all(word in words for word in ("c1", "24", "12", "c2", "48", "d1", "64", "32"))
    assert (tmp_path / "small.onnx").stat().st_size < 0.35 * model.stat().st_size
    assert run(tmp_path / "small.onnx").shape == (1797, 10)


@pytest.mark.parametrize(("options", "least"), [([], 0.9), (["--pattern", "2:4"], 0.8), (["--global"], 0)])
def test_half_of_the_weights_of_the_bundled_digits(
    model: Path, tmp_path: Path, options: list[str], least: float
) -> None:
    status, said = lathe(model, "--weights", "50%", *options, "-o", tmp_path / "sparse.onnx")
    assert status == 0, said
    weights = [onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "sparse.onnx").graph.initializer]
    zeros = sum(int((array == 0).sum()) for array in weights if array.ndim > 1)
    total = sum(array.size for array in weights if array.ndim > 1)
    assert zeros / total == pytest.approx(0.5, abs=0.01)
    assert (run(tmp_path / "sparse.onnx").argmax(axis=1) == load_digits().target).mean() >= least


def test_a_file_of_the_weights_that_are_left(model: Path, tmp_path: Path) -> None:
    dense, small = tmp_path / "dense.onnx", tmp_path / "small.onnx"
    for options in ([dense], [small, "--sparse"]):
        status, said = lathe(model, "--weights", "90%", "-o", *options)
        assert status == 0, said
    assert small.stat().st_size < 0.35 * dense.stat().st_size
    np.testing.assert_array_equal(run(small), run(dense))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ([], "expected either --channels or --weights"),
        (["--channels", "50%", "--weights", "50%"], "expected either --channels or --weights"),
        (["--channels", "50%", "--sparse"], "--sparse: expected --weights as well"),
        (["--channels", "half"], "--channels: expected a percentage above 0 such as 1%, got 'half'"),
        (["--channels", "100%"], "share: expected more than 0, below 1, got 1.0"),
        (["--channels", "50%", "--measure", "l3"], "measure: expected one of l1, l2, got 'l3'"),
        (["--channels", "50%", "--skip", "nothing"], "skip: expected names of nodes, got nothing"),
        (["--weights", "50%", "--pattern", "4:2"], "pattern: expected N:M with N below M, got '4:2'"),
    ],
)
def test_mistakes_write_no_file(model: Path, tmp_path: Path, options: list[str], complaint: str) -> None:
    status, said = lathe(model, *options, "-o", tmp_path / "small.onnx")
    assert status == 1
    assert complaint in " ".join(said.split())
    assert not (tmp_path / "small.onnx").exists()
