"""Training from recipe to result in this process: files, stopping, resuming, choosing the best epoch, and failures."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from lathe.core.errors import DataError, LatheError, ModelError
from lathe.core.frontends.export import export
from lathe.core.frontends.onnx import load
from lathe.core.train.data import open_dataset
from lathe.core.train.recipe import parent_model
from lathe.core.train.recipe.parent_model import Parent
from lathe.core.train.recipe.recipe import RecipeError
from lathe.core.train.recipe.training_setup import Resources
from lathe.core.train.run import checkpoint, events
from lathe.core.train.run.training_loop import Diverged, FitRun, Outcome
from tests.core.train.models import perceptron
from tests.core.train.small_trainings import asked, final_state, fit, kinds, model_bytes, quadrants


def after(steps: int) -> Callable[[], bool]:
    """A stop callback that returns true on its n-th call."""
    asked_times = count(1)
    return lambda: next(asked_times) >= steps


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quadrants(tmp_path_factory.mktemp("data") / "quadrants.npz")


def test_from_recipe_to_result(tmp_path: Path, data: Path) -> None:
    told: list[events.Event] = []
    training = fit(tmp_path, asked(epochs=30), data, watch=told.append)
    assert training.run() is Outcome.DONE
    metrics = json.loads((tmp_path / "result/metrics.json").read_bytes())
    assert metrics["metrics"]["accuracy"] >= 0.8
    assert metrics["rows"] == {"train": 66, "validation": 30, "test": 24}
    assert metrics["data"] == open_dataset(data).digest
    assert np.sum(metrics["confusion"]) == 24
    assert np.trace(metrics["confusion"]) == round(24 * metrics["metrics"]["accuracy"])
    rows = training.assembly.split.test
    onnx.checker.check_model(onnx.load_from_string(model_bytes(tmp_path)))
    session = onnxruntime.InferenceSession(model_bytes(tmp_path), providers=["CPUExecutionProvider"])
    with np.load(data) as arrays:
        (answers,) = session.run(["logits"], {"x": arrays["x"][rows]})
        right = float((answers.argmax(1) == arrays["y"][rows]).mean())
    assert metrics["metrics"]["accuracy"] == pytest.approx(right)
    assert kinds(tmp_path)[0] == "started" and kinds(tmp_path)[-1] == "done"
    assert [event.line() for event in told] == [event.line() for event in events.read(tmp_path)]
    epochs = [event.values for event in told if event.kind == "epoch"]
    assert [values["epoch"] for values in epochs] == list(range(1, 31))
    assert epochs[-1]["loss"] < 0.5 * epochs[0]["loss"]
    assert epochs[-1]["step"] == 30 * 5  # 66 rows in batches of 16: the last one has 2
    assert all(set(values["validation"]) >= {"loss", "accuracy"} for values in epochs)


def test_the_result_is_the_best_epoch(tmp_path: Path, data: Path) -> None:
    """A learning rate of 30 ruins later epochs: the weights of the best epoch stay."""
    for keep in ("best", "last"):
        what = asked(epochs=6, keep=keep, judge="loss", schedule=None, optimizer={"kind": "sgd", "rate": 30.0})
        fit(tmp_path / keep, what, data).run()
    looks = [event.values for event in events.read(tmp_path / "best") if event.kind == "epoch"]
    losses = [values["validation"]["loss"] for values in looks]
    best = int(np.argmin(losses)) + 1
    assert best != 6, "the last epoch must not be the best one here"
    record = json.loads((tmp_path / "best/result/metrics.json").read_bytes())
    assert record["best_epoch"] == best
    assert [values["best"] for values in looks] == [loss == min(losses[: i + 1]) for i, loss in enumerate(losses)]
    assert model_bytes(tmp_path / "best") != model_bytes(tmp_path / "last")
    shorter = asked(epochs=best, keep="last", judge="loss", schedule=None, optimizer={"kind": "sgd", "rate": 30.0})
    fit(tmp_path / "shorter", shorter, data).run()
    assert model_bytes(tmp_path / "shorter") == model_bytes(tmp_path / "best")


def test_early_stopping(tmp_path: Path, data: Path) -> None:
    fit(tmp_path, asked(epochs=200, stop={"patience": 3, "least_change": 0.05}, judge="loss"), data).run()
    looks = [event.values["validation"]["loss"] for event in events.read(tmp_path) if event.kind == "epoch"]
    assert 4 <= len(looks) < 200
    assert min(looks[-3:]) >= looks[-4] - 0.05 or min(looks[-3:]) >= min(looks[:-3]) - 0.05


@pytest.mark.sample(2)
@pytest.mark.parametrize("changes", [{"accumulate": 3, "average": 0.9}, {"precision": "float16", "memory": 1 << 20}])
def test_a_stopped_and_resumed_training_gives_the_same_result(
    tmp_path: Path, data: Path, changes: dict[str, Any]
) -> None:
    what = asked(**changes)
    fit(tmp_path / "whole", what, data).run()
    runs = 1
    while fit(tmp_path / "parts", what, data, stop=after(5)).run() is Outcome.STOPPED:  # within updates too
        runs += 1
    assert runs > 3
    assert kinds(tmp_path / "parts").count("resumed") == runs - 1
    assert model_bytes(tmp_path / "parts") == model_bytes(tmp_path / "whole")
    whole, parts = final_state(tmp_path / "whole"), final_state(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    for name, array in whole.items():
        np.testing.assert_array_equal(parts[name], array, err_msg=name)
    looks = [
        [event.values["loss"] for event in events.read(tmp_path / folder) if event.kind == "epoch"]
        for folder in ("whole", "parts")
    ]
    assert looks[0] == looks[1]


def test_float16_training_reports_its_loss_scale(tmp_path: Path, data: Path) -> None:
    fit(tmp_path, asked(precision="float16"), data).run()
    steps = [event.values for event in events.read(tmp_path) if event.kind == "step"]
    assert steps[-1]["loss_scale"] > 0 and steps[-1]["skipped"] >= 0 and steps[-1]["loss"] < steps[0]["loss"]


def test_an_overflowing_float16_step_is_skipped(tmp_path: Path) -> None:
    """Two rows are equal, far out of range, and of different classes, so at least one is misclassified."""
    path = quadrants(tmp_path / "far.npz")
    with np.load(path) as file:
        arrays = dict(file)
    arrays["x"][7:9], arrays["y"][7:9] = 2e38, (0, 3)
    with path.open("wb") as opened:
        np.savez(opened, **arrays)
    what = asked(precision="float16", data={"held_out": 0.0}, epochs=2)
    training = fit(tmp_path / "job", what, path)
    training.run()
    skipped = training.learner.skipped
    assert 2 <= skipped <= 4 and training.learner.loss_scale == 65536 / 2**skipped
    assert all(np.isfinite(array).all() for array in final_state(tmp_path / "job").values())


@pytest.mark.parametrize(
    ("precision", "run", "is_lost"), [("float16", 2, False), ("float16", 4, True), ("float32", 2, True)]
)
def test_the_last_of_several_accumulated_batches_decides_on_skipping(
    tmp_path: Path, data: Path, precision: str, run: int, is_lost: bool
) -> None:
    """The loss of one batch is infinite; only after the last batch it is known whether the update is skipped."""
    training = fit(tmp_path, asked(precision=precision, accumulate=4, epochs=1), data)
    step = training.learner.run

    def told(batch: Any) -> dict[str, Any]:
        results = step(batch)
        return results | ({"loss": np.float32("inf")} if training.learner.runs == run else {})

    training.learner.run = told  # type: ignore[method-assign]
    if is_lost:
        with pytest.raises(Diverged):
            training.run()
    else:
        assert training.run() is Outcome.DONE


def test_the_seed_decides(tmp_path: Path, data: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        fit(tmp_path / name, asked(seed=seed, epochs=1), data).run()
    assert model_bytes(tmp_path / "a") == model_bytes(tmp_path / "b") != model_bytes(tmp_path / "c")


def test_a_damaged_checkpoint_is_ignored(tmp_path: Path, data: Path) -> None:
    what = asked()
    fit(tmp_path / "whole", what, data).run()
    parts = tmp_path / "parts"
    assert fit(parts, what, data, stop=after(10)).run() is Outcome.STOPPED
    newest = checkpoint.steps(parts)[0]
    tensors = parts / checkpoint.FOLDER / str(newest) / "state.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"!")
    assert fit(parts, what, data).run() is Outcome.DONE
    messages = [event.values["message"] for event in events.read(parts) if event.kind == "log"]
    assert len(messages) == 1 and messages[0].startswith(f"checkpoint {newest}: ")
    assert model_bytes(parts) == model_bytes(tmp_path / "whole")


def test_checkpoints_of_another_training_are_refused(tmp_path: Path, data: Path) -> None:
    fit(tmp_path, asked(), data, stop=after(3)).run()
    with pytest.raises(RecipeError, match="recipe: the folder has checkpoints with sha256"):
        fit(tmp_path, asked(batch=8), data).run()
    with pytest.raises(RecipeError, match="data: the folder has checkpoints with sha256"):
        fit(tmp_path, asked(), quadrants(tmp_path / "other.npz", rows=121)).run()


def test_a_disk_that_is_full_for_a_while(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    what, room, write = asked(), [True], checkpoint.write_folder

    def refusing(path: Path, files: Any) -> None:
        if not room[0]:
            raise OSError(28, "No space left on device")
        write(path, files)

    def watch(event: events.Event) -> None:
        if event.kind == "checkpoint":
            room[0] = False  # after the first one
        elif event.kind == "epoch" and event.values["epoch"] == 3:
            room[0] = True

    fit(tmp_path / "whole", what, data).run()
    monkeypatch.setattr(checkpoint, "write_folder", refusing)
    assert fit(tmp_path / "full", what, data, watch=watch).run() is Outcome.DONE
    messages = [event.values["message"] for event in events.read(tmp_path / "full") if event.kind == "log"]
    assert 1 <= len(messages) <= 4, "an attempt for every checkpoint that is due, not for every step"
    assert all("could not be written: [Errno 28] No space left" in message for message in messages)
    assert model_bytes(tmp_path / "full") == model_bytes(tmp_path / "whole")


def test_a_nan_loss_ends_the_training(tmp_path: Path, data: Path) -> None:
    what = asked(optimizer={"kind": "sgd", "rate": 1e30}, loss={"kind": "mse"}, data={"task": "numbers"})
    with pytest.raises(Diverged, match=r"the loss is (inf|nan) at step \d+, epoch 1: try a lower rate"):
        fit(tmp_path, what, data).run()
    assert not (tmp_path / "result").exists()


def test_regression(tmp_path: Path) -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (200, 3)).astype(np.float32)
    np.savez(tmp_path / "line.npz", x=x, y=x @ [1.0, -2.0, 0.5])
    what = asked(model={"architecture": "mlp", "hidden": [16]}, epochs=40, data={"target": "y"})
    fit(tmp_path / "job", what, tmp_path / "line.npz").run()
    metrics = json.loads((tmp_path / "job/result/metrics.json").read_bytes())["metrics"]
    assert metrics["rmse"] < 0.2
    assert metrics["mae"] <= metrics["rmse"]


def test_finetuning_an_onnx_model(tmp_path: Path, data: Path) -> None:
    parent = Parent(load(export(perceptron(features=2, classes=4))))
    what = asked(model={"onnx": "any.onnx", "trainable": ["w2", "b*"]})
    training = FitRun(what, open_dataset(data), tmp_path, parent, Resources(threads=1))
    training.run()
    before = {value.name: array for value, array in parent.model.constants.items()}
    after_training = {
        value.name: array for value, array in load(model_bytes(tmp_path)).constants.items() if value.name in before
    }
    moved = {name for name, array in after_training.items() if not np.array_equal(array, before[name])}
    assert moved == {"w2", "b1", "b2"}


@pytest.mark.parametrize(
    ("changes", "parent", "error", "message"),
    [
        ({"model": {"parent": True}}, None, RecipeError, "model: expected a model to fine-tune, and none was given"),
        ({"model": {"parent": True}}, Parent(perceptron(2, 3)), DataError, "has 4 classes, .* has 3"),
        (
            {"data": {"inputs": {"z": "x"}}, "model": {"parent": True}},
            Parent(perceptron(2, 4)),
            DataError,
            r"inputs are \['z'\], but the model takes \['x'\]",
        ),
        ({"data": {"target": "label"}}, None, DataError, "label"),
        ({"loss": {"kind": "mse"}}, None, RecipeError, "loss: expected a target of float32"),
        ({"data": {"inputs": {"loss": "x"}}}, None, ModelError, "has an input 'loss'"),
        ({"data": {"inputs": {"optimizer.rate": "x"}}}, None, ModelError, "has an input 'optimizer.rate'"),
        (
            {"data": {"task": "numbers"}, "judge": "accuracy"},
            None,
            RecipeError,
            r"judge: accuracy needs a target of classes, got float32\[1\]",
        ),
        ({"accumulate": 25}, None, RecipeError, "accumulate: expected at most the 20 steps of all epochs, got 25"),
        ({"model": {"architecture": "lenet5"}}, None, ModelError, r"expected images.*got rows float32\[2\]"),
        (
            {"model": {"parent": True, "trainable": ["q*"]}},
            Parent(perceptron(2, 4)),
            RecipeError,
            r"'q\*' matches none of the weights w1, b1, w2, b2",
        ),
    ],
)
def test_data_and_recipes_that_do_not_fit_are_refused(
    tmp_path: Path, data: Path, changes: dict[str, Any], parent: Any, error: type[LatheError], message: str
) -> None:
    with pytest.raises(error, match=message):
        FitRun(asked(**changes), open_dataset(data), tmp_path, parent, Resources(threads=1))


def test_rows_without_a_number_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((8, 0), np.float32), y=np.arange(8) % 2)
    with pytest.raises(DataError, match=r"column 'x': rows are empty \(float32\[0\]\), which input 'x' cannot take"):
        fit(tmp_path / "job", asked(), tmp_path / "data.npz")


def images(path: Path) -> Path:
    """Pixels of uint8 [H, W, 1]: a bright bar that stands or lies."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 60, (160, 8, 8, 1), np.uint8), np.arange(160) % 2
    for row, place in enumerate(rng.integers(1, 7, 160)):
        x[row, place if y[row] else slice(None), slice(None) if y[row] else place] += 180
    np.savez(path, image=x, label=np.array(["stands", "lies"])[y])
    return path


@pytest.mark.slow
def test_the_model_takes_raw_pixels_and_stores_class_names(tmp_path: Path) -> None:
    """Preprocessing is part of the model, augmentation (in float32) is not; a fine-tuned child knows its classes."""
    data = images(tmp_path / "bars.npz")
    what = asked(
        model={"architecture": "lenet5", "channels": [4, 4], "hidden": [8]},
        preprocess=[{"kind": "scale", "factor": 1 / 255}, {"kind": "standardize"}],
        augment=[{"kind": "flip"}, {"kind": "noise", "sigma": 5.0}],
        epochs=12,
    )
    fit(tmp_path / "job", what, data).run()
    model = model_bytes(tmp_path / "job")
    assert parent_model.classes_of(model) == ("lies", "stands")
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    assert (given.name, given.type, given.shape[1:]) == ("x", "tensor(uint8)", [8, 8, 1])
    with np.load(data) as arrays:
        (answers,) = session.run(None, {"x": arrays["image"]})
        names = np.array(["lies", "stands"])[answers.argmax(1)]
        assert (names == arrays["label"]).mean() > 0.95
    (tmp_path / "parent.onnx").write_bytes(model)
    parent = parent_model.read_parent(tmp_path / "parent.onnx")
    child = FitRun(asked(model={"parent": True}, epochs=1), open_dataset(data), tmp_path, parent, Resources(threads=1))
    assert child.assembly.examples.classes == ("lies", "stands")
    assert not any(name.startswith("preprocess.") for name in child.learner.parameters)
    assert child.run() is Outcome.DONE


def test_classes_missing_in_the_data_keep_their_index(tmp_path: Path, data: Path) -> None:
    training = fit(tmp_path, asked(model={"parent": True}), data, parent=Parent(perceptron(2, classes=6)))
    assert training.assembly.examples.classes == ("0", "1", "2", "3", "4", "5")
    training.run()
    confusion = json.loads((tmp_path / "result/metrics.json").read_bytes())["confusion"]
    assert np.shape(confusion) == (6, 6)


@pytest.mark.parametrize("names", ['"digits"', "[1, 2]", "{"])
def test_metadata_that_name_no_classes(tmp_path: Path, names: str) -> None:
    proto = onnx.load_from_string(export(perceptron()))
    onnx.helper.set_model_props(proto, {"classes": names})
    with pytest.raises(ModelError, match="metadata"):
        parent_model.classes_of(proto.SerializeToString())
