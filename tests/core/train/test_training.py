"""`fit` from Python: trains modules, graphs, files and architectures like `lathe train`; and its errors."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lathe
from lathe import nn
from lathe.core.errors import LatheError, ModelError
from lathe.core.train import Trained, fit
from lathe.core.train.data import Column, open_dataset
from lathe.core.train.recipe import recipe
from lathe.core.train.recipe.parent_model import graph_files, read_parent
from lathe.core.train.recipe.training_setup import Resources
from lathe.core.train.run.work_folder import Sources, prepare, run_training
from lathe.core.train.training_step import optimizers
from lathe.core.train.zoo import ARCHITECTURES
from tests.core.train.small_trainings import RECIPE, kinds, model_bytes, quadrants
from tests.random_numbers import made_at_import

QUICK: dict[str, Any] = {"epochs": 2, "batch": 16, "rate": 0.02, "threads": 1, "progress": False}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for each test's trainings."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def data(place: Path) -> Path:
    return quadrants(place / "data.npz")


def arrays(path: Path) -> dict[str, Any]:
    return dict(np.load(path))


class Net(nn.Module):
    """Two layers with a norm, which learns statistics besides its weights."""

    def __init__(self, width: int = 16) -> None:
        self.first = nn.Linear(2, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 4)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.last(nn.functional.relu(self.norm(self.first(x))))


# -- the same training as lathe train's -------------------------------------------------------------------------------


def test_an_architecture_name_trains_like_its_recipe(place: Path, data: Path) -> None:
    prepare(place / "theirs", recipe.from_values(dict(RECIPE)))
    run_training(place / "theirs", Sources(data), Resources(threads=1))
    ours = fit(RECIPE["model"], data, {**RECIPE, "model": {"architecture": "lenet5"}}, threads=1, progress=False)
    assert ours.folder == Path("mlp")
    assert model_bytes(ours.folder) == model_bytes(place / "theirs")
    assert kinds(ours.folder) == kinds(place / "theirs")
    assert ours.report.read_text().startswith("<!doctype html>")


def test_a_module_trains_like_the_architecture_made_of_it(data: Path) -> None:
    settings = ARCHITECTURES["mlp"](**RECIPE["model"])
    with nn.seeded(0):
        module = settings.module(Column("x", lathe.core.ir.types.DType.FLOAT32, (2,)), 4)
    named = fit(None, data, RECIPE, threads=1, progress=False)
    given = fit(module, data, {**RECIPE, "model": None}, threads=1, progress=False)
    assert given.weights.keys() == named.weights.keys()
    for name, array in named.weights.items():
        np.testing.assert_array_equal(given.weights[name], array, name)
    assert given.metrics == named.metrics


# -- models -----------------------------------------------------------------------------------------------------------


def test_an_object_holds_the_trained_weights(data: Path) -> None:
    net = Net()
    before = net.state_dict()
    trained = fit(net, data, **QUICK)
    same = [name for name, array in net.state_dict().items() if np.array_equal(before[name], array)]
    assert same == ["norm.num_batches_tracked"]  # no output depends on it, so it is not in the graph
    x = arrays(data)["x"]
    with trained.compile(threads=1, tune="off") as session:
        np.testing.assert_allclose(session(x), net.eval()(x).numpy(), 1e-4, 1e-5)
    assert trained.classes == ("0", "1", "2", "3")
    assert trained.metrics["accuracy"] > 0.5


def test_a_class_is_instantiated_with_the_seed(data: Path) -> None:
    first, again = (fit(Net, data, **QUICK) for _ in range(2))
    assert first.folder != again.folder
    assert model_bytes(first.folder) == model_bytes(again.folder)
    assert model_bytes(fit(Net, data, {"seed": 1}, **QUICK).folder) != model_bytes(first.folder)


def test_frozen_and_detached_parameters_do_not_change(data: Path) -> None:
    """ONNX has no form for frozen parameters, so the training gets a graph in other files."""

    class Detached(Net):
        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return self.last(self.norm(self.first(x)).detach())

    frozen, detached = Net(), Detached()
    frozen.last.requires_grad_(False)
    before, other = frozen.state_dict(), detached.state_dict()
    fit(frozen, data, **QUICK)
    fit(detached, data, **QUICK)
    moved = {name for name, array in frozen.state_dict().items() if not np.array_equal(array, before[name])}
    assert {name.partition(".")[0] for name in moved} == {"first", "norm"}
    moved = {name for name, array in detached.state_dict().items() if not np.array_equal(array, other[name])}
    assert moved == {"last.weight", "last.bias", "norm.running_mean", "norm.running_var"}


def test_a_graph_round_trips_through_files(place: Path) -> None:
    net = Net()
    net.first.requires_grad_(False)
    graph = nn.trace(net, {"x": "float32[n,2]"}, ["logits"])
    for name, content in graph_files(graph).items():
        (place / name).write_bytes(content)
    again = read_parent(place).model
    assert str(again) == str(graph)
    for one, other in zip(again.constants.values(), graph.constants.values(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("content", [b"\xff", b"graph @"], ids=["not UTF-8", "ends early"])
def test_a_damaged_graph_is_an_error_of_the_model(place: Path, content: bytes) -> None:
    for name in graph_files(nn.trace(Net(), {"x": "float32[n,2]"}, ["logits"])):
        (place / name).write_bytes(content)
    with pytest.raises(ModelError):
        read_parent(place)


def test_graphs_and_files_can_be_finetuned(place: Path, data: Path) -> None:
    net = Net()
    graph = nn.trace(net, {"points": "float32[n,2]"}, ["logits"], name="points")
    (place / "points.onnx").write_bytes(lathe.export(graph))
    from_graph, from_file = fit(graph, data, **QUICK), fit(place / "points.onnx", data, **QUICK)
    assert (from_graph.folder, from_file.folder) == (Path("points"), Path("points-2"))
    for name, array in from_graph.weights.items():  # ONNX's momentum of a norm is 1 minus that of PyTorch
        np.testing.assert_allclose(from_file.weights[name], array, 1e-4, 1e-6, err_msg=name)
    recipe = {"model": {"onnx": "any", "trainable": ["last.*"]}}
    only = fit("points.onnx", data, recipe, **QUICK)
    np.testing.assert_array_equal(only.weights["first.weight"], net.state_dict()["first.weight"])
    again = fit(from_file.path, data, {"model": {"parent": True, "head": "replace"}}, **QUICK)
    assert again.graph.outputs[0].shape[1] == 4


def test_rows_are_converted_to_the_form_of_the_architecture(place: Path) -> None:
    """Bytes become float32, images channels first; `inputs` says otherwise."""

    class Small(nn.Module):
        def __init__(self) -> None:
            self.conv, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 2)

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return self.last(self.conv(x).flatten(1))

    random = np.random.default_rng(0)
    images, target = random.integers(0, 255, (40, 8, 8, 3), np.uint8), np.arange(40) % 2
    trained = fit(Small, (images, target), **QUICK)
    assert str(trained.graph.inputs[0].type) == "uint8[batch,8,8,3]"
    ready = {"preprocess": [{"kind": "standardize"}]}
    standard = fit(Small, (images, target), ready, **QUICK)
    assert str(standard.graph.inputs[0].type) == "uint8[batch,8,8,3]"
    flat = fit(Small, (images.reshape(40, -1), target), inputs={"x": "float32[n,3,8,8]"}, **QUICK)
    assert str(flat.graph.inputs[0].type) == "float32[n,3,8,8]"
    with pytest.raises(LatheError, match=r"module 'conv' .*: expected \[N, 3, H, W\], got"):
        fit(Small, (images[..., 0], target), **QUICK)


# -- data and recipes -------------------------------------------------------------------------------------------------


def test_data_in_every_form(data: Path) -> None:
    x, y = arrays(data).values()
    forms = (data, str(data), open_dataset(data), (x, y), {"x": x, "y": y}, {"x": x.tolist(), "y": y.tolist()})
    made = [fit(Net, form, **QUICK) for form in forms]
    for trained in made[1:5]:
        assert model_bytes(trained.folder) == model_bytes(made[0].folder)
    assert made[5].metrics == pytest.approx(made[0].metrics, abs=0.1)  # lists become float64 first
    numbers = fit(nn.Linear(2, 1), (x, x.sum(1)), **QUICK)
    assert numbers.classes is None
    assert "accuracy" not in numbers.metrics and numbers.metrics


def test_arguments_override_the_recipe(place: Path, data: Path) -> None:
    (place / "points.json").write_text(json.dumps(dict(RECIPE)))
    trained = fit(None, data, "points.json", epochs=1, batch=32, rate=0.5, threads=1, progress=False)
    said = trained.record["recipe"]
    assert trained.folder == Path("points")
    assert (said["epochs"], said["batch"], said["optimizer"]["rate"]) == (1, 32, 0.5)
    assert (said["optimizer"]["kind"], said["schedule"]["kind"]) == ("adam", "one_cycle")
    forms = ("adamw", {"kind": "adamw"}, optimizers.AdamW())
    found = [fit(Net, data, optimizer=form, **QUICK).record["recipe"]["optimizer"] for form in forms]
    assert found[0] == found[1] == found[2]
    assert found[0]["kind"] == "adamw" and found[0]["rate"] == 0.02
    momentum = fit(Net, data, optimizer=optimizers.SGD(0.1, momentum=0.9), epochs=1, threads=1, progress=False)
    assert momentum.record["recipe"]["optimizer"]["momentum"] == 0.9


def test_a_recipe_without_a_model_is_enough_for_an_argument(place: Path, data: Path) -> None:
    (place / "how.toml").write_text('epochs = 1\noptimizer = { kind = "sgd", rate = 0.1 }\n')
    assert fit(Net, data, place / "how.toml", threads=1, progress=False).folder == Path("how")


# -- folders, progress, interruptions ---------------------------------------------------------------------------------


def test_epochs_are_printed_without_a_terminal(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {**QUICK, "progress": True}
    fit(Net, data, **options)
    shown = capsys.readouterr().out
    assert [line.split()[1] for line in shown.splitlines()] == ["1/2", "2/2"]
    fit(Net, data, **QUICK)
    assert capsys.readouterr().out == ""


def test_a_used_folder_is_refused(place: Path, data: Path) -> None:
    (place / "net").mkdir()  # a user's file
    first = fit(Net, data, **QUICK)
    assert first.folder == Path("net-2") and not list((place / "net").iterdir())
    with pytest.raises(LatheError, match=r"net-2: the folder already has a training; resume=True continues it, out= "):
        fit(Net, data, out="net-2", **QUICK)
    done = fit(Net, data, out="net-2", resume=True, **QUICK)
    assert model_bytes(done.folder) == model_bytes(first.folder)
    with pytest.raises(LatheError, match="net-2: the training in the folder has a different recipe than the one given"):
        fit(Net, data, out="net-2", resume=True, **{**QUICK, "epochs": 3})
    assert repr(Trained(Path("net-2"))).startswith("Trained(accuracy ")
    assert first.save(place / "copy.onnx").read_bytes() == model_bytes(first.folder)


@pytest.mark.slow
def test_interrupted_and_resumed(place: Path, data: Path) -> None:
    script = f"""
import sys
from lathe import nn
from lathe.core.train import fit
with nn.seeded(3):
    net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
fit(net, {str(data)!r}, epochs=300, batch=16, out=sys.argv[1], resume="resume" in sys.argv, threads=1, progress=False)
"""
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([*command, "whole"], check=True, env=environment)
    process = subprocess.Popen([*command, "parts"], stderr=subprocess.PIPE, text=True, env=environment)
    while not (place / "parts").is_dir() or "epoch" not in kinds(place / "parts"):
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert "KeyboardInterrupt: stopped; fit(..., out='parts', resume=True) continues the training" in said
    assert not (place / "parts" / "result").exists()
    subprocess.run([*command, "parts", "resume"], check=True, env=environment)
    assert model_bytes(place / "parts") == model_bytes(place / "whole")


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused() -> Iterator[tuple[str, dict[str, Any], str]]:
    x, y = np.zeros((8, 2), np.float32), np.arange(8) % 4
    yield "a number", {"model": 7}, "model: expected an architecture (lenet5, mlp, "
    yield "another class", {"model": dict}, "model: expected an architecture"
    yield (
        "no such file",
        {"model": "lenet6"},
        "model: 'lenet6' is neither a file nor an architecture (lenet5, mlp",
    )
    yield "no model", {"model": None}, "model: expected an architecture"
    yield "a class with arguments", {"model": nn.Linear}, "model: cannot make an object of class Linear:"
    yield (
        "inputs of a name",
        {"model": "mlp", "inputs": {"x": "float32[n,2]"}},
        "inputs: expected a lathe.core.nn.Module",
    )
    yield "a third array", {"data": (x, y, y)}, "data: expected arrays by name, a pair (inputs, targets), or the path"
    yield "one array", {"data": x}, "got ndarray"
    yield "names", {"data": {1: x, "y": y}}, "data: expected names of columns, got the key 1"
    yield "lengths", {"data": (x, y[:5])}, "columns differ in their number of rows: 'x' 8, 'y' 5"
    yield "no file", {"data": "none.npz"}, "there is no file or folder none.npz"
    yield "no recipe", {"recipe": 7}, "recipe: expected a file or a mapping, got int"
    yield "an unknown field", {"recipe": {"epoch": 3}}, "epoch: there is no such key, did you mean `epochs`?"
    yield "no epochs", {"epochs": None}, "epochs: is missing"
    yield "epochs", {"epochs": 0}, "epochs: expected at least 1, got 0"
    yield "batch", {"batch": 2.5}, "batch: expected a whole number"
    yield "rate", {"rate": -1.0}, "optimizer.rate: expected more than 0, got -1.0"
    yield "a name of no optimizer", {"optimizer": "adamm"}, "got 'adamm', did you mean 'adam'?"
    yield "another optimizer", {"optimizer": 3}, "optimizer: expected one of sgd, adagrad, "
    yield "resume", {"resume": True}, "resume: expected the folder of the training in `out`, too"
    yield "nothing there", {"resume": True, "out": "none"}, "none: there is no training to resume"
    yield "too few classes", {"model": nn.Linear(2, 3)}, "has 4 classes, but the model's output"


REFUSED = made_at_import(lambda: list(refused()))


@pytest.mark.parametrize(("change", "complaint"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_invalid_arguments_are_refused(place: Path, change: dict[str, Any], complaint: str) -> None:
    x, y = np.zeros((8, 2), np.float32), np.arange(8) % 4
    given = {"model": Net, "data": (x, y), "epochs": 1, "threads": 1, "progress": False, **change}
    with pytest.raises(LatheError, match=re.escape(complaint)):
        fit(given.pop("model"), given.pop("data"), given.pop("recipe", None), **given)
    assert not list(place.rglob("result"))


def test_a_mistake_leaves_the_folder_free(data: Path) -> None:
    with pytest.raises(LatheError, match="has 4 classes"):
        fit(nn.Linear(2, 3), data, out="net", **QUICK)
    assert fit(Net, data, **QUICK).folder == Path("net")
