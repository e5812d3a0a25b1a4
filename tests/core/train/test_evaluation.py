"""Evaluation of models on data: the training's own metrics, the right rows, clear errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
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
