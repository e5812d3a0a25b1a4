"""The process of a job of kind `compress`: its rows, its metrics against ONNX Runtime's, its stops and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from lathe.core.errors import DataError, LatheError
from lathe.core.frontends.onnx import load
from lathe.core.train.data import from_arrays
from lathe.core.train.recipe.compression import from_json, select_data
from lathe.core.train.recipe.parent_model import Parent, classes_of, with_classes
from lathe.core.train.recipe.recipe import RecipeError
from lathe.core.train.recipe.training_setup import Resources
from lathe.core.train.run import result
from lathe.core.train.run.compression import file_bytes, run_compression
from lathe.core.train.run.compression_check import main as check
from lathe.core.train.run.training_loop import Outcome
from lathe.core.train.run.work_folder import Sources
from tests.core.small_models import model
from tests.core.train.small_trainings import kinds
from tests.random_numbers import RNG

F = np.float32
STATIC = {"method": {"kind": "static"}}


def numbers(*shape: int) -> str:
    return f"{{{', '.join(f'{value:.4f}' for value in RNG.standard_normal(int(np.prod(shape))))}}}"


def perceptron(signature: str = "float[n,8] x => float[n,3] y") -> bytes:
    constants = f"float[8,16] w = {numbers(8, 16)}, float[16,3] v = {numbers(16, 3)}"
    return model(signature, "h = MatMul(x, w) r = Relu(h) y = MatMul(r, v)", constants)


def folder_with(path: Path, content: bytes, recipe: dict[str, Any], **arrays: Any) -> Sources:
    path.mkdir(exist_ok=True)
    (path / "recipe.json").write_text(json.dumps(recipe))
    (path / "model.onnx").write_bytes(content)
    np.savez(path / "data.npz", **arrays)
    return Sources(path / "data.npz", path / "model.onnx")


def never() -> bool:
    return False


def compressed(path: Path, content: bytes, recipe: dict[str, Any] = STATIC, **arrays: Any) -> dict[str, Any]:
    """The content of metrics.json."""
    assert run_compression(path, folder_with(path, content, recipe, **arrays), Resources(1), never) is Outcome.DONE
    return result.read_metrics(path)


def outputs(content: bytes, x: Any) -> Any:
    return ort.InferenceSession(content).run(None, {"x": x})[0]


def test_metrics_of_a_classifier_are_those_of_onnx_runtime_on_the_held_out_rows(tmp_path: Path) -> None:
    source, x = perceptron(), RNG.standard_normal((300, 8)).astype(F)
    labels = (outputs(source, x) + RNG.standard_normal((300, 3))).argmax(axis=1)
    recipe = {"method": {"kind": "weight-only", "weights": "nearest"}, "data": {"held_out": 0.5, "seed": 4}}
    recipe = {"method": {"kind": "static", "calibration": "min-max"}, "data": recipe["data"], "rows": 40, "batch": 16}
    record = compressed(tmp_path, source, recipe, x=x, y=labels)
    made = (tmp_path / "result/model.onnx").read_bytes()
    dataset = from_arrays({"x": x, "y": labels})
    test = select_data(from_json(json.dumps(recipe)), dataset, Parent(load(source))).test
    assert len(test) == record["rows"]["test"] == 150 and record["rows"]["calibration"] == 40
    exact, got = outputs(source, x[test]), outputs(made, x[test])
    before, after = ((each.argmax(axis=1) == labels[test]).mean() for each in (exact, got))
    assert record["figures"]["source"]["metrics"]["accuracy"] == pytest.approx(before)
    assert record["metrics"]["accuracy"] == pytest.approx(after, abs=0.014)  # two rows, whose results nearly tie
    drop = before - record["metrics"]["accuracy"]
    assert record["metrics"]["accuracy_drop"] == pytest.approx(drop)
    error = np.sqrt(((got - exact) ** 2).sum() / (exact**2).sum())
    assert record["metrics"]["output_error"] == pytest.approx(error, rel=0.05)
    assert record["metrics"]["size_ratio"] == pytest.approx(len(made) / len(source))
    figures = record["figures"]
    times = [figures[which]["microseconds"] for which in ("source", "result")]
    assert record["metrics"]["latency_ratio"] == pytest.approx(times[1] / times[0]) and min(times) > 0
    assert kinds(tmp_path) == ["stage", "stage", "stage", "done"]


def test_a_regression_is_compared_by_its_root_mean_square_error(tmp_path: Path) -> None:
    source, x = perceptron(), RNG.standard_normal((200, 8)).astype(F)
    y = outputs(source, x) + RNG.standard_normal((200, 3)).astype(F)
    metrics = compressed(tmp_path, source, x=x, y=y.astype(F))["metrics"]
    assert metrics["rmse_ratio"] == pytest.approx(1, abs=0.05) and metrics["rmse"] == pytest.approx(1, abs=0.3)
    assert "accuracy" not in metrics


def test_class_names_of_the_version_stay_and_order_the_labels(tmp_path: Path) -> None:
    source, x = with_classes(perceptron(), ["owl", "cat", "ant"]), RNG.standard_normal((300, 8)).astype(F)
    labels = np.array(["owl", "cat", "ant"])[outputs(source, x).argmax(axis=1)]
    record = compressed(tmp_path, source, x=x, y=labels)
    assert record["classes"] == ["owl", "cat", "ant"]
    assert record["figures"]["source"]["metrics"]["accuracy"] == 1.0
    assert classes_of((tmp_path / "result/model.onnx").read_bytes()) == ("owl", "cat", "ant")


def test_a_model_of_two_inputs_without_a_target(tmp_path: Path) -> None:
    constants = f"float[8,3] v = {numbers(8, 3)}, float[8,3] w = {numbers(8, 3)}"
    source = model(
        "float[n,8] b, float[n,8] a => float[n,3] y", "l = MatMul(a, v) r = MatMul(b, w) y = Add(l, r)", constants
    )
    arrays = {name: RNG.standard_normal((50, 8)).astype(F) for name in "ab"}
    record = compressed(tmp_path, source, {"method": {"kind": "static", "calibration": "min-max"}}, **arrays)
    assert record["metrics"].keys() == {"output_error", "size_ratio", "latency_ratio"}
    assert record["recipe"]["data"]["inputs"] == {"b": "b", "a": "a"}
    split = select_data(from_json(json.dumps(STATIC)), from_arrays(arrays), Parent(load(source)))
    feeds = {name: array[split.calibration] for name, array in arrays.items()}  # nothing is clipped
    made = ort.InferenceSession((tmp_path / "result/model.onnx").read_bytes()).run(None, feeds)[0]
    assert np.abs(made - ort.InferenceSession(source).run(None, feeds)[0]).max() < 0.2


def test_a_model_that_always_takes_four_rows_gets_whole_runs(tmp_path: Path) -> None:
    source, x = perceptron("float[4,8] x => float[4,3] y"), RNG.standard_normal((58, 8)).astype(F)
    record = compressed(tmp_path, source, {**STATIC, "batch": 32}, x=x)
    assert record["rows"] == {"calibration": 44, "test": 12, "timed": 4}  # of 46 and 12 rows


def test_a_model_of_large_intermediate_values_gets_fewer_rows_per_run() -> None:
    wide = model("float[n,8] x => float[n,8000000] y", "y = Tile(x, times)", "int64[2] times = {1, 1000000}")
    dataset = from_arrays({"x": np.zeros((100, 8), F)})
    for content, given, expected in (
        (perceptron(), {}, 32),
        (perceptron(), {"batch": 50}, 50),
        (wide, {}, (512 << 20) // (4 * 8_000_000)),
        (wide, {"batch": 50}, 50),
    ):
        found = select_data(from_json(json.dumps({**STATIC, **given})), dataset, Parent(load(content)))
        assert found.batch == expected


def test_an_input_without_rows_is_refused() -> None:
    scalar = model("float x => float y", "y = Add(x, one)", "float one = {1}")
    with pytest.raises(DataError, match=r"input 'x' of the model is float32\[\], expected a tensor with rows"):
        select_data(from_json(json.dumps(STATIC)), from_arrays({"x": np.zeros((9, 8), F)}), Parent(load(scalar)))


def test_without_held_out_rows_only_size_and_latency_are_measured(tmp_path: Path) -> None:
    x = RNG.standard_normal((20, 8)).astype(F)
    record = compressed(tmp_path, perceptron(), {**STATIC, "data": {"held_out": 0.0}}, x=x, y=np.arange(20) % 3)
    assert record["metrics"].keys() == {"size_ratio", "latency_ratio"}


def test_a_stop_leaves_no_result_and_the_next_run_begins_again(tmp_path: Path) -> None:
    sources = folder_with(tmp_path, perceptron(), STATIC, x=RNG.standard_normal((400, 8)).astype(F))
    asked = iter([False, False, True])
    assert run_compression(tmp_path, sources, Resources(1), lambda: next(asked)) is Outcome.STOPPED
    assert not (tmp_path / "result").exists()
    assert run_compression(tmp_path, sources, Resources(1), never) is Outcome.DONE
    written = (tmp_path / "result/metrics.json").stat().st_mtime_ns
    assert run_compression(tmp_path, sources, Resources(1), never) is Outcome.DONE
    assert (tmp_path / "result/metrics.json").stat().st_mtime_ns == written


def test_equal_inputs_give_equal_models(tmp_path: Path) -> None:
    source, x = perceptron(), RNG.standard_normal((100, 8)).astype(F)
    for name in ("one", "two"):
        compressed(tmp_path / name, source, x=x)
    one, two = ((tmp_path / name / "result/model.onnx").read_bytes() for name in ("one", "two"))
    assert one == two


@pytest.mark.parametrize(
    ("arrays", "recipe", "complaint"),
    [
        ({"x": np.zeros((9, 7), F)}, {}, "rows of input 'x' are float32[7], but the model takes float32[8]"),
        ({"a": np.zeros((9, 8), F), "b": np.zeros((9, 8), F), "y": np.zeros(9)}, {}, "the model takes ['x']"),
        ({"x": np.zeros((9, 8)), "y": np.arange(9)}, {}, "has 9 classes, but the model's output"),
        (
            {"x": np.zeros((9, 8)), "y": np.zeros(9)},
            {"data": {"inputs": {"z": "x"}}},
            "inputs are ['z'], but the model",
        ),
        ({"x": np.zeros((9, 8)), "y": np.zeros(9)}, {"data": {"target": "label"}}, "label"),
        ({"x": np.array(["a"] * 9)}, {}, "is text, which input 'x' cannot take"),
        ({"x": np.full((9, 8), np.nan, F)}, {}, "the number is missing or NaN"),
        ({"x": np.zeros((9, 8), F)}, {"method": {"kind": "static", "skip": ["n"]}}, "skip: expected names of nodes"),
        ({"x": np.zeros((9, 8), F)}, {"method": {"kind": "weight-only"}}, "of 4096 or more elements, got none"),
    ],
)
def test_what_does_not_fit_ends_the_run_without_a_result(
    tmp_path: Path, arrays: dict[str, Any], recipe: dict[str, Any], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = folder_with(tmp_path, perceptron(), {**STATIC, **recipe}, **arrays)
    with pytest.raises(LatheError) as refused:
        run_compression(tmp_path, sources, Resources(1), never)
    assert complaint in str(refused.value)
    assert not (tmp_path / "result").exists()
    assert kinds(tmp_path)[-1] == "failed"
    status = check(["check", str(tmp_path / "recipe.json"), str(sources.dataset), str(sources.parent)])
    shown = json.loads(capsys.readouterr().out)
    if "NaN" in complaint:  # the rows are read by the job only
        assert status == 0
    else:
        assert (status, shown) == (2, {"error": str(refused.value)})


def test_the_check_names_the_metrics_that_a_gate_may_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = RNG.standard_normal((20, 8)).astype(F)
    for arrays, expected, comparable in (
        ({"x": x}, {"output_error", "size_ratio", "latency_ratio"}, set()),
        ({"x": x, "y": x[:, :3]}, {"rmse", "rmse_ratio", "mae"}, {"rmse", "mae", "r2"}),
        ({"x": x, "y": np.arange(20) % 3}, {"accuracy", "accuracy_drop"}, {"accuracy", "f1"}),
    ):
        sources = folder_with(tmp_path, perceptron(), STATIC, **arrays)
        assert check(["check", str(tmp_path / "recipe.json"), str(sources.dataset), str(sources.parent)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert set(found["metrics"]) >= expected and set(found["comparable"]) >= comparable
        assert not {"accuracy_drop", "size_ratio", "rmse_ratio"} & set(found["comparable"])


def test_external_data_count_as_part_of_the_source(tmp_path: Path) -> None:
    proto = onnx.load_model_from_string(perceptron())
    for tensor in proto.graph.initializer:  # only raw data become external
        tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor), tensor.name))
    onnx.save_model(proto, tmp_path / "model.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    sizes = [(tmp_path / name).stat().st_size for name in ("model.onnx", "weights")]
    assert file_bytes(tmp_path / "model.onnx") == sum(sizes) and min(sizes) > 0
    (tmp_path / "weights").unlink()
    with pytest.raises(DataError, match="expected the external file weights beside the model"):
        file_bytes(tmp_path / "model.onnx")


def test_an_invalid_recipe_is_refused_by_field() -> None:
    with pytest.raises(RecipeError, match=r"method\.calibration: expected 'min-max', .* got 'kl'; batch: expected at"):
        from_json('{"method": {"kind": "static", "calibration": "kl"}, "batch": 0}')
