"""A training from recipe to result, in this process: what it writes, how it stops, goes on, chooses and fails."""

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

from core.errors import DataError, LatheError, ModelError
from core.frontends.export import export
from core.frontends.onnx import load
from core.train import checkpoint, events
from core.train import parent as parents
from core.train.assembly import Means
from core.train.data import open_dataset
from core.train.fitting import Diverged, Fit, Outcome
from core.train.parent import Parent
from core.train.recipe import RecipeError
from tests.core.train.models import perceptron
from tests.core.train.world import asked, final_state, fit, kinds, model_bytes, quadrants


def after(steps: int) -> Callable[[], bool]:
    """Asks for an end when it is asked for the n-th time."""
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
    """With a rate that ruins what was learned, the weights from before stay."""
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


def test_it_ends_early_when_nothing_improves(tmp_path: Path, data: Path) -> None:
    fit(tmp_path, asked(epochs=200, stop={"patience": 3, "least_change": 0.05}, judge="loss"), data).run()
    looks = [event.values["validation"]["loss"] for event in events.read(tmp_path) if event.kind == "epoch"]
    assert 4 <= len(looks) < 200
    assert min(looks[-3:]) >= looks[-4] - 0.05 or min(looks[-3:]) >= min(looks[:-3]) - 0.05


@pytest.mark.parametrize("changes", [{"accumulate": 3, "average": 0.9}, {"precision": "float16", "memory": 1 << 20}])
def test_stopping_changes_nothing(tmp_path: Path, data: Path, changes: dict[str, Any]) -> None:
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


def test_a_training_in_float16_tells_of_its_scale(tmp_path: Path, data: Path) -> None:
    fit(tmp_path, asked(precision="float16"), data).run()
    steps = [event.values for event in events.read(tmp_path) if event.kind == "step"]
    assert steps[-1]["loss_scale"] > 0 and steps[-1]["skipped"] >= 0 and steps[-1]["loss"] < steps[0]["loss"]


def test_a_step_beyond_float16_is_skipped_and_the_training_goes_on(tmp_path: Path) -> None:
    """Two rows are alike, far out of range, and of different classes: one of them at least is told wrong."""
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
def test_where_batches_make_one_update_the_last_one_decides(
    tmp_path: Path, data: Path, precision: str, run: int, is_lost: bool
) -> None:
    """The loss of one of them is infinite; whether the update is skipped, nobody knows before all have come."""
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


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, data: Path) -> None:
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


def test_checkpoints_of_something_else_are_refused(tmp_path: Path, data: Path) -> None:
    fit(tmp_path, asked(), data, stop=after(3)).run()
    with pytest.raises(RecipeError, match="checkpoints of another recipe"):
        fit(tmp_path, asked(batch=8), data).run()
    with pytest.raises(RecipeError, match="checkpoints of another data"):
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


def test_a_loss_that_is_no_number_ends_it(tmp_path: Path, data: Path) -> None:
    what = asked(optimizer={"kind": "sgd", "rate": 1e30}, loss={"kind": "mse"}, data={"task": "numbers"})
    with pytest.raises(Diverged, match=r"the loss is (inf|nan) at step \d+, epoch 1: try a lower rate"):
        fit(tmp_path, what, data).run()
    assert not (tmp_path / "result").exists()


def test_numbers_are_learned_too(tmp_path: Path) -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (200, 3)).astype(np.float32)
    np.savez(tmp_path / "line.npz", x=x, y=x @ [1.0, -2.0, 0.5])
    what = asked(model={"architecture": "mlp", "hidden": [16]}, epochs=40, data={"target": "y"})
    fit(tmp_path / "job", what, tmp_path / "line.npz").run()
    metrics = json.loads((tmp_path / "job/result/metrics.json").read_bytes())["metrics"]
    assert metrics["rmse"] < 0.2
    assert metrics["mae"] <= metrics["rmse"]


def test_an_onnx_model_goes_on_learning(tmp_path: Path, data: Path) -> None:
    parent = Parent(load(export(perceptron(features=2, classes=4))))
    what = asked(model={"onnx": "any.onnx", "trainable": ["w2", "b*"]})
    training = Fit(what, open_dataset(data), tmp_path, parent, Means(threads=1))
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
        ({"model": {"parent": True}}, None, RecipeError, "model: goes on from a model, and none was given"),
        ({"model": {"parent": True}}, Parent(perceptron(2, 3)), DataError, "counts 4 classes, .* tells 3"),
        (
            {"data": {"inputs": {"z": "x"}}, "model": {"parent": True}},
            Parent(perceptron(2, 4)),
            DataError,
            r"inputs are \['z'\], but the model takes \['x'\]",
        ),
        ({"data": {"target": "label"}}, None, DataError, "label"),
        ({"loss": {"kind": "mse"}}, None, RecipeError, "loss: expects a target of float32"),
        ({"data": {"inputs": {"loss": "x"}}}, None, ModelError, "has an input called 'loss'"),
        ({"data": {"inputs": {"optimizer.rate": "x"}}}, None, ModelError, "has an input called 'optimizer.rate'"),
        (
            {"data": {"task": "numbers"}, "judge": "accuracy"},
            None,
            RecipeError,
            r"judge: expects classes, .* rows have float32\[1\]",
        ),
        ({"accumulate": 25}, None, RecipeError, "accumulate: 25 steps make one update, all epochs have 20 together"),
        ({"model": {"architecture": "lenet5"}}, None, ModelError, r"takes images.*rows are float32\[2\]"),
        (
            {"model": {"parent": True, "trainable": ["q*"]}},
            Parent(perceptron(2, 4)),
            RecipeError,
            r"'q\*' names none of the weights w1, b1, w2, b2",
        ),
    ],
)
def test_what_does_not_fit_together(
    tmp_path: Path, data: Path, changes: dict[str, Any], parent: Any, error: type[LatheError], message: str
) -> None:
    with pytest.raises(error, match=message):
        Fit(asked(**changes), open_dataset(data), tmp_path, parent, Means(threads=1))


def test_rows_without_a_number_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((8, 0), np.float32), y=np.arange(8) % 2)
    with pytest.raises(DataError, match=r"column 'x': is float32\[0\]: rows hold nothing that input 'x' could take"):
        fit(tmp_path / "job", asked(), tmp_path / "data.npz")


def images(path: Path) -> Path:
    """Pixels of uint8 [H, W, 1]: a bright bar that stands or lies."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 60, (160, 8, 8, 1), np.uint8), np.arange(160) % 2
    for row, place in enumerate(rng.integers(1, 7, 160)):
        x[row, place if y[row] else slice(None), slice(None) if y[row] else place] += 180
    np.savez(path, image=x, label=np.array(["stands", "lies"])[y])
    return path


def test_raw_pixels_go_in_and_class_names_come_along(tmp_path: Path) -> None:
    """Preprocessing is part of the model; augmentation, in float32, is not; a child of it knows its classes."""
    data = images(tmp_path / "bars.npz")
    what = asked(
        model={"architecture": "lenet5", "channels": [4, 4], "hidden": [8]},
        preprocess=[{"kind": "scale", "factor": 1 / 255}, {"kind": "standardize"}],
        augment=[{"kind": "flip"}, {"kind": "noise", "sigma": 5.0}],
        epochs=12,
    )
    fit(tmp_path / "job", what, data).run()
    model = model_bytes(tmp_path / "job")
    assert parents.classes_of(model) == ("lies", "stands")
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    assert (given.name, given.type, given.shape[1:]) == ("x", "tensor(uint8)", [8, 8, 1])
    with np.load(data) as arrays:
        (answers,) = session.run(None, {"x": arrays["image"]})
        names = np.array(["lies", "stands"])[answers.argmax(1)]
        assert (names == arrays["label"]).mean() > 0.95
    (tmp_path / "parent.onnx").write_bytes(model)
    parent = parents.read_parent(tmp_path / "parent.onnx")
    child = Fit(asked(model={"parent": True}, epochs=1), open_dataset(data), tmp_path, parent, Means(threads=1))
    assert child.assembly.examples.classes == ("lies", "stands")
    assert not any(name.startswith("preprocess.") for name in child.learner.parameters)
    assert child.run() is Outcome.DONE


def test_classes_that_the_data_lack_keep_their_place(tmp_path: Path, data: Path) -> None:
    training = fit(tmp_path, asked(model={"parent": True}), data, parent=Parent(perceptron(2, classes=6)))
    assert training.assembly.examples.classes == ("0", "1", "2", "3", "4", "5")
    training.run()
    confusion = json.loads((tmp_path / "result/metrics.json").read_bytes())["confusion"]
    assert np.shape(confusion) == (6, 6)


@pytest.mark.parametrize("names", ['"digits"', "[1, 2]", "{"])
def test_metadata_that_name_no_classes(tmp_path: Path, names: str) -> None:
    proto = onnx.load_from_string(export(perceptron()))
    onnx.helper.set_model_props(proto, {"classes": names})
    with pytest.raises(ModelError, match="has metadata"):
        parents.classes_of(proto.SerializeToString())
