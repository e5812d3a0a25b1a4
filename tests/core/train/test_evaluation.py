"""Evaluation of models on data: the training's own metrics, the right rows, clear errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from lathe.core.errors import DataError, LatheError
from lathe.core.train.data import open_dataset
from lathe.core.train.recipe import recipe
from lathe.core.train.recipe.parent_model import with_classes
from lathe.core.train.recipe.training_setup import Resources
from lathe.core.train.run import evaluation, result, work_folder
from lathe.core.train.run.training_loop import Outcome, never_stop
from lathe.core.train.run.work_folder import Sources
from tests.core.train.small_trainings import asked, kinds, quadrants


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quadrants(tmp_path_factory.mktemp("data") / "data")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    work_folder.prepare(folder, asked(data={"held_out": 0.3}))
    assert work_folder.run_training(folder, Sources(data), Resources(threads=1)) is Outcome.DONE
    return folder / result.FOLDER


def evaluated(model: Path, file: Path, **asked: Any) -> dict[str, Any]:
    what = evaluation.from_json(json.dumps({"operators": False, **asked}))
    return evaluation.evaluate(what, open_dataset(file), model, Resources(threads=1), never_stop)


def test_evaluation_gives_the_metrics_of_the_training(trained: Path, data: Path) -> None:
    said = json.loads((trained / "metrics.json").read_bytes())
    found = evaluated(trained / "model.onnx", data, data={"held_out": 0.3}, rows="test", batch=7)
    assert found["metrics"] == pytest.approx(said["metrics"])
    assert (found["confusion"], found["rows"], found["data"]) == (said["confusion"], 36, said["data"])
    assert found["classes"] == ("0", "1", "2", "3")


def test_metrics_on_all_rows_agree_with_onnx_runtime(trained: Path, data: Path) -> None:
    arrays = np.load(data)
    session = onnxruntime.InferenceSession(trained / "model.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"x": arrays["x"]})
    found = evaluated(trained / "model.onnx", data)
    assert found["rows"] == 120
    assert found["metrics"]["accuracy"] == pytest.approx(np.mean(logits.argmax(1) == arrays["y"]))


def test_classes_are_matched_by_name(trained: Path, data: Path, tmp_path: Path) -> None:
    """The same points, their quadrants called by words that sort differently from the numbers."""
    arrays, words = np.load(data), np.array(["south-west", "north-west", "south-east", "north-east"])
    named = tmp_path / "named.npz"
    np.savez(named, x=arrays["x"], y=words[arrays["y"]])
    expected = evaluated(trained / "model.onnx", data)["metrics"]["accuracy"]
    (tmp_path / "model.onnx").write_bytes(with_classes((trained / "model.onnx").read_bytes(), words.tolist()))
    assert evaluated(tmp_path / "model.onnx", named)["metrics"]["accuracy"] == expected
    assert evaluated(trained / "model.onnx", named, classes=words.tolist())["metrics"]["accuracy"] == expected
    with pytest.raises(LatheError, match="class 'south-east' is not one of the model's classes"):
        evaluated(trained / "model.onnx", named)


def test_operators_are_timed(trained: Path, data: Path) -> None:
    found = evaluated(trained / "model.onnx", data, operators=True)["operators"]
    assert [entry["batch"] for entry in found] == [1, 16, 64]
    assert all(0 < len(entry["operators"]) <= 10 for entry in found)


def test_models_and_data_that_do_not_fit_are_refused(trained: Path, data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.npz"
    np.savez(other, x=np.zeros((6, 3), np.float32), y=np.arange(6) % 4)
    with pytest.raises(DataError, match=r"rows of input 'x' are float32\[3\], but the model takes float32\[2\]"):
        evaluated(trained / "model.onnx", other)
    with pytest.raises(DataError, match="the split has no rows for 'validation'"):
        evaluated(trained / "model.onnx", data, rows="validation")
    with pytest.raises(recipe.RecipeError, match=r"rows: .*got 'some'; speed: "):
        evaluation.from_json('{"rows": "some", "speed": 1}')


def test_evaluation_in_a_process(trained: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text('{"rows": "test", "operators": false}')
    command = [
        sys.executable,
        "-m",
        "lathe.core.train.run.evaluation_process",
        str(tmp_path),
        "--dataset",
        str(data),
        "--threads",
        "1",
    ]
    parent = ["--parent", str(trained / "model.onnx")]
    done = subprocess.run([*command, *parent], check=True, capture_output=True, text=True)
    assert done.stdout == ""
    assert done.stderr.startswith("done: ") and "accuracy " in done.stderr
    assert result.read_metrics(tmp_path)["rows"] == 24
    parts = Sources(data, trained / "model.onnx"), Resources(threads=1)
    assert evaluation.run_evaluation(tmp_path, *parts, never_stop) is Outcome.DONE  # again: it is done
    assert kinds(tmp_path) == ["done"]

    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "recipe.json").write_text('{"rows": "validation"}')
    command[3] = str(tmp_path / "bad")
    refused = subprocess.run([*command, *parent], capture_output=True, check=False)
    assert (refused.returncode, "no rows for 'validation'" in json.loads(refused.stdout)["error"]) == (2, True)
    assert kinds(tmp_path / "bad") == ["failed"]


def linear(path: Path, weight: Any, output: list[str | int], *, flat: bool = False) -> Path:
    """An ONNX file of x [n, 2] @ `weight`, whose output has the shape `output`; `flat` takes the first column."""
    nodes = [onnx.helper.make_node("MatMul", ["x", "w"], ["product" if flat else "scores"])]
    if flat:
        nodes.append(onnx.helper.make_node("Gather", ["product", "zero"], ["scores"], axis=1))
    float32 = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        nodes,
        "linear",
        [onnx.helper.make_tensor_value_info("x", float32, ["n", 2])],
        [onnx.helper.make_tensor_value_info("scores", float32, output)],
        [
            onnx.numpy_helper.from_array(np.asarray(weight, np.float32), "w"),
            onnx.numpy_helper.from_array(np.array(0), "zero"),
        ],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def test_a_model_may_have_more_outputs_than_the_data_have_classes(tmp_path: Path) -> None:
    """Ten outputs, targets 0 to 8; the model predicts 9 for the last row."""
    classes, x = np.arange(9), np.stack([np.arange(10), np.ones(10)], 1).astype(np.float32)
    weight = np.stack([2 * np.arange(10), -(np.arange(10.0) ** 2)])  # the output nearest to x[:, 0] is the greatest
    model = linear(tmp_path / "model.onnx", weight, ["n", 10])
    with (tmp_path / "data.npz").open("wb") as file:
        np.savez(file, x=x, y=np.append(classes, 8))
    found = evaluated(model, tmp_path / "data.npz")
    assert found["metrics"]["accuracy"] == 0.9
    assert found["classes"] == tuple("0123456789")
    assert np.array(found["confusion"])[8].tolist() == [0] * 8 + [1, 1]


@pytest.mark.parametrize(
    ("y", "shape", "fault"),
    [
        (np.arange(6) % 4, ["n", 3], "has 4 classes, but the model's output float32.n,3. has 3"),
        (np.arange(6) % 4, ["n"], "has 4 classes, but the model's output float32.n. has 1"),
        (np.arange(6) * 0, ["n"], r"expected numbers \[rows, 1\] from the model, but its output 'scores' .* \[rows\]"),
        (np.arange(18).reshape(6, 3) % 4, ["n", 4], r"expected numbers \[rows, 4, 3\] .* \[rows, 4\]"),
        (np.ones((6, 2), np.float32), ["n", 3], r"expected numbers \[rows, 2\] .* \[rows, 3\]"),
        (np.ones((6, 1), np.float32), ["n", 3], r"expected numbers \[rows, 1\] .* \[rows, 3\]"),
        (np.ones((6, 3), np.float32), ["n", 1], r"expected numbers \[rows, 3\] .* \[rows, 1\]"),
    ],
)
def test_outputs_that_do_not_fit_the_targets_are_refused(y: Any, shape: list[Any], fault: str, tmp_path: Path) -> None:
    model = linear(tmp_path / "model.onnx", np.ones((2, shape[1] if shape[1:] else 1)), shape, flat=len(shape) == 1)
    with (tmp_path / "data.npz").open("wb") as file:
        np.savez(file, x=np.ones((6, 2), np.float32), y=y)
    with pytest.raises(DataError, match=fault):
        evaluated(model, tmp_path / "data.npz")
